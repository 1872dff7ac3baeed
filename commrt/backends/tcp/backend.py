# SPDX-License-Identifier: Apache-2.0
"""The ``tcp`` backend: schedules across nodes over connections of commrt's own.

Ranks of a node share memory. Between nodes each pair of ranks has connections of its
own (commrt/tcp), unless MPI or gloo carries the messages (commrt/job/between_nodes.py).
"""

from __future__ import annotations

from commrt import env
from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.parameters import schedule_parameters
from commrt.backends.tcp.attached import AttachedTcp
from commrt.group.group import Group
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters

__all__ = ["TcpBackend"]


class TcpBackend:
    """Ranks on several nodes, connected by TCP."""

    name = "tcp"
    capabilities = Capabilities(
        limits="ranks on several nodes; of those that MPI started, where that is "
        "quicker than MPI's messages",
    )

    def availability(self) -> Availability:
        """Connections need no library."""
        carrier = env.read_str("COMMRT_CARRIER")
        here = carrier in ("auto", self.name)
        reason = "connections of commrt's own" if here else f"COMMRT_CARRIER={carrier}"
        return Availability(self.name, here, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedTcp:
        """Return its object on one communicator."""
        return AttachedTcp(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms."""
        return facts.nodes > 1 and self.availability().available

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""
