# SPDX-License-Identifier: Apache-2.0
"""Calls of one operation, in the words of each library that has it.

Reductions and broadcasts work in place, as torch has no other form of them. All arrays
are made before the call, so that it alone is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from commrt.bench.varying_lengths import ROOT, Array, Lengths
from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["LISTS", "MEASURED", "WAYS", "Library", "Mpi4py", "Own", "Torch", "spec_of"]

Call = Callable[[], Any]

LISTS = {
    "allgather of a list": "allgather",
    "alltoall of a list": "alltoallv",
    "reduce_scatter of a list": "reduce_scatter",
    "allreduce at once": "allreduce",
    "allgather at once": "allgather",
    "reduce_scatter at once": "reduce_scatter",
}
"""Forms that only torch has, and the operations that they run."""
MEASURED = (*(spec.name for spec in OPERATIONS if not spec.is_empty), *LISTS)
WAYS = ("commrt", "torch", "mpi4py", "gloo")
"""commrt called directly, its process group of torch, and the libraries beside."""
_WITH_LISTS = (
    *("gather", "scatter", "allgatherv", "reduce_scatterv"),
    *(name for name in LISTS if name.endswith("of a list")),
)
IN_PLACE = ("allreduce", "reduce", "bcast")
_AT_ONCE = 3


def spec_of(name: str) -> OpSpec:
    """Return the operation that a form of a call runs."""
    return operation(LISTS.get(name, name))


class Library(Protocol):
    """One way to make calls."""

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays; None where the library has no such call.

        Calls that work in place have all in ``x``.
        """


class Own:
    """commrt's communicator, called directly."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays."""
        if name in LISTS:
            return None
        comm, spec = self._comm, operation(name)
        method, more = getattr(comm, name), dict[str, Any]()
        if spec.has_root:
            more["root"] = ROOT
        if len(spec.count_arguments) == 2:
            more["send_counts"] = lengths.sent(comm.rank)
            more["recv_counts"] = lengths.received(comm.rank)
        elif spec.count_arguments:
            more["counts"] = list(lengths.row)
        if name not in IN_PLACE and (spec.output_on != "root" or comm.rank == ROOT):
            more["out"] = out
        given = x if spec.input_on == "all" or comm.rank == ROOT else None
        if name == "bcast":
            given = x
        return lambda: method(given, **more)


class Mpi4py:
    """A communicator of mpi4py."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = comm, MPI.IN_PLACE
        self._rank = comm.Get_rank()

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays."""
        if name in LISTS:
            return None
        if self._rank == ROOT:
            return self._at_root(name, lengths, x, out)
        calls: dict[str, Call] = {
            "reduce": lambda: self._comm.Reduce(x, None, root=ROOT),
            "gather": lambda: self._comm.Gather(x, None, ROOT),
            "scatter": lambda: self._comm.Scatter(None, out, ROOT),
            "gatherv": lambda: self._comm.Gatherv(x, None, ROOT),
            "scatterv": lambda: self._comm.Scatterv(None, out, ROOT),
        }
        return calls.get(name) or self._at_root(name, lengths, x, out)

    def _at_root(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call:
        comm, inside = self._comm, self._in_place
        row = list(lengths.row)
        sent = [x, lengths.sent(self._rank)]
        received = [out, lengths.received(self._rank)]
        calls: dict[str, Call] = {
            "allreduce": lambda: comm.Allreduce(inside, x),
            "reduce": lambda: comm.Reduce(inside, x, root=ROOT),
            "bcast": lambda: comm.Bcast(x, ROOT),
            "allgather": lambda: comm.Allgather(x, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out),
            "alltoall": lambda: comm.Alltoall(x, out),
            "gather": lambda: comm.Gather(x, out, ROOT),
            "scatter": lambda: comm.Scatter(x, out, ROOT),
            "scan": lambda: comm.Scan(x, out),
            "exscan": lambda: comm.Exscan(x, out),
            "allgatherv": lambda: comm.Allgatherv(x, [out, row]),
            "alltoallv": lambda: comm.Alltoallv(sent, received),
            "gatherv": lambda: comm.Gatherv(x, [out, row], ROOT),
            "scatterv": lambda: comm.Scatterv([x, row], out, ROOT),
            "reduce_scatterv": lambda: comm.Reduce_scatter(x, out, row),
        }
        return calls[name]


class Torch:
    """A process group of torch.distributed.

    Args:
        group: the group.
        lacks: names of calls that it refuses.
    """

    def __init__(self, group: Any, lacks: tuple[str, ...] = ()) -> None:
        import torch.distributed as dist

        self._group, self._lacks = group, lacks
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on tensors in the memory of these arrays.

        Tensors of a list that is sent lie apart from each other; those that are
        received lie one behind the other.
        """
        import torch

        if name in self._lacks:
            return None
        a, b = torch.from_numpy(x), torch.from_numpy(out)
        if name.endswith("at once"):
            return self._at_once(name, a, b)
        if name in _WITH_LISTS:
            return self._with_lists(name, lengths, a, b)
        return self._single(name, lengths, a, b)

    def _single(self, name: str, lengths: Lengths, a: Any, b: Any) -> Call | None:
        import torch.distributed as dist

        group = self._group
        sent, received = lengths.sent(self._rank), lengths.received(self._rank)
        to_all = dist.all_to_all_single
        calls: dict[str, Call] = {
            "allreduce": lambda: dist.all_reduce(a, group=group),
            "reduce": lambda: dist.reduce(a, ROOT, group=group),
            "bcast": lambda: dist.broadcast(a, ROOT, group=group),
            "allgather": lambda: dist.all_gather_into_tensor(b, a, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(b, a, group=group),
            "alltoall": lambda: to_all(b, a, group=group),
            "alltoallv": lambda: to_all(b, a, received, sent, group=group),
        }
        return calls.get(name)

    def _with_lists(self, name: str, lengths: Lengths, a: Any, b: Any) -> Call:
        import torch.distributed as dist

        group, spec = self._group, spec_of(name)
        row = lengths.row if spec.count_arguments else (lengths.block,) * self._size
        sends = lengths.sent(self._rank) if spec.by_pair else row
        receives = lengths.received(self._rank) if spec.by_pair else row
        inputs: Any = None
        outputs: Any = None
        if a.numel() and spec.out_count != "times_size":
            inputs = [part.clone() for part in a.split(list(sends))]
        if b.numel() and spec.out_count != "div_size":
            outputs = list(b.split(list(receives)))
        calls: dict[str, Call] = {
            "allgather": lambda: dist.all_gather(outputs, a, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter(b, inputs, group=group),
            "alltoall": lambda: dist.all_to_all(outputs, inputs, group=group),
            "gather": lambda: dist.gather(a, outputs, ROOT, group=group),
            "scatter": lambda: dist.scatter(b, inputs, ROOT, group=group),
        }
        return calls[spec.vector_of or spec.name]

    def _at_once(self, name: str, a: Any, b: Any) -> Call:
        import torch.distributed as dist

        group = self._group
        pairs = [(a, b), *((a.clone(), b.clone()) for _ in range(_AT_ONCE - 1))]

        def start(x: Any, out: Any) -> None:
            if name.startswith("allreduce"):
                dist.all_reduce(x, group=group)
            elif name.startswith("allgather"):
                dist.all_gather_into_tensor(out, x, group=group)
            else:
                dist.reduce_scatter_tensor(out, x, group=group)

        def all_of_them() -> None:
            with dist._coalescing_manager(group):
                for pair in pairs:
                    start(*pair)

        return all_of_them
