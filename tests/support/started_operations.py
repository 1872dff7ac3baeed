# SPDX-License-Identifier: Apache-2.0
"""Operations of a communicator where some rank's calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from commrt.comm import core_of
from commrt.errors import RefusedError

__all__ = ["num_started", "past_refusals"]

T = TypeVar("T")


def num_started(comm: Any) -> int:
    """Return the number of operations that this rank has begun.

    A call that it refused has a number, too, and has begun nothing. Up to 64 are known.
    """
    core = core_of(comm)
    return int(core.next_seq) - len(core.own_refusals)


def past_refusals(call: Callable[[], T]) -> T:
    """Return ``call()``, made again as often as another rank refuses its own call."""
    while True:
        try:
            return call()
        except RefusedError:
            continue
