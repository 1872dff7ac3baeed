# SPDX-License-Identifier: Apache-2.0
"""The product of a graph's matrix with features, over a grid of ranks.

Each rank multiplies its block of A (rows along the row axis, columns along the inner
one) by its block of F. The products along the inner axis are summed by ``allreduce``,
in chunks of rows: while one chunk travels, the next is computed. The gradient is the
same with the transposed block, whose products are summed along the row axis.

Bytes, for N nodes and D features of e bytes each, on a grid of i inner, f feature and r
row ranks. N/r and so on stand for this rank's piece; an axis of 1 rank sends nothing.

    forward: allreduce of N/r * D/f * e over the inner axis; before it, allgatherv of
        N/i * D/f * e over the row axis, if the features rest
    backward: allreduce of N/i * D/f * e over the row axis; reduce_scatterv of as many
        bytes instead, if the features rest

Source: Plexus (SC'25), "3D parallel aggregation" and "blocked aggregation".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.autocast import full_precision
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.graphs.adjacency import Adjacency, Block
from commrt.layers.graphs.csr import CsrMatrix, Range
from commrt.layers.graphs.device_products import times_on_device
from commrt.layers.graphs.roles import Roles, roles_of
from commrt.layers.graphs.row_blocks import gathered_rows, nested_sizes, scattered_rows
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges
from commrt.layers.tensors import DistTensor

__all__ = ["multiply", "own_features", "spmm"]

Tensor: TypeAlias = torch.Tensor
HOST = "cpu"
"""The type of devices whose memory the native kernel reads."""
_CHUNK_NBYTES = 1 << 20
_MOST_CHUNKS = 8


def spmm(
    adjacency: Adjacency,
    x: DistTensor,
    layer_index: int = 0,
    *,
    chunks: int | None = None,
) -> DistTensor:
    """Return A x; differentiable in ``x``. Collective.

        h = spmm(adjacency, x)         # x: Placement("x", "y"), h: Placement("z", "y")

    Args:
        adjacency: the graph's matrix, of N nodes.
        x: (N, D), float32 or float64 as the matrix, as ``roles_of(grid, layer_index)``
            says: ``given``, or ``resting`` for features that the grid keeps once.
        layer_index: the layer in its network.
        chunks: the products of how many chunks of rows are summed apart; None: one for
            each 1 MiB of the result, at most 8.

    The result lies as ``roles.aggregated``, in the type of the matrix, also under
    torch's autocast, where ``x`` may have a narrower type. Raises UsageError for an
    ``x`` that lies elsewhere, before anything is sent.
    """
    roles = roles_of(adjacency.grid, layer_index)
    return _spmm(adjacency, adjacency.block(layer_index), x, roles, chunks)


def own_features(adjacency: Adjacency, x: DistTensor, layer_index: int) -> DistTensor:
    """Return x where ``spmm`` leaves its result; differentiable. Collective.

    Bytes: ``redistribute`` of N/r * D/f * e, and of N/i * D/f * e in the backward pass;
    where a double permutation gives both sides of a layer other orders, those of
    ``spmm``, as its own part is a product with a matrix of ones.
    """
    roles = roles_of(adjacency.grid, layer_index)
    move = adjacency.reordering(layer_index)
    if move is None:
        return x.redistribute(placement=roles.aggregated)
    return _spmm(adjacency, move, x, roles, None)


def _spmm(
    adjacency: Adjacency,
    block: Block,
    x: DistTensor,
    roles: Roles,
    chunks: int | None,
) -> DistTensor:
    """Return the product with the matrix that has this rank's block."""
    grid = adjacency.grid
    dtype = getattr(torch, block.forward.data.dtype.name)
    if isinstance(x, DistTensor):
        x = DistTensor(full_precision(x.local, dtype), x.shape, x.grid, x.placement)
    rests = _check(adjacency, block, x, roles)
    if chunks is not None and (type(chunks) is not int or chunks < 1):
        raise UsageError(f"spmm: chunks={shown(chunks)} must be a number from 1")
    how = _Product(grid, roles, block, adjacency.num_nodes, rests, chunks)
    local = _Spmm.apply(x.local, how)
    return DistTensor(local, x.shape, grid, roles.aggregated)


