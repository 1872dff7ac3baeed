# SPDX-License-Identifier: Apache-2.0
"""The ``gloo`` backend: gloo's collectives across nodes without MPI, and schedules.

Where gloo keeps commrt's rules, its own collectives are candidates (``gloo/native``):
one step that gloo runs over all ranks, on its own threads. Schedules are its own only
where it carries messages between nodes, with COMMRT_CARRIER=gloo. Connections of
commrt's own do that otherwise (backends/tcp).
"""

from __future__ import annotations

from importlib.util import find_spec

from commrt import env
from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.gloo.attached import AttachedGloo
from commrt.backends.parameters import schedule_parameters
from commrt.group.group import Group
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters

__all__ = ["GlooBackend"]


class GlooBackend:
    """Ranks on several nodes that have met without MPI."""

    name = "gloo"
    capabilities = Capabilities(
        native=True,
        limits="ranks on several nodes that torchrun, srun or a torch Store brought "
        "together; schedules: with COMMRT_CARRIER=gloo; native: all but scans and "
        "blocks of different lengths, of reductions sum and avg of types of 32 and 64 "
        "bits, prod of floats of these, and prod, min, max and bitwise of signed "
        "integers of these",
    )

    def availability(self) -> Availability:
        """Look for torch without importing it."""
        here = find_spec("torch") is not None
        reason = "torch's gloo" if here else "torch is not installed"
        return Availability(self.name, here, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedGloo:
        """Return its object on one communicator."""
        return AttachedGloo(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms."""
        if facts.nodes == 1 or by_mpi:
            return False
        return algorithm == "native" or env.read_str("COMMRT_CARRIER") == self.name

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""
