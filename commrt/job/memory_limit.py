# SPDX-License-Identifier: Apache-2.0
"""Limit of the memory that this process may use: the machine's, or its cgroup's.

The kernel does not refuse shared memory beyond the limit when a process creates it: it
kills the process later, when it touches the memory. So commrt compares sizes first.
"""

from __future__ import annotations

import os
from pathlib import Path

from commrt.errors import BackendError

__all__ = ["check_fits", "memory_limit_nbytes"]


def check_fits(nbytes: int, limit_nbytes: int | None = None) -> None:
    """Raise BackendError if ``nbytes`` are more than this process may ever use."""
    limit = memory_limit_nbytes() if limit_nbytes is None else limit_nbytes
    if nbytes > limit:
        raise BackendError(
            f"{nbytes} bytes of shared memory are asked for, but this machine or "
            f"container may use {limit} in all: use fewer ranks per node, or raise "
            f"the container's memory limit"
        )


def memory_limit_nbytes(
    proc_cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the smallest of physical memory and the limits of this cgroup's line."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            limits += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Read ``name`` in the cgroup and all its parents; a limit holds for the whole."""
    group = mount / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            text = "max"
        if text != "max":
            found.append(int(text))
        if folder == mount:
            break
    return found
