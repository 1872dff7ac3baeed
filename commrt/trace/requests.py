# SPDX-License-Identifier: Apache-2.0
"""Requests of recorded calls: they see the end where the program sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.errors import TimeoutError_
from commrt.trace.recorder import END, KIND, Record, now, recorder

__all__ = ["TracedRequest", "end_all"]


def end_all(records: Sequence[Record]) -> None:
    """Note that calls have ended, those that are not known to have."""
    ended = now()
    for record in records:
        if record[END] == 0:
            record[END] = ended


class TracedRequest:
    """A request, with notes of its end. It passes for one of the same class."""

    __slots__ = ("__weakref__", "_records", "_request")

    def __init__(self, request: Any, records: Sequence[Record]) -> None:
        self._request = request
        self._records = records

    @property  # type: ignore[misc]  # so that isinstance() knows it
    def __class__(self) -> type:
        kind: type = type(self._request)
        return kind

    def wait(self, **limits: Any) -> Any:
        """As the request's."""
        try:
            result = self._request.wait(**limits)
        except Exception as error:
            self._raised(error)
            raise
        ended = now()
        for record in self._records:
            # On a device the stream goes on: the host learns nothing of the end.
            if record[END] == 0 and not record[KIND].on_device:
                record[END] = ended
        return result

    def synchronize(self, **limits: Any) -> Any:
        """As the request's."""
        try:
            result = self._request.synchronize(**limits)
        except Exception as error:
            self._raised(error)
            raise
        end_all(self._records)
        return result

    def test(self) -> bool:
        """As the request's."""
        try:
            done = bool(self._request.test())
        except Exception as error:
            self._raised(error)
            raise
        if done:
            end_all(self._records)
        return done

    def _raised(self, error: Exception) -> None:
        if isinstance(error, TimeoutError_):  # it stays in flight
            recorder().tell(error)
            return
        for record in self._records:
            recorder().failed(record, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __bool__(self) -> bool:
        return bool(self._request)

    def __repr__(self) -> str:
        return repr(self._request)
