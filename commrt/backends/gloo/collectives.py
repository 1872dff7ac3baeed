# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch's gloo: which keep commrt's rules, and how they are called."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import DType, ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation
from commrt.vocabulary.reduction_names import is_known

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["NATIVE", "digest", "library_call", "why_not"]

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
    """Return whether a reduction of a type that gloo adds is commrt's."""
    if reduction is ReduceOp.SUM:
        return True
    if reduction is ReduceOp.AVG:  # scaled before it is sent
        return dtype.kind in ("float", "complex")
    if dtype.kind == "float":  # the least and the largest of NaN are not commrt's
        return reduction is ReduceOp.PROD
    return dtype.kind == "int" and reduction in _ORDERED | _BITWISE | _ALL


def digest(spec: PlanSpec) -> int:
    """Return a number of all that must be equal on the ranks."""
    # Pairs of ranks of an alltoallv exchange what they like.
    num_elements = None if spec.op.rule_bytes == "any" else spec.num_elements
    facts = (
        spec.op.name,
        num_elements,
        spec.dtype.name,
        spec.reduction.name if spec.op.reduces else None,
        spec.root if spec.op.has_root else None,
    )
    return zlib.crc32(repr(facts).encode())


Arguments = Callable[[int, int], tuple[Any, ...]]
"""Function from the addresses of the input and of the result to a method's
arguments."""


def library_call(
    group: dist.ProcessGroup, spec: PlanSpec, rank: int, size: int
) -> tuple[Any, Arguments]:
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
