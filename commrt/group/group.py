# SPDX-License-Identifier: Apache-2.0
"""State of one set of ranks (usable, closed, failed) and the errors it raises."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from commrt import _native, env
from commrt.bootstrap.base import VainWaitError
from commrt.errors import (
    BackendError,
    ChangedInFlightError,
    ClosedError,
    IntegrityError,
    MismatchError,
    PeerFailedError,
    ReductionError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
    shown,
)
from commrt.group import faults
from commrt.group.end_errors import error_of_end
from commrt.group.finite_values import not_finite
from commrt.group.missing_ranks import have, missing_elsewhere, starved
from commrt.group.rank_states import (
    Asked,
    Elsewhere,
    RankState,
    ask_elsewhere,
    own_wait,
    rank_states,
    table_of,
)
from commrt.job.arena import Arena
from commrt.job.links import agree_link_class, measure_links, spins_for
from commrt.job.private_places import Place, Places
from commrt.job.slot_window import measure_slot_window
from commrt.job.world import World
from commrt.mpi import tags
from commrt.planning.footprint import LANE_NBYTES
from commrt.schedule.nodes import check_nodes
from commrt.select.facts import CommFacts
from commrt.vocabulary.checks import as_integer, check_flag
from commrt.vocabulary.limits import NO_LIMIT_S, check_timeout
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["CallChecker", "Group"]


_KINDS: dict[str, type[Exception]] = {
    "backend": BackendError,
    "calls": MismatchError,
    "integrity": IntegrityError,
    "mismatch": MismatchError,
    "peer": PeerFailedError,
    "reduction": ReductionError,
    "refused": RefusedError,
    "revoked": RevokedError,
    "truncation": TruncationError,
}


_FAULTS = {"calls": "mismatch", "mismatch": "mismatch", "peer": "death"}
"""Kinds of errors that faults are told of, by the engine's word."""
_REST_S = 1.0
_MOST_REFUSALS = 64
_FROM_ANYONE = ("probe", "recv", "recv_object")


class Latest(dict[int, str]):
    """Keeps the last entries, as far back as another rank may be behind."""

    def __setitem__(self, key: int, value: str) -> None:
        super().__setitem__(key, value)
        while len(self) > _MOST_REFUSALS:
            del self[next(iter(self))]


class Exchange(Protocol):
    """Lets each rank tell each other one something."""

    def alltoall(self, x: Any, *, out: Any, timeout_s: float) -> Any:
        """Send an element to each rank, and return what each one has sent here."""
        ...


