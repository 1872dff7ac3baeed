# SPDX-License-Identifier: Apache-2.0
"""Calls that move boxes, run by the engine alone once Python has seen one of a kind.

Python checks the arguments of the first call of a kind, and says what later calls have
to be like (``native/calls/box_front.hpp``). The engine then looks at numpy's arrays,
lets the ranks agree, plans and runs. Whatever is not like that comes back to Python,
before anything was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commrt import _native
from commrt.group.agreed_calls import SharedFact
from commrt.vocabulary.checks import typed
from commrt.vocabulary.dtypes import DType

__all__ = ["ANY_SHAPE", "Fronts", "box_front"]

ANY_SHAPE = -1
"""Dimensions of an array of which only the number of elements counts."""


def box_front(
    family: _native.PlanFamily,
    what: str,
    arrays: Sequence[tuple[DType, int, bool]],
    *,
    least: Sequence[tuple[int, int, int]] = (),
    facts: Sequence[SharedFact] = (),
) -> _native.BoxFront:
    """Return what runs calls of a kind.

    Args:
        family: of their plans.
        what: the operation's name.
        arrays: element type, dimensions, and whether it is written, of each array.
            Arrays of ``ANY_SHAPE`` are contiguous.
        least: array, dimension, and the elements that it has at least.
        facts: those that ranks share; none: they need not agree.
    """
    return _native.BoxFront(
        family,
        what,
        arrays=[(dtype.code, ndim, written) for dtype, ndim, written in arrays],
        least=list(least),
        facts=[(fact.seed, fact.factor, fact.extents) for fact in facts],
    )


class Fronts:
    """The fronts of one communicator's calls of an operation."""

    _MOST = 64

    def __init__(self) -> None:
        self._known: dict[Any, _native.BoxFront] = {}

    def find(
        self, options: tuple[Any, ...], arrays: Sequence[Any]
    ) -> _native.BoxFront | None:
        """Return the front of calls with these options and such arrays, if known."""
        key = _key(options, arrays)
        return None if key is None else self._known.get(key)

    def keep(
        self,
        options: tuple[Any, ...],
        arrays: Sequence[Any],
        make: Callable[[], _native.BoxFront],
    ) -> None:
        """Keep the front of such calls, in place of an earlier one."""
        key = _key(options, arrays)
        if key is None:
            return
        if len(self._known) == self._MOST and key not in self._known:
            self._known.clear()
        self._known[key] = make()


def _key(options: tuple[Any, ...], arrays: Sequence[Any]) -> Any:
    """Return what a kind is found by; None for calls that always go through Python."""
    kinds = []
    for array in arrays:
        if type(array) is not np.ndarray:
            return None
        kinds.append((array.dtype.num, array.ndim))
    try:
        return typed(options), *kinds
    except TypeError:  # of a type that may be equal to what it is not
        return None
