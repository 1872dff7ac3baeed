# SPDX-License-Identifier: Apache-2.0
"""Schedules on one communicator, over connections of commrt's own between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.backends.base import Attached
from commrt.backends.relayed import relayed_us
from commrt.backends.shm import schedule_candidates
from commrt.job.links import measure_between_nodes
from commrt.planning.own_blocks import keeps_own_block
from commrt.planning.spec import PlanSpec
from commrt.planning.templates import plan_of, schedule_template
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Rejected

__all__ = ["AttachedTcp"]

_ALL_OF_TCP = Candidate("tcp", "*")
"""All schedules over such connections, in an explanation."""


class AttachedTcp(Attached):
    """Connections of commrt's own on one communicator."""

    stands_in_for = frozenset({"gloo", "mpi"})

    def measure(self) -> None:
        """Measure messages between the nodes, where gloo's have not been beside them.

        That is where this torch has no gloo, or there is no torch; once in a job.
        """
        world = self.group.world
        if world.relay is None or world.between_nodes is not None:
            return
        if not world.relay.is_staged:
            world.between_nodes = measure_between_nodes(
                *(world, self.beside.sendrecv, None), is_staged=False
            )

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return every schedule, where these connections carry messages."""
        group = self.group
        if query.device != "host" or not group.is_relayed:
            return ()
        relay = group.world.relay
        if relay is None or relay.is_staged:
            return ()
        return tuple(schedule_candidates(group, query, self.backend.name))

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return all schedules, with the reason, where MPI carries their messages."""
        world, nodes = self.group.world, self.group.facts.nodes
        if query.device != "host" or nodes == 1 or world.native_comms is None:
            return ()
        is_carried = world.relay is None
        return [Rejected(_ALL_OF_TCP, world.why_carried)] if is_carried else ()

    def modelled_us(
        self, query: Query, candidate: Candidate, *, only_floor: bool = False
    ) -> float:
        """Return the model's time of a schedule, by messages as measured."""
        group = self.group
        return relayed_us(
            *(group.facts, query, candidate, group.world.between_nodes),
            only_floor=only_floor,
        )

    def keeps_own_block(self, spec: PlanSpec) -> bool:
        """Return whether a schedule's input may be a block of its output."""
        return keeps_own_block(self.group, spec)

    def plan(self, spec: PlanSpec) -> Any:
        """Return the plan of this rank."""
        return self.sized(self.template(spec), spec)

    def template(self, spec: PlanSpec) -> Any:
        """Return what makes the plans of a schedule, whatever their lengths."""
        return schedule_template(self.group, spec)

    def sized(self, template: Any, spec: PlanSpec) -> Any:
        """Return the plan for the lengths of ``spec``."""
        return plan_of(self.group, template, spec)
