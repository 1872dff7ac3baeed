# SPDX-License-Identifier: Apache-2.0
"""Backends that run only schedules: ``shm`` on a node, ``local`` alone.

Across nodes ``mpi`` runs them (backends/mpi), or without MPI ``gloo`` (backends/gloo).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from commrt import algorithms
from commrt.backends.base import Availability, Capabilities
from commrt.planning.host_plans import schedule_plan
from commrt.planning.spec import PlanSpec, serves
from commrt.select.facts import Candidate, Query

__all__ = ["LocalBackend", "ShmBackend", "schedule_candidates"]


def schedule_candidates(comm: Any, query: Query, backend: str) -> Iterator[Candidate]:
    """Yield every schedule algorithm that can run ``query``, simplest first."""
    where = comm.size, comm.facts.layout
    found = algorithms.names(query.coll, *where)
    for name in algorithms.simplest_first(query.coll, found):
        # What nothing is offered of runs where it is named.
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

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return every schedule algorithm where all ranks share this node."""
        here = serves(comm.facts, self.name) and not comm.in_process
        if query.device != "host" or not here:
            return ()
        return tuple(schedule_candidates(comm, query, self.name))

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the native plan of this rank."""
        return schedule_plan(comm, spec)


class LocalBackend:
    """Ranks that are threads of one process, and communicators of one rank."""

    name = "local"
    capabilities = Capabilities(limits="one rank, or ranks that are threads")

    def availability(self) -> Availability:
        """Always there."""
        reason = "this process"
        return Availability(self.name, True, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return every schedule algorithm where the ranks are in this process."""
        alone = serves(comm.facts, self.name)
        if query.device != "host" or not (alone or comm.in_process):
            return ()
        return tuple(schedule_candidates(comm, query, self.name))

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the native plan of this rank."""
        return schedule_plan(comm, spec)
