# SPDX-License-Identifier: Apache-2.0
"""A session: Horovod's state on one rank, over a communicator.

A rank that waits takes part in the rounds of all its process sets. So ranks may wait
for operations of different sets in different orders. One thread of a rank drives at a
time; the others submit meanwhile, and wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from commrt.comm import Communicator
from commrt.errors import (
    ClosedError,
    CommError,
    MismatchError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
    shown,
)
from commrt.hvd.entries import Entry, UnderWay
from commrt.hvd.patience import Patience
from commrt.hvd.rank_set import RankSet
from commrt.hvd.signatures import Signature, ranks_text
from commrt.layers.data.bucket_size import best_bucket_nbytes
from commrt.request import Request, wait_any
from commrt.vocabulary.limits import check_timeout

__all__ = ["Session"]

_SETS = "process sets"
"""Name of the meetings in which sets are added and removed."""
_LOG = logging.getLogger("commrt.hvd")
_CACHE_CAPACITY = 1024
"""Names whose signatures are kept, as in Horovod."""
_GRACE_S = 2.0
"""Seconds that a rank which ends with operations waits for the other ranks."""
_PAUSE_S = (0.0005, 0.02)
"""First and longest pause between rounds in which nobody had anything to say."""


class Session:
    """Horovod's state on one rank.

        with Session(commrt.init()) as session:
            ...

    ``commrt.hvd.init`` makes one for the functions of ``commrt.hvd``.

    Args:
        comm: all ranks; it stays the caller's.
        fusion_nbytes: bytes at which small tensors are sent together; None: as
            ``best_bucket_nbytes(comm)`` finds best from a table or by measuring; 0:
            each tensor by itself.
        stall_warning_s: seconds after which a warning names operations that wait for
            other ranks, and these ranks.
        cache_capacity: names whose signatures are kept between steps.

    Collective over ``comm``, with equal arguments. For others it raises UsageError or
    MismatchError; RefusedError on ranks whose own arguments fit.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        fusion_nbytes: int | None = None,
        stall_warning_s: float = 60.0,
        cache_capacity: int = _CACHE_CAPACITY,
    ) -> None:
        what = "hvd.init"
        if not isinstance(comm, Communicator):
            raise UsageError(f"{what}: comm={shown(comm)} must be a communicator")
        self.comm = comm
        self._meetings = comm.dup(name=f"{comm.name}.hvd.sets")
        try:
            self._check_arguments(what, fusion_nbytes, stall_warning_s, cache_capacity)
        except CommError:
            self._meetings.free()
            raise
        self._stall_warning_s = stall_warning_s
        if fusion_nbytes is None:
            fusion_nbytes = best_bucket_nbytes(self._meetings)
        self.fusion_nbytes = fusion_nbytes
        self._cache_capacity = cache_capacity
        self._driving = threading.RLock()
        self._naming = threading.Lock()
        self._names: dict[tuple[int, str], Entry] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._num_sets = 0
        self._ranks_of: dict[int, list[int]] = {}
        self._sets: dict[int, RankSet] = {}
        self._norms: Communicator | None = None
        self._is_open = True
        self._add(list(range(comm.size)))

    def _check_arguments(
        self, what: str, fusion_nbytes: Any, stall_warning_s: Any, cache_capacity: Any
    ) -> None:
        """Raise an error on all ranks unless all have arguments that fit; collective.

        Ranks tell each other of their own errors before they raise these.
        """
        refusal: UsageError | None = None
        try:
            check_timeout(what, stall_warning_s)
            for name, number in (
                ("fusion_nbytes", 0 if fusion_nbytes is None else fusion_nbytes),
                ("cache_capacity", cache_capacity),
            ):
                if type(number) is not int or number < 0:
                    raise UsageError(
                        f"{what}: {name}={shown(number)} must be a whole number from 0"
                    )
        except UsageError as error:
            refusal = error
        why = None if refusal is None else str(refusal)
        told = self._meetings.allgather_object(why)
        if refusal is not None:
            raise refusal
        refused = {rank: each for rank, each in enumerate(told) if each is not None}
        if refused:
            rank, why = next(iter(refused.items()))
            raise RefusedError(
                f"{what}: {ranks_text(refused)} refused the arguments: on rank {rank}: "
                f"{why}"
            )
        given = fusion_nbytes, cache_capacity
        self.check_equal("fusion_nbytes and cache_capacity", given)

    def check_equal(self, what: str, value: Any) -> None:
        """Raise MismatchError on all ranks unless all give ``init`` equal values.

        Collective, and blocks without rounds.
        """
        told = self._meetings.allgather_object(value)
        if any(each != told[0] for each in told):
            raise MismatchError(
                f"hvd.init: the ranks gave different {what}: {shown(told)}; pass equal "
                f"ones"
            )

    # -- meetings ----------------------------------------------------------------

    def meet(self, name: str, op: str = "") -> None:
        """Return once all ranks have come here; take part in rounds meanwhile.

        For what blocks without rounds. A rank that is not here yet may wait for an
        operation of this one, and comes after it.

        Args:
            name: of the meeting, equal on all ranks.
            op: what the ranks meet for, if there is a choice.
        """
        entry = Entry(name, Signature("meeting", op=op))
        self.submit(0, entry)
        self.wait(0, entry)

    # -- process sets ------------------------------------------------------------

    def refuse_set(self, error: UsageError) -> None:
        """Tell the other ranks that this one can add no set, because of an error."""
        self.refuse(0, Entry(_SETS, Signature("meeting", refusal=str(error))))

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a process set of some ranks; return its number. Collective over all.

        Raises UsageError, on all ranks, unless all give the same ranks, and a set that
        there is not yet.
        """
        self.check_open()
        given = sorted(ranks)
        self.meet(_SETS, "add")
        told = self._meetings.allgather_object(given)
        if any(each != given for each in told):
            raise MismatchError(
                f"add_process_set: the ranks gave different process sets: "
                f"{shown(told)}; all ranks must add the same ones in the same order"
            )
        if not given or len({*given}) < len(given):
            raise UsageError(
                f"add_process_set: ranks={given} must be distinct, and one at least"
            )
        if given[0] < 0 or given[-1] >= self.comm.size:
            raise UsageError(
                f"add_process_set: ranks={given} must be among the ranks 0 to "
                f"{self.comm.size - 1}"
            )
        for number, known in self._ranks_of.items():
            if known == given:
                raise UsageError(
                    f"add_process_set: process set {number} has the ranks {given} "
                    f"already; use that"
                )
        return self._add(given)

    def _add(self, ranks: list[int]) -> int:
        number = self._num_sets
        self._num_sets += 1
        self._ranks_of[number] = ranks
        if self.comm.rank in ranks:
            comm, name = self._meetings, f"{self.comm.name}.hvd"
            is_part = len(ranks) < comm.size
            if is_part:
                name = f"{name}.set{number}"
                comm = comm.create_group(ranks, name=f"{name}.ranks")
            self._sets[number] = RankSet(
                comm,
                ranks,
                name=name,
                fusion_nbytes=self.fusion_nbytes,
                cache_capacity=self._cache_capacity,
            )
            if is_part:
                comm.free()
        return number

    def remove_set(self, number: int | None) -> bool:
        """Remove a process set; True if there was one. Collective over all ranks.

        Raises UsageError on all ranks where one has operations of it that are not over.
        """
        self.check_open()
        self.meet(_SETS, "remove")
        names = self._names.items() if number else ()
        busy = [entry.name for (of, _), entry in names if of == number]
        told = self._meetings.allgather_object((number, busy))
        if any(each[0] != number for each in told):
            raise MismatchError(
                f"remove_process_set: the ranks gave different process sets: "
                f"{[each[0] for each in told]}"
            )
        if any(each[1] for each in told):
            named = {rank: each[1] for rank, each in enumerate(told) if each[1]}
            raise UsageError(
                f"remove_process_set: operations of process set {number} are not over: "
                f"{shown(named)} by rank; call hvd.synchronize for them first"
            )
        if not number or number not in self._ranks_of:
            return False
        del self._ranks_of[number]
        mine = self._sets.pop(number, None)
        if mine is not None:
            mine.free()
        return True

    def ranks_of(self, number: int) -> list[int]:
        """Return the ranks of a process set."""
        self.check_open()
        found = self._ranks_of.get(number)
        if found is None:
            raise UsageError(
                f"there is no process set {number}; the sets of this job are "
                f"{shown(self._ranks_of)}"
            )
        return found

    def set_of(self, number: int) -> RankSet:
        """Return a process set that this rank is in."""
        ranks = self.ranks_of(number)
        mine = self._sets.get(number)
        if mine is None:
            raise UsageError(
                f"rank {self.comm.rank} is not in process set {number}, which has the "
                f"ranks {ranks}; only these may call its operations"
            )
        if mine.error is not None:
            raise RevokedError(
                f"process set {number} has failed: {mine.error}. Call hvd.shutdown() "
                f"and hvd.init() with a communicator that works"
            ) from mine.error
        return mine

    # -- operations --------------------------------------------------------------

    def next_number(self, number: int, kind: str) -> int:
        """Return the number of an unnamed operation: ranks count alike."""
        with self._naming:
            found = self._numbers[number, kind]
            self._numbers[number, kind] += 1
        return found

    def submit(self, number: int, entry: Entry) -> None:
        """Submit an operation to a process set, and go on with what is under way.

        Raises UsageError for a name whose operation has not been waited for.
        """
        ranks = self.set_of(number)
        with self._naming:
            before = self._names.get((number, entry.name))
            if before is not None and entry.is_named:
                raise UsageError(
                    f"{entry.name}: an operation of this name is not over "
                    f"({before!r}): wait for it by hvd.synchronize(handle), or give "
                    f"this one another name"
                )
            self._names[number, entry.name] = entry
            ranks.submit(entry)
        if self._driving.acquire(blocking=False):
            try:
                ranks.advance(waits=False)
            finally:
                self._driving.release()

    def refuse(self, number: int, entry: Entry) -> None:
        """Tell the other ranks that this rank has refused its call.

        ``entry`` says so in its signature. It fails on the other ranks.
        """
        ranks = self.set_of(number)
        with self._naming:
            if (number, entry.name) not in self._names:
                ranks.submit(entry)

    def poll(self, number: int, entry: Entry) -> bool:
        """Return whether an operation is over, after a little progress."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            if not entry.is_started:
                self._advance_all()
            is_over = entry.is_started and all(each.test() for each in entry.transfers)
        finally:
            self._driving.release()
        if is_over:
            self._let_go(number, entry)
        return is_over

    def wait(self, number: int, entry: Entry) -> None:
        """Wait until an operation is over; raises its error."""
        self._wait_until(lambda: entry.is_started, self.set_of, number, entry.name)
        with self._driving:
            self._finish(entry.transfers)
            if number in self._sets:
                self._sets[number].forget(entry.transfers)
        self._let_go(number, entry)
        if entry.error is not None:
            raise entry.error

    def _finish(self, transfers: Iterable[UnderWay]) -> None:
        """Wait for transfers, and take part in rounds meanwhile.

        Another rank may wait for a transfer of another set, whose round has ended, and
        which this rank has yet to start.
        """
        left = list(transfers)
        patience = Patience(self.comm.timeout_s, self._stall_warning_s)
        while not all([each.test() for each in left]) and not patience.is_over():
            busy = self._advance_all()
            if not busy:
                break
            self._pause(busy, patience, left)
        for each in left:
            each.finish()

    def _let_go(self, number: int, entry: Entry) -> None:
        with self._naming:
            if self._names.get((number, entry.name)) is entry:
                del self._names[number, entry.name]

    def join(self) -> int:
        """Take part in sums with zeros until all ranks have joined; return the last."""
        ranks = self.set_of(0)
        ranks.joins, ranks.last_joined = True, None
        self._wait_until(lambda: ranks.last_joined is not None, self.set_of, 0, "join")
        with self._driving:
            self._finish(ranks.under_way)
        with self._naming:
            # Ranks that joined early have made fewer unnamed calls than the others.
            for key in [key for key in self._numbers if key[0] == 0]:
                del self._numbers[key]
        last = ranks.last_joined
        assert last is not None
        return last

    # -- waiting -----------------------------------------------------------------

    def _advance_all(self) -> list[RankSet]:
        """Go on with all process sets, as one who waits; return the busy ones."""
        busy = []
        for ranks in list(self._sets.values()):
            if ranks.error is None and (ranks.joins or not ranks.is_settled):
                ranks.advance(waits=True)
                busy.append(ranks)
        return busy

    def _wait_until(
        self,
        is_over: Callable[[], bool],
        set_of: Callable[[int], RankSet],
        number: int,
        name: str,
    ) -> None:
        """Take part in rounds until something is over, or the deadline has passed."""
        if is_over():
            return
        patience = Patience(self.comm.timeout_s, self._stall_warning_s)
        if not self._driving.acquire(
            timeout=min(patience.limit_s, threading.TIMEOUT_MAX)
        ):
            raise TimeoutError_(
                f"{name}: another thread of this rank has waited in commrt.hvd for "
                f"{patience.limit_s:g} s"
            )
        try:
            ranks = set_of(number) if not is_over() else None
            while ranks is not None and not is_over():
                rounds = ranks.num_rounds
                busy = self._advance_all()
                if is_over():
                    break
                if ranks.error is not None:
                    raise ranks.error
                if ranks.joins and ranks.num_rounds > rounds:
                    patience.begin()  # others are at work
                self._look_at_clock(patience, ranks, name)
                self._pause(busy, patience)
        finally:
            if number in self._sets:
                self._sets[number].give_up("")  # another wait has its own reasons
            self._driving.release()

    def _pause(
        self,
        busy: Sequence[RankSet],
        patience: Patience,
        transfers: Sequence[UnderWay] = (),
    ) -> None:
        """Wait for the rounds that are under way, or a moment where there are none.

        Args:
            busy: sets with something to agree on.
            patience: of this wait.
            transfers: whose ends end the pause as well.
        """
        requests = [each.round_request for each in busy]
        requests += [each.request for each in transfers]
        waiting: list[Request] = [each for each in requests if each is not None]
        limit_s = patience.next_s()
        between = [each for each in busy if each.round_request is None]
        if between or not waiting:
            idle = min(
                (each.num_idle for each in between if not each.has_news), default=0
            )
            first, longest = _PAUSE_S
            limit_s = min(limit_s, longest, first * 2 ** min(idle, 8) * bool(idle))
        if limit_s <= 0:
            return
        if not waiting:
            time.sleep(limit_s)
            return
        try:
            if len(waiting) == 1:
                waiting[0].synchronize(timeout_s=limit_s)
            else:
                wait_any(waiting, timeout_s=limit_s)
        except CommError:
            return  # the time is over, or the next step of a round raises it

    def _look_at_clock(self, patience: Patience, ranks: RankSet, name: str) -> None:
        """Warn of ranks that are missing, give up in time, and end at the deadline."""
        if patience.asks and ranks.missing:
            patience.asks = False
            why = f"{name}: waited for {patience.waited_s():.1f} s"
            _LOG.warning("rank %d: %s", self.comm.rank, ranks.told_missing(why))
        if patience.is_over():
            error = TimeoutError_(
                f"{name}: not over within {patience.limit_s:g} s.{_late(ranks)} All "
                f"ranks of a process set must submit its operations, and wait for them"
            )
            ranks.end(error)
            raise error
        if patience.takes_last_words():
            ranks.give_up(
                f"{name}: rank {self.comm.rank} has waited for "
                f"{patience.waited_s():.1f} s of {patience.limit_s:g}"
            )
        if patience.warns():
            late = _late(ranks)
            if late:
                _LOG.warning(
                    "rank %d: %s: waited for %.1f s.%s",
                    *(self.comm.rank, name, patience.waited_s(), late),
                )
            else:
                ranks.ask()
                patience.asks = True

    # -- beside the rounds -------------------------------------------------------

    def norm_comm(self) -> Communicator:
        """Return a communicator for statistics of batches; collective at first.

        It blocks without rounds, so ranks ``meet`` before.
        """
        self.check_open()
        if self._norms is None:
            self._norms = self._meetings.dup(name=f"{self.comm.name}.hvd.norm")
        return self._norms

    # -- the end -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True until it is closed."""
        return self._is_open

    def check_open(self) -> None:
        """Raise ClosedError once it is closed."""
        if not self._is_open:
            raise ClosedError("hvd.shutdown() was called; call hvd.init() again")

    def close(self) -> None:
        """End the session; idempotent.

        Operations that other ranks have not submitted fail, here and there. A rank that
        has some waits a moment for the others, who may have ended.
        """
        if not self._is_open:
            return
        with self._driving:
            self._is_open = False
            why = f"rank {self.comm.rank} has called hvd.shutdown()"
            patience = Patience(min(self.comm.timeout_s, _GRACE_S), _GRACE_S)
            for ranks in self._sets.values():
                if not ranks.is_settled:
                    ranks.give_up(why)
                while ranks.error is None and not ranks.is_settled:
                    ranks.advance(waits=True)
                    self._pause([ranks], patience)
                    if patience.is_over():
                        ranks.end(TimeoutError_(f"hvd.shutdown: {_late(ranks)}"))
                if ranks.error is None:
                    ranks.finish_all()
                ranks.free()
            for comm in (self._norms, self._meetings):
                if comm is not None:
                    comm.free()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"<hvd.Session of {self.comm.name}: {len(self._ranks_of)} sets{state}>"


def _late(ranks: RankSet) -> str:
    """Return a sentence about the ranks that have not come to a round; or nothing."""
    request = ranks.round_request
    if request is None:
        return ""
    try:
        request.synchronize(timeout_s=1e-3)
    except TimeoutError_ as error:
        started = {each.rank: each.started or 0 for each in error.ranks}
        own = started.get(ranks.rank, 0)
        late = [rank for rank, number in started.items() if number < own]
        if late:
            who = ranks_text(ranks.ranks[rank] for rank in late)
            return f" {who.capitalize()} did not come to negotiate."
    except CommError:
        return ""
    return ""
