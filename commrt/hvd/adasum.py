# SPDX-License-Identifier: Apache-2.0
"""Adasum: adds gradients that point elsewhere, and averages those that agree.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021),
section 3. For two gradients a and b the sum is

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

and more ranks are added in pairs, pairs of pairs and so on. Each tensor has scalar
products of its own. Each rank adds a piece of all vectors, as in a recursive halving:
one ``alltoallv`` brings it the piece of every rank, and one ``allgatherv`` sends sums.
Between them the scalar products are summed over the pieces, by one ``allreduce`` for
each level of pairs. Bytes, for n elements of e bytes in t tensors on p ranks: n e each
way, and ``24 t p / 2, 24 t p / 4, ..., 24 t``.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from commrt.errors import UsageError
from commrt.hvd.transfers import Transfer, rows_of, scale
from commrt.request import Request

__all__ = ["Adasum", "adasum_of", "check_ranks"]

Tensor: TypeAlias = torch.Tensor


def check_ranks(size: int) -> None:
    """Raise UsageError unless the number of ranks is a power of two."""
    if size & (size - 1):
        raise UsageError(
            f"Adasum adds pairs of ranks, and pairs of pairs: it needs 2, 4, 8, ... "
            f"ranks, and there are {size}. Use op=hvd.Average, or another number of "
            f"ranks"
        )


class Adasum(Transfer):
    """The adaptive sum of all ranks' tensors; it blocks until it is done."""

    name = "adasum"

    def send(self) -> Request | None:
        comm = self.comm
        vector = torch.cat([tensor.reshape(-1) for tensor in self.inputs()])
        self.before_sum(vector)
        self._sum = torch.empty_like(vector)
        if vector.numel() == 0:
            return None
        counts = rows_of(vector.numel(), comm.size)
        count = counts[comm.rank]
        rows = vector.new_empty((comm.size, count))
        comm.alltoallv(
            vector,
            send_counts=counts,
            recv_counts=[count] * comm.size,
            out=rows.view(-1),
        )
        begin = sum(counts[: comm.rank])
        own = self._added(rows.double(), begin).to(vector.dtype)
        comm.allgatherv(own, counts=counts, out=self._sum)
        return None

    def _added(self, rows: Tensor, begin: int) -> Tensor:
        """Return the sum of all rows, this rank's piece of all vectors.

        Args:
            rows: (ranks, elements), in float64.
            begin: first element of the piece.
        """
        lengths = self._lengths(begin, rows.shape[1])
        while len(rows) > 1:
            a, b = rows[0::2], rows[1::2]
            products = torch.stack([a * b, a * a, b * b])
            parts = products.split(lengths, dim=2)
            sums = torch.stack([part.sum(2) for part in parts]).contiguous()
            self.comm.allreduce(sums.view(-1))
            of_a, of_b = _coefficients(sums)
            repeats = torch.tensor(lengths, device=rows.device)
            rows = a * of_a.repeat_interleave(repeats, 0).T
            rows += b * of_b.repeat_interleave(repeats, 0).T
        return rows[0]

    def _lengths(self, begin: int, count: int) -> list[int]:
        """Return how many elements of each tensor lie in a piece of the vector."""
        found, first = [], 0
        for tensor in self.inputs():
            last = first + tensor.numel()
            inside = min(last, begin + count) - max(first, begin)
            found.append(max(0, inside))
            first = last
        return found

    def put(self) -> None:
        scale(self._sum, self.parts[0].entry.signature.postscale)
        begin = 0
        for part, tensor in zip(self.parts, self.inputs(), strict=True):
            end = begin + tensor.numel()
            piece = self._sum[begin:end].view(part.shape)
            output = part.entry.outputs[part.number]
            if output is None:
                part.entry.outputs[part.number] = piece.clone()
            else:
                output.copy_(piece)
            begin = end


def _coefficients(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a and b from (..., 3, pairs): a.b, a.a and b.b."""
    dot, a, b = sums.unbind(-2)
    tiny = torch.finfo(torch.float64).tiny ** 0.5
    one = torch.ones_like(dot)
    of_a = torch.where(a >= tiny, 1 - dot / (2 * a.clamp_min(tiny)), one)
    of_b = torch.where(b >= tiny, 1 - dot / (2 * b.clamp_min(tiny)), one)
    return of_a, of_b


def adasum_of(a: Tensor, b: Tensor) -> Tensor:
    """Return the adaptive sum of two tensors, on one process; in float64."""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    sums = torch.stack([x @ y, x @ x, y @ y]).view(3, 1)
    of_x, of_y = _coefficients(sums)
    return (of_x * x + of_y * y).view(a.shape)
