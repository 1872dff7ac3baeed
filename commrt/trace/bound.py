# SPDX-License-Identifier: Apache-2.0
"""Calls that ``comm.plan`` has bound, while somebody records: each run is in the log.

The engine's own kinds hold a method that records them; others get a class that does,
and their own one back at the end. Their label says what runs them, so nobody asks the
policy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from commrt import _native
from commrt.trace.call_sites import CORE
from commrt.trace.methods import group_of_communicator, kinds_of, stream_of
from commrt.trace.recorder import Group, Kind, Recorder, recorder
from commrt.trace.requests import TracedRequest
from commrt.trace.traced import Traced

__all__ = ["follow_bound"]

_ENGINES = (_native.PersistentCall, _native.PersistentMessages)
_KINDS = "_kinds_in_log"
_CLASSES: dict[type, type] = {}


def follow_bound(
    held: object,
    comm: Traced,
    bound: Any,
    name: str,
    args: tuple[Any, ...],
    more: dict[str, Any],
) -> None:
    """Record the runs of a bound call while somebody records.

    Args:
        held: the communicator of the program.
        comm: its facts.
        bound: what ``comm.plan`` has made.
        name: of the communicator's method that it stands for.
        args: positional arguments of that.
        more: the others.
    """
    to = recorder()
    if to.is_followed(held):  # and none of commrt's own

        def attach(to: Recorder, target: Any) -> Group:
            return _attach(to, target, comm, name, args, more)

        to.follow(bound, attach)


def _attach(
    to: Recorder,
    bound: Any,
    comm: Traced,
    name: str,
    args: tuple[Any, ...],
    more: dict[str, Any],
) -> Group:
    group = to.group(group_of_communicator(comm))
    label = getattr(bound, "label", "")

    def described() -> Sequence[Kind]:
        kinds = kinds_of(comm, group, name, args, more)
        if len(kinds) == 1 and kinds[0].peer < 0 and label:
            return [kinds[0].run_by(label)]
        return kinds

    kinds = described()
    kind = type(bound)
    if isinstance(bound, _ENGINES):

        def look(args: tuple[Any, ...], more: dict[str, Any]) -> Sequence[Kind]:
            return kinds

        # The collector does not see what it holds: not itself, therefore.
        method = to.method(
            *(name, kind.run_bound, weakref.ref(bound), look),
            reads="",
            watch=TracedRequest,
        )
        bound.record_by(method)
        to.at_end(bound, lambda of: of.record_by(None))
    else:
        object.__setattr__(bound, _KINDS, _by_stream(kinds, described, args, more))
        object.__setattr__(bound, "__class__", _class_of(kind))
        to.at_end(bound, lambda of: object.__setattr__(of, "__class__", kind))
    return group


def _by_stream(
    kinds: Sequence[Kind],
    described: Callable[[], Sequence[Kind]],
    args: tuple[Any, ...],
    more: dict[str, Any],
) -> Callable[[], Sequence[Kind]]:
    """Return what says the kinds of a run.

    On a device, the caller's current stream orders it, which may be another each time.
    """
    if not kinds or not kinds[0].on_device or more.get("stream") is not None:
        return lambda: kinds
    array = _first_array(args, more)
    known = {kinds[0].stream: kinds}

    def now() -> Sequence[Kind]:
        stream = stream_of(array, more)
        found = known.get(stream)
        if found is None:
            found = known[stream] = described()
        return found

    return now


def _first_array(args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    given = (*args[:1], *(more.get(name) for name in ("x", "out", "sends", "recvs")))
    for found in given:
        while isinstance(found, list | tuple) and found:
            found = found[0]
        if not (found is None or isinstance(found, list | tuple)):
            return found
    return None


def _class_of(kind: type) -> type:
    """Return a class of bound calls whose runs are recorded."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _recorded(kind)
    return _CLASSES[kind]


def _recorded(kind: type) -> type:

    def call(self: Any) -> Any:
        return _run(self, kind.__call__, sys._getframe(1), waits=True)

    def start(self: Any) -> Any:
        return _run(self, kind.start, sys._getframe(1), waits=False)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"__call__": call, "start": start})


def _run(
    bound: Any, function: Callable[[Any], Any], frame: FrameType, *, waits: bool
) -> Any:
    to = recorder()
    site = to.sites.of_caller(frame)
    if site is CORE:
        return function(bound)
    numbers = [to.ring.append(kind, site) for kind in getattr(bound, _KINDS)()]
    first, num = numbers[0] if numbers else 0, len(numbers)
    try:
        result = function(bound)
    except BaseException as error:
        to.raised(first, num, error)
        raise
    if not waits:
        return TracedRequest(result, first, num)
    to.ring.end(first, num)
    return result
