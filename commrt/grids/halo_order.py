# SPDX-License-Identifier: Apache-2.0
"""One order for what halos add up, where ``deterministic=True`` asks for it.

A cell near a corner gets contributions of several ranks. Dimension by dimension they
travel as sums of two, straight from their owners one by one: other bits. In one order
they come straight, and one direction after another, whatever else moves with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.boxes.strided import StridedArray
from commrt.errors import UsageError
from commrt.planning.ordering import wanted_order
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.dtypes import ReduceOp

__all__ = ["choose_direct", "needs_order"]


def needs_order(
    deterministic: bool, reduction: ReduceOp | None, arrays: Sequence[StridedArray]
) -> bool:
    """Return whether the order of contributions could change the result's bits."""
    return reduction is not None and any(
        wanted_order(deterministic, reduction.name.lower(), None, each.dtype.name)
        != "any"
        for each in arrays
    )


def choose_direct(
    what: str, direct: Any, corners: bool, ndim: int, in_order: bool
) -> bool:
    """Return whether corners come straight from their owners; None: what suits."""
    if direct is None:
        return in_order
    found = check_flag(what, "direct", direct)
    if in_order and corners and ndim > 1 and not found:
        raise UsageError(
            f"{what}: direct=False adds corners up dimension by dimension, and "
            f"deterministic=True asks for one order, that of direct messages; leave "
            f"out direct=, or pass direct=True"
        )
    return found
