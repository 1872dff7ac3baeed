# SPDX-License-Identifier: Apache-2.0
"""The ``nccl`` backend: arrays on GPUs, by NVIDIA's library."""

from __future__ import annotations

from commrt import nccl
from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.nccl.attached import AttachedNccl
from commrt.backends.nccl.collectives import NAME
from commrt.backends.parameters import schedule_parameters
from commrt.group.group import Group
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters

__all__ = ["NcclBackend"]


class NcclBackend:
    """Arrays on GPUs, by NVIDIA's library."""

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        native=True,
        limits="stream-ordered; where all ranks have it, and a GPU each; native runs "
        "what NCCL itself does, schedules all else, with kernels of commrt's",
    )

    def availability(self) -> Availability:
        """Return whether this process has a driver, a GPU and a library."""
        why = nccl.why_missing()
        reason = why or str(nccl.library())
        return Availability(self.name, why is None, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedNccl:
        """Return its object on one communicator."""
        return AttachedNccl(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return True: how the ranks have met does not matter."""
        return True

    def variants(self, candidate: Candidate, full_nbytes: int) -> tuple[Candidate, ...]:
        """Return none: NCCL cuts its calls itself."""
        return ()
