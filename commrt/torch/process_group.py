# SPDX-License-Identifier: Apache-2.0
"""The process group: what torch holds of a commrt communicator.

torch 2.13 lets Python derive from ``ProcessGroup``, not from ``Backend``. So a group of
commrt's serves every device itself, by where a call's tensors are. The calls are in
base classes that know nothing of ProcessGroup: a Backend, where torch allows one, is
another class as short as this one.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup

from commrt.comm import Communicator
from commrt.errors import CommError, TimeoutError_, UsageError
from commrt.torch import jobs
from commrt.torch.backend_view import BackendView
from commrt.torch.calls import Calls, RangedCalls
from commrt.torch.checked_calls import CheckedCalls
from commrt.torch.errors import as_torch_error
from commrt.torch.functional import serve_compiled_gathers
from commrt.torch.futures import Completer
from commrt.torch.group_methods import Collectives
from commrt.torch.group_options import Options
from commrt.torch.memory import SharedMemory
from commrt.torch.messages import Messages
from commrt.torch.registration import BACKEND
from commrt.torch.tracing import follow_group
from commrt.trace.folder import keep_files
from commrt.world import progress_mode

__all__ = ["CheckedProcessGroup", "CommrtProcessGroup", "make_process_group"]

_LIVING: weakref.WeakSet[CommrtProcessGroup] = weakref.WeakSet()
"""Groups that ``destroy_process_group`` has not ended, for the end of the process."""


def make_process_group(options: Any, pg_options: Any) -> CommrtProcessGroup:
    """Return the group that torch asks for; collective over its ranks."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise UsageError(
            f"init_process_group or new_group: pg_options={pg_options!r}: expected "
            f"commrt.torch.Options, or None"
        )
    return _made(
        jobs.Member(
            store=options.store,
            rank=options.group_rank,
            size=options.group_size,
            ranks=list(options.global_ranks_in_group),
            name=options.group_id,
            timeout_s=options.timeout.total_seconds(),
            options=pg_options or Options(),
        )
    )


def _made(member: jobs.Member) -> CommrtProcessGroup:
    """Return a group of which this process is a member; collective over its ranks."""
    try:
        comm = jobs.join(member)
    except TimeoutError_ as error:
        ranks = list(member.ranks) or list(range(member.size))
        error.args = (f"process group {member.name!r} of ranks {ranks}: {error}",)
        raise as_torch_error(error) from error.__cause__
    except CommError as error:
        raise as_torch_error(error) from error.__cause__
    if not _LIVING:
        atexit.unregister(_end_groups)
        atexit.register(_end_groups, os.getpid())
    serve_compiled_gathers()
    kind = CommrtProcessGroup if comm._checker is None else CheckedProcessGroup
    group = kind(comm, member)
    _LIVING.add(group)
    return group


def _end_groups(owner: int) -> None:
    """End the threads of groups that were not destroyed; runs as the process ends."""
    if os.getpid() == owner:
        for group in list(_LIVING):
            group._completer.close()


class CommrtProcessGroup(Collectives, Messages, ProcessGroup):  # type: ignore[misc]
    """A process group of torch on a communicator of commrt."""

    def __init__(self, comm: Communicator, member: jobs.Member) -> None:
        # With the store, as other groups have it, torch 2.13 fails.
        ProcessGroup.__init__(self, member.rank, member.size)
        self._comm = comm
        self._member = member
        self._group_name = member.name
        self._group_desc = "undefined"
        # Without a second core for it, progress would only interrupt the computation.
        self._completer = Completer(member.name)
        by_itself = member.size > 1 and progress_mode(comm._world)
        completer = self._completer if by_itself else None
        kind = Calls if comm._ranges is None else RangedCalls
        self._calls = kind(comm, completer, member.options.sparse_algorithm)
        self._memory = SharedMemory(comm)
        self._view = BackendView(self)
        self._is_over = False
        self._splits = 0
        follow_group(self)

    # -- what it is --------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """commrt's communicator of these ranks, for what torch has no call for."""
        return self._comm

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return what init_process_group called it."""
        return BACKEND

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name by which functional collectives find the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._group_desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        found = [torch.device("cpu")]
        if torch.cuda.is_available():
            found.append(torch.device("cuda"))
        return found

    def _get_backend(self, device: torch.device) -> BackendView:
        return self._view

    def get_group_store(self) -> Any:
        """Return the store of this group."""
        return self._member.store

    def _get_sequence_number_for_group(self) -> int:
        return int(self._comm.next_seq)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: commrt counts by itself."""

    def __repr__(self) -> str:
        return f"<CommrtProcessGroup {self._group_name}: {self._comm!r}>"

    # -- groups made of it -------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> CommrtProcessGroup | None:
        """Return a group of some of these ranks, None on the others; all call it.

        ``torch.distributed.split_group`` does not come here: it wants a device that
        the default group is bound to, and torch binds none to a group of Python's.
        What is returned is not known to torch.distributed's functions with a root.
        """
        given = self._member
        self._splits += 1
        ranks = sorted(new_ranks)
        if given.rank not in ranks:
            return None
        of_all = given.ranks or range(given.size)
        name = group_name or f"{self._group_name}:split:{self._splits}:{ranks[0]}"
        limit = self._comm.timeout_s if timeout is None else timeout.total_seconds()
        group = _made(
            jobs.Member(
                store=PrefixStore(f"{name}/", given.store),
                rank=ranks.index(given.rank),
                size=len(ranks),
                ranks=[of_all[rank] for rank in ranks],
                name=name,
                timeout_s=limit,
                options=opts or given.options,
            )
        )
        group.setGroupDesc(group_desc or f"{self._group_desc}:split:{self._splits}")
        return group

    splitGroup = split_group  # noqa: N815  what C++ calls it

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        """Raise UsageError: a job of commrt's has the ranks that it began with."""
        raise UsageError(
            f"merge_remote_group: the process group {self._group_name!r} of commrt "
            f"cannot take in ranks of another job; start one job of all of them, by "
            f"init_process_group with a store that they share, and give the parts to "
            f"new_group"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815

    # -- limits and ends ---------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the calls from now on that have none of their own."""
        self._comm.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group here; ``destroy_process_group`` calls it. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        _LIVING.discard(self)
        keep_files()
        self._completer.close()
        try:
            self._comm.free()
        except UsageError:
            # Something is in flight that nobody has waited for: it keeps its memory.
            self._comm.let_go()
        jobs.leave(self._comm, self._member.is_default)

    def abort(self) -> None:
        """Fail all that is under way, here and on ranks of this node that wait."""
        if not self._is_over:
            self._comm.give_up("the process group was aborted")
        self.shutdown()


class CheckedProcessGroup(CheckedCalls, CommrtProcessGroup):
    """A process group whose ranks compare their calls before they run."""
