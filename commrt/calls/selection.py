# SPDX-License-Identifier: Apache-2.0
"""What a communicator would run, and why: what it asks of policy and backends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from commrt import algorithms, backends
from commrt.backends.gloo import collectives as by_gloo
from commrt.backends.ipc import collectives as by_ipc
from commrt.backends.mpi import collectives as by_mpi
from commrt.backends.nccl import collectives as by_nccl
from commrt.backends.staged.collectives import on_host
from commrt.calls import arguments
from commrt.calls.channel import Channel
from commrt.calls.plan_cache import Choices
from commrt.errors import UsageError, suggest
from commrt.job.world import NATIVE
from commrt.planning import host_plans
from commrt.planning.ordering import wanted_order, why_refused
from commrt.planning.prediction import floor_us, predicted_us
from commrt.select.facts import Candidate, CommFacts, Query, without_compression
from commrt.select.policy import Explanation, Policy, Rejected
from commrt.select.schema import DEVICES
from commrt.select.wishes import Wish
from commrt.vocabulary.dtypes import is_known
from commrt.vocabulary.operations import rule_nbytes
from commrt.vocabulary.reductions import Reduction

if TYPE_CHECKING:
    from commrt.backends.ipc.attached import IpcFacts
    from commrt.backends.mpi.attached import MpiFacts
    from commrt.backends.nccl.attached import NcclFacts
    from commrt.bootstrap.lending import Lease
    from commrt.calls.arguments import Bound, Call
    from commrt.device_calls.collectives import Staging
    from commrt.gloo.groups import GlooCollectives

__all__ = ["Choosing"]


class Choosing(Channel):
    """The part of a communicator that chooses among candidates."""

    facts: CommFacts
    devices: Staging
    policy: Policy
    choices: Choices
    _unasked_native: bool
    _gloo_lease: Lease | None = None

    @property
    def nccl_facts(self) -> NcclFacts:
        """What selection knows of NCCL here."""
        return self.devices.nccl.facts

    @property
    def ipc_facts(self) -> IpcFacts:
        """What selection knows of memory of peers here."""
        return self.devices.ipc.facts

    @property
    def mpi_facts(self) -> MpiFacts:
        """What selection knows of MPI on device memory here."""
        return self.devices.mpi.facts

    @property
    def ipc_half_nbytes(self) -> int:
        """What a rank can publish at once in memory of peers."""
        return self.devices.ipc.half_nbytes

    @property
    def gloo_collectives(self) -> GlooCollectives | None:
        """What runs gloo's own collectives here; None where nothing does."""
        return None if self._gloo_lease is None else self._gloo_lease.lent

    def _lease_gloo(self, is_users: bool, timeout_s: float) -> None:
        """Get what runs gloo's own collectives, where it connects the ranks.

        Collective. Not for a communicator that only commrt itself uses.
        """
        lender = self.world.gloo_groups
        if lender is not None and is_users and self.is_relayed:
            # gloo takes no MPI tag.
            self._gloo_lease = lender.lend(
                self.world_ranks, self.identity, 0, timeout_s
            )

    def _give_gloo_back(self) -> None:
        lender, lease = self.world.gloo_groups, self._gloo_lease
        self._gloo_lease = None
        if lender is not None and lease is not None and not self.failure:
            lender.give_back(lease)

    def _found(self, query: Query) -> list[Candidate]:
        """Return what backends offer, whatever order they combine in."""
        found: list[Candidate] = []
        for backend in backends.all_backends().values():
            found.extend(backend.candidates(self, query))
        return found

    def _candidates(self, query: Query) -> list[Candidate]:
        found = self._found(query)
        return [each for each in found if self._why_refused(query, each) is None]

    def _why_refused(self, query: Query, candidate: Candidate) -> str | None:
        return why_refused(self, *on_host(query, candidate))

    def _refused(self, query: Query) -> Sequence[Rejected]:
        """Return what could run the operation, but not as this query needs it."""
        by_user = query.op is not None and not is_known(query.op)
        refused = []
        libraries = (by_nccl.NATIVE, by_mpi.NATIVE) if query.device == "cuda" else ()
        if query.device == "cuda":
            for one, why in (
                (by_nccl.NATIVE, by_nccl.why_refused(self, query)),
                (by_ipc.DIRECT, by_ipc.why_refused(self, query)),
                (by_mpi.NATIVE, by_mpi.why_refused(self, query)),
            ):
                if why is not None:
                    refused.append(Rejected(one, why, is_missing=True))
        if query.order == "any" and not by_user:
            why = by_gloo.why_refused(self, query)
            return refused if why is None else [*refused, Rejected(by_gloo.NATIVE, why)]
        allowed = {str(each) for each in self._candidates(query)}
        plain = replace(query, order="any", op="sum" if by_user else query.op)
        for each in self._found(plain):
            if str(each) not in allowed and not (by_user and each in libraries):
                reason = self._why_refused(query, each) or "knows no reduction of yours"
                refused.append(Rejected(each, reason))
        return refused

    def _cost(self, query: Query, candidate: Candidate) -> float:
        if candidate.backend == by_ipc.DIRECT.backend:
            return by_ipc.predicted_us(self.facts, query, candidate)
        query, candidate = on_host(query, candidate)
        coll, name = query.coll, candidate.algorithm
        if name in algorithms.names(coll):
            own, _ = host_plans.split_params(candidate.params)
            if host_plans.why_not(self, coll, name, query.root or 0, own) is not None:
                return math.inf
        return predicted_us(self.facts, query, candidate, self.world.between_nodes)

    def _floor(self, query: Query, candidate: Candidate) -> float:
        if candidate.backend == by_ipc.DIRECT.backend:
            return 0.0
        between = self.world.between_nodes
        return floor_us(self.facts, *on_host(query, candidate), between)

    def candidates(
        self,
        coll: str,
        nbytes: int,
        *,
        dtype: str = "float32",
        op: str | Reduction = "sum",
        distinct: bool = False,
        device: str = "host",
    ) -> list[Candidate]:
        """Return everything that can run ``coll`` here, simplest first.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``). With
        ``distinct`` a candidate that runs the very program of an earlier one is left
        out: on two ranks a ring and a direct exchange are one and the same.
        """
        query = self._question("candidates", coll, nbytes, dtype, op, 0, device)
        found = self.policy.candidates(query)
        return (
            host_plans.distinct(coll, found, self.facts.layout) if distinct else found
        )

    def explain(
        self,
        coll: str,
        nbytes: int,
        *,
        dtype: str = "float32",
        op: str | Reduction = "sum",
        root: int = 0,
        device: str = "host",
        backend: str | None = None,
        algorithm: str | None = None,
        params: Mapping[str, int | str] | None = None,
    ) -> Explanation:
        """Return what a call would run, why, and what was rejected; print it.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``);
        ``device`` is ``cuda`` for arrays on devices. ``backend``, ``algorithm`` and
        ``params`` are what the call itself asks for.
        """
        query = self._question("explain", coll, nbytes, dtype, op, root, device)
        found = self.policy.explain(
            query, backend=backend, algorithm=algorithm, params=params
        )
        return self._explained(found, by_user=isinstance(op, Reduction))

    def _explained(self, found: Explanation, *, by_user: bool) -> Explanation:
        """Return an explanation with what else there is to say of it."""
        return found

    def _question(
        self,
        what: str,
        coll: str,
        nbytes: int,
        dtype: str,
        op: str | Reduction,
        root: int,
        device: str = "host",
    ) -> Query:
        user = op if isinstance(op, Reduction) else None
        name = "sum" if user is not None else op
        query = arguments.check_question(
            what, coll, nbytes, dtype, name, root, self.size
        )
        if device not in DEVICES:
            raise UsageError(f"{what}: device={device!r}{suggest(device, DEVICES)}")
        query = replace(query, device=device)
        if query.op is None:
            return query
        order = wanted_order(self.deterministic, query.op, user, query.dtype)
        label = query.op if user is None else user.label
        return replace(query, op=label, order=order)

    def _choose(self, call: Call, bound: Bound) -> Candidate:
        query, candidate = self.asked(call, bound)
        if call.spec.compresses:
            candidate = without_compression(candidate)
        # Parameters that the call gives make it another program.
        reason = self._why_refused(query, candidate)
        if reason is not None:
            raise UsageError(f"{candidate} must not run {query}: {reason}")
        return candidate

    def asked(self, call: Call, bound: Bound) -> tuple[Query, Candidate]:
        """Return a call as a question, and the policy's answer to it."""
        spec = call.spec
        nbytes = bound.num_elements * bound.dtype.itemsize
        records = bound.dtype.kind == "bytes"
        query = Query(
            coll=spec.name,
            nbytes=rule_nbytes(spec.name, nbytes, self.size),
            dtype="uint8" if records else bound.dtype.name,
            device="host" if bound.on is None and call.stream is None else "cuda",
            op=call.op,
            root=call.root if spec.has_root else None,
        )
        if spec.reduces:
            name = call.reduction.name.lower()
            order = wanted_order(self.deterministic, name, call.user, query.dtype)
            query = replace(query, order=order)
        return query, self.choices.of(query, call)

    def _speaks_of(self, query: Query, wish: Wish) -> bool:
        """Whether what was asked for beforehand means such memory.

        MPI's collectives are those of host memory, and of devices' where it takes that.
        """
        if wish.backend is None:
            return True
        if query.device == "cuda" and wish.backend == by_mpi.NATIVE.backend:
            return self._has_mpi(query) and wish.algorithm in (None, "native")
        return query.device in backends.get(wish.backend).capabilities.devices

    def _has_nccl(self, query: Query) -> bool:
        """Whether NCCL runs ``query`` here."""
        if query.device != "cuda" or query.order != "any":
            return False
        return by_nccl.why_refused(self, query) is None

    def _has_mpi(self, query: Query) -> bool:
        """Whether an MPI library that takes device memory runs ``query`` there."""
        if query.device != "cuda" or query.order != "any":
            return False
        return by_mpi.why_refused(self, query) is None

    def _prefers_ipc(self, query: Query) -> bool:
        """Whether memory of peers runs ``query`` unasked.

        Where ranks share a device and NCCL does not run: each reads what it wants
        where it lies, and nothing goes to the host and back.
        """
        if query.device != "cuda" or not self.ipc_facts.shares_device:
            return False
        if not self.nccl_facts.why or by_ipc.why_refused(self, query) is not None:
            return False
        return self._why_refused(query, by_ipc.DIRECT) is None

    def _runs_before_host(self, query: Query) -> str | None:
        """Return what runs unasked before anything in which the host has a part."""
        if self._prefers_ipc(query):
            return "memory of peers serves"
        return "NCCL runs this" if self._has_nccl(query) else None

    def _only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        if candidate.backend == by_ipc.DIRECT.backend:
            if not self._prefers_ipc(query):
                return "memory of peers serves where a table or the call names it"
            if candidate.algorithm == by_ipc.DIRECT.algorithm:
                return None
            return "another schedule runs there where a table or the call names it"
        is_mpi = query.device == "cuda" and candidate == by_mpi.NATIVE
        if is_mpi or candidate.backend == "staged":
            first = self._runs_before_host(query)
            if first is None and self._has_mpi(query) and not is_mpi:
                first = "MPI, which takes device memory, runs this"
            if first is not None:
                return f"{first} unless a table, COMMRT_ALGORITHM or the call says so"
            if is_mpi:
                return None
        if candidate.backend == by_nccl.NATIVE.backend and candidate != by_nccl.NATIVE:
            return "a schedule on NCCL runs where a table or the call names it"
        native = candidate.name in (NATIVE, "staged/native")
        query, candidate = on_host(query, candidate)
        if not native or self._unasked_native:
            return host_plans.only_by_name(self.facts.layout, query.coll, candidate)
        return "has no MPI communicator here until a call asks for it by name"
