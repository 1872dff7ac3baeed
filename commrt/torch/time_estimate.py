# SPDX-License-Identifier: Apache-2.0
"""How long calls would take: torch's ``_time_estimator``, which runs nothing.

    with torch.distributed._time_estimator(group, device) as estimate:
        torch.distributed.all_reduce(x, group=group)
    estimate.estimated_time  # microseconds

A stand-in takes the communicator's place meanwhile. It chooses as a call does, and adds
the time that the table's measurements say, or the model. It is local.

torch does not say that an exception has left the block. So the stand-in looks at each
call whether the block is still open; else it steps aside, and the call runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from commrt.errors import UsageError
from commrt.vocabulary.operations import COLLECTIVES

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["Estimating", "block_of_caller"]

_UNKNOWN_US = -1.0
"""torch takes any number below 0 for a time that is not known."""


def block_of_caller(depth: int) -> GeneratorType[Any, Any, Any] | None:
    """Return the generator of the context manager that is entered up the stack.

    ``depth``: frames from here to the function that the manager was made of. None where
    it is no such function: the caller then ends the estimate by itself.
    """
    frame = sys._getframe(depth + 1)
    manager = frame.f_locals.get("self")
    found = getattr(manager, "gen", None)
    return found if isinstance(found, GeneratorType) else None


class Estimating:
    """A communicator whose collectives only say how long they would take.

    Args:
        comm: the communicator.
        block: the generator of the block in which that is so; None: until told.
        step_aside: puts the communicator in its place again.
    """

    def __init__(
        self,
        comm: Core,
        block: GeneratorType[Any, Any, Any] | None,
        step_aside: Callable[[], object],
    ) -> None:
        self._comm, self._block, self._step_aside = comm, block, step_aside
        self._us = 0.0

    @property
    def expected_us(self) -> float:
        """The time of all calls so far, one after the other; -1 if not known."""
        return self._us if math.isfinite(self._us) else _UNKNOWN_US

    @property
    def is_open(self) -> bool:
        """True unless the block was left, as by an exception."""
        return self._block is None or self._block.gi_frame is not None

    def _is_over(self) -> bool:
        """Return whether the block was left; then step aside."""
        if not self.is_open:
            self._step_aside()
        return not self.is_open

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the time of a collective. Raises what the call would."""
        if self._is_over():
            return getattr(self._comm, name)(*args, **kwargs)
        call, bound = self._comm.collectives.parsed(name, args, kwargs)
        self._us += self._comm.selection.expected_us(call, bound)
        return None

    def fused(self) -> contextlib.AbstractContextManager[Any]:
        """Count calls in here apart."""
        return self._comm.fused() if self._is_over() else contextlib.nullcontext()

    @property
    def comparison(self) -> Any:
        """What tells other ranks of an error: none of them makes an estimated call."""
        return self._comm.comparison if self._is_over() else self

    def refuse(self, *args: Any, **kwargs: Any) -> None:
        """Tell nobody."""

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_ESTIMATED and not self._is_over():
            raise UsageError(
                "the time of messages and of sparse sums is not estimated: "
                "_time_estimator takes collectives of dense tensors"
            )
        return getattr(self._comm, name)


_NOT_ESTIMATED = frozenset(
    ("messages", "multi_sendrecv", "recv", "send", "sparse_allreduce")
)


def _method_of(name: str) -> Any:
    def call(self: Estimating, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, args, kwargs)

    call.__name__ = name
    return call


for _name in COLLECTIVES:
    setattr(Estimating, _name, _method_of(_name))
