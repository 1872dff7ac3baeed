# SPDX-License-Identifier: Apache-2.0
"""Backends that run only schedules: ``shm`` on a node, ``local`` alone.

Across nodes ``mpi`` runs them (backends/mpi), or without MPI ``tcp`` (backends/tcp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from commrt import algorithms
from commrt.backends.base import Attached, Availability, Capabilities, Surroundings
from commrt.backends.parameters import schedule_parameters
from commrt.group.group import Group
from commrt.planning.own_blocks import keeps_own_block
from commrt.planning.spec import PlanSpec
from commrt.planning.templates import plan_of, schedule_template
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.schema import Parameters

__all__ = ["LocalBackend", "ShmBackend", "schedule_candidates"]


def schedule_candidates(
    group: Group, query: Query, backend: str
) -> Iterator[Candidate]:
    """Yield every schedule algorithm that can run ``query``, simplest first."""
    where = group.size, group.facts.layout
    found = algorithms.names(query.coll, *where)
    for name in algorithms.simplest_first(query.coll, found):
        # An algorithm that offers no values here runs only where a call names it.
        for params in list(algorithms.offered_params(query.coll, name, *where)) or [{}]:
            yield Candidate(backend, name, params)


class ShmBackend:
    """Every schedule over shared memory, for communicators within one node."""

    name = "shm"
    capabilities = Capabilities(limits="two or more ranks, all on one node")

    def availability(self) -> Availability:
        """Shared memory needs no library."""
        from commrt import env

        source = env.read_str("COMMRT_SHM")
        reasons = {
            "memfd": "anonymous shared memory (memfd)",
            "devshm": "shared memory in /dev/shm (COMMRT_SHM=devshm)",
            "off": "COMMRT_SHM=off",
        }
        reason = reasons[source or "memfd"]
        return Availability(self.name, source != "off", reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> Attached:
        """Return its object on one communicator."""
        serves_here = self._serves(group.facts) and not group.in_process
        return _AttachedSchedules(self, group, beside, serves_here)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms."""
        return self._serves(facts)

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""

    @staticmethod
    def _serves(facts: CommFacts) -> bool:
        return facts.size > 1 and facts.nodes == 1


class LocalBackend:
    """Ranks that are threads of one process, and communicators of one rank."""

    name = "local"
    capabilities = Capabilities(limits="one rank, or ranks that are threads")

    def availability(self) -> Availability:
        """Always there."""
        reason = "this process"
        return Availability(self.name, True, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> Attached:
        """Return its object on one communicator."""
        serves_here = self._serves(group.facts) or group.in_process
        return _AttachedSchedules(self, group, beside, serves_here)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms."""
        return self._serves(facts)

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""

    @staticmethod
    def _serves(facts: CommFacts) -> bool:
        return facts.size == 1


class _AttachedSchedules(Attached):
    """Every schedule algorithm on one communicator, where the backend serves it."""

    def __init__(
        self,
        backend: ShmBackend | LocalBackend,
        group: Group,
        beside: Surroundings,
        serves_here: bool,
    ) -> None:
        super().__init__(backend, group, beside)
        self._serves_here = serves_here

    def candidates(self, query: Query) -> Sequence[Candidate]:
        if query.device != "host" or not self._serves_here:
            return ()
        return tuple(schedule_candidates(self.group, query, self.backend.name))

    def keeps_own_block(self, spec: PlanSpec) -> bool:
        return keeps_own_block(self.group, spec)

    def plan(self, spec: PlanSpec) -> Any:
        return self.sized(self.template(spec), spec)

    def template(self, spec: PlanSpec) -> Any:
        return schedule_template(self.group, spec)

    def sized(self, template: Any, spec: PlanSpec) -> Any:
        return plan_of(self.group, template, spec)
