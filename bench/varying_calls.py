# SPDX-License-Identifier: Apache-2.0
"""Calls of one operation, in the words of each library that has it.

Reductions and broadcasts work in place, as torch has no other form of them. All arrays
are made before the call, so that it alone is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from commrt.bench.varying_forms import (
    AT_ONCE,
    FORMS,
    HALO,
    MESSAGES,
    NEIGHBORS,
    REDISTRIBUTED,
    SPARSE,
    WITH_LISTS,
    fills_its_input,
    works_in_place,
)
from commrt.bench.varying_lengths import ROOT, Array, Lengths
from commrt.boxes.layouts import Block, Layout
from commrt.request import wait_all
from commrt.sparse.vector import SparseVector
from commrt.vocabulary.operations import COLLECTIVES, operation

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

    from commrt.comm import Communicator

__all__ = ["WAYS", "Library", "Mpi4py", "Own", "Torch"]

Call = Callable[[], Any]

WAYS = ("commrt", "torch", "mpi4py", "gloo")
"""commrt called directly, its process group of torch, and the libraries beside."""
_AT_ONCE = 3


class Library(Protocol):
    """One way to make calls."""

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays; None where the library has no such call.

        Calls that work in place have all in ``x``.
        """


class Own:
    """commrt's communicator, called directly; making it is collective."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._line = comm.cart((comm.size,), periodic=True)

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays."""
        if name == MESSAGES:
            return self._messages(lengths, x, out)
        if name == HALO:
            return lambda: self._line.halo_exchange(x, width=1)
        if name == NEIGHBORS:
            return lambda: self._line.neighbor_allgather(x, out=out)
        if name == REDISTRIBUTED:
            return self._redistributed(x, out)
        if name == SPARSE:
            return self._sparse(x)
        if name in AT_ONCE:
            return self._fused(x) if FORMS[name].fuses else None
        return self._collective(name, lengths, x, out) if name in COLLECTIVES else None

    def _collective(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call:
        comm, spec = self._comm, operation(name)
        method, more = getattr(comm, name), dict[str, Any]()
        if spec.has_root:
            more["root"] = ROOT
        if len(spec.count_arguments) == 2:
            more["send_counts"] = lengths.sent(comm.rank)
            more["recv_counts"] = lengths.received(comm.rank)
        elif spec.count_arguments:
            more["counts"] = list(lengths.row)
        if not works_in_place(spec) and (spec.output_on != "root" or comm.rank == ROOT):
            more["out"] = out
        has_x = fills_its_input(spec) or spec.input_on == "all" or comm.rank == ROOT
        given = x if has_x else None
        return lambda: method(given, **more)

    def _messages(self, lengths: Lengths, x: Array, out: Array) -> Call:
        comm = self._comm
        sends, recvs = (
            [(part, rank) for rank, part in enumerate(_split(array, counts))]
            for array, counts in (
                (x, lengths.sent(comm.rank)),
                (out, lengths.received(comm.rank)),
            )
        )
        return lambda: comm.multi_sendrecv(sends=sends, recvs=recvs)

    def _redistributed(self, x: Array, out: Array) -> Call:
        comm, size = self._comm, self._comm.size
        rows, columns = x.reshape(-1, size), out.reshape(-1, 1)
        before, behind = (
            Layout((rows.shape[0] * size, size), (size,), dims)
            for dims in ((Block(0), None), (None, Block(0)))
        )
        return lambda: comm.redistribute(rows, before, behind, out=columns)

    def _sparse(self, x: Array) -> Call:
        comm, given = self._comm, SparseVector(np.arange(x.size), x.copy(), x.shape)

        def summed() -> None:
            x[:] = comm.sparse_allreduce(given, result="dense")

        return summed

    def _fused(self, x: Array) -> Call:
        comm = self._comm
        arrays = [x, *(x.copy() for _ in range(_AT_ONCE - 1))]

        def fused() -> None:
            with comm.fused():
                wait_all([comm.allreduce(each, nonblocking=True) for each in arrays])

        return fused


class Mpi4py:
    """A communicator of mpi4py."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = comm, MPI.IN_PLACE
        self._line = comm.Create_cart([comm.Get_size()], [True])
        self._wait_all = MPI.Request.Waitall
        self._rank = comm.Get_rank()

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on these arrays."""
        if name == MESSAGES:
            return self._messages(lengths, x, out)
        if name == NEIGHBORS:
            return lambda: self._line.Neighbor_allgather(x, out)
        if name not in COLLECTIVES:
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

    def _messages(self, lengths: Lengths, x: Array, out: Array) -> Call:
        comm, wait_all = self._comm, self._wait_all
        sends = _split(x, lengths.sent(self._rank))
        receives = _split(out, lengths.received(self._rank))

        def exchange() -> None:
            requests = [comm.Irecv(part, r) for r, part in enumerate(receives)]
            requests += [comm.Isend(part, r) for r, part in enumerate(sends)]
            wait_all(requests)

        return exchange

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

    def __init__(self, group: dist.ProcessGroup, lacks: tuple[str, ...] = ()) -> None:
        import torch.distributed as dist

        self._group, self._lacks = group, lacks
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def bind(self, name: str, lengths: Lengths, x: Array, out: Array) -> Call | None:
        """Return a call on tensors in the memory of these arrays.

        Tensors of a list that is sent lie apart from each other; those that are
        received lie one behind the other.
        """
        import torch

        if name in self._lacks or name in (
            MESSAGES,
            SPARSE,
            HALO,
            NEIGHBORS,
            REDISTRIBUTED,
        ):
            return None
        a, b = torch.from_numpy(x), torch.from_numpy(out)
        if name in AT_ONCE:
            return self._at_once(name, a, b)
        if name in WITH_LISTS:
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

        group, spec = self._group, FORMS[name]
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
        starts: dict[str, Callable[[Any, Any], Any]] = {
            "allreduce": lambda x, _: dist.all_reduce(x, group=group),
            "allgather": lambda x, out: dist.all_gather_into_tensor(
                out, x, group=group
            ),
            "reduce_scatter": lambda x, out: dist.reduce_scatter_tensor(
                out, x, group=group
            ),
        }
        start = starts[AT_ONCE[name]]

        def all_of_them() -> None:
            with dist._coalescing_manager(group):
                for x, out in pairs:
                    start(x, out)

        return all_of_them


def _split(array: Array, counts: list[int]) -> list[Array]:
    """Return the parts of an array that have so many elements."""
    return np.split(array, np.cumsum(counts[:-1]))
