# SPDX-License-Identifier: Apache-2.0
"""Shares of a machine's cores for its ranks."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

__all__ = ["shares_of_cores"]


def shares_of_cores(size: int) -> list[set[int]]:
    """Return the cores of each rank: neighbours, and threads of a core together."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if len(cores) < size:
        sys.stderr.write(
            f"commrt.run: --bind: {size} ranks on {len(cores)} cores: some share one\n"
        )
        return [{cores[number % len(cores)]} for number in range(size)]
    ends = [number * len(cores) // size for number in range(size + 1)]
    return [{*cores[a:b]} for a, b in pairwise(ends)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return a processor's socket, core and own number."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    found = []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(cpu)
    return found[0], found[1], cpu