def multiply(a: CsrMatrix, x: Tensor, out: Tensor, rows: Range | None = None) -> None:
    """Write this rank's product of a sparse block and a dense one."""
    if x.device.type == HOST:
        a.times(x.detach().numpy(), out.numpy(), rows)
    else:
        times_on_device(a, x, out, rows)


@dataclass(frozen=True)
class _Product:
    """The parts that both directions of a product need."""

    grid: ProcessGrid
    roles: Roles
    block: Block
    num_nodes: int
    rests: bool
    chunks: int | None

    @property
    def pieces(self) -> tuple[int, ...]:
        """Rows of each rank along the row axis, of features that rest."""
        grid, inner, rows = self.grid, self.roles.inner, self.roles.rows
        return nested_sizes(
            self.num_nodes, grid.size(inner), grid.place([inner]), grid.size(rows)
        )


class _Spmm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Product) -> Tensor:
        ctx.how = how
        x = x.detach().contiguous()
        if how.rests:
            along = how.grid[how.roles.rows]
            x = gathered_rows(x, along, how.pieces)
        inner = how.grid[how.roles.inner]
        return _summed_products(how.block.forward, x, inner, how.chunks)

    @staticmethod
    @differentiable_once("a graph layer")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        how: _Product = ctx.how
        along, transpose = how.grid[how.roles.rows], how.block.backward
        gradient = gradient.contiguous()
        if not how.rests:
            return _summed_products(transpose, gradient, along, how.chunks), None
        product = gradient.new_empty((transpose.shape[0], gradient.shape[1]))
        multiply(transpose, gradient, product)
        return scattered_rows(product, along, how.pieces), None


def _summed_products(
    a: CsrMatrix, x: Tensor, comm: Communicator, chunks: int | None
) -> Tensor:
    """Return the sum over ranks of their products, chunk by chunk of rows.

    All ranks have as many rows and columns, so their chunks are the same.
    """
    out = x.new_empty((a.shape[0], x.shape[1]))
    if comm.size == 1 or out.numel() == 0:
        multiply(a, x, out)
        return out
    if chunks is None:
        nbytes = out.numel() * out.element_size()
        chunks = min(max(1, nbytes // _CHUNK_NBYTES), _MOST_CHUNKS)
    requests = []
    for low, high in even_ranges(a.shape[0], chunks):
        if low < high:
            multiply(a, x, out, (low, high))
            requests.append(comm.allreduce(out[low:high], nonblocking=True))
    for request in requests:
        request.wait()
    return out


def _check(adjacency: Adjacency, block: Block, x: DistTensor, roles: Roles) -> bool:
    """Return whether the features rest; UsageError where they do not fit."""
    if not isinstance(x, DistTensor) or x.dim() != 2:
        raise UsageError(
            f"spmm: x={shown(x)} must be a DistTensor with a row for each node, as "
            f"shard_graph returns"
        )
    grid, shape = adjacency.grid, x.shape
    dtype = getattr(torch, block.forward.data.dtype.name)
    if x.grid is not grid or shape[0] != adjacency.num_nodes or x.dtype != dtype:
        raise UsageError(
            f"spmm: x of shape {tuple(shape)} and {x.dtype} on {x.grid}; expected "
            f"{adjacency.num_nodes} rows and {dtype} on the graph's grid, {grid}"
        )
    if x.placement.is_same_as(roles.given, grid, shape):
        return False
    if not x.placement.is_same_as(roles.resting, grid, shape):
        raise UsageError(
            f"spmm: x lies as {x.placement}; expected {roles.given}, or "
            f"{roles.resting}: call redistribute(placement=...) first"
        )
    return True
