# SPDX-License-Identifier: Apache-2.0
"""Requests: their base class, and waiting for several of them.

The engine makes three kinds itself, which are registered here: of calls on host arrays,
of calls on device arrays, and of calls on host arrays within ``comm.fused()``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt._native import DeviceRequest
from commrt.errors import CommError, TimeoutError_, UsageError, shown
from commrt.vocabulary.checks import as_items
from commrt.vocabulary.limits import check_timeout, deadline_after
from commrt.vocabulary.request import Request

__all__ = [
    "DeviceRequest",
    "Request",
    "RequestErrors",
    "test_all",
    "wait_all",
    "wait_any",
]

_OF_ENGINE: set[type] = {_native.Request, _native.DeviceRequest, _native.FusedRequest}
"""Kinds known at a glance: to ask the base class takes a microsecond longer."""
for _kind in _OF_ENGINE:
    Request.register(_kind)


class RequestErrors(CommError):
    """Several requests failed; ``errors`` holds (index, error) for each."""

    def __init__(self, errors: Sequence[tuple[int, Exception]]) -> None:
        self.errors = list(errors)
        lines = [f"  request {index}: {error}" for index, error in self.errors]
        super().__init__(f"{len(self.errors)} requests failed:\n" + "\n".join(lines))


def wait_all(
    requests: Sequence[Request], *, timeout_s: float | None = None
) -> list[Any]:
    """Wait for all requests, then return their outputs in order.

    Every request is waited for even when some fail; one failure is raised as it is,
    several together as RequestErrors. ``timeout_s`` bounds the whole call. Requests on
    device arrays let the current stream wait; with ``timeout_s`` they block the host.
    """
    outputs: list[Any] = []
    errors: list[tuple[int, Exception]] = []
    if timeout_s is None and type(requests) is list:
        outputs, error = _native.wait_fused(requests)
        if outputs and len(outputs) == len(requests):
            return outputs
        if error is not None:
            if not isinstance(error, CommError):
                raise error
            errors.append((len(outputs), error))
    requests = _listed("wait_all", requests)
    deadline = _deadline("wait_all", timeout_s)
    waited = len(outputs) + len(errors)
    for index, request in enumerate(requests[waited:], waited):
        try:
            if deadline is None:
                output = request.wait()
            else:
                left_s = max(1e-3, deadline - time.monotonic())
                # A wait for device arrays blocks nobody, so only this has a limit.
                output = request.synchronize(timeout_s=left_s)
            outputs.append(output)
        except CommError as error:
            errors.append((index, error))
    if len(errors) == 1:
        raise errors[0][1]
    if errors:
        raise RequestErrors(errors) from errors[0][1]
    return outputs


def _listed(what: str, requests: Any) -> list[Request]:
    """Return the requests; UsageError for anything else."""
    items = as_items(requests)
    iterable, listed = items is not None, [requests] if items is None else items
    kinds = {*map(type, listed)}
    if iterable and (
        kinds <= _OF_ENGINE or all(issubclass(kind, Request) for kind in kinds)
    ):
        return listed
    wrong = [each for each in listed if not iterable or not isinstance(each, Request)]
    if wrong:
        raise UsageError(
            f"{what}: expected a list of requests, found {shown(wrong[0])}"
            f"{' in it' if iterable else ''}; calls with nonblocking=True return them"
        )
    return listed


def _deadline(what: str, timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    return deadline_after(check_timeout(what, timeout_s))


def wait_any(
    requests: Sequence[Request], *, timeout_s: float | None = None
) -> tuple[int, Any]:
    """Wait until one request is complete; return its index and its output.

    timeout_s defaults to the longest of the requests' own limits.
    """
    requests = _listed("wait_any", requests)
    if not requests:
        raise UsageError(
            "wait_any: no requests given; pass at least one, as calls with "
            "nonblocking=True return them"
        )
    if timeout_s is None:
        timeout_s = max(request.timeout_s for request in requests)
    end = time.monotonic() + check_timeout("wait_any", timeout_s)
    backoff = _native.Backoff()
    while True:
        for index, request in enumerate(requests):
            if request.test():
                return index, request.wait()
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError_(
                f"wait_any: none of {len(requests)} requests was complete within "
                f"{timeout_s:g} s: {', '.join(map(repr, requests[:4]))}"
            )
        backoff.pause(left_s)


def test_all(requests: Sequence[Request]) -> bool:
    """Return whether all requests are complete, after a little progress."""
    return all([request.test() for request in requests])
