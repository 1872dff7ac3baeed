# SPDX-License-Identifier: Apache-2.0
"""Process sets: ranks that run operations without the others."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from commrt.errors import UsageError, shown
from commrt.hvd.current import current, session_or_none
from commrt.hvd.session import Session
from commrt.vocabulary.checks import as_integer

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
]


class ProcessSet:
    """Ranks that run operations together.

        evens = hvd.add_process_set(hvd.ProcessSet([0, 2]))    # on all ranks
        if evens.included():
            hvd.allreduce(x, process_set=evens)

    Args:
        ranks: the ranks, in any order.

    Attributes:
        ranks: the ranks in order.
        process_set_id: its number in the current session; None: it was not added since
            ``hvd.init``, or is removed.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        try:
            given = [as_integer(rank) for rank in ranks]
        except TypeError:
            given = [None]
        known = [rank for rank in given if rank is not None]
        if len(known) < len(given):
            raise UsageError(
                f"ProcessSet: ranks={shown(ranks)} must be a list of ranks, such as "
                f"[0, 2]"
            )
        self._ranks: list[int] | None = sorted(known)
        self._numbers: WeakKeyDictionary[Session, int] = WeakKeyDictionary()

    @property
    def process_set_id(self) -> int | None:
        """Its number in the current session; None: it is not there."""
        session = session_or_none()
        return None if session is None else self._numbers.get(session)

    def bind(self, session: Session, number: int | None) -> None:
        """Note its number in a session; None: it was removed."""
        if number is None:
            self._numbers.pop(session, None)
        else:
            self._numbers[session] = number

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in order; None: all, and ``hvd.init`` was not called."""
        if self._ranks is not None:
            return self._ranks
        session = session_or_none()
        return None if session is None else session.ranks_of(0)

    def size(self) -> int | None:
        """Return the number of ranks; None: the set was not added."""
        if self.process_set_id is None:
            return None
        return len(current().ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process's place in the set; None: not added, or it has none."""
        if self.process_set_id is None:
            return None
        session = current()
        ranks, own = session.ranks_of(self.process_set_id), session.comm.rank
        return ranks.index(own) if own in ranks else None

    def included(self) -> bool | None:
        """Return whether this process is in the set; None without ``hvd.init``."""
        ranks = self.ranks
        session = session_or_none()
        if ranks is None or session is None:
            return None
        return session.comm.rank in ranks

    def number(self, what: str) -> int:
        """Return its number; UsageError, which names the caller, without one."""
        if self.process_set_id is None:
            raise UsageError(
                f"{what}: {self!r} was not added since hvd.init(), or is removed: call "
                f"hvd.add_process_set(process_set) on all ranks first"
            )
        return self.process_set_id

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """The set of all ranks, whichever session is the current one."""

    def __init__(self) -> None:
        super().__init__([])
        self._ranks = None

    @property
    def process_set_id(self) -> int:
        """Return 0."""
        return 0


global_process_set: ProcessSet = _AllRanks()
"""The process set of all ranks."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, and return it. Collective over all ranks, with equal ranks.

    Raises UsageError on all ranks for a set with the same ranks as another one.
    """
    session = current()
    if not isinstance(process_set, ProcessSet):
        try:
            process_set = ProcessSet(process_set)
        except UsageError as error:
            session.refuse_set(error)
            raise
    ranks = process_set.ranks
    assert ranks is not None
    process_set.bind(session, session.add_set(ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether there was one. Collective over all ranks.

    The set of all ranks stays. Raises UsageError on all ranks while operations of the
    set are not over.
    """
    session = current()
    is_gone = session.remove_set(process_set.process_set_id)
    process_set.bind(session, None)
    return is_gone
