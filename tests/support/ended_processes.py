# SPDX-License-Identifier: Apache-2.0
"""Waits for processes that are no children of this one."""

from __future__ import annotations

import os
import select

__all__ = ["ended"]

_DEADLINE_S = 300


def ended(pid: int) -> bool:
    """Return whether a process ends, or has ended, within the deadline."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], _DEADLINE_S)[0])
    finally:
        os.close(handle)
