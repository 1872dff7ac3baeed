# SPDX-License-Identifier: Apache-2.0
"""The argument ``residual=`` of lossy operations: what earlier calls still owe."""

from __future__ import annotations

from typing import Any

from commrt.arrays.host import HostView, overlap, view_anywhere
from commrt.errors import BufferError_, UsageError

__all__ = ["check_residual"]


def check_residual(
    what: str, x: HostView, residual: Any, out: HostView | None = None
) -> HostView:
    """Return the residual's view; UsageError unless it is a writable array like x."""
    owed = view_anywhere(residual, f"{what}: residual")
    if owed.on is not x.on:
        raise UsageError(
            f"{what}: residual is not where x is: pass both in host memory, or on one "
            f"device"
        )
    if owed.dtype is not x.dtype or owed.count != x.count:
        raise UsageError(
            f"{what}: residual has {owed.count} elements of {owed.dtype.name}, x has "
            f"{x.count} of {x.dtype.name}; they must be equal"
        )
    if not owed.writable:
        raise BufferError_(f"{what}: residual is read-only: pass a writable array")
    for name, other in (("x", x), ("out", out)):
        if other is not None and overlap(owed, other):
            raise UsageError(f"{what}: residual overlaps {name}; pass a separate array")
    return owed
