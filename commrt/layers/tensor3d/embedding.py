# SPDX-License-Identifier: Apache-2.0
"""Tables of embeddings over a grid."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.activations import whole_features
from commrt.layers.tensor3d.depth import DepthShards
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import GridModule, equal_on_all_ranks
from commrt.layers.tensor3d.parameter_cut import weight_cut
from commrt.layers.tensor3d.products import weight_gradient
from commrt.layers.tensor3d.roles import Along, Roles

__all__ = ["Embedding3d", "why_not_embedding"]

Tensor: TypeAlias = torch.Tensor


class Embedding3d(GridModule):
    """torch's Embedding over a grid with the axes data, x, y and z.

    Rows are cut along ``x``, features along ``y``. So it may share its weight with a
    ``Linear3d`` from features to rows that is not transposed.

    Args:
        num_embeddings, embedding_dim: V and D of the whole table.
        padding_idx: a row that gets no gradient, or None.
        grid: the ranks.
        whole_output: True: the result has all features; False: this rank's.
        device, dtype: of the parameter.

    Shapes: any shape of integers; the result has a last dimension of D features, or of
    this rank's. ``weight`` has (V / (x z), D / y) elements.

    Pattern, for m indices of a rank:

    - forward: ``allgatherv`` of VD / (xy) elements over z; ``allreduce`` of mD / y over
      x; ``allgatherv`` of mD over y for a whole output;
    - backward: ``reduce_scatterv`` of VD / (xy) over z.

    The source is Shoeybi et al., "Megatron-LM" (2019), section 3, for the cut rows. On
    one rank the layer is torch's, bit for bit. Collective when it is made.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        grid: ProcessGrid,
        whole_output: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(Roles(grid))
        serial = nn.Embedding(
            num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype
        )
        equal_on_all_ranks(serial, grid)
        self._take(serial, whole_output)

    @classmethod
    def from_embedding(
        cls, serial: nn.Embedding, grid: ProcessGrid, *, whole_output: bool = True
    ) -> Embedding3d:
        """Return the layer with the table of a serial one; local.

        Raises UsageError for a table with ``max_norm``, ``scale_grad_by_freq`` or
        sparse gradients.
        """
        reason = why_not_embedding(serial)
        if reason is not None:
            raise UsageError(f"Embedding3d: {reason}")
        made: Embedding3d = cls.__new__(cls)
        GridModule.__init__(made, Roles(grid))
        made._take(serial, whole_output)
        made.train(serial.training)
        return made

    def _take(self, serial: nn.Embedding, whole_output: bool) -> None:
        self.num_embeddings = serial.num_embeddings
        self.embedding_dim = serial.embedding_dim
        self.padding_idx, self.whole_output = serial.padding_idx, whole_output
        self.rows = Features((self.num_embeddings,))
        self.columns = Features((self.embedding_dim,))
        shape = self.num_embeddings, self.embedding_dim
        cut = weight_cut(self.roles, shape, self.rows, self.columns)
        self.take_parameter("weight", serial.weight, cut)
        self.depth = DepthShards(cut)

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of the indices; collective.

        Raises UsageError for an index outside the table, before anything is sent.
        """
        if self.roles.is_alone:
            return functional.embedding(indices, self.weight, self.padding_idx)
        self._check(indices)
        y: Tensor = _Lookup.apply(indices, self.weight, self)
        if not self.whole_output:
            return y
        return whole_features(y, -1, self.columns, self.roles.inputs)

    def _check(self, indices: Tensor) -> None:
        if indices.device.type != "cpu" or indices.numel() == 0:
            return  # A look at a device's values would wait for the device.
        low, high = indices.aminmax()
        if low < 0 or high >= self.num_embeddings:
            raise UsageError(
                f"Embedding3d: the indices {int(low)} to {int(high)} must lie in 0 to "
                f"{self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        """Return the table's size and grid, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, grid={self.grid.shape}"


class _Lookup(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Tensor, layer: Embedding3d
    ) -> Tensor:
        rows: Along = layer.roles.outputs
        ctx.layer, ctx.weight = layer, weight
        ctx.save_for_backward(indices)
        block = layer.overlap.block(
            layer.depth, weight, weight.dtype, backward=False, is_read_again=False
        )
        low, high = layer.rows.pieces(rows.place, rows.size)[0]
        if rows.comm is None:
            return functional.embedding(indices, block)
        others = (indices < low) | (indices >= high)
        if high > low:
            near = (indices - low).clamp(0, high - low - 1)
            y = functional.embedding(near, block)
            y.masked_fill_(others.unsqueeze(-1), 0)
        else:
            y = block.new_zeros((*indices.shape, block.shape[1]))
        if y.numel():
            rows.comm.allreduce(y)
        return y

    @staticmethod
    @differentiable_once("a 3-d tensor-parallel layer")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        layer: Embedding3d = ctx.layer
        (indices,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None
        rows: Along = layer.roles.outputs
        low, high = layer.rows.pieces(rows.place, rows.size)[0]
        nowhere = high - low  # torch drops the gradients of one row
        skipped = (indices < low) | (indices >= high)
        if layer.padding_idx is not None:
            skipped |= indices == layer.padding_idx
        at = (indices - low).masked_fill(skipped, nowhere)
        block = torch.ops.aten.embedding_dense_backward(
            gradient.contiguous(), at, nowhere + 1, nowhere, False
        )[:nowhere]
        summed = layer.depth.reduce(block)
        return (
            None,
            weight_gradient(ctx.weight, summed, layer.depth, layer.overlap),
            None,
        )


def why_not_embedding(serial: nn.Embedding) -> str | None:
    """Return why a table cannot be cut; None: it can."""
    if serial.max_norm is not None:
        return "max_norm changes rows in each call, and ranks have parts of rows"
    if serial.scale_grad_by_freq:
        return "scale_grad_by_freq would have to count indices of all ranks"
    if serial.sparse:
        return "sparse gradients cannot be summed along the depth; use sparse=False"
    return None
