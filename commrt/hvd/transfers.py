# SPDX-License-Identifier: Apache-2.0
"""Transfers: a bucket on its way, as one collective of a communicator.

Tensors of a bucket are copied into one vector, and results are copied out of it. A
single tensor that is contiguous is sent from where it lies, and arrives there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.hvd.buckets import Bucket, Part
from commrt.request import Request

__all__ = ["AVERAGE", "TRANSFERS", "Transfer", "rows_of", "scale"]

Tensor: TypeAlias = torch.Tensor
AVERAGE = "average"
"""Name of the reduction that divides the sum by the number of ranks."""


class Transfer(ABC):
    """A bucket on its way.

    Args:
        bucket: whose parts have one kind, type, device and reduction.
        comm: of the process set, for transfers alone.
    """

    def __init__(self, bucket: Bucket, comm: Communicator) -> None:
        self.parts: Sequence[Part] = bucket.parts
        self.comm = comm
        self._request: Request | None = None
        self._is_over = False

    def start(self) -> None:
        """Start the collective; an error ends the entries of the bucket."""
        entries = [part.entry for part in self.parts]
        for entry in entries:
            entry.transfers.append(self)
            entry.num_missing -= 1
        try:
            with torch.no_grad():
                self._request = self.send()
        except CommError as error:
            self._end(error)

    @property
    def request(self) -> Request | None:
        """The collective, while the host may have to wait for it."""
        return None if self._is_over else self._request

    def test(self) -> bool:
        """Return whether ``finish`` would not wait, after a little progress."""
        try:
            return self._is_over or self._request is None or self._request.test()
        except CommError as error:
            self._end(error)
            return True

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the collective, and put results where they belong; idempotent."""
        if self._is_over:
            return
        try:
            if self._request is not None:
                self._request.wait(timeout_s=timeout_s)
            with torch.no_grad():
                self.put()
        except CommError as error:
            self._end(error)
        self._is_over = True

    @abstractmethod
    def send(self) -> Request | None:
        """Start the collective; None: there is nothing to send, or it has ended."""

    @abstractmethod
    def put(self) -> None:
        """Put results into the entries' outputs."""

    def _end(self, error: CommError) -> None:
        self._is_over = True
        for part in self.parts:
            part.entry.fail(error)

    def inputs(self) -> Iterator[Tensor]:
        """Yield this rank's tensors."""
        for part in self.parts:
            yield part.entry.inputs[part.number]

    @property
    def op(self) -> str:
        """Name of the reduction."""
        return self.parts[0].entry.signature.op

    def before_sum(self, vector: Tensor) -> None:
        """Scale what is summed."""
        scale(vector, self.parts[0].entry.signature.prescale)

    def after_sum(self, vector: Tensor) -> None:
        """Divide and scale the sum."""
        if self.op == AVERAGE:
            _divide(vector, self.comm.size)
        scale(vector, self.parts[0].entry.signature.postscale)

    @property
    def comm_op(self) -> str:
        """Name of the reduction for a communicator."""
        return "sum" if self.op == AVERAGE else self.op


