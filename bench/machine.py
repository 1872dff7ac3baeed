# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine that produced a figure."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from commrt.launch.mpiexec import available_cpus

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, Any]:
    """Return CPU, cores, memory, kernel, load and time; facts only, no host name."""
    return {
        "cpu": _cpu_model(),
        "cpus_online": os.cpu_count(),
        "cpus_available": available_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("model name", "Model", "CPU part"):
            return value.strip()
    return platform.processor() or "unknown"
