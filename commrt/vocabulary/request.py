# SPDX-License-Identifier: Apache-2.0
"""The base class of all requests: what a started operation can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Request"]


class Request(ABC):
    """One started operation. Keep it, and wait() for it: the buffers are in use.

    The engine's own kinds of request are registered in ``commrt/request.py``. Kinds
    that are written in Python derive from this class, or from one of the engine's.
    """

    @abstractmethod
    def wait(self, *, stream: Any = None, timeout_s: Any = None) -> Any:
        """Return the operation's output once it is complete.

        On device arrays a stream waits, and the host goes on. Idempotent; raises the
        same error every time.
        """

    @abstractmethod
    def synchronize(self, *, timeout_s: Any = None) -> Any:
        """Block the host until the operation is complete, and return its output."""

    @abstractmethod
    def test(self) -> bool:
        """Run a little progress; True once complete. Raises the operation's error."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if the operation has ended, without progress."""

    @property
    @abstractmethod
    def operation(self) -> str:
        """Name of the operation."""

    @property
    @abstractmethod
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""

    @property
    def seq(self) -> int:
        """Sequence number on its communicator; -1 where it has none of its own."""
        return -1

    @property
    def device(self) -> int | None:
        """Number of the device of its arrays; None for host memory."""
        return None

    @property
    def stream(self) -> int | None:
        """Stream that it is ordered with, as an integer; None for host memory."""
        return None

    @property
    def received_nbytes(self) -> int:
        """Bytes that a receive has taken; -1 for other operations."""
        return -1

    @property
    def source(self) -> int:
        """Rank that a receive took its message from; -1 for other operations."""
        return -1

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of a request is not its completion: call test() or wait() on "
            f"{self!r}"
        )
