# SPDX-License-Identifier: Apache-2.0
"""The ``gloo`` backend: schedules across nodes without MPI, and gloo's collectives.

Ranks of a node share memory, and torch's gloo carries what goes between nodes. Where
gloo keeps commrt's rules, its own collectives are candidates, too (``gloo/native``):
one step that gloo runs over all ranks, on its own threads. gloo ends a process whose
peer sends more than it expects. So the ranks compare first what they have called, by a
schedule of one short message for each round.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from commrt import _native
from commrt.backends.base import Availability, Capabilities
from commrt.backends.shm import schedule_candidates
from commrt.planning.host_plans import check_params, scaling, schedule_plan
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.select.model import COMPARED, COMPARED_NBYTES
from commrt.vocabulary.dtypes import DType, ReduceOp, dtype_by_name, is_known
from commrt.vocabulary.operations import operation

__all__ = ["NATIVE", "GlooBackend", "why_not", "why_refused"]

NATIVE = Candidate("gloo", "native")

_FOREVER = timedelta(days=365)
"""A collective that gloo gives up ends its whole group. So deadlines are commrt's,
after which a collective stays in flight."""
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ALL = frozenset({ReduceOp.SUM, ReduceOp.PROD})
_REDUCED_AS = {
    "int32": "int32",
    "int64": "int64",
    # Bits are the same as those of signed numbers, but for min, max and prod of halves.
    "uint32": "int32",
    "uint64": "int64",
    "float32": "float32",
    "float64": "float64",
    "complex64": "float32",
    "complex128": "float64",
}
"""Types that gloo adds, and as what."""


class GlooBackend:
    """Ranks on several nodes that have met without MPI."""

    name = "gloo"
    capabilities = Capabilities(
        native=True,
        limits="ranks on several nodes that torchrun, srun or a torch Store brought "
        "together; native: all but scans and blocks of different lengths, of "
        "reductions sum and avg of types of 32 and 64 bits, prod of floats of these, "
        "and prod, min, max and bitwise of signed integers of these",
    )

    def availability(self) -> Availability:
        """Look for torch without importing it."""
        here = find_spec("torch") is not None
        reason = "messages by torch's gloo" if here else "torch is not installed"
        return Availability(self.name, here, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return every schedule, and ``native`` where it keeps commrt's rules."""
        if query.device != "host" or not comm.is_relayed:
            return ()
        found = list(schedule_candidates(comm, query, self.name))
        if why_refused(comm, query) is None:
            found.append(NATIVE)
        return found

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the native plan of this rank."""
        if spec.candidate.algorithm != "native":
            return schedule_plan(comm, spec)
        check_params(spec.op.name, "native", comm.size, spec.candidate.params)
        lent = comm.gloo_collectives
        method, arguments = _call(lent.group, spec, comm.rank, comm.size)
        factor, _, _ = scaling(spec, comm.size)
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
            agreement=_agreement(comm, spec),
            digest=_digest(spec),
        )


def why_refused(comm: Any, query: Query) -> str | None:
    """Return why gloo's own collective does not run ``query``, where gloo is."""
    if query.device != "host" or not comm.is_relayed:
        return None
    if comm.gloo_collectives is None:
        return "there is no group of gloo for these ranks"
    return why_not(query)


def why_not(query: Query) -> str | None:
    """Return why gloo's own collective would not keep commrt's rules."""
    if query.coll not in _OPTIONS:
        return f"gloo has no {query.coll}"
    if query.nbytes == 0 and operation(query.coll).rule_bytes not in ("none", "any"):
        return "there is nothing to move"
    if query.op is None:
        return None
    if query.order != "any":
        return "gloo combines in any order"
    if not is_known(query.op):
        return "knows no reduction of yours"
    dtype, reduction = dtype_by_name(query.dtype), ReduceOp[query.op.upper()]
    if dtype.is_short_float:
        return "short floats would be rounded at every step"
    if dtype.name not in _REDUCED_AS:
        return f"gloo adds no {dtype.name}"
    if not _keeps(dtype, reduction):
        return f"gloo's {query.op} of {dtype.name} is another one, or it has none"
    return None


def _keeps(dtype: DType, reduction: ReduceOp) -> bool:
    """Whether a reduction of a type that gloo adds is commrt's."""
    if reduction is ReduceOp.SUM:
        return True
    if reduction is ReduceOp.AVG:  # scaled before it is sent
        return dtype.kind in ("float", "complex")
    if dtype.kind == "float":  # the least and the largest of NaN are not commrt's
        return reduction is ReduceOp.PROD
    return dtype.kind == "int" and reduction in _ORDERED | _BITWISE | _ALL


