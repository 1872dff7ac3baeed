# SPDX-License-Identifier: Apache-2.0
"""How long calls would take: torch's ``_time_estimator``, which runs nothing.

    with torch.distributed._time_estimator(group, device) as estimate:
        torch.distributed.all_reduce(x, group=group)
    estimate.estimated_time  # microseconds

A stand-in takes the communicator's place meanwhile. It chooses as a call does, and adds
the time that the table's measurements say, or the model. It is local.

The stand-in passes on the calls of other threads. torch does not tell it that an
exception has left the block. So it looks at each call whether the block is still open;
else it steps aside, and the call runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from commrt.errors import UsageError
from commrt.vocabulary.operations import COLLECTIVES

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["ESTIMATED", "Estimating", "block_of_caller"]

ESTIMATED = object()
"""The result of a call that did not run."""
_UNKNOWN_US = -1.0
"""torch takes any number below 0 for a time that is not known."""
_FACTS = frozenset(("checker", "name", "rank", "ranges", "size", "timeout_s"))
"""Attributes of the communicator that say what it is, and start nothing."""


def block_of_caller(depth: int) -> GeneratorType[Any, Any, Any] | None:
    """Return the generator of the context manager that is entered up the stack.

    ``depth``: frames from here to the generator function that the manager was made of.
    None where another function asks for the estimate. Nobody can tell then whether an
    exception has ended it.
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
        step_aside: puts the communicator in its place again, if this stands there.
    """

    def __init__(
        self,
        comm: Core,
        block: GeneratorType[Any, Any, Any] | None,
        step_aside: Callable[[Estimating], object],
    ) -> None:
        self._comm, self._block, self._step_aside = comm, block, step_aside
        self._thread = threading.get_ident()
        self._us = 0.0

    @property
    def expected_us(self) -> float:
        """The time of all calls so far, one after the other; -1 if not known."""
        return self._us if math.isfinite(self._us) else _UNKNOWN_US

    @property
    def is_open(self) -> bool:
        """True unless the block was left, as by an exception."""
        return self._block is None or self._block.gi_frame is not None

    def estimates(self) -> bool:
        """Return whether a call of this thread only says how long it would take."""
        if not self.is_open:
            self._step_aside(self)
            return False
        return threading.get_ident() == self._thread

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the time of a collective. Raises what the call would."""
        if not self.estimates():
            return getattr(self._comm, name)(*args, **kwargs)
        call, bound = self._comm.collectives.parsed(name, args, kwargs)
        self._us += self._comm.selection.expected_us(call, bound)
        return ESTIMATED

    def fused(self) -> contextlib.AbstractContextManager[Any]:
        """Count calls in here apart."""
        return contextlib.nullcontext() if self.estimates() else self._comm.fused()

    # -- errors of estimated calls, which no other rank makes --------------------------

    @property
    def comparison(self) -> Any:
        """Return what tells other ranks of an error."""
        return self if self.estimates() else self._comm.comparison

    def refuse(self, *args: Any, **kwargs: Any) -> None:
        """Tell nobody."""

    def refuse_message(self, *args: Any, **kwargs: Any) -> Any:
        """Tell nobody; a real message is refused."""
        if not self.estimates():
            return self._comm.refuse_message(*args, **kwargs)
        return None

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS and self.estimates():
            raise UsageError(
                f"_time_estimator estimates collectives of dense tensors alone, and "
                f"this call would use {name} of the communicator"
            )
        return getattr(self._comm, name)


def _method_of(name: str) -> Any:
    def call(self: Estimating, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, args, kwargs)

    call.__name__ = name
    return call


for _name in COLLECTIVES:
    setattr(Estimating, _name, _method_of(_name))
