# SPDX-License-Identifier: Apache-2.0
"""A group on this rank, whichever of torch's classes stands before it.

torch sees a group as a ``ProcessGroup``, or as the ``Backend`` of a device in a group
of its own. Both have the same communicator and the same end, and these are here.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from commrt.comm import Communicator
from commrt.core import Core
from commrt.errors import CommError, TimeoutError_, UsageError
from commrt.job.world import progress_mode
from commrt.torch import jobs
from commrt.torch.calls import Calls, RangedCalls
from commrt.torch.completer import Completer
from commrt.torch.errors import as_torch_error
from commrt.torch.faults import GroupFaults
from commrt.torch.memory import SharedMemory
from commrt.torch.names import BACKEND
from commrt.torch.time_estimate import block_of_caller
from commrt.trace.folder import keep_files
from commrt.trace.nvtx import put_ranges
from commrt.vocabulary.limits import timedelta_seconds

__all__ = ["AsBackend", "JoinedGroup", "Joins"]

_STEPS = 1000
_LIVING: weakref.WeakSet[JoinedGroup] = weakref.WeakSet()
"""Groups that ``destroy_process_group`` has not ended, for the end of the process."""


class JoinedGroup:
    """A communicator made for torch, and what serves torch's calls of it."""

    def __init__(
        self,
        member: jobs.Member,
        join: Callable[[jobs.Member], Core] = jobs.join,
        faults: GroupFaults | None = None,
        remedy: str = "destroy the process group and make a new one",
    ) -> None:
        """Join the group's other ranks; collective over them.

        Args:
            member: this process's place in the group.
            join: returns the communicator of the group's ranks.
            faults: hears of what the group runs into.
            remedy: what ranks do to go on where the group has failed.
        """
        try:
            comm = join(member)
        except TimeoutError_ as error:
            ranks = list(member.ranks) or list(range(member.size))
            error.args = (f"process group {member.name!r} of ranks {ranks}: {error}",)
            raise as_torch_error(error) from error.__cause__
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        self.comm, self.member = comm, member
        self.communicator = Communicator(comm)
        """What programs get of it."""
        put_ranges(comm, comm)
        # Without a second core for it, progress would only interrupt the computation.
        by_itself = member.size > 1 and progress_mode(comm.world)
        self.faults = GroupFaults() if faults is None else faults
        self.completer = Completer(
            member.name, comm.world.engine, by_itself, self.faults
        )
        weakref.finalize(self, self.completer.close, joins=False).atexit = False
        kind = Calls if comm.ranges is None else RangedCalls
        self.calls = kind(comm, self.completer, member.options.sparse_algorithm)
        self.memory = SharedMemory(comm)
        self._is_over = False
        comm.remedy = remedy
        self.faults.follow(comm)
        if not _LIVING:
            atexit.unregister(_end_groups)
            atexit.register(_end_groups, os.getpid())
        _LIVING.add(self)

    @property
    def is_checked(self) -> bool:
        """True if ranks compare their calls before they run."""
        return self.comm.checker is not None

    def shutdown(self) -> None:
        """End the group here. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        _LIVING.discard(self)
        keep_files()
        self.completer.close()
        try:
            self.comm.free()
        except UsageError:
            # Something is in flight that nobody has waited for: it keeps its memory.
            self.comm.let_go()
        jobs.leave(self.comm, self.member.is_default)

    def revoke(self, why: str) -> None:
        """Fail all that is under way, and all calls from now on, on all ranks."""
        if self._is_over:
            return
        comm = self.comm
        comm.recovery.end(why)
        # Ranks of other nodes are told by messages, which are to leave before the
        # communicator does.
        for _ in range(_STEPS):
            if len(comm.node_members) == comm.size or not comm.world.engine.step():
                break

    def abort(self) -> None:
        """Fail all that is under way, on all ranks, and end the group here."""
        if not self._is_over:
            self.revoke("the process group was aborted")
            self.faults.notice_abort()
        self.shutdown()


def _end_groups(owner: int) -> None:
    """End the threads of groups that were not destroyed; runs as the process ends."""
    if os.getpid() == owner:
        for group in list(_LIVING):
            group.completer.close()


class Joins:
    """Methods that torch calls on groups and on backends alike."""

    _joined: JoinedGroup
    _comm: Core
    member: jobs.Member
    calls: Calls

    def take(self, joined: JoinedGroup) -> None:
        """Stand for these ranks from now on."""
        self._joined, self._comm = joined, joined.comm
        self.member, self.calls = joined.member, joined.calls

    @property
    def communicator(self) -> Communicator:
        """commrt's communicator of these ranks, for what torch has no call for."""
        return self._joined.communicator

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the backend's name, as init_process_group has it."""
        return BACKEND

    name = _get_backend_name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        return self._joined.comm.next_seq

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: commrt counts by itself."""

    def get_error(self) -> Any:
        """Return torch's word for what has ended the group; SUCCESS: nothing has."""
        return self._joined.faults.error_type

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Let a hook be called when a timeout, an error or ``abort`` ends the group.

        It is called once, in the thread that finds the fault. A timeout that does not
        end the group is told, too, the first one.
        """
        self._joined.faults.hooks.register(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._joined.faults.hooks.unregister(hook_id)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the calls from now on that have none of their own."""
        self._joined.comm.timeout_s = timedelta_seconds(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group here; ``destroy_process_group`` calls it. Idempotent."""
        self._joined.shutdown()

    def abort(self) -> None:
        """Fail all that is under way, on all ranks, and end the group here."""
        self._joined.abort()


class AsBackend(Joins):
    """Methods that torch calls on the backend of a device."""

    supports_splitting = False
    supports_coalescing = True
    # torch's own answers, of a backend in Python, ask themselves without end.
    supports_reconfigure = False
    supports_window = False

    @property
    def supports_time_estimate(self) -> bool:
        """True unless ranks compare their calls: an estimate is one rank's alone."""
        return not self._joined.is_checked

    def _start_time_estimate(self) -> None:
        # torch's generator called this, and contextlib's __enter__ that.
        self._joined.calls.start_estimate(block_of_caller(2))

    def _end_time_estimate(self) -> float:
        return self._joined.calls.end_estimate()

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether tensors from ``allocate_tensor`` save copies.

        torch's code in C++, which names a device by its number, is told that they do
        not: torch 2.14.1 cannot pass to Python what it then asks for.
        """
        is_host = isinstance(device, torch.device) and device.type == "cpu"
        return is_host and self._joined.memory.is_of_use

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor of ``size`` elements in memory that the ranks share.

        The first call on a group is collective; later ones are local.
        """
        self._joined.calls.refuse_estimate("allocate_tensor")
        if not self.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return self._joined.memory.allocate(size, dtype)
