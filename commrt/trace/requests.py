# SPDX-License-Identifier: Apache-2.0
"""Requests of recorded calls: they see the end where the program sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.errors import TimeoutError_

if TYPE_CHECKING:
    from commrt.trace.recorder import Record, Recorder

__all__ = ["TracedRequest", "end_all"]


def end_all(records: list[Record]) -> None:
    """Note that calls have ended, those that are not known to have."""
    from commrt.trace.recorder import END, now

    ended = now()
    for record in records:
        if record[END] == 0:
            record[END] = ended


class TracedRequest:
    """A request, with notes of its end. It passes for one of the same class."""

    __slots__ = ("__weakref__", "_records", "_request", "_to")

    def __init__(self, request: Any, records: list[Record], to: Recorder) -> None:
        self._request = request
        self._records = records
        self._to = to

    @property
    def __class__(self) -> type:  # so that isinstance() knows it
        kind: type = type(self._request)
        return kind

    def wait(self, **limits: Any) -> Any:
        """As the request's."""
        result = self._watched(self._request.wait, limits)
        # On a device the stream goes on: the host learns nothing of the end.
        if self._records and not self._records[0][0].on_device:
            end_all(self._records)
        return result

    def synchronize(self, **limits: Any) -> Any:
        """As the request's."""
        result = self._watched(self._request.synchronize, limits)
        end_all(self._records)
        return result

    def test(self) -> bool:
        """As the request's."""
        done = bool(self._watched(self._request.test, {}))
        if done:
            end_all(self._records)
        return done

    def _watched(self, call: Any, limits: dict[str, Any]) -> Any:
        try:
            return call(**limits)
        except TimeoutError_ as error:  # it stays in flight
            self._to.tell(error)
            raise
        except Exception as error:
            for record in self._records:
                self._to.failed(record, error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __bool__(self) -> bool:
        return bool(self._request)

    def __repr__(self) -> str:
        return repr(self._request)
