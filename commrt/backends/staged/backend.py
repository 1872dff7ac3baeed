# SPDX-License-Identifier: Apache-2.0
"""The ``staged`` backend: arrays on devices, through pinned host memory."""

from __future__ import annotations

from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.parameters import checked_by, schedule_parameters
from commrt.backends.staged.attached import AttachedStaged
from commrt.backends.staged.collectives import (
    COPIES,
    NAME,
    PIECE,
    check_copies,
    check_piece,
)
from commrt.backends.staged.variants import copy_variants, piece_variants
from commrt.group.group import Group
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters

__all__ = ["StagedBackend"]


class StagedBackend:
    """Arrays on devices, through pinned memory."""

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        native=True,
        limits="stream-ordered, through pinned memory; runs what a host backend runs",
    )

    def availability(self) -> Availability:
        """There wherever arrays on devices are."""
        reason = "the host backends, for arrays on devices"
        return Availability(self.name, True, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedStaged:
        """Return its object on one communicator."""
        return AttachedStaged(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of staging, and those of the host's algorithm."""
        return {
            **schedule_parameters(coll, algorithm, ranks),
            PIECE: checked_by(check_piece),
            COPIES: checked_by(check_copies),
        }

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return True: the host's backends run its part there."""
        return True

    def variants(self, candidate: Candidate, full_nbytes: int) -> list[Candidate]:
        """Return it with pieces of other lengths, and with copies by kernels."""
        return [
            *piece_variants(candidate, full_nbytes),
            *copy_variants(candidate, full_nbytes),
        ]