_COMPARING = Candidate("gloo", COMPARED.algorithm)


def _agreement(comm: Any, spec: PlanSpec) -> Any:
    """Return the plan by which the ranks compare what they have called, or None."""
    # A barrier has nothing to compare, and what pairs of ranks exchange may differ.
    if spec.op.rule_bytes in ("none", "any"):
        return None
    return schedule_plan(
        comm,
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


def _digest(spec: PlanSpec) -> int:
    """Return a number of all that must be equal on the ranks."""
    facts = (
        spec.op.name,
        spec.num_elements,
        spec.dtype.name,
        spec.reduction.name if spec.op.reduces else None,
        spec.root if spec.op.has_root else None,
    )
    return zlib.crc32(repr(facts).encode())


Arguments = Callable[[int, int], tuple[Any, ...]]
"""From the addresses of what is sent and of the result to a method's arguments."""


def _call(group: Any, spec: PlanSpec, rank: int, size: int) -> tuple[Any, Arguments]:
    """Return the method of torch's group, and what makes its arguments."""
    import torch

    coll, root = spec.op.name, spec.root
    as_type, per_element = torch.uint8, spec.dtype.itemsize
    if spec.op.reduces:
        as_type = getattr(torch, _REDUCED_AS[spec.dtype.name])
        per_element = spec.dtype.itemsize // as_type.itemsize
    sent, received = spec.in_elements * per_element, spec.out_elements * per_element

    def at(address: int, count: int) -> Any:
        if count == 0:
            return torch.empty(0, dtype=as_type)
        memory = (ctypes.c_char * (count * as_type.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=as_type)

    options = _options(spec)
    if spec.op.is_empty:
        return group.barrier, lambda x, out: (options,)
    if spec.op.rule_bytes == "whole" and spec.op.out_count == "same":
        count = max(sent, received)
        methods = {"allreduce": group.allreduce, "bcast": group.broadcast}
        method = methods.get(coll, group.reduce)
        return method, lambda x, out: ([at(out, count)], options)
    if spec.op.out_count == "times_size" and not spec.op.has_root:
        return group._allgather_base, lambda x, out: (
            *(at(out, received), at(x, sent)),
            options,
        )
    if spec.op.out_count == "div_size" and spec.op.reduces:
        return group._reduce_scatter_base, lambda x, out: (
            *(at(out, received), at(x, sent)),
            options,
        )
    if spec.op.out_count == "div_size":
        return group.scatter, lambda x, out: (
            [at(out, received)],
            [[*at(x, sent).chunk(size)]] if rank == root else [],
            options,
        )
    splits = [[n * per_element for n in counts] for counts in spec.counts]
    sends, receives = (splits[0], splits[-1]) if splits else ([], [])
    if spec.op.out_count == "times_size":  # what torch calls so copies once more
        sends = [sent if peer == root else 0 for peer in range(size)]
        receives = [sent if rank == root else 0] * size
    return group.alltoall_base, lambda x, out: (
        *(at(out, received), at(x, sent)),
        *(receives, sends),
        options,
    )


_OPTIONS = {
    "allreduce": "AllreduceOptions",
    "reduce": "ReduceOptions",
    "bcast": "BroadcastOptions",
    "allgather": "AllgatherOptions",
    "reduce_scatter": "ReduceScatterOptions",
    "alltoall": "AllToAllOptions",
    "alltoallv": "AllToAllOptions",
    "gather": "AllToAllOptions",
    "scatter": "ScatterOptions",
    "barrier": "BarrierOptions",
}
"""The operations that gloo has, and torch's options of each."""


def _options(spec: PlanSpec) -> Any:
    from torch.distributed import ReduceOp as TorchReduceOp
    from torch.distributed import distributed_c10d

    # Some of them have no other public place.
    made = getattr(distributed_c10d, _OPTIONS[spec.op.name])()
    if spec.op.reduces:
        same = {"PROD": "PRODUCT", "AVG": "SUM"}
        name = spec.reduction.name
        made.reduceOp = getattr(TorchReduceOp, same.get(name, name))
    if spec.op.has_root and spec.op.out_count != "times_size":
        made.rootRank = spec.root
    made.timeout = _FOREVER
    return made
