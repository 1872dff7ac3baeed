# SPDX-License-Identifier: Apache-2.0
"""Layers as products of matrices: rows of inputs, rows of gradients, one for a place.

A place is where a layer applies its weight: one for each sample of a linear layer, more
where samples are sequences or images, or where the model uses the layer again. With
gradients g and inputs a of all P places of N samples, a layer's block of the Fisher
matrix is about

    A x G,   A = sum(a aT) / N,   G = sum(g gT) / P

(Martens and Grosse 2015, arXiv 1503.05671, section 3; Grosse and Martens 2016, arXiv
1602.01407, section 3, for convolutions). ``a`` ends with a 1 where the layer has a
bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.layers.kfac.placement import Sides

__all__ = ["ConvolutionRows", "LayerRows", "LinearRows"]

Tensor: TypeAlias = torch.Tensor

_MOST_ELEMENTS = 1 << 24
"""Elements of the windows of a convolution that are laid out at a time."""


class LayerRows(ABC):
    """Rows of one layer."""

    def __init__(self, weight: Tensor, has_bias: bool) -> None:
        self.has_bias = has_bias
        """True if the bias is trained with the weight."""
        outputs, inputs = weight.shape[0], weight[0].numel()
        self.sides = Sides(inputs + has_bias, outputs)
        self.dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        """Of factors: float32 for narrower weights."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield rows (places, features) of inputs, some at a time."""

    @abstractmethod
    def gradients(self, gradient: Tensor) -> Tensor:
        """Return rows (places, features) of gradients of the output."""

    def _with_ones(self, rows: Tensor) -> Tensor:
        return functional.pad(rows, (0, 1), value=1.0) if self.has_bias else rows

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return gradients as a matrix (outputs, inputs); a missing bias is zeros."""
        rows = weight.reshape(weight.shape[0], -1).to(self.dtype)
        if not self.has_bias:
            return rows
        column = rows.new_zeros(len(rows)) if bias is None else bias.to(self.dtype)
        return torch.cat([rows, column[:, None]], 1)

    def parts(self, matrix: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a matrix has for the weight, in its shape, and for the bias."""
        if not self.has_bias:
            return matrix.reshape(weight.shape), None
        return matrix[:, :-1].reshape(weight.shape), matrix[:, -1]


class LinearRows(LayerRows):
    """Rows of ``nn.Linear``, whose input is (..., features)."""

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield all rows at once."""
        yield self._with_ones(x.reshape(-1, x.shape[-1]).to(self.dtype))

    def gradients(self, gradient: Tensor) -> Tensor:
        """Return all rows."""
        return gradient.reshape(-1, gradient.shape[-1]).to(self.dtype)


class ConvolutionRows(LayerRows):
    """Rows of ``nn.Conv2d`` in one group: a row of input is a window of all channels.

    Args:
        layer: any kernel, stride, dilation, padding and mode of padding.
        has_bias: True if its bias is trained with the weight.
    """

    def __init__(self, layer: nn.Conv2d, has_bias: bool) -> None:
        super().__init__(layer.weight, has_bias)
        self._kernel = layer.kernel_size
        self._stride, self._dilation = layer.stride, layer.dilation
        pairs = [(0, 0), (0, 0)]
        if layer.padding == "same":
            for dim in range(2):
                total = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
                pairs[dim] = total // 2, total - total // 2
        elif not isinstance(layer.padding, str):
            pairs = [(int(each), int(each)) for each in layer.padding]
        self._padding = [*pairs[1], *pairs[0]]  # the last dimension first
        zeros = layer.padding_mode == "zeros"
        self._mode = "constant" if zeros else layer.padding_mode

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the rows of some samples at a time."""
        x = x if x.dim() == 4 else x[None]
        begin, step = 0, 1
        while begin < len(x):
            windows = self._windows(x[begin : begin + step])
            yield self._with_ones(windows.transpose(1, 2).reshape(-1, windows.shape[1]))
            begin += step
            step = max(1, step * _MOST_ELEMENTS // max(1, windows.numel()))

    def _windows(self, x: Tensor) -> Tensor:
        """Return (samples, features, places)."""
        x = x.to(self.dtype)
        if any(self._padding):
            x = functional.pad(x, self._padding, mode=self._mode)
        found: Tensor = functional.unfold(
            x, self._kernel, dilation=self._dilation, stride=self._stride
        )
        return found

    def gradients(self, gradient: Tensor) -> Tensor:
        """Return all rows, in the order of the windows."""
        gradient = gradient if gradient.dim() == 4 else gradient[None]
        channels_last = gradient.permute(0, 2, 3, 1)
        return channels_last.reshape(-1, gradient.shape[1]).to(self.dtype)
