# SPDX-License-Identifier: Apache-2.0
"""Process groups whose ranks change: torch's ``enable_reconfigure``, 2.14 and later.

Such a group is not connected when it is made. ``reconfigure`` connects it to the ranks
that handles name, again and again, and the object stays the same. Each time the ranks
meet in the group's store under a fresh uuid, make a world of their own, and put it in
the place of the one before, which ends then.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world as torchs

from commrt.bootstrap.single import SingleBootstrap
from commrt.errors import ClosedError, CommError, UsageError, shown
from commrt.torch import jobs
from commrt.torch.backend import CommrtBackend
from commrt.torch.checked_calls import CheckedCalls
from commrt.torch.errors import as_torch_error, wrong_call
from commrt.torch.faults import GroupFaults
from commrt.torch.generations import Generation, agreed_job, reaching
from commrt.torch.handles import Handle, in_order, new_handle
from commrt.torch.joined_group import JoinedGroup
from commrt.torch.process_group import CommrtProcessGroup
from commrt.torch.tracing import follow_group
from commrt.torch.work import CommrtWork
from commrt.vocabulary.limits import deadline_after, timedelta_seconds

__all__ = ["reconfigurable_group"]


def reconfigurable_group(member: jobs.Member) -> ReconfigurableGroup:
    """Return a group that is not connected so far; local."""
    return ReconfigurableGroup(NotConnected(member))


class NotConnected:
    """Stands for a group's communicator, and for its calls, while there is none."""

    is_checked = False

    def __init__(self, member: jobs.Member) -> None:
        self.member = member
        self.faults = GroupFaults()
        self.comm = self.calls = _Refusing(member.name)

    @property
    def communicator(self) -> NoReturn:
        """Raise UsageError."""
        self.comm.refuse()

    @property
    def memory(self) -> NoReturn:
        """Raise UsageError."""
        self.comm.refuse()

    def revoke(self, why: str) -> None:
        """Do nothing: nothing is under way."""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to end."""


class _Refusing:
    """Refuses whatever is asked of it, since its group is not connected."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def refuse(self) -> NoReturn:
        """Raise UsageError."""
        raise wrong_call(
            f"the process group {self._name!r} is not connected: after "
            f"enable_reconfigure=True call dist._reconfigure() with the handles of its "
            f"ranks first"
        ) from None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        self.refuse()

    def __repr__(self) -> str:
        return f"<not connected: {self._name}>"


class Reconfigures:
    """What a group that can be reconfigured, and its backend, have otherwise."""

    member: jobs.Member
    _joined: Any
    supports_reconfigure = True

    def rank(self) -> int:
        """Return this process's rank in the group, -1 before it is connected."""
        return -1 if isinstance(self._joined, NotConnected) else self.member.rank

    def size(self) -> int:
        """Return the ranks of the group."""
        return self.member.size

    getRank, getSize = rank, size  # noqa: N815  what C++ calls them