class _Whole(Transfer):
    """Tensors of one shape on all ranks, whose results have the same shape."""

    def _gather(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return a vector of all tensors, zeros or junk for None.

        The one tensor of a part is itself, where it is contiguous and in place.
        """
        if len(self.parts) == 1:
            return self._of_one()
        count = sum(tensor.numel() for tensor in self.inputs())
        first = next(self.inputs())
        vector = first.new_empty(count)
        for piece, tensor in zip(self._pieces(vector), tensors, strict=True):
            if tensor is not None:
                piece.copy_(tensor)
        return vector

    def _of_one(self) -> Tensor:
        part = self.parts[0]
        own = part.entry.inputs[part.number]
        if part.entry.in_place and own.is_contiguous():
            return own.view(-1)
        made = own.clone(memory_format=torch.contiguous_format)
        if not part.entry.in_place:
            part.entry.outputs[part.number] = made
        return made.view(-1)

    def _pieces(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield the piece of a vector that is each part's, in its shape."""
        begin = 0
        for part, tensor in zip(self.parts, self.inputs(), strict=True):
            end = begin + tensor.numel()
            yield vector[begin:end].view(part.shape)
            begin = end

    def _scatter(self, vector: Tensor) -> None:
        """Copy a vector's pieces into the outputs, unless they lie there."""
        for part, piece in zip(self.parts, self._pieces(vector), strict=True):
            output = part.entry.outputs[part.number]
            if output is None:
                part.entry.outputs[part.number] = piece.clone()
            elif output.data_ptr() != piece.data_ptr():
                output.copy_(piece)


class _Allreduce(_Whole):
    """One ``allreduce``."""

    def send(self) -> Request | None:
        self._vector = self._gather(list(self.inputs()))
        self.before_sum(self._vector)
        if self._vector.numel() == 0:
            return None
        request: Request = self.comm.allreduce(
            self._vector, op=self.comm_op, nonblocking=True
        )
        return request

    def put(self) -> None:
        self.after_sum(self._vector)
        self._scatter(self._vector)


class _Broadcast(_Whole):
    """One ``bcast``."""

    def send(self) -> Request | None:
        root = self.parts[0].entry.signature.root
        own = self.comm.rank == root
        self._vector = self._gather([x if own else None for x in self.inputs()])
        if self._vector.numel() == 0:
            return None
        request: Request = self.comm.bcast(self._vector, root=root, nonblocking=True)
        return request

    def put(self) -> None:
        self._scatter(self._vector)


class _Allgather(Transfer):
    """One ``allgather`` or ``allgatherv``: of rank after rank, all its tensors."""

    def send(self) -> Request | None:
        size = self.comm.size
        vector = torch.cat([tensor.reshape(-1) for tensor in self.inputs()])
        self._counts = [
            [torch.Size(part.shape_on(rank)).numel() for part in self.parts]
            for rank in range(size)
        ]
        totals = [sum(each) for each in self._counts]
        self._all = vector.new_empty(sum(totals))
        if self._all.numel() == 0:
            return None
        request: Request
        if len({*totals}) == 1:
            request = self.comm.allgather(vector, out=self._all, nonblocking=True)
        else:
            request = self.comm.allgatherv(
                vector, counts=totals, out=self._all, nonblocking=True
            )
        return request

    def put(self) -> None:
        flat = [count for counts in self._counts for count in counts]
        pieces = self._all.split(flat)
        num_parts = len(self.parts)
        for place, part in enumerate(self.parts):
            own = [
                piece.view(part.shape_on(rank))
                for rank, piece in enumerate(pieces[place::num_parts])
            ]
            rows = tuple(len(each) for each in own)
            part.entry.gathered_rows[part.number] = rows
            if num_parts == 1:  # they lie one after the other
                shape = sum(rows), *part.shape[1:]
                part.entry.outputs[part.number] = self._all.view(shape)
            else:
                part.entry.outputs[part.number] = torch.cat(own)


class _Alltoall(Transfer):
    """One ``alltoallv`` of one tensor's rows."""

    def send(self) -> Request | None:
        (part,) = self.parts
        me, each = self.comm.rank, torch.Size(part.shape[1:]).numel()
        sends = part.entry.signature.splits
        recvs = tuple(part.signatures[r].splits[me] for r in range(self.comm.size))
        part.entry.received_splits = recvs
        tensor = next(self.inputs())
        output = tensor.new_empty((sum(recvs), *part.shape[1:]))
        part.entry.outputs[part.number] = output
        request: Request = self.comm.alltoallv(
            tensor.reshape(-1),
            send_counts=[rows * each for rows in sends],
            recv_counts=[rows * each for rows in recvs],
            out=output.view(-1),
            nonblocking=True,
        )
        return request

    def put(self) -> None:
        """Do nothing: rows arrive in the output."""


class _ReduceScatter(Transfer):
    """One ``reduce_scatterv``: for rank after rank, its rows of all tensors."""

    def send(self) -> Request | None:
        size = self.comm.size
        pieces: list[list[Tensor]] = [[] for _ in range(size)]
        for tensor in self.inputs():
            for rank, rows in enumerate(tensor.split(rows_of(len(tensor), size))):
                pieces[rank].append(rows.reshape(-1))
        counts = [sum(each.numel() for each in of_rank) for of_rank in pieces]
        vector = torch.cat([each for of_rank in pieces for each in of_rank])
        self.before_sum(vector)
        self._own = vector.new_empty(counts[self.comm.rank])
        if vector.numel() == 0:
            return None
        request: Request = self.comm.reduce_scatterv(
            vector, op=self.comm_op, counts=counts, out=self._own, nonblocking=True
        )
        return request

    def put(self) -> None:
        self.after_sum(self._own)
        begin = 0
        for part in self.parts:
            shape = part.shape
            rows = rows_of(shape[0], self.comm.size)[self.comm.rank]
            end = begin + rows * torch.Size(shape[1:]).numel()
            piece = self._own[begin:end].view(rows, *shape[1:])
            only = len(self.parts) == 1
            part.entry.outputs[part.number] = piece if only else piece.clone()
            begin = end


def rows_of(num_rows: int, size: int) -> list[int]:
    """Return the rows that each rank gets of a reducescatter: the first ones more."""
    each, more = divmod(num_rows, size)
    return [each + (rank < more) for rank in range(size)]


def scale(vector: Tensor, factor: float) -> None:
    """Multiply by a factor in place. Integers are scaled in float64, and truncated."""
    if factor == 1.0:
        return
    if vector.is_floating_point():
        vector.mul_(factor)
    else:
        vector.copy_(vector.double().mul_(factor).trunc_())


def _divide(vector: Tensor, size: int) -> None:
    if vector.is_floating_point():
        vector.div_(size)
    else:
        vector.copy_(torch.div(vector, size, rounding_mode="trunc"))


TRANSFERS: dict[str, type[Transfer]] = {
    "allreduce": _Allreduce,
    "allgather": _Allgather,
    "broadcast": _Broadcast,
    "alltoall": _Alltoall,
    "reducescatter": _ReduceScatter,
}
"""The transfer of each kind of operation that moves tensors."""
