# SPDX-License-Identifier: Apache-2.0
"""gloo on one communicator: schedules between nodes, and gloo's own collectives.

gloo ends a process whose peer sends more than it expects. So the ranks compare first
what they have called, by a schedule of one short message for each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.backends.base import Attached, Backend, Surroundings
from commrt.backends.gloo.collectives import NATIVE, digest, library_call, why_not
from commrt.backends.gloo.prediction import COMPARED, COMPARED_NBYTES, predicted_us
from commrt.backends.shm import schedule_candidates
from commrt.bootstrap.lending import Lease
from commrt.errors import BackendError
from commrt.group.group import Group
from commrt.job.links import measure_between_nodes
from commrt.planning.host_plans import check_params, scaling
from commrt.planning.own_blocks import keeps_own_block
from commrt.planning.spec import PlanSpec
from commrt.planning.templates import plan_of, schedule_plan, schedule_template
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Rejected
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation
from commrt.vocabulary.reduction_names import is_known

__all__ = ["AttachedGloo"]

_COMPARING = Candidate(NATIVE.backend, COMPARED.algorithm)
"""A barrier has nothing to compare, and what pairs of ranks exchange may differ."""


class AttachedGloo(Attached):
    """gloo on one communicator."""

    starts_in_python = frozenset({NATIVE.algorithm})
    runs_in_a_library = frozenset({NATIVE.algorithm})

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._lease: Lease | None = None

    # -- beginning and end -------------------------------------------------------

    def join(self, timeout_s: float) -> None:
        """Get what runs gloo's own collectives, where it connects the ranks."""
        group = self.group
        lender = group.world.gloo_groups
        if lender is not None and group.is_relayed:
            # gloo takes no MPI tag.
            self._lease = lender.lend(group.world_ranks, group.identity, 0, timeout_s)

    def measure(self) -> None:
        """Measure messages between the nodes; once in a job."""
        world = self.group.world
        if world.gloo_groups is None or world.between_nodes is not None:
            return
        native = None if self._lease is None else self._lease.lent.group
        assert world.relay is not None
        world.between_nodes = measure_between_nodes(
            *(world, self.beside.sendrecv, native), is_staged=world.relay.is_staged
        )

    def close(self, *, may_call: bool = True) -> None:
        """Let other communicators of the same ranks have it, unless this one failed."""
        lender, lease = self.group.world.gloo_groups, self._lease
        self._lease = None
        if lender is not None and lease is not None and not self.group.failure:
            lender.give_back(lease)

    # -- what it runs ------------------------------------------------------------

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return ``native`` where it keeps commrt's rules.

        And every schedule, where gloo carries the messages between nodes.
        """
        if query.device != "host" or not self.group.is_relayed:
            return ()
        found: list[Candidate] = []
        relay = self.group.world.relay
        if relay is not None and relay.is_staged:
            found += schedule_candidates(self.group, query, self.backend.name)
        if self._lease is not None and why_not(query) is None:
            found.append(NATIVE)
        return found

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return gloo's own collective where it does not run the query.

        Where the operands need an order, the verifier tells more of each candidate.
        """
        if query.device != "host" or not self.group.is_relayed:
            return ()
        if query.order != "any" or (query.op is not None and not is_known(query.op)):
            return ()
        why: str | None = (
            "there is no group of gloo for these ranks: not all of them had imported "
            "torch when they met, or there are too many groups"
        )
        if self._lease is not None:
            why = why_not(query)
        return () if why is None else [Rejected(NATIVE, why)]

    def modelled_us(
        self, query: Query, candidate: Candidate, *, only_floor: bool = False
    ) -> float:
        """Return the model's time of a candidate, by messages as measured."""
        group = self.group
        return predicted_us(
            *(group.facts, query, candidate, group.world.between_nodes),
            only_floor=only_floor,
        )

    def keeps_own_block(self, spec: PlanSpec) -> bool:
        """Return whether a schedule's input may be a block of its output."""
        is_schedule = spec.candidate.algorithm != NATIVE.algorithm
        return is_schedule and keeps_own_block(self.group, spec)

    def plan(self, spec: PlanSpec) -> _native.Plan:
        """Return the plan of this rank."""
        group = self.group
        template = self.template(spec)
        if template is not None:
            return self.sized(template, spec)
        check_params(spec.op.name, NATIVE.algorithm, group.size, spec.candidate.params)
        if self._lease is None:
            raise BackendError(
                f"{spec.candidate} on {group.name}: there is no group of gloo for "
                f"these ranks; use a schedule"
            )
        lent = self._lease.lent
        method, arguments = library_call(lent.group, spec, group.rank, group.size)
        factor, _, _ = scaling(spec, group.size)
        return _native.make_gloo_plan(
            lent.order,
            coll=spec.op.code,
            dtype=spec.dtype.code,
            redop=int(spec.reduction),
            root=spec.root,
            in_elems=spec.in_elements,
            out_elems=spec.out_elements,
            label=str(spec.candidate),
            returns_out=spec.has_output,
            factor=factor,
            method=method,
            arguments=arguments,
            agreement=self._agreement(),
            digest=digest(spec),
        )

    def template(self, spec: PlanSpec) -> _native.PlanTemplate | None:
        """Return what makes the plans of a schedule, whatever their lengths.

        None for gloo's own collectives: torch is given views of each call's lengths.
        """
        if spec.candidate.algorithm == NATIVE.algorithm:
            return None
        return schedule_template(self.group, spec)

    def sized(self, template: _native.PlanTemplate, spec: PlanSpec) -> _native.Plan:
        """Return the plan for the lengths of ``spec``."""
        made: _native.Plan = plan_of(self.group, template, spec)
        return made

    def _agreement(self) -> Any:
        """Return the plan by which the ranks compare what they have called.

        A barrier needs it, too: gloo cannot take back what a rank refuses.
        """
        return schedule_plan(
            self.group,
            PlanSpec(
                op=operation(COMPARED.coll),
                num_elements=COMPARED_NBYTES // 8,
                dtype=dtype_by_name("int64"),
                reduction=ReduceOp.MAX,
                root=0,
                candidate=_COMPARING,
                in_elements=COMPARED_NBYTES // 8,
                out_elements=COMPARED_NBYTES // 8,
                has_output=True,
            ),
        )
