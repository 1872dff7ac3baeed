# SPDX-License-Identifier: Apache-2.0
"""A layer's product over a grid, and its gradients.

This is the matrix product of Agarwal et al., "A three-dimensional approach to parallel
matrix multiplication" (1995), as in Singh and Bhatele, "A 4D hybrid algorithm to scale
parallel training to thousands of GPUs" (SC'24), algorithm 1. Let k input features be
cut over c ranks and n output features over r ranks, m rows be those of this rank's
samples, and d the depth.

- forward: ``allgatherv`` of the weight's block over the depth, kn/(rc) elements. The
  local product gives m x n/r summands, and an ``allreduce`` over the c ranks sums them.
- backward: the block is gathered again. An ``allreduce`` over the r ranks sums the
  gradient of the input, m x k/c elements. A ``reduce_scatterv`` over the depth sums the
  gradient of the weight, kn/(rc) elements. An ``allreduce`` over the depth sums that of
  the bias, n/r elements.

Where a dimension of the input is a sequence that is cut over the r ranks, an
``allgather`` of it comes first, and a ``reduce_scatter`` over the c ranks takes the
place of the first ``allreduce``. The backward pass gathers the gradient and the input,
and has a ``reduce_scatter`` in place of the ``allreduce`` (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", section 4.2.2).

A collective among one rank is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.autocast import low_precision
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.tensor3d.activations import Gathering, Scattering
from commrt.layers.tensor3d.depth import DepthShards, Reduced
from commrt.layers.tensor3d.kernels import Kernel
from commrt.layers.tensor3d.overlap import Overlap, is_accumulated
from commrt.layers.tensor3d.roles import Roles

__all__ = ["Product", "weight_gradient"]

Tensor: TypeAlias = torch.Tensor


@dataclass
class Product:
    """What stays the same from call to call of a layer.

    Args:
        kernel: the product on one rank.
        roles: the axes.
        depth: the weight along the depth.
        sequence_dim: the dimension that is cut besides features; None: none is.
        overlap: which collectives run meanwhile; a model's layers share it.
    """

    kernel: Kernel
    roles: Roles
    depth: DepthShards
    sequence_dim: int | None
    overlap: Overlap

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's output features of its samples; differentiable.

        Args:
            x: this rank's input features.
            weight: this rank's shard.
            bias: this rank's output features, or None.
        """
        result: Tensor = _Product.apply(x, weight, bias, self)
        return result

    @property
    def sums(self) -> Communicator | None:
        """The ranks whose summands make an output."""
        return self.roles.inputs.comm

    @property
    def gradient_sums(self) -> Communicator | None:
        """The ranks whose summands make the gradient of an input."""
        return self.roles.outputs.comm


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        p, dtype = product, low_precision(x, weight.dtype)
        x = x.to(dtype)
        ctx.product, ctx.dtype = p, dtype
        # As they are: what a checkpoint saves of them has no .grad that anyone sees.
        ctx.parameters = weight, bias
        ctx.save_for_backward(x, weight)
        sequence = _started_gathering(x, p.gradient_sums, p)
        block = p.overlap.block(p.depth, weight, dtype, backward=False)
        x = x if sequence is None else sequence.wait()
        offset = None if bias is None else bias.to(dtype)
        if p.sums is None:
            return p.kernel.forward(x, block, offset)
        y = p.kernel.forward(x, block, None).contiguous()
        if p.sequence_dim is None:
            p.sums.allreduce(y)
        else:
            y = Scattering(y, p.sequence_dim, p.sums).wait()
        if offset is not None:
            p.kernel.add_bias(y, offset)
        return y

    @staticmethod
    @differentiable_once("a 3-d tensor-parallel layer")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        p: Product = ctx.product
        x, _ = ctx.saved_tensors  # torch sees here whether the weight has changed
        weight, bias = ctx.parameters
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        whole_gradient = _started_gathering(gradient, p.sums, p)
        whole_x = _started_gathering(x, p.gradient_sums, p) if for_weight else None
        if whole_gradient is not None:
            gradient = whole_gradient.wait()
        of_x: Any = None
        of_weight: Any = None
        of_bias: Any = None
        block = p.overlap.block(p.depth, weight, ctx.dtype, backward=True)
        if for_x:
            of_x = _InputGradient(gradient, x, block, p)
            if not p.overlap.all_reduce:
                of_x.wait()
        if for_weight:
            x = x if whole_x is None else whole_x.wait()
            summed = p.depth.reduce(p.kernel.of_weight(gradient, x, block))
            of_weight = weight_gradient(weight, summed, p.depth, p.overlap)
        if for_bias:
            summed = p.depth.add_up(p.kernel.of_bias(gradient))
            of_bias = weight_gradient(bias, summed, p.depth, p.overlap)
        return None if of_x is None else of_x.wait(), of_weight, of_bias, None


class _InputGradient:
    """The gradient of an input on its way; ``wait()`` returns it."""

    def __init__(self, gradient: Tensor, x: Tensor, block: Tensor, p: Product) -> None:
        comm = p.gradient_sums
        self._scattering: Scattering | None = None
        self._request: Any = None
        if comm is None or p.sequence_dim is None:
            self._of_x = p.kernel.of_input(gradient, x, block)
            if comm is not None:
                self._of_x = self._of_x.contiguous()
                self._request = comm.allreduce(self._of_x, nonblocking=True)
        else:
            of_whole = p.kernel.of_input(gradient, x, block)
            self._scattering = Scattering(of_whole, p.sequence_dim, comm)

    def wait(self) -> Tensor:
        if self._scattering is not None:
            return self._scattering.wait()
        if self._request is not None:
            self._request.wait()
        return self._of_x


def _started_gathering(
    x: Tensor, comm: Communicator | None, product: Product
) -> Gathering | None:
    """Return the sequence's pieces on their way, where a layer has a cut sequence."""
    if comm is None or product.sequence_dim is None:
        return None
    return Gathering(x, product.sequence_dim, comm)


def weight_gradient(
    parameter: Tensor, summed: Reduced, depth: DepthShards, overlap: Overlap
) -> Tensor | None:
    """Return a parameter's gradient to autograd, or None where it comes later."""
    can_wait = overlap.reduce_scatter and depth.comm is not None and parameter.is_leaf
    if can_wait and is_accumulated(parameter):
        overlap.gradients.add(parameter, summed.wait)
        return None
    return summed.wait()
