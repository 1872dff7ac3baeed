# SPDX-License-Identifier: Apache-2.0
"""Exchange memory that ranks share: its start and its end.

    memory = connect(bootstrap, members, device, world.share_memory, timeout_s=30)
    shared = Shared(memory, _native.PeerWork(comm, memory.exchange))
    ...
    shared.end_later()

All ranks connect, or none. The end of a communicator waits for nobody: its memory is
given up step by step, in later calls and at the end of the process. Once its streams
have run all their work, this rank closes the memory of the others that it has open.
Once the others have done so, too, this rank frees its own block.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from commrt import _native
from commrt.backends.ipc.memory import HALF_NBYTES, PeerMemory
from commrt.bootstrap.base import Bootstrap
from commrt.errors import BackendError, CommError, DeviceError, UsageError
from commrt.job.arena import Arena
from commrt.vocabulary.limits import deadline_after

__all__ = ["ENDING", "Shared", "connect", "end_all", "sweep"]

_GRACE_S = 5.0
_RELAXED = 2
"""The capture mode in which calls end no other thread's capture."""
_GONE = (DeviceError, UsageError)
"""Errors of a device that has failed or was closed: it runs nothing any more."""

ShareMemory = Callable[[Sequence[int], str, int, float], Arena]
"""``World.share_memory``: memory of the host that all ranks map, a region for each."""


def connect(
    bootstrap: Bootstrap,
    members: Sequence[int],
    device: Any,
    share_memory: ShareMemory,
    half_nbytes: int = HALF_NBYTES,
    *,
    timeout_s: float,
    name: str = "ipc",
    first_value: int = 0,
) -> PeerMemory:
    """Return exchange memory that all ``members`` have opened, or raise on all.

    Collective. Memory that cannot be had or shared is an error with ``on_all_ranks``
    set: of the ranks where it went wrong their own, of the others a BackendError that
    names them. ``first_value`` is what flags begin with, for tests of their wrapping.
    """
    rank, size = list(members).index(bootstrap.rank), len(members)
    made: list[PeerMemory] = []

    def allocate() -> str:
        made.append(PeerMemory(device, rank, size, half_nbytes, name, first_value))
        return made[0].handle

    def open_all() -> str:
        made[0].open(handles, book)
        return ""

    def agree(step: str, attempt: Callable[[], str]) -> list[str]:
        return _agree(bootstrap, members, f"{name}/{step}", timeout_s, attempt)

    try:
        handles = agree("allocate", allocate)
        book = share_memory(members, f"ipc/{name}/book", 1, timeout_s)
        agree("open", open_all)
        bootstrap.forget(f"ipc/{name}")  # no two groups have one name here
    except BaseException:
        for one in made:
            Shared(one, None).end_later()
        sweep(device)
        raise
    return made[0]


def _agree(
    bootstrap: Bootstrap,
    members: Sequence[int],
    what: str,
    timeout_s: float,
    attempt: Callable[[], str],
) -> list[str]:
    """Return the answers of all ranks; raise on all if any of them failed."""
    said, error = "", None
    try:
        said = attempt()
    except CommError as exc:
        error = exc
    mine = json.dumps([said, "" if error is None else str(error)])
    blobs = bootstrap.exchange(members, f"ipc/{what}", mine.encode(), timeout_s)
    found = [json.loads(blob) for blob in blobs]
    failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(found) if why]
    if not failed:
        return [text for text, _ in found]
    if error is None:
        error = BackendError(
            f"{what}: not all ranks could share memory of their devices, so none "
            f"does: {'; '.join(failed)}"
        )
    error.on_all_ranks = True
    raise error


class Shared:
    """Memory of a communicator's peers, from connecting to closing."""

    def __init__(self, memory: PeerMemory, work: _native.PeerWork | None) -> None:
        self.memory, self.work = memory, work
        self.device = memory.device
        self.is_ending = False
        with _LOCK:
            _SHARED.append(self)
            if not _REGISTERED:
                # Handlers run in the reverse order: before those of cupy and torch,
                # which take the driver away, as these were imported before their
                # arrays came.
                atexit.register(_end_at_exit, os.getpid())
                _REGISTERED.append(os.getpid())

    def end_later(self) -> None:
        """Nobody calls any more. Calls nothing of the device; ``sweep`` does."""
        if self.work is not None:
            self.work.close()
        self.is_ending = True
        ENDING.append(self)

    def let_go(self, deadline: float) -> None:
        """Wait for what is under way until the deadline; then give it up.

        A driver that closes would wait for streams that wait for peers.
        """
        while not self._has_run() and time.monotonic() < deadline:
            os.sched_yield()
        if self.work is not None and not self._has_run():
            self.work.give_up("the process ends")

    @property
    def is_stuck(self) -> bool:
        """True if its streams wait for peers that may never come."""
        work = self.work
        return work is not None and work.failed and not self._has_run()

    def step(self) -> bool:
        """Go on with the end, without waiting for peers; True once it is over."""
        try:
            if not self._has_run():
                return False
            if self.work is None:
                self.memory.end_unused()
            else:
                self.work.end()
                self.work = None
            self.memory.leave()
            return self.memory.free()
        except _GONE:
            self.work = None
            self.memory.forget()
            return True

    def _has_run(self) -> bool:
        try:
            return self.work is None or self.work.has_run()
        except _GONE:
            return True


_LOCK = threading.Lock()
_SHARED: list[Shared] = []
ENDING: list[Shared] = []
"""Memories that are ending; a call that finds the list empty has nothing to do."""
_SWEEPING = threading.Lock()
_REGISTERED: list[int] = []


def sweep(device: Any = None) -> int:
    """Go on with what ends, on one device or on all; return how much is left of it.

    Waits for no peer. Where a stream is stuck on a device, which only failures can
    bring about, nothing is given back there: to free memory may wait for all streams.
    """
    if not ENDING:
        return 0
    if not _SWEEPING.acquire(blocking=False):
        return 1
    try:
        with _LOCK:
            here = [one for one in _SHARED if device is None or one.device is device]
        ending = [one for one in here if one.is_ending]
        over: list[Shared] = []
        for one in ending:
            beside = [other for other in here if other.device is one.device]
            if not any(other.is_stuck for other in beside) and _relaxed(one):
                over.append(one)
        with _LOCK:
            for one in over:
                _SHARED.remove(one)
                ENDING.remove(one)
        return len(ending) - len(over)
    finally:
        _SWEEPING.release()


def _relaxed(one: Shared) -> bool:
    """Take a step that ends no capture of another thread."""
    try:
        before = one.device.exchange_capture_mode(_RELAXED)
    except _GONE:
        return one.step()
    try:
        return one.step()
    finally:
        one.device.exchange_capture_mode(before)


def end_all(timeout_s: float = _GRACE_S) -> None:
    """End all that there is, and wait for the other ranks to leave it, but not longer.

    Memory that others still have open by then stays with the process.
    """
    with _LOCK:
        live = [one for one in _SHARED if not one.is_ending]
    deadline = deadline_after(timeout_s)
    for one in live:
        one.let_go(deadline)
        one.end_later()
    while sweep() and time.monotonic() < deadline:
        os.sched_yield()


def _end_at_exit(owner: int) -> None:
    """A forked process must not touch what is its parent's."""
    if os.getpid() == owner:
        end_all()
