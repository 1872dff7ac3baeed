# SPDX-License-Identifier: Apache-2.0
"""The products of a layer on one rank: what it computes, and its two gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional

__all__ = ["Convolution", "Kernel", "Matmul"]

Tensor: TypeAlias = torch.Tensor


class Kernel(Protocol):
    """A product that is linear in its input and in its weight."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        """Add a bias to an output, in place."""

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""

    def of_weight(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight."""

    def of_bias(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""


class Matmul:
    """The product of torch's ``linear``; features are the last dimension."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        return functional.linear(x, weight, bias)

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        """Add a bias to an output, in place."""
        y += bias

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""
        return gradient.matmul(weight)

    def of_weight(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight."""
        return _rows(gradient).t().matmul(_rows(x))

    def of_bias(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""
        return _rows(gradient).sum(0)


def _rows(x: Tensor) -> Tensor:
    """Return a tensor of any dimensions as a matrix with a row for each sample."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


@dataclass(frozen=True)
class Convolution:
    """torch's convolution, transposed or not; features are dimension 1.

    Args:
        stride, padding, dilation: for each dimension of space.
        groups: this rank's groups of channels.
        more: for a transposed convolution, the elements that the output has more in
            each dimension of space; None: it is none.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    more: tuple[int, ...] | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        if 0 in weight.shape[:2]:
            return self._nothing(x, weight, bias)
        return torch.convolution(x, weight, bias, *self._arguments())

    def add_bias(self, y: Tensor, bias: Tensor) -> None:
        """Add a bias to an output, in place."""
        y += bias.view(-1, *[1] * len(self.stride))

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""
        if 0 in weight.shape[:2]:
            return torch.zeros_like(x)
        return self._gradients(gradient, x, weight, (True, False, False))[0]

    def of_weight(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight."""
        if 0 in weight.shape[:2]:
            return torch.zeros_like(weight)
        return self._gradients(gradient, x, weight, (False, True, False))[1]

    def of_bias(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""
        return gradient.sum((0, *range(2, gradient.dim())))

    def _gradients(self, *arguments: Any) -> tuple[Tensor, ...]:
        gradient, x, weight, wanted = arguments
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *self._arguments(), wanted
        )
        return found

    def _arguments(self) -> tuple[Any, ...]:
        more = [0] * len(self.stride) if self.more is None else list(self.more)
        return (
            *(list(self.stride), list(self.padding), list(self.dilation)),
            *(self.more is not None, more, max(self.groups, 1)),
        )

    def _nothing(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of a rank without input or output features.

        torch has no convolution without channels.
        """
        one = torch.empty((x.shape[0], 1, *x.shape[2:]), device="meta")
        kernel = torch.empty((1, 1, *weight.shape[2:]), device="meta")
        *arguments, _ = self._arguments()
        space = torch.convolution(one, kernel, None, *arguments, 1).shape[2:]
        outputs = weight.shape[0] if self.more is None else weight.shape[1]
        if not self.groups:
            outputs = 0
        y = x.new_zeros((x.shape[0], outputs, *space))
        if bias is not None:
            self.add_bias(y, bias)
        return y
