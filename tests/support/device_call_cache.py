# SPDX-License-Identifier: Apache-2.0
"""What tests ask of calls on device arrays that are started without Python.

with without_python(comm):
    comm.allreduce(x)  # fails where Python had to look at it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commrt import _native
from commrt.comm import Communicator, core_of

__all__ = ["calls_of_python", "num_cached", "said", "without_python"]


def num_cached(comm: Communicator) -> int:
    """Return how many kinds of calls the communicator knows."""
    return int(_native.num_cached_device_calls(core_of(comm)))


@contextlib.contextmanager
def calls_of_python(comm: Communicator) -> Iterator[list[str]]:
    """Write down the calls that Python looks at."""
    looked_at: list[str] = []
    look = core_of(comm)._call

    def noting(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looked_at.append(name)
        return look(name, args, kwargs)

    core_of(comm)._call = noting  # type: ignore[method-assign]
    try:
        yield looked_at
    finally:
        del core_of(comm)._call  # type: ignore[method-assign]


@contextlib.contextmanager
def without_python(comm: Communicator) -> Iterator[None]:
    """Fail where Python looked at a call."""
    with calls_of_python(comm) as looked_at:
        yield
    assert looked_at == [], "Python had to look at it"


def said(call: Callable[[], Any]) -> str:
    """Return what an error says, with its type; numbers of operations left out."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  it is compared
        call()
    return f"{type(caught.value).__name__}: {caught.value}"
