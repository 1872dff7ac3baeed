# SPDX-License-Identifier: Apache-2.0
"""The recorder: the calls of this process's ranks, in a ring in memory.

While nobody records, communicators and process groups are unchanged. Recording gives
each of them methods of its own (``methods.py``, and torch's in
``commrt/torch/tracing.py``), written in C++. Each makes a record of forty bytes per
call. It puts the record into the ring before the call, so that the log has a call that
never ends, too.

A ``Kind`` holds the facts that calls share: operation, bytes, element type, peer,
algorithm. The recorder finds it again by facts that it can read from a call at once,
and finds the place in the program the same way. Python looks only at the first call of
a kind, and at calls that fail.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from commrt import _native
from commrt.errors import UsageError, shown
from commrt.trace.call_sites import call_sites
from commrt.trace.volumes import MESSAGES

__all__ = [
    "END",
    "KIND",
    "SEQ",
    "SITE",
    "START",
    "Group",
    "Kind",
    "Record",
    "Recorder",
    "recorder",
]

KIND, SITE, SEQ, START, END = range(5)
"""Places of a record's fields. The end is 0 until it is seen, and negative if the call
failed."""
Record: TypeAlias = tuple["Kind", Any, int, int, int]
DEFAULT_RECORDS = 100_000
_MOST_KINDS = 1 << 15

now: Final = time.monotonic_ns


class Kind:
    """The fields two calls must share to count as the same call."""

    __slots__ = (
        "algorithm",
        "backend",
        "counter",
        "dtype",
        "group",
        "itemsize",
        "nbytes",
        "op",
        "out_nbytes",
        "peer",
        "root",
        "stream",
        "tag",
    )

    def __init__(
        self,
        group: Group,
        op: str,
        nbytes: int,
        *,
        dtype: str = "",
        itemsize: int = 1,
        out_nbytes: int | None = None,
        peer: int = -1,
        tag: int = 0,
        root: int = -1,
        algorithm: str = "",
        stream: int | None = None,
    ) -> None:
        self.group = group
        self.op = op
        self.nbytes = nbytes
        self.dtype = dtype
        self.itemsize = itemsize
        self.out_nbytes = nbytes if out_nbytes is None else out_nbytes
        self.peer = peer
        self.tag = tag
        self.root = root
        self.backend, _, self.algorithm = algorithm.partition("/")
        self.stream = stream
        self.counter = group.counter_of(op, peer, tag)

    def run_by(self, label: str) -> Kind:
        """Return the same, run by something else: backend/algorithm."""
        return Kind(
            *(self.group, self.op, self.nbytes),
            dtype=self.dtype,
            itemsize=self.itemsize,
            out_nbytes=self.out_nbytes,
            peer=self.peer,
            tag=self.tag,
            root=self.root,
            algorithm=label,
            stream=self.stream,
        )

    @property
    def on_device(self) -> bool:
        """True if its arrays are in the memory of a device."""
        return self.stream is not None


class Group:
    """A communicator or a process group, as a log knows it."""

    def __init__(
        self,
        key: str,
        layer: str,
        ranks: Sequence[int],
        rank: int,
        job: str,
        num_ranks: int,
        names: Callable[[], tuple[str, str, str]],
    ) -> None:
        """Take what is known of a group.

        Args:
            key: the same on all of its ranks, and of no other group.
            layer: ``commrt`` or ``torch``.
            ranks: its members, as ranks of the job.
            rank: this process's place among them.
            job: names the job; the same on all ranks.
            num_ranks: of the job.
            names: return its name, what torch says it is for, and its dimension or "".
        """
        self.key = key
        self.layer = layer
        self.ranks = tuple(ranks)
        self.rank = rank
        self.job = job
        self.num_ranks = num_ranks
        self.kinds: dict[Hashable, Kind] = {}
        self.label = ""
        """The dimension that a program has given it."""
        self.pending: list[int] = []
        """Calls that torch coalesces, until they are one Work: numbers of records."""
        self._names = names
        self._said = ("", "", "")
        self._counters: dict[Hashable, _native.RecordCounter] = {}

    @property
    def names(self) -> tuple[str, str, str]:
        """Its name, what torch says it is for, and its parallel dimension."""
        with suppress(ReferenceError):  # of a group that is gone
            self._said = self._names()
        name, desc, dimension = self._said
        return name, desc, self.label or dimension or name

    def counter_of(self, op: str, peer: int, tag: int) -> _native.RecordCounter:
        """Return the counter of calls: collectives of a group, messages of a pair."""
        key = (op, peer, tag) if op in MESSAGES else None
        return self._counters.setdefault(key, _native.RecordCounter())

    def keep(self, key: Hashable, kind: Kind) -> Kind:
        """Remember what calls with a key have in common."""
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds.clear()
        self.kinds[key] = kind
        return kind


Attach = Callable[["Recorder", Any], Group]
"""Gives an object methods that record."""
Undo = Callable[[Any], None]
"""Takes what was given away from an object, which it must not hold."""
Look = Callable[[tuple[Any, ...], dict[str, Any]], "Sequence[Kind] | None"]
"""Says what a call is: one operation, or several messages; None: nothing to record."""
Watch = Callable[[Any, int, int], Any]
"""Takes a result, the number of the first record, and how many there are."""


class Recorder:
    """Everything that this process has recorded."""

    def __init__(self) -> None:
        self.ring = _native.RecordRing(DEFAULT_RECORDS)
        self.sites = call_sites()
        self.groups: weakref.WeakValueDictionary[str, Group] = (
            weakref.WeakValueDictionary()
        )
        """Groups by key and rank: ranks may be threads of one process."""
        self.users = 0
        """Number of users that record at the moment."""
        self.failures: list[Callable[[str], None]] = []
        """Functions to call with the error of a failed call."""
        self._lock = threading.RLock()
        self._followed: weakref.WeakKeyDictionary[Any, Attach] = (
            weakref.WeakKeyDictionary()
        )
        self._wrapped: weakref.WeakKeyDictionary[Any, list[Undo]] = (
            weakref.WeakKeyDictionary()
        )
        self._groups: weakref.WeakKeyDictionary[Any, Group] = (
            weakref.WeakKeyDictionary()
        )
        self._labels: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._lasting: list[Group] = []

    # -- who is recorded ---------------------------------------------------------

    def follow(self, target: Any, attach: Attach) -> None:
        """Record a communicator or group while somebody records."""
        with self._lock:
            self._followed[target] = attach
            if target in self._wrapped:  # it is followed anew: it has changed
                self._detach(target)
            if self.users:
                self._attach(target, attach)

    def is_followed(self, target: Any) -> bool:
        """Return whether it is recorded while somebody records."""
        return target in self._followed

    def begin(self, num_records: int | None = None) -> None:
        """Record from now on."""
        with self._lock:
            if num_records is not None:
                self.ring.resize(num_records)
            self.ring.reserve()
            self.users += 1
            if self.users == 1:
                for target, attach in list(self._followed.items()):
                    self._attach(target, attach)

    def end(self) -> None:
        """Record no more, unless somebody else does."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                for target in list(self._wrapped):
                    self._detach(target)

    def clear(self) -> None:
        """Forget what was recorded; in a forked process it is the parent's."""
        self.ring.clear()
        self.groups.clear()
        self._lasting.clear()

    def group(self, group: Group) -> Group:
        """Return the group of this key and rank, which may have been met before."""
        key = f"{group.key}#{group.ranks[group.rank]}"
        found = self.groups.setdefault(key, group)
        if found is group and group.layer == "torch":
            # Names of torch's groups come again, and calls are then counted on.
            self._lasting.append(group)
        return found

    def label(self, target: Any, dimension: str) -> None:
        """Name the parallel dimension of a communicator or process group."""
        if not isinstance(dimension, str):
            raise UsageError(
                f"commrt.trace.label: dimension={shown(dimension)} must be a string, "
                f'such as "tp"'
            )
        with self._lock:
            try:
                is_followed = target in self._followed
            except Exception:  # noqa: BLE001 - of what has no hash, or a wrong one
                is_followed = False
            if not is_followed:
                raise UsageError(
                    f"commrt.trace.label: group={shown(target)} is neither a "
                    "communicator nor a process group of commrt's"
                )
            self._labels[target] = dimension
            if target in self._groups:
                self._groups[target].label = dimension

    def _attach(self, target: Any, attach: Attach) -> None:
        if target not in self._wrapped:
            self._wrapped[target] = []
            group = self._groups[target] = attach(self, target)
            group.label = self._labels.get(target, group.label)

    def replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Give an object a method of its own, until recording ends."""
        held = vars(target)
        before = held.get(name)

        def undo(of: Any) -> None:
            vars(of).pop(name, None)
            if before is not None:
                vars(of)[name] = before

        held[name] = method
        self.at_end(target, undo)

    def at_end(self, target: Any, undo: Undo) -> None:
        """Let something be done to an object when recording ends."""
        self._wrapped[target].append(undo)

    def _detach(self, target: Any) -> None:
        for undo in reversed(self._wrapped.pop(target)):
            undo(target)

    # -- what happens ------------------------------------------------------------

    def method(
        self,
        name: str,
        function: Callable[..., Any],
        owner: Any,
        look: Look,
        *,
        reads: str,
        watch: Watch,
        **of_torch: Any,
    ) -> Callable[..., Any]:
        """Return a callable that runs a function, with a record of each call.

        Args:
            name: of the method.
            function: called with the owner before the call's own arguments.
            owner: what the method is of, or a weak reference to it; None for a bound
                function.
            look: says what a call is that was not met before.
            reads: how each positional argument is read (calls/recorded_method.hpp).
            watch: lets what a call returns note its end, where that is no request of
                the engine's; returns what the caller gets.
            of_torch: see there.
        """
        method: Callable[..., Any] = _native.record_method(
            *(name, function, owner, self.ring, self.sites),
            reads=reads,
            look=look,
            watch=watch,
            raised=self.raised,
            **of_torch,
        )
        return method

    def raised(self, first: int, num: int, error: BaseException) -> None:
        """Note that a call has raised an error: it has failed, or was none."""
        if isinstance(error, (UsageError, TypeError)):  # of this rank's arguments
            self.ring.take_back(first, num)
        else:
            self.ring.fail(first, num, error)

    @property
    def num_made(self) -> int:
        """Records that were made so far, those that are gone included."""
        return self.ring.num_dropped + len(self.ring)

    def tell(self, error: BaseException) -> None:
        """Tell all listeners that something went wrong."""
        said = f"{type(error).__name__}: {error}"
        for each in list(self.failures):
            each(said)


_RECORDER = Recorder()


def _forget() -> None:
    """Forget, in a forked process, the parent's records and wrapped objects."""
    _RECORDER._lock = threading.RLock()  # a thread of the parent's may have held it
    for target in list(_RECORDER._wrapped):
        _RECORDER._detach(target)
    _RECORDER.users = 0
    _RECORDER.failures.clear()
    _RECORDER._followed.clear()
    _RECORDER.clear()


os.register_at_fork(after_in_child=_forget)


def recorder() -> Recorder:
    """Return this process's recorder."""
    return _RECORDER
