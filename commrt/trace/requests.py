# SPDX-License-Identifier: Apache-2.0
"""Requests of recorded calls that the engine did not make; they record their ends."""

from __future__ import annotations

from typing import Any

from commrt.errors import TimeoutError_
from commrt.trace.recorder import recorder

__all__ = ["TracedRequest"]


class TracedRequest:
    """A request, with notes of its end. It passes for one of the same class."""

    __slots__ = ("__weakref__", "_first", "_num", "_request")

    def __init__(self, request: Any, first: int, num: int) -> None:
        """Take a request, and the records of its call."""
        self._request = request
        self._first = first
        self._num = num

    @property  # type: ignore[misc]  # so that isinstance() knows it
    def __class__(self) -> type:
        kind: type = type(self._request)
        return kind

    def wait(self, **limits: Any) -> Any:
        """Call the request's method of this name."""
        try:
            result = self._request.wait(**limits)
        except Exception as error:
            self._raised(error)
            raise
        ring = recorder().ring
        kind = ring.kind_of(self._first)
        # On a device the stream goes on: the host learns nothing of the end.
        if kind is not None and not kind.on_device:
            ring.end(self._first, self._num)
        return result

    def synchronize(self, **limits: Any) -> Any:
        """Call the request's method of this name."""
        try:
            result = self._request.synchronize(**limits)
        except Exception as error:
            self._raised(error)
            raise
        recorder().ring.end(self._first, self._num)
        return result

    def test(self) -> bool:
        """Call the request's method of this name."""
        try:
            done = bool(self._request.test())
        except Exception as error:
            self._raised(error)
            raise
        if done:
            recorder().ring.end(self._first, self._num)
        return done

    def _raised(self, error: Exception) -> None:
        if isinstance(error, TimeoutError_):  # it stays in flight
            recorder().tell(error)
        else:
            recorder().ring.fail(self._first, self._num, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __bool__(self) -> bool:
        return bool(self._request)

    def __repr__(self) -> str:
        return repr(self._request)
