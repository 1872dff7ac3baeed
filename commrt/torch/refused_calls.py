# SPDX-License-Identifier: Apache-2.0
"""Calls of torch that are refused before commrt has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from commrt.torch.calls import Calls

__all__ = ["refuse", "tells_of_errors"]

T = TypeVar("T")


class _Group(Protocol):
    calls: Calls


def refuse(calls: Calls, name: str, error: Exception) -> None:
    """Take the place of a call of this name, unless the others know of the error.

    In check mode the group compares its calls itself (checked_calls.py).
    """
    if calls.comm.checker is None:
        calls.comm.comparison.refuse(name, error, None)


def tells_of_errors(method: Callable[..., T]) -> Callable[..., T]:
    """Return a collective whose errors end it on the other ranks, too."""

    @wraps(method)
    def call(self: _Group, *args: Any, **more: Any) -> T:
        try:
            return method(self, *args, **more)
        except Exception as error:
            refuse(self.calls, method.__name__, error)
            raise

    return call