class ReconfigurableGroup(Reconfigures, CommrtProcessGroup):
    """A process group whose ranks a program gives by ``reconfigure``."""

    def __init__(self, joined: NotConnected) -> None:
        super().__init__(joined)  # type: ignore[arg-type]
        self._first = joined.member
        """Place that torch gave this process when it made the group."""
        self._turn = threading.Lock()
        self._own: Handle | None = None
        self._is_over = False

    def _backend_of(self, joined: JoinedGroup) -> CommrtBackend:
        return ReconfigurableBackend(joined, self)

    # -- torch's interface -------------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """Return the text by which ranks name this one to ``reconfigure``.

        It stays the same, through all reconfigurations.
        """
        try:
            return self._handle().text()
        except CommError as error:
            raise as_torch_error(error) from error.__cause__

    def reconfigure(self, opts: Any) -> CommrtWork:
        """Connect the group to the ranks that handles name; collective over them.

        Args:
            opts: torch's ReconfigureOptions. A list of handles gives the ranks, of a
                set ranks of one machine come together. The uuid is a fresh one for
                each attempt, and the same on all ranks.

        A group that has failed, or has calls in flight, ends at once on all of its old
        ranks. Any other one lasts until the new ranks are connected: where that fails,
        it goes on. Ranks that are left out do not call; their group ends.

        Raises:
            UsageError: a handle is none, of another job, or given twice; the rank's
                own one is missing; the uuid was used.
            MismatchError: the ranks give different handles, or different options.
            RefusedError: another rank's call was wrong.
            TimeoutError_: a rank did not come in time.
            PeerFailedError: the process of a rank has ended.
        """
        if not self._turn.acquire(blocking=False):
            raise wrong_call(
                f"reconfigure: another thread reconfigures the process group "
                f"{self._group_name!r}"
            )
        try:
            with reaching(f"reconfigure of process group {self._group_name!r}"):
                joined = self._connected(opts)
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        finally:
            self._turn.release()
        return CommrtWork(None, [], completer=joined.completer)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the calls from now on that have none of their own."""
        limit_s = timedelta_seconds(timeout)
        self._first = replace(self._first, timeout_s=limit_s)
        if isinstance(self._joined, JoinedGroup):
            self._joined.comm.timeout_s = limit_s

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Fail all that is under way, on all ranks; ``reconfigure`` connects anew."""
        joined = self._joined
        if isinstance(joined, JoinedGroup):
            joined.revoke("the process group was aborted")
            joined.faults.notice_abort()

    def shutdown(self) -> None:
        """End the group here. Idempotent."""
        self._is_over = True
        self._joined.shutdown()

    # -- connecting --------------------------------------------------------------

    def _handle(self) -> Handle:
        if self._is_over:
            raise ClosedError(
                f"the process group {self._group_name!r} was destroyed, and cannot be "
                f"connected again: make another one"
            )
        if self._own is None:
            with reaching("get_reconfigure_handle"):
                job = agreed_job(self._first.store, secrets.token_hex(8))
            self._own = new_handle(job, self._first.rank)
        return self._own

    def _connected(self, opts: Any) -> JoinedGroup:
        limit_s = self._limit_s(opts)
        if opts.hints:
            warnings.warn(
                f"reconfigure: commrt knows no hints, and passes over "
                f"{shown(dict(opts.hints))}",
                RuntimeWarning,
                stacklevel=4,
            )
        deadline = deadline_after(limit_s)
        store, own, uuid = self._first.store, self._handle(), opts.uuid
        try:
            members = in_order(opts.handles, own)
        except UsageError as error:
            if own.text() in opts.handles:
                Generation(store, uuid, own).refuse(error)
            raise
        generation = Generation(store, uuid, own, members)
        try:
            generation.claim()
            self._end_if_broken()
            facts = self._met(generation, deadline)
            joined = self._joined_anew(generation, facts, deadline)
        except BaseException as error:
            generation.give_up(error)
            raise
        self._succeed(joined, facts)
        return joined

    def _limit_s(self, opts: Any) -> float:
        if opts.timeout is None:
            return self._first.timeout_s
        limit_s = timedelta_seconds(opts.timeout)
        if limit_s <= 0:
            raise UsageError(
                f"reconfigure: timeout={shown(opts.timeout)} must be above 0"
            )
        return limit_s

    def _end_if_broken(self) -> None:
        """End the old communicator, if its ranks may wait in it for each other."""
        joined = self._joined
        if isinstance(joined, JoinedGroup):
            comm = joined.comm
            if not comm.is_over and (comm.known_end()[0] or not comm.idle):
                joined.revoke(f"rank {comm.rank} reconfigures the process group")

    def _met(self, generation: Generation, deadline: float) -> list[dict[str, int]]:
        """Return what each of the new ranks says of itself, once all have come."""
        mine = {"rank": _default_rank(), "groups": torchs.group_count}
        if len(generation.members) == 1:
            return [mine]
        said = generation.meet(
            json.dumps(mine).encode(), _left_s(deadline), jobs.progress()
        )
        return [json.loads(blob) for blob in said]

    def _joined_anew(
        self, generation: Generation, facts: list[dict[str, int]], deadline: float
    ) -> JoinedGroup:
        first, meeting = self._first, generation.meeting
        member = replace(
            first,
            rank=generation.rank,
            size=len(facts),
            ranks=[] if first.is_default else _global_ranks(facts),
        )

        def join(member: jobs.Member) -> Any:
            return jobs.join_anew(
                member, meeting or SingleBootstrap(), _left_s(deadline)
            )

        hooks = self._joined.faults.hooks
        faults = GroupFaults(hooks, ends_late=True)
        joined = JoinedGroup(member, join, faults, "call dist._reconfigure()")
        try:
            if meeting is not None:
                generation.conclude(_left_s(deadline))
            else:
                generation.conclude_alone()
        except BaseException:
            joined.revoke("a rank gave up before all ranks were connected")
            joined.shutdown()
            raise
        return joined

    def _succeed(self, joined: JoinedGroup, facts: list[dict[str, int]]) -> None:
        """Put the new communicator in the place of the old one, which ends."""
        old, backend = self._joined, self._backend
        assert isinstance(backend, CommrtBackend)
        self.take(joined)
        backend.take(joined)
        self.__class__ = _GROUPS[joined.is_checked]
        backend.__class__ = _BACKENDS[joined.is_checked]
        follow_group(self)
        self._tell_torch(joined.member, facts)
        old.revoke(
            f"the process group {self._group_name!r} has been reconfigured to "
            f"{joined.member.size} ranks; a rank that is not among them can be in the "
            f"next reconfiguration"
        )
        old.shutdown()

    def _tell_torch(self, member: jobs.Member, facts: list[dict[str, int]]) -> None:
        """Let torch's functions know the new ranks.

        Ranks that come late have made fewer groups. Torch numbers groups, and the next
        one is to have the same number on all ranks.
        """
        if self in torchs.pg_group_ranks:
            ranks = member.ranks or range(member.size)
            torchs.pg_group_ranks[self] = {rank: i for i, rank in enumerate(ranks)}
        if member.is_default:
            jobs.lead(self._comm)
            torchs.group_count = max(each["groups"] for each in facts)


class CheckedReconfigurableGroup(CheckedCalls, ReconfigurableGroup):
    """One whose ranks compare their calls before they run."""


class ReconfigurableBackend(Reconfigures, CommrtBackend):
    """The backend of such a group, for those who ask for that of a device."""

    def __init__(self, joined: JoinedGroup, group: ReconfigurableGroup) -> None:
        super().__init__(joined)
        self._group = weakref.ref(group)

    @property
    def _whole(self) -> ReconfigurableGroup:
        group = self._group()
        assert group is not None, "a backend lives as long as its group"
        return group

    def get_reconfigure_handle(self) -> str:
        """Return the group's handle."""
        return self._whole.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> CommrtWork:
        """Reconfigure the group."""
        return self._whole.reconfigure(opts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the group's limit."""
        self._whole.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group."""
        self._whole.abort()

    def shutdown(self) -> None:
        """End the group here. Idempotent."""
        self._whole.shutdown()


class CheckedReconfigurableBackend(CheckedCalls, ReconfigurableBackend):
    """One whose ranks compare their calls before they run."""


_GROUPS = {False: ReconfigurableGroup, True: CheckedReconfigurableGroup}
_BACKENDS = {False: ReconfigurableBackend, True: CheckedReconfigurableBackend}


def _default_rank() -> int:
    """Return this process's rank in torch's default group, -1 where it has none."""
    return int(dist.get_rank()) if dist.is_initialized() else -1


def _global_ranks(facts: Sequence[dict[str, int]]) -> list[int]:
    """Return the ranks of a group's members in the default group.

    Where they have no default group in common, their places stand for these.
    """
    ranks = [each["rank"] for each in facts]
    are_of_one = len({*ranks}) == len(ranks) and min(ranks) >= 0
    return ranks if are_of_one else list(range(len(ranks)))


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