class CallChecker(Protocol):
    """Compares calls across ranks before anything of them is sent (check mode)."""

    @property
    def channel(self) -> Exchange:
        """Collectives of the same ranks, which the comparisons go over."""

    def check(self, call: Any, bound: Any) -> None:
        """Raise MismatchError on every rank unless all of them make the same call."""
        ...

    def tell(self, what: str, error: UsageError, timeout_s: float | None) -> None:
        """Raise this rank's error on every rank."""
        ...

    def compare(
        self,
        fields: dict[str, Any],
        timeout_s: float | None,
        call: Sequence[str] = (),
    ) -> None:
        """Raise MismatchError on every rank unless all of them say the same."""
        ...

    def with_calls(self, error: MismatchError, call: Sequence[str]) -> MismatchError:
        """Return an error of all ranks with the calls of all of them."""
        ...

    def failed(
        self, what: str, error: BaseException, timeout_s: float
    ) -> BaseException:
        """Return the error of a call whose comparison failed."""
        ...

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one."""
        ...

    def free(self) -> None:
        """Free what the comparisons go over."""
        ...


@lru_cache(maxsize=1)
def watch_forks() -> None:
    """Mark the engine as dead in every process that forks from this one."""
    os.register_at_fork(after_in_child=_native.mark_forked)


class Group(_native.Group):
    """A set of ranks: who they are, where they run, and whether they can go on.

    It has the engine's object for these ranks and checks its own state. It runs no
    collective: ``Channel`` adds those.
    """

    closed: str | None = None
    """The word for its end, "freed" or "dropped"; None while it can be used."""
    checker: CallChecker | None = None
    """Compares calls across ranks in check mode."""
    remedy: str = "call shrink()"
    """Messages tell this cure to ranks whose group has failed."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        name: str,
        identity: int,
        *,
        deterministic: bool = False,
        limit_s: float | None = None,
        place: Place | None = None,
    ) -> None:
        """Connect ``ranks`` (ranks of the world); collective over them.

        Args:
            world: the job.
            ranks: who takes part, in the order of this group.
            name: what messages call it.
            identity: a number that the ranks agreed on, and nobody else has.
            deterministic: results shall not depend on the algorithm.
            limit_s: limit of the waits in here; None for the job's.
            place: its memory, where it is a private one: then nobody waits in here.
        """
        watch_forks()
        world.free_lingering()
        self.world = world
        self.world_ranks = tuple(ranks)
        self.identity = identity
        self.pid = os.getpid()
        self.deterministic = deterministic
        """True if results are bitwise the same whatever algorithm runs."""
        rank = self.world_ranks.index(world.rank)
        super().__init__(world.engine, rank, len(ranks), name)
        self.timeout_s = world.timeout_s
        self.nan_check = env.read_bool("COMMRT_NAN_CHECK")
        self.has_checksums = env.read_bool("COMMRT_CHECKSUM")
        # Check mode compares each call before that.
        checks = env.read_str("COMMRT_DEBUG") != "off"
        every = env.read_float("COMMRT_COMPARE_EVERY")
        self.compare_every = 0 if checks else int(every)
        self.is_staged = world.relay is None or world.relay.is_staged
        """True if its relay copies messages on both sides, as gloo's does."""
        self.arena: Arena | None = None
        self.own_refusals: Latest = Latest()
        """Why this rank's last refused calls were, by their numbers."""
        self._resources = ExitStack()
        """Gives back what the group holds, the latest first."""
        world.holders.begin()
        self._resources.callback(world.holders.end)
        # Keys of exchanges of this group, and of groups made from it, begin with it.
        self._resources.callback(world.bootstrap.forget, f"comm{identity}")
        world.heeds.begin(self.set_failure)
        self._attach(self.timeout_s if limit_s is None else limit_s, place)
        self.facts = self._agree_facts()
        others_need_core = self.is_staged or world.shares_cores
        self._set_spins(spins_for(self.facts, self.is_relayed and others_need_core))
        self.set_slot_window(world.slot_window_nbytes)
        members = str([*self.world_ranks])
        key = f"{name} ({identity})"
        _native.describe_flight(self, world.number, identity, key, members)
        self.of_group = frozenset((*vars(self), "closed", "of_group"))
        """Attributes that refer to no service over the group."""
        faults.began(world)

    # -- making ------------------------------------------------------------------

    def _attach(self, limit_s: float, place: Place | None) -> None:
        """Connect with the ranks of this node by memory, with others by messages."""
        world = self.world
        here = world.node_of(world.rank)
        ranks = self.world_ranks
        members = [i for i, r in enumerate(ranks) if world.node_of(r) == here]
        if len(members) > 1:
            region = _native.region_nbytes(len(members), LANE_NBYTES)
            key = f"comm{self.identity}/arena/{here}"
            on_node = [ranks[i] for i in members]
            asked = on_node, key, region, limit_s, Places.parts(region)
            arena = place.memory() if place else world.share_memory(*asked)
            self.arena = arena
            self._resources.callback(self._leave_memory)
            memory = arena.address, arena.region_nbytes
            self._attach_arena(*memory, LANE_NBYTES, members)
            if world.bells is not None:
                self.attach_bells(world.bells.native, world.bells.of(ranks))
        if world.liveness is not None:
            self.attach_liveness(world.liveness.native, list(ranks))
        self.node_members = frozenset(members)
        if len(members) < len(ranks):
            world.attach_other_nodes(self, list(ranks), tags.of_steps(self.identity))

    def _leave_memory(self) -> None:
        if self.arena is not None:
            self._detach()
            self.arena.close()
            self.arena = None

    def _agree_facts(self) -> CommFacts:
        world = self.world
        per_node = Counter(map(world.node_of, self.world_ranks))
        if not world.has_measured and len(self.world_ranks) == world.size:
            world.links = measure_links(self, world)
            world.slot_window_nbytes = measure_slot_window(self, world)
            world.has_measured = True
        ppn = max(per_node.values())
        link = agree_link_class(world, self.world_ranks, ppn)
        layout = check_nodes(map(world.node_of, self.world_ranks), self.size)
        seen = self.size, len(per_node), ppn, world.cores, link, layout
        return CommFacts(*seen, world.network if len(per_node) > 1 else None)

    # -- what it is --------------------------------------------------------------

    @property
    def in_process(self) -> bool:
        """True if the ranks are threads of this process."""
        return self.world.in_process

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks of this group on each node."""
        world = self.world
        groups: dict[int, list[int]] = {}
        for rank, world_rank in enumerate(self.world_ranks):
            groups.setdefault(world.node_of(world_rank), []).append(rank)
        return list(groups.values())

    def shares_memory_with(self, rank: int) -> bool:
        """Return whether ``rank`` is reached over shared memory."""
        return rank in self.node_members

    @property
    def has_heap(self) -> bool:
        """True if there is symmetric memory; the same on all ranks of a node."""
        return False

    @property
    def timeout_s(self) -> float:
        """Default limit of a wait, in seconds; None and ``inf`` set no limit."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float | None) -> None:
        limit = NO_LIMIT_S if timeout_s is None else timeout_s
        self._timeout_s = check_timeout(self.name, limit)

    @property
    def nan_check(self) -> bool:
        """True if calls whose arrays have NaN or infinity are refused on this rank."""
        return self._nan_check

    @nan_check.setter
    def nan_check(self, wanted: bool) -> None:
        self._nan_check = check_flag(self.name, "nan_check", wanted)

    @property
    def is_relayed(self) -> bool:
        """True if messages to ranks on other nodes go without MPI."""
        return self.world.relay is not None and len(self.node_members) < self.size

    @property
    def _asked(self) -> Asked | None:
        """Carries questions to this group's ranks of other nodes, if there are any."""
        if len(self.node_members) == self.size:
            return None
        return self.world.relay or self.world.inquiries

    def who_is_missing(self, seq: int, elsewhere: Elsewhere | None = None) -> str:
        """Return who keeps operation ``seq`` waiting, as far as this node can tell.

        ``elsewhere``: what ranks of other nodes have said; None: ask them.
        """
        missing = self.not_started(seq) if self.arena is not None else []
        said = [have(missing, "on this node", "not started it")] if missing else []
        if self._asked is not None:
            found = self.asked_elsewhere() if elsewhere is None else elsewhere
            said += missing_elsewhere(found, seq)
            started = "all ranks have started it and one does not make progress"
            return "; ".join(said) or started
        if said:
            return said[0]
        if len(self.node_members) < self.size:
            return "all ranks of this node have started it; look at the other nodes"
        return "all ranks have started it and one does not make progress"

    def asked_elsewhere(self) -> Elsewhere:
        """Ask ranks of other nodes what they do."""
        asked = self._asked
        if asked is None:
            return {}
        away = [rank for rank in range(self.size) if rank not in self.node_members]
        members = {self.world_ranks[rank]: rank for rank in away}
        tag = tags.of_steps(self.identity)
        return ask_elsewhere(asked, members, tag, self.world.beside)

    def rank_states(self, elsewhere: Elsewhere | None = None) -> tuple[RankState, ...]:
        """Return what each rank does now, as far as this one can tell."""
        found = self.asked_elsewhere() if elsewhere is None else elsewhere
        return rank_states(self, self.node_members, found)

    def limit(self, what: str, timeout_s: Any) -> float:
        """Return the limit of a call's wait in seconds, by its argument or here."""
        return self.timeout_s if timeout_s is None else check_timeout(what, timeout_s)

    def comes_to_rest(self) -> bool:
        """Wait until nothing is in flight, for a moment: messages may be on the way."""
        deadline = time.monotonic() + _REST_S
        backoff = _native.Backoff(self.world.engine)
        while not self.idle and not self.failure:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            if not self.world.engine.step():
                backoff.pause(left_s)
        return self.idle

    def check_process(self) -> None:
        """Raise ClosedError in a process that was forked from the group's."""
        if os.getpid() != self.pid:
            raise ClosedError(
                f"{self.name} belongs to process {self.pid}, from which this one was "
                f"forked: memory and messages cannot be shared with it. Use the "
                f"communicator in the parent only, or start workers by 'spawn'"
            )

    def check_open(self) -> None:
        """Raise ClosedError where the group has been freed, or is another process's."""
        self.check_process()
        if self.closed is not None:
            raise ClosedError(
                f"{self.name} takes no calls any more, because it was {self.closed}: "
                f"make a new communicator, such as by dup() of one that is open"
            )

    def check_going(self) -> None:
        """Raise the error of its end, as later calls do, unless it can be used."""
        self.check_open()
        if self.failure:
            raise error_of_end(self)

    def check_usable(self) -> None:
        """Do the same before a call that has a place in the order of calls."""
        self.check_going()

    def check_rank(self, what: str, argument: str, rank: Any) -> int:
        """Return a rank of this group, or raise UsageError."""
        found = as_integer(rank)
        if found is None or not 0 <= found < self.size:
            more = ", or no source, for whichever rank sends"
            raise UsageError(
                f"{what}: {argument}={shown(rank)} is not a rank of {self.name}; "
                f"expected 0..{self.size - 1}{more if what in _FROM_ANYONE else ''}"
            )
        return found

    def _check_timeout(self, what: str, timeout_s: Any) -> float:
        return check_timeout(what, timeout_s)

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused here, in the order of calls.

        The other ranks' operation fails with RefusedError, and all ranks go on with
        their next one. A rank that is many such calls ahead of others waits for them.
        """
        if self.closed is not None or self.failure or os.getpid() != self.pid:
            return
        deadline = time.monotonic() + self.timeout_s
        backoff = _native.Backoff(self.world.engine)
        why = str(error).encode(errors="backslashreplace").decode()
        self.own_refusals[self.next_seq] = why
        while not self._refuse(why):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.set_failure(
                    "other ranks have yet to make calls that this rank has refused"
                )
                return
            if not self.world.engine.step():
                backoff.pause(left_s)

    def heed_deaths(self, source: int | None) -> None:
        """Raise PeerFailedError where a rank's process has ended.

        One that has left matters only as the ``source`` of a message; None: any rank.
        """
        why = self.who_died(-1 if source is None else source)
        if not why:
            return
        if self.who_died():  # it has not left by itself
            self.set_failure(why, by_death=True)
        raise PeerFailedError(f"{self.name}, rank {self.rank}: {why}")

    def check_places(self, places: _native.Places, what: str) -> None:
        """Raise UsageError where an array of a bound collective has other memory.

        The call takes its place in the order of calls.
        """
        self.check_bound(lambda: places.check(what))

    def check_bound(self, look: Callable[[], None]) -> None:
        """Call what looks at a bound call's arrays; refuse the call where it raises."""
        try:
            look()
        except Exception as error:
            self.refuse(error)
            raise

    def refuse_not_finite(
        self, what: str, argument: str, index: int, count: int, is_nan: bool
    ) -> NoReturn:
        """Raise NotFiniteError; a collective takes its place in the order of calls."""
        error = not_finite(self, what, argument, (index, count), is_nan=is_nan)
        if what in COLLECTIVES:
            self.refuse(error)
        raise error

    def heed_refusals(self) -> None:
        """End a wait by RefusedError where another rank has refused what comes next."""
        why = self._why_next_is_refused()
        if why:
            raise VainWaitError(lambda: self.refused_next(why))

    def heed_end(
        self, ranks: Sequence[int] | None = None, *, deaths: bool = True
    ) -> None:
        """Raise RevokedError or PeerFailedError where a rank has ended the group.

        ``ranks``: these are waited for; None: all. ``deaths``: a dead one ends it.
        """
        why, by_death = self.known_end()
        if not why or not self._has_end(ranks):
            return
        died = by_death or self.who_died()
        if died and not deaths:
            return
        if not (died or self.failure or self._others_gave_up()):
            return  # ranks have left, and may have done their part before
        if not self.failure:
            self.set_failure(why, by_death=bool(died))
        self.check_going()

    def _others_gave_up(self) -> bool:
        """Return whether another rank of this node has given the group up."""
        near = filter(self.shares_memory_with, range(self.size))
        return any(rank != self.rank and self.has_given_up(rank) for rank in near)

    def _has_end(self, ranks: Sequence[int] | None) -> bool:
        """Return whether one of these ranks may have ended the group."""
        if ranks is None:
            return True
        others = [rank for rank in ranks if rank != self.rank]
        near = [rank for rank in others if self.shares_memory_with(rank)]
        return len(near) < len(others) or any(map(self.has_given_up, near))

    def heed_others(self) -> None:
        """Raise what ends this rank's wait for others that come to the next call."""
        self.heed_refusals()
        self.heed_end()

    def making(
        self, ranks: Sequence[int] | None = None, *, deaths: bool = True
    ) -> AbstractContextManager[None]:
        """Let waits in here end where the group has ended; as ``heed_end``."""
        return self.world.heeds.until(lambda: self.heed_end(ranks, deaths=deaths))

    def refused_next(self, why: str) -> RefusedError:
        """Count the next operation, which does not happen; return what to raise."""
        error = RefusedError(f"operation #{self.next_seq} on {self.name}: {why}")
        self.pass_over()
        return error

    def operation_error(self, what: str, error: str, kind: str) -> Exception:
        """Return the error of a failed operation; ``kind`` is the engine's word."""
        # Calls that differ have the same words on all ranks.
        text = error if kind == "calls" else f"{what}, rank {self.rank}: {error}"
        if kind in _FAULTS:
            faults.failed(self.world, _FAULTS[kind], text)
        return _KINDS[kind](text)

    def changed_in_flight(self, what: str, site: str) -> ChangedInFlightError:
        """Return the error of an operation whose array the program has written to."""
        return ChangedInFlightError(
            f"{what}, rank {self.rank} (called at {site}): its array was written to "
            f"while it was in flight, so other ranks may have got any of both values; "
            f"wait() for the request before you write to the array (check mode)"
        )

    def check_failed(
        self, what: str, error: BaseException, timeout_s: float
    ) -> BaseException:
        """Return the error of a call that check mode could not compare."""
        checker = self.checker
        return error if checker is None else checker.failed(what, error, timeout_s)

    def _stream_on_host(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what}: wait(stream=...) is for device arrays; this operation is on host "
            f"memory, call wait() without a stream"
        )

    def timed_out(
        self,
        what: str,
        seq: int,
        seconds: float,
        waits_for: str,
        request: Any = None,
        starved_s: float = 0.0,
        process_ran: bool = False,
    ) -> NoReturn:
        """Raise TimeoutError_, with the request that can be waited for again.

        Args:
            what: the operation, as messages call it.
            seq: its number.
            seconds: how long it was waited for.
            waits_for: who keeps it waiting; empty: find it out.
            request: what can be waited for again.
            starved_s: the longest time in which this rank's wait did not look.
            process_ran: whether its process computed meanwhile.
        """
        elsewhere = self.asked_elsewhere()
        who = waits_for or self.who_is_missing(seq, elsewhere)
        states = self.rank_states(elsewhere)
        states = own_wait(states, self.rank, what, seq, self.name, seconds)
        error = TimeoutError_(
            f"{what}, rank {self.rank}: not complete within {seconds:g} s: "
            f"{starved(starved_s, process_ran)}{who}; it "
            f"stays in flight and its buffers stay alive: wait() for it again (the "
            f"request is in the error's .request), or abort()"
            f"{table_of(states, self.name, seq)}"
        )
        error.request = request
        error.ranks = states
        self.world.missed_deadline = True
        faults.failed(self.world, "timeout", str(error))
        raise error

    def with_ranks(self, error: TimeoutError_) -> TimeoutError_:
        """Return the error of another wait than a request's, with what ranks do."""
        error.ranks = self.rank_states()
        self.world.missed_deadline = True
        faults.failed(self.world, "timeout", str(error))
        return error
