# SPDX-License-Identifier: Apache-2.0
"""Near memory: which storages are in it, and how they leave and come back.

If there is no room for what is needed, transfers out are awaited first. Then storages
that no block computes with leave though the plan keeps them, the oldest first: the
backward pass needs these last. That happens if a program does what the plan does not
know of: larger inputs, or several forward passes before a backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch

from commrt.errors import BackendError, CommError
from commrt.layers.out_of_core.entries import Entry
from commrt.layers.out_of_core.far import FarMemory, Transfer, is_in_lane
from commrt.layers.out_of_core.ledger import Ledger
from commrt.layers.out_of_core.turn import Turn

__all__ = ["NearMemory"]

T = TypeVar("T")


class NearMemory:
    """The entries of all passes, within one budget.

    Autograd may release entries in threads of its own, so calls exclude each other.
    """

    def __init__(self, budget_bytes: int, far: FarMemory) -> None:
        self.ledger = Ledger(budget_bytes)
        self.stall_s = 0.0
        self.stored_nbytes = self.loaded_nbytes = 0
        self._far = far
        self._lock = Turn()
        self._asked: deque[Callable[[], None]] = deque()
        self._entries: dict[Entry, None] = {}  # near ones, the oldest first
        self._leaving: deque[list[Entry]] = deque()
        self._ending: list[Entry] = []  # dead ones, to which a transfer still writes

    def restart(self) -> None:
        """Begin to count anew."""
        self.poll()
        self.stall_s = 0.0
        self.stored_nbytes = self.loaded_nbytes = 0
        self.ledger.restart()

    def later(self, act: Callable[[], None]) -> None:
        """Do something at once, or at the next ``poll`` if another call is under way.

        For finalizers, which must not wait: the garbage collector may run in a thread
        for which the holder of the lock waits, or amid a change of this object.
        """
        self._asked.append(act)
        if not is_in_lane() and self._lock.enter_if_free():
            with self._lock.entered():
                self._do_asked()

    def _do_asked(self) -> None:
        while self._asked:
            self._asked.popleft()()

    # -- room --------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Wait, and let entries leave, until so many bytes fit, or none can leave."""
        with self._lock:
            self.poll()
            while not self.ledger.fits(nbytes):
                if self._leaving:
                    self._await(self._leaving[0][-1].leaving)
                    self.poll()
                elif not self._spill():
                    break

    def _spill(self) -> bool:
        """Let the oldest entry leave that may; return False if there is none."""
        for entry in [*self._entries]:  # autograd may release some meanwhile
            is_idle = not entry.is_pinned and entry.leaving is None
            is_here = entry.coming is None or self._is_done(entry.coming)
            if is_idle and is_here and entry.can_leave:
                self.leave([entry])
                return True
        return False

    def add(self, entry: Entry) -> None:
        """Count an entry that is near; MemoryError_ if there is no room for it."""
        with self._lock:
            self.make_room(entry.nbytes)
            self.ledger.take(entry.nbytes)
            self._entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """Forget an entry that nobody uses any more."""
        with self._lock:
            if entry.is_dead:
                return
            entry.is_dead = True
            if entry.leaving is not None:
                return  # poll() releases it
            if entry.coming is not None and not entry.coming.is_done():
                self._ending.append(entry)
                return
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        if entry.is_near:
            self._drop_near(entry)
        if entry.slot is not None:
            self._far.drop(entry.slot)
            entry.slot = None

    def _drop_near(self, entry: Entry) -> None:
        entry.is_near = False
        entry.storage = entry.coming = None
        for use in entry.uses:
            use.leave()
        self.ledger.give(entry.nbytes)
        self._entries.pop(entry, None)

    # -- transfers ---------------------------------------------------------------

    def leave(self, entries: Iterable[Entry]) -> None:
        """Start to move near entries out; they stop being near at the end of the last.

        Those whose bytes are far already are not near at once.
        """
        with self._lock:
            going: list[Entry] = []
            for entry in entries:
                if entry.is_dead or not entry.is_near or entry.leaving is not None:
                    continue
                if not entry.can_leave:
                    continue
                if entry.slot is not None:
                    if entry.coming is None or entry.coming.is_done():
                        self._drop_near(entry)
                    continue
                entry.slot, entry.leaving = self._told(
                    partial(self._far.store, entry.bytes())
                )
                entry.stays = False
                self.stored_nbytes += entry.nbytes
                going.append(entry)
                if len(going) == 1:
                    self._leaving.append(going)

    def poll(self) -> None:
        """Release what has left, or has come to its end."""
        with self._lock:
            self._do_asked()
            while self._leaving and self._is_done(self._leaving[0][-1].leaving):
                gone = self._leaving[0]
                for entry in gone:
                    assert entry.leaving is not None
                    if entry.is_dead:  # an error does not matter any more
                        self._settle(entry.leaving)
                    else:
                        self._told(entry.leaving.wait)
                self._leaving.popleft()
                for entry in gone:
                    entry.leaving = None
                    if entry.is_dead:
                        self._release(entry)
                    elif not entry.stays:
                        self._drop_near(entry)
            for entry in [*self._ending]:
                if self._is_done(entry.coming):
                    self._ending.remove(entry)
                    self._release(entry)

    def bring(self, entries: Iterable[Entry], *, is_needed: bool) -> bool:
        """Start to bring entries back; return False if there is no room yet.

        ``is_needed``: room is made, and MemoryError_ is raised if there is none.
        """
        with self._lock:
            self.poll()
            missing = []
            for entry in entries:
                if entry.leaving is not None:
                    entry.stays = True
                elif not entry.is_near:
                    missing.append(entry)
            nbytes = sum(entry.nbytes for entry in missing)
            if is_needed:
                self.make_room(nbytes)
            elif not self.ledger.fits(nbytes):
                return False
            for entry in missing:
                self.ledger.take(entry.nbytes)
                entry.is_near = True
                self._entries[entry] = None
                self._told(partial(self._load, entry))
            return True

    def _load(self, entry: Entry) -> None:
        target = torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.device())
        entry.storage = target.untyped_storage()
        entry.coming = self._far.load(entry.slot, target)
        self.loaded_nbytes += entry.nbytes

    def arrive(self, entries: Iterable[Entry]) -> None:
        """Wait until entries that were asked for are near."""
        for entry in entries:
            if entry.leaving is not None:
                self._await(entry.leaving)
            if entry.coming is not None:
                self._await(entry.coming, orders=True)
        self.poll()

    def abandon(self, entries: Iterable[Entry]) -> None:
        """Forget entries, after transfers that failed perhaps."""
        with self._lock:
            for entry in entries:
                self.remove(entry)
            for gone in [*self._leaving]:
                if all(entry.is_dead for entry in gone):
                    self._leaving.remove(gone)
                    for entry in gone:
                        self._settle(entry.leaving)
                        entry.leaving = None
                        self._release(entry)

    # -- transfers' ends ---------------------------------------------------------

    def _await(self, transfer: Transfer | None, *, orders: bool = False) -> None:
        assert transfer is not None
        begin = self._far.clock.now()
        self._told(transfer.order if orders else transfer.wait)
        self.stall_s += self._far.clock.now() - begin

    def _is_done(self, transfer: Transfer | None) -> bool:
        return transfer is None or bool(self._told(transfer.is_done))

    def _settle(self, transfer: Transfer | None) -> None:
        """Wait for the end of a transfer whose result does not matter."""
        if transfer is not None:
            try:
                transfer.wait()
            except Exception:  # noqa: BLE001 - another error is on its way
                return

    def _told(self, act: Callable[[], T]) -> T:
        """Return what the far memory returns; its errors become commrt's."""
        try:
            return act()
        except (CommError, AssertionError):
            raise
        except Exception as error:
            raise BackendError(
                f"OutOfCore: {type(self._far).__name__} failed: {error}"
            ) from error
