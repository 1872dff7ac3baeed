# SPDX-License-Identifier: Apache-2.0
"""What a communicator may have of its own, where others have what the job has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commrt.backends.staged.collectives import on_host
from commrt.planning.host_plans import allows
from commrt.select.policy import Policy
from commrt.select.table import Table
from commrt.select.wishes import Wishes

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Settings", "make_policy"]


@dataclass(frozen=True)
class Settings:
    """A communicator's own choices; equal on all of its ranks."""

    wishes: Wishes | None = None
    """What its calls ask for unless they say otherwise; before COMMRT_ALGORITHM."""
    table: Table | None = None
    """Selection table; None: that of the job."""
    checks: bool | None = None
    """Whether calls are compared across ranks; None: as COMMRT_DEBUG says."""

    def all_wishes(self, of_job: Wishes) -> list[Wishes]:
        """Return what is asked for beforehand; what comes first holds."""
        return [each for each in (self.wishes, of_job) if each]


def make_policy(
    comm: Communicator, table: Table | None, wishes: Sequence[Wishes]
) -> Policy:
    """Return what decides how a communicator's operations run."""
    return Policy(
        comm.facts,
        table,
        comm._candidates,
        comm._cost,
        wishes,
        comm._only_on_request,
        comm._floor,
        lambda query, one: allows(comm.facts.layout, *on_host(query, one)),
        comm._refused,
        comm._speaks_of,
    )
