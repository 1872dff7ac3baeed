# SPDX-License-Identifier: Apache-2.0
"""The recorder: what this process's ranks have called, in a ring in memory.

While nobody records, communicators and process groups are what they always are.
Recording gives each of them methods of its own (``methods.py``, and torch's in
``commrt/torch/tracing.py``), which make a record per call: a list of five that is in
the ring before the call, so that a call that never ends is in the log as well. What
calls have in common (operation, bytes, element type, peer, algorithm) is a ``Kind``,
found again by what can be read off a call at once; the place in the program likewise.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final

from commrt.errors import UsageError
from commrt.trace.call_sites import CallSites

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
"""What a record holds: its end is 0 while it is not seen, negative where it failed."""
Record = list[Any]
DEFAULT_RECORDS = 100_000
_MOST_KINDS = 1 << 15

now: Final = time.monotonic_ns


class Kind:
    """What calls have in common that differ in nothing but when and where."""

    __slots__ = (
        "algorithm",
        "backend",
        "counter",
        "dtype",
        "group",
        "itemsize",
        "nbytes",
        "on_device",
        "op",
        "out_nbytes",
        "peer",
        "root",
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
        on_device: bool = False,
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
        self.on_device = on_device
        self.counter = group.counter_of(op, peer, tag)


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
        self.glances: dict[str, dict[Any, Kind]] = {}
        """By operation: kinds of calls that less tells apart."""
        self.label = ""
        """The dimension that a program has given it."""
        self.pending: list[Record] = []
        """Calls that torch coalesces, until they are one Work."""
        self._names = names
        self._said = ("", "", "")
        self._counters: dict[Hashable, list[int]] = {}

    @property
    def names(self) -> tuple[str, str, str]:
        """Its name, what torch says it is for, and its parallel dimension."""
        with suppress(ReferenceError):  # of a group that is gone
            self._said = self._names()
        name, desc, dimension = self._said
        return name, desc, self.label or dimension or name

    def counter_of(self, op: str, peer: int, tag: int) -> list[int]:
        """Return what counts calls: collectives of a group, messages of a pair."""
        key = (op, peer, tag) if op in ("send", "recv") else None
        return self._counters.setdefault(key, [0])

    def keep(self, key: Hashable, kind: Kind) -> Kind:
        """Remember what calls with a key have in common."""
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds.clear()
            for known in self.glances.values():
                known.clear()
        self.kinds[key] = kind
        return kind


Attach = Callable[["Recorder", Any], Group]
"""Gives an object methods that record."""


class Recorder:
    """Everything that this process has recorded."""

    def __init__(self) -> None:
        self.ring: deque[Record] = deque(maxlen=DEFAULT_RECORDS)
        self.sites = CallSites()
        self.groups: dict[str, Group] = {}
        """By key and rank: ranks may be threads of one process."""
        self.users = 0
        """How many record at the moment."""
        self.failures: list[Callable[[str], None]] = []
        """To be called with what a call has failed with."""
        self._lock = threading.RLock()
        self._followed: weakref.WeakKeyDictionary[Any, Attach] = (
            weakref.WeakKeyDictionary()
        )
        self._wrapped: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._groups: weakref.WeakKeyDictionary[Any, Group] = (
            weakref.WeakKeyDictionary()
        )
        self._labels: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    # -- who is recorded ---------------------------------------------------------

    def follow(self, target: Any, attach: Attach) -> None:
        """Record a communicator or group while somebody records."""
        with self._lock:
            self._followed[target] = attach
            if self.users:
                self._attach(target, attach)

    def begin(self, num_records: int | None = None) -> None:
        """Record from now on."""
        with self._lock:
            if num_records is not None and num_records != self.ring.maxlen:
                self.ring = deque(self.ring, maxlen=num_records)
                for target in list(self._wrapped):  # they hold the other ring
                    self._detach(target)
                    self._attach(target, self._followed[target])
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

    def group(self, group: Group) -> Group:
        """Return the group of this key and rank, which may have been met before."""
        return self.groups.setdefault(f"{group.key}#{group.ranks[group.rank]}", group)

    def label(self, target: Any, dimension: str) -> None:
        """Name the parallel dimension of a communicator or process group."""
        with self._lock:
            if target not in self._followed:
                raise UsageError(
                    f"commrt.trace.label: {target!r} is neither a communicator nor a "
                    f"process group of commrt's"
                )
            self._labels[target] = dimension
            if target in self._groups:
                self._groups[target].label = dimension

    def _attach(self, target: Any, attach: Attach) -> None:
        if target not in self._wrapped:
            self._wrapped[target] = {}
            group = self._groups[target] = attach(self, target)
            group.label = self._labels.get(target, group.label)

    def replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Give an object a method of its own, until recording ends."""
        held = vars(target)
        self._wrapped[target][name] = held.get(name)
        held[name] = method

    def _detach(self, target: Any) -> None:
        held = vars(target)
        for name, before in self._wrapped.pop(target).items():
            held.pop(name, None)
            if before is not None:
                held[name] = before

    # -- what happens ------------------------------------------------------------

    @property
    def num_dropped(self) -> int:
        """Records that the ring has lost, of all that were made."""
        made = sum(
            counter[0]
            for group in self.groups.values()
            for counter in group._counters.values()
        )
        return max(0, made - len(self.ring))

    def failed(self, record: Record, error: BaseException) -> None:
        """Note that a call has failed, and tell who wants to know."""
        if record[END] == 0:
            record[END] = -now()
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Tell who wants to know that something went wrong."""
        said = f"{type(error).__name__}: {error}"
        for each in list(self.failures):
            each(said)

    def taken_back(self, record: Record) -> None:
        """Forget a call that was refused here, so that it counts on no rank."""
        counter = record[KIND].counter
        if counter[0] == record[SEQ] + 1:
            counter[0] -= 1
        with suppress(ValueError, IndexError):
            if self.ring[-1] is record:
                self.ring.pop()
            else:
                self.ring.remove(record)

    def snapshot(self) -> list[Record]:
        """Return the records, oldest first, while others may be added."""
        while True:
            try:
                return [list(record) for record in self.ring]
            except RuntimeError:  # it changed meanwhile
                continue


_RECORDER = Recorder()


def _forget() -> None:
    """In a forked process: nothing is its own."""
    _RECORDER.users = 0
    _RECORDER.failures.clear()
    _RECORDER._wrapped.clear()
    _RECORDER._followed.clear()
    _RECORDER.clear()


os.register_at_fork(after_in_child=_forget)


def recorder() -> Recorder:
    """Return this process's recorder."""
    return _RECORDER
