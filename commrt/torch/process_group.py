# SPDX-License-Identifier: Apache-2.0
"""The process group: what torch holds of a commrt communicator.

A group of commrt's serves every device itself, by where a call's tensors are. It is a
``ProcessGroup`` of Python's, whose methods torch.distributed calls at once. torch 2.14
and later let Python derive from ``Backend``, too; what only that makes possible, the
group has by holding one (``backend.py``). The calls are in base classes that know
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup

from commrt.torch import jobs
from commrt.torch.backend import DEVICES, CommrtBackend, backend_of, can_be_made
from commrt.torch.backend_view import BackendView
from commrt.torch.checked_calls import CheckedCalls
from commrt.torch.errors import wrong_call
from commrt.torch.functional import serve_compiled_gathers
from commrt.torch.group_methods import Collectives
from commrt.torch.group_options import Options
from commrt.torch.joined_group import JoinedGroup, Joins
from commrt.torch.messages import Messages
from commrt.torch.tracing import follow_group
from commrt.vocabulary.limits import timedelta_seconds

__all__ = ["CheckedProcessGroup", "CommrtProcessGroup", "group_of"]


def group_of(joined: JoinedGroup) -> CommrtProcessGroup:
    """Return the process group of ranks that have joined."""
    kind = CheckedProcessGroup if joined.is_checked else CommrtProcessGroup
    group = kind(joined)
    follow_group(group)
    return group


class CommrtProcessGroup(Collectives, Messages, Joins, ProcessGroup):  # type: ignore[misc]
    """A process group of torch on a communicator of commrt."""

    def __init__(self, joined: JoinedGroup) -> None:
        member = joined.member
        # With the store, as other groups have it, torch 2.13 fails.
        ProcessGroup.__init__(self, member.rank, member.size)
        self.take(joined)
        self._group_name = member.name
        self._group_desc = "undefined"
        self._splits = 0
        self._backend: BackendView | CommrtBackend
        if can_be_made():
            self._backend = self._backend_of(joined)
            self._backend.supports_splitting = True  # by ``split_group`` below
            kind = ProcessGroup.BackendType.CUSTOM
            for device in DEVICES:
                self._register_backend(device, kind, self._backend)
            self._set_default_backend(kind)
        else:
            self._backend = BackendView(joined)
            serve_compiled_gathers()

    def _backend_of(self, joined: JoinedGroup) -> CommrtBackend:
        return backend_of(joined)

    # -- what it is --------------------------------------------------------------

    def getGroupName(self) -> str:  # noqa: N802  torch's name
        """Return torch's name of the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name by which functional collectives find the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the purpose of the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take the purpose of the group."""
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

    def _get_backend(self, device: torch.device) -> BackendView | CommrtBackend:
        return self._backend

    def get_group_store(self) -> Any:
        """Return the store of this group."""
        return self.member.store

    def register_pre_hook(self, *args: Any) -> None:
        """Raise UsageError: torch's C++ runs hooks, and calls do not come by there."""
        raise wrong_call(
            f"the process group {self._group_name!r} of commrt runs no hooks of "
            f"torch's; commrt.trace.record() sees all of its calls"
        )

    register_post_hook = register_pre_hook

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

        ``torch.distributed.split_group`` does not come here: it wants a device that the
        default group is bound to, and torch binds none to a group of Python's.
        torch.distributed's functions with a root do not know the returned group.
        """
        given = self.member
        self._splits += 1
        ranks = list(new_ranks)
        if given.rank not in ranks:
            return None
        of_all = given.ranks or range(given.size)
        name = group_name or f"{self._group_name}:split:{self._splits}:{ranks[0]}"
        limit = self._comm.timeout_s if timeout is None else timedelta_seconds(timeout)
        group = group_of(
            JoinedGroup(
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
        )
        group.setGroupDesc(group_desc or f"{self._group_desc}:split:{self._splits}")
        return group

    splitGroup = split_group  # noqa: N815  what C++ calls it

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        """Raise UsageError: a job of commrt's has the ranks that it began with."""
        raise wrong_call(
            f"merge_remote_group: the process group {self._group_name!r} of commrt "
            f"cannot take in ranks of another job; start one job of all of them, by "
            f"init_process_group with a store that they share, and give the parts to "
            f"new_group"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815


class CheckedProcessGroup(CheckedCalls, CommrtProcessGroup):
    """A process group whose ranks compare their calls before they run."""
