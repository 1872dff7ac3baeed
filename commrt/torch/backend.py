# SPDX-License-Identifier: Apache-2.0
"""The backend of a device, as torch's C++ sees one; torch 2.14 and later.

It stands in two places. Where a program gives each device a backend of its own, as in
``"cpu:gloo,cuda:commrt"``, torch makes the group and this is one of its backends. And
a group that is all commrt's (``process_group.py``) holds one for what torch's C++ does
not ask a group in Python.

A call of such a group goes from Python through C++ and its dispatcher to Python again,
and its Work comes back in one of C++ that passes on ``wait`` and ``get_future`` and
nothing else. So it is not what a group of one backend is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import SHRINK_ABORT

from commrt.torch.checked_calls import CheckedCalls
from commrt.torch.group_methods import Collectives
from commrt.torch.jobs import torchs_wrapper_compares
from commrt.torch.joined_group import AsBackend, JoinedGroup
from commrt.torch.messages import Messages
from commrt.torch.tracing import follow_group
from commrt.torch.work import CommrtWork

__all__ = ["CheckedBackend", "CommrtBackend", "backend_of", "can_be_made"]


@cache
def can_be_made() -> bool:
    """Return whether this torch lets Python derive from Backend."""
    try:
        Backend(0, 1)
    except TypeError:  # 2.13: no constructor defined
        return False
    return True


_WRAPPED: set[CommrtBackend] = set()
"""Backends around which torch puts its wrapper for DETAIL. The wrapper keeps only their
C++ half, and calls need the other half, too."""


def backend_of(joined: JoinedGroup) -> CommrtBackend:
    """Return the backend of a group's devices."""
    backend = (CheckedBackend if joined.is_checked else CommrtBackend)(joined)
    if joined.member.is_wrapped and torchs_wrapper_compares():
        _WRAPPED.add(backend)
    return backend


class CommrtBackend(Collectives, Messages, AsBackend, Backend):  # type: ignore[misc]
    """A backend of torch on a communicator of commrt."""

    def __init__(self, joined: JoinedGroup) -> None:
        Backend.__init__(self, joined.member.rank, joined.member.size)
        self.take(joined)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> CommrtWork | None:
        """Reduce a sparse tensor over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Run the group's method of this name, given options of a barrier."""
        super().monitored_barrier(getattr(opts, "timeout", opts), wait_all_ranks)

    def shutdown(self) -> None:
        """End the group here. Idempotent."""
        _WRAPPED.discard(self)
        super().shutdown()

    # -- groups made of it -------------------------------------------------------

    supports_shrinking = True

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None
    ) -> CommrtBackend:
        """Return a backend of the other ranks; they alone call it.

        ``torch.distributed.shrink_group`` does, and makes a group of it. With
        ``SHRINK_ABORT`` what is under way on this group fails, on all of its ranks of
        this node.
        """
        given = self.member
        left = [rank for rank in range(given.size) if rank not in ranks_to_exclude]
        of_all = given.ranks or range(given.size)
        name = f"{given.name}:left:{','.join(map(str, left))}"
        if shrink_flags & SHRINK_ABORT:
            self._joined.abort()
        member = replace(
            given,
            store=PrefixStore(f"{name}/", given.store),
            rank=left.index(given.rank),
            size=len(left),
            # The group after a default group is a default group, too: a world of its
            # own.
            ranks=[] if given.is_default else [of_all[rank] for rank in left],
            name=name,
            timeout_s=self._comm.timeout_s,
            options=opts or given.options,
            is_wrapped=False,
        )
        backend = backend_of(JoinedGroup(member))
        follow_group(backend)
        return backend

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing to do: ranks that are in no new group are not asked."""

    # -- for logs ----------------------------------------------------------------

    def getGroupName(self) -> str:  # noqa: N802  as groups have it
        """Return torch's name of the group."""
        return self.member.name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the purpose of the group, as far as torch tells it to a backend."""
        return "default_pg" if self.member.is_default else "undefined"

    def __repr__(self) -> str:
        return f"<CommrtBackend {self.member.name}: {self._comm!r}>"


class CheckedBackend(CheckedCalls, CommrtBackend):
    """A backend whose ranks compare their calls before they run."""


DEVICES = (torch.device("cpu"), torch.device("cuda"))
"""Devices that one backend serves."""
