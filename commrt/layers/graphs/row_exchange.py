# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix by their numbers, wherever they lie: gather, and scatter-add.

For message passing on edge lists: edges lie on any ranks, and read and write nodes of
all of them.

    nodes = RowExchange(edges[0], num_nodes, comm)      # this rank's edges
    others = RowExchange(edges[1], num_nodes, comm)
    messages = nodes.gather(x) * weight[:, None]        # a row for each edge
    summed = others.scatter(messages)                   # a row for each own node

Pattern: ``alltoallv``. A row that a rank names several times travels once; rows that it
adds to one other row are summed before they travel. Owners add in the order of ranks.

Bytes, for u different rows that a rank names and f features of e bytes: making an
exchange sends 8 u and an alltoall of 8 bytes for each rank. Then a gather is an
alltoallv of as many rows as other ranks and this one name of this rank, times f * e; a
scatter is one of u * f * e. Each is the other one's backward pass.

Source: the distributed scatter and gather layers of LBANN.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.spatial.windows import even_sizes

__all__ = ["RowExchange", "gather", "scatter"]

Tensor: TypeAlias = torch.Tensor


class RowExchange:
    """Who needs which rows; for any number of gathers and scatters.

    Args:
        index: the rows that this rank names, int64, in any order; ranks may differ in
            number, also 0.
        num_rows: rows of the whole; or a tuple of each rank's rows, in rank order.
            A number means pieces as even as can be.
        comm: the ranks.

    Collective. Raises UsageError on all ranks alike where any of them names a row that
    is not there.
    """

    def __init__(
        self, index: Tensor, num_rows: int | Sequence[int], comm: Communicator
    ) -> None:
        self._comm = comm
        self._sizes = _sizes(num_rows, comm)
        ends = np.array([0, *accumulate(self._sizes)])
        names = _names(index)
        wrong = names is None or (
            len(names) > 0 and not 0 <= names.min() <= names.max() < ends[-1]
        )
        _refuse_together(comm, wrong, index, int(ends[-1]))
        unique, place = np.unique(names, return_inverse=True)
        self._place = torch.from_numpy(place.reshape(-1).astype(np.int64))
        self._num_named = len(unique)
        bounds = np.searchsorted(unique, ends)
        self._named = tuple(np.diff(bounds).tolist())
        asked = np.array(self._named, np.int64)
        answers = np.empty_like(asked)
        comm.alltoall(asked, out=answers)
        self._asked = tuple(answers.tolist())
        rows = np.empty(sum(self._asked), np.int64)
        comm.alltoallv(
            unique.astype(np.int64),
            send_counts=self._named,
            recv_counts=self._asked,
            out=rows,
        )
        self._rows = torch.from_numpy(rows - ends[comm.rank])

    @property
    def num_own(self) -> int:
        """Rows of the whole that this rank has."""
        return self._sizes[self._comm.rank]

    @property
    def num_named(self) -> int:
        """Different rows that this rank names."""
        return self._num_named

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows that this rank names, in their order; differentiable.

        Args:
            x: this rank's rows of the whole, (num_own, ...).

        Collective; its backward pass is ``scatter``.
        """
        self._check("gather", x, self.num_own)
        result: Tensor = _Gather.apply(x, self)
        return result

    def scatter(self, x: Tensor) -> Tensor:
        """Return, for each row that this rank has, the sum of what ranks add to it.

        Args:
            x: a row for each one that this rank names, in their order.

        Collective and differentiable; its backward pass is ``gather``. Rows that nobody
        names are 0.
        """
        self._check("scatter", x, len(self._place))
        result: Tensor = _Scatter.apply(x, self)
        return result

    def _check(self, what: str, x: Any, rows: int) -> None:
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or x.shape[0] != rows:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else shown(x)
            raise UsageError(
                f"RowExchange.{what}: x is {shape}; expected a tensor of {rows} rows"
            )

    def fetched(self, x: Tensor) -> Tensor:
        """Return the rows that this rank names, without a gradient."""
        leaving = x.detach().index_select(0, self._rows)
        came = self._moved(leaving, self._asked, self._named)
        return came.index_select(0, self._place)

    def added(self, x: Tensor) -> Tensor:
        """Return the sums for this rank's rows, without a gradient."""
        x = x.detach()
        named = x.new_zeros((self._num_named, *x.shape[1:]))
        named.index_add_(0, self._place, x)
        came = self._moved(named, self._named, self._asked)
        total = x.new_zeros((self.num_own, *x.shape[1:]))
        return total.index_add_(0, self._rows, came)

    def _moved(
        self, rows: Tensor, sends: tuple[int, ...], recvs: tuple[int, ...]
    ) -> Tensor:
        """Return the rows that come for those that leave."""
        if self._comm.size == 1:
            return rows
        each = rows[0].numel() if len(rows) else rows.new_empty(rows.shape[1:]).numel()
        out = rows.new_empty((sum(recvs), *rows.shape[1:]))
        self._comm.alltoallv(
            rows.contiguous().view(-1),
            send_counts=tuple(count * each for count in sends),
            recv_counts=tuple(count * each for count in recvs),
            out=out.view(-1),
        )
        return out


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.fetched(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Scatter.apply(gradient, ctx.exchange), None


class _Scatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.added(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.exchange), None


def gather(
    x: Tensor,
    index: Tensor,
    comm: Communicator,
    *,
    num_rows: int | Sequence[int] | None = None,
) -> Tensor:
    """Return rows of a matrix that ranks have in pieces, by number; differentiable.

    Args:
        x: this rank's rows of the whole.
        index: the rows that are wanted, as for ``RowExchange``.
        comm: the ranks.
        num_rows: as for ``RowExchange``; None: ranks tell each other their rows.

    Collective. A program that gathers by the same index again keeps a ``RowExchange``.
    """
    if num_rows is None:
        own = np.array([len(x)], np.int64)
        num_rows = tuple(np.asarray(comm.allgather(own)).reshape(-1).tolist())
    return RowExchange(index, num_rows, comm).gather(x)


def scatter(
    x: Tensor, index: Tensor, num_rows: int | Sequence[int], comm: Communicator
) -> Tensor:
    """Return the sums of rows by number, of which each rank has its piece.

    Differentiable and collective; arguments as for ``RowExchange`` and its ``scatter``.
    """
    return RowExchange(index, num_rows, comm).scatter(x)


def _sizes(num_rows: Any, comm: Communicator) -> tuple[int, ...]:
    """Return each rank's rows; UsageError for numbers that are none."""
    if type(num_rows) is int and num_rows >= 0:
        return even_sizes(num_rows, comm.size)
    sizes = tuple(num_rows) if isinstance(num_rows, tuple | list) else ()
    if len(sizes) != comm.size or not all(type(n) is int and n >= 0 for n in sizes):
        raise UsageError(
            f"RowExchange: num_rows={shown(num_rows)} must be a number of rows, or one "
            f"for each of the {comm.size} ranks"
        )
    return sizes


def _names(index: Any) -> Any:
    """Return the numbers as an array; None for what is none."""
    if not isinstance(index, torch.Tensor) or index.dim() != 1:
        return None
    return index.detach().numpy() if index.dtype == torch.int64 else None


def _refuse_together(
    comm: Communicator, wrong: bool, index: Any, num_rows: int
) -> None:
    """Raise UsageError on all ranks if it is wrong on any."""
    first = np.array([comm.rank if wrong else comm.size], np.int64)
    comm.allreduce(first, "min")
    if first[0] < comm.size:
        given = f": {shown(index)}" if wrong else ""
        raise UsageError(
            f"RowExchange: index of rank {first[0]} is wrong{given}; expected a tensor "
            f"of int64 with one dimension, and numbers from 0 to {num_rows - 1}"
        )
