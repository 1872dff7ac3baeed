# SPDX-License-Identifier: Apache-2.0
"""Groups of gloo for its own collectives, lent to commrt's communicators.

gloo matches the collectives of a group by their order, and commrt those of a
communicator; several communicators interleave as each rank likes. So each has a group
of its own. Groups are never ended before the job is: a rank may be done with a
collective whose other ranks are not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.lending import Lender
from commrt.gloo.connecting import connect_group

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["GlooCollectives", "GlooGroups"]

_LIMIT = 256
"""Groups that commrt makes at most: each has two threads, and a socket for each other
rank."""


@dataclass(frozen=True)
class GlooCollectives:
    """Runs gloo's collectives of one communicator."""

    group: dist.ProcessGroup
    """torch's ProcessGroupGloo of the communicator's ranks."""
    order: Any
    """Gives it the operations in their order (native/engine/gloo_calls.hpp)."""


class GlooGroups(Lender):
    """Makes them, over ranks that gloo connects anyway.

    Args:
        bootstrap: lets the ranks agree; it has a store of torch's.
        address: of this rank; empty: as gloo chooses it.
    """

    def __init__(self, bootstrap: Bootstrap, address: str = "") -> None:
        super().__init__(bootstrap, _LIMIT)
        self._groups: list[GlooCollectives] = []
        self._owner = os.getpid()
        self._address = address

    def close(self) -> None:
        """Let go of what is not in use any more. At the end of the job, idempotent.

        The end of a group waits for its collectives, of which one may never end.
        """
        groups, self._groups = self._groups, []
        self.forget()
        for each in groups:
            if os.getpid() != self._owner or each.order.is_busy:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each.group))

    def _create(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> GlooCollectives:
        store = self._bootstrap.private_store(_key(ranks, number))  # type: ignore[attr-defined]
        group = connect_group(store, ranks, self._bootstrap, timeout_s, self._address)
        made = GlooCollectives(group, _native.GlooGroup())
        self._groups.append(made)
        return made


def _key(ranks: Sequence[int], number: int) -> str:
    # Groups that have no rank in common may have the same number.
    return f"gloo/{number}/{ranks[0]}"
