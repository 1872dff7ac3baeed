# SPDX-License-Identifier: Apache-2.0
"""Convolutions over a grid, whose channels are cut."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.activations import cut_features, whole_features
from commrt.layers.tensor3d.depth import DepthShards
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import GridModule, equal_on_all_ranks
from commrt.layers.tensor3d.kernels import Convolution
from commrt.layers.tensor3d.linear import Form, check_features
from commrt.layers.tensor3d.overlap import Overlap
from commrt.layers.tensor3d.parameter_cut import bias_cut, weight_cut
from commrt.layers.tensor3d.products import Product
from commrt.layers.tensor3d.roles import Roles

__all__ = ["ChannelConv", "ChannelConv1d", "ChannelConv2d", "ChannelConv3d"]

Tensor: TypeAlias = torch.Tensor
SERIAL = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class ChannelConv(GridModule):
    """torch's convolution over a grid with the axes data, x, y and z.

    Input channels are cut along ``y`` and output channels along ``x``; space is whole.
    It is the layer of ``Linear3d`` with k input and n output channels: the weight has
    kn times the kernel's elements, and the m samples count once for each place of the
    input's space, or of the output's. Bytes follow from these numbers by the formulas
    of ``Linear3d``.

    Args:
        serial: torch's Conv1d, Conv2d or Conv3d, the same on all ranks; one group.
        grid: the ranks.
        form: how the layer meets its neighbours; None: with whole input and output.

    Shapes: those of torch's layer, with this rank's channels where they are not whole.
    Local when it is made. Raises UsageError for a convolution with groups.
    """

    def __init__(
        self, serial: Any, grid: ProcessGrid, form: Form | None = None
    ) -> None:
        form = form or Form()
        what = type(self).__name__
        super().__init__(Roles(grid, form.transpose))
        if serial.groups != 1:
            raise UsageError(
                f"{what}: groups={serial.groups} must be 1: channels of different "
                f"groups are never summed; leave the layer whole"
            )
        if form.sequence_dim is not None:
            raise UsageError(f"{what}: sequence_dim must be None")
        check_features(what, serial.in_channels, serial.out_channels, form)
        self.in_channels, self.out_channels = serial.in_channels, serial.out_channels
        self.form = form
        self.inputs = form.inputs or Features((self.in_channels,))
        self.outputs = form.outputs or Features((self.out_channels,))
        cut = weight_cut(self.roles, (*serial.weight.shape,), self.outputs, self.inputs)
        self.take_parameter("weight", serial.weight, cut)
        self.take_parameter("bias", serial.bias, bias_cut(self.roles, self.outputs))
        self._dims = len(serial.kernel_size)
        self._pad_mode, self._pad = _padding_before(serial)
        inner = (0,) * self._dims if self._pad else _symmetric(serial)
        self.product = Product(
            Convolution((*serial.stride,), inner, (*serial.dilation,)),
            *(self.roles, DepthShards(self.cuts["weight"]), None, self.overlap),
        )
        self.train(serial.training)

    def set_overlap(self, overlap: Overlap) -> None:
        """Take the switches of a model, which its layers share."""
        super().set_overlap(overlap)
        self.product.overlap = overlap

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output; collective where the grid has several ranks.

        Raises UsageError for other channels, or another type than the weight's, before
        anything is sent.
        """
        self._check(x)
        is_single = x.dim() == self._dims + 1
        if is_single:
            x = x.unsqueeze(0)
        roles = self.roles
        if self.form.whole_input:
            x = cut_features(x, 1, self.inputs, roles.inputs)
        if self._pad:
            x = self._padded(x)
        if roles.is_alone:
            kernel: Any = self.product.kernel
            y = functional_conv(x, self.weight, self.bias, kernel)
        else:
            y = self.product(x, self.weight, self.bias)
        if self.form.whole_output:
            y = whole_features(y, 1, self.outputs, roles.outputs)
        return y.squeeze(0) if is_single else y

    def _padded(self, x: Tensor) -> Tensor:
        """Return the padded input; torch itself pads no tensor without channels."""
        if x.shape[1]:
            return functional.pad(x, self._pad, mode=self._pad_mode)
        return functional.pad(x, self._pad)

    def _check(self, x: Tensor) -> None:
        inputs = self.roles.inputs
        own = self.inputs.count(inputs.place, inputs.size)
        expected = self.in_channels if self.form.whole_input else own
        dims = self._dims
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != expected:
            raise UsageError(
                f"{type(self).__name__}: input of shape {tuple(x.shape)} must have "
                f"{expected} channels and {dims} dimensions of space, with a batch or "
                f"without one, on the grid {self.grid.shape}"
            )
        kind = x.device.type
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(kind):
            raise UsageError(
                f"{type(self).__name__}: input of type {x.dtype} meets a weight of "
                f"type {self.weight.dtype}; convert one of them, or use torch.autocast"
            )

    def extra_repr(self) -> str:
        """Return the layer's sizes and grid, for ``print(model)``."""
        turned = ", transpose=True" if self.roles.transpose else ""
        return (
            f"{self.in_channels}, {self.out_channels}, "
            f"kernel_size={self.cuts['weight'].shape[2:]}{turned}, "
            f"grid={self.grid.shape}"
        )


class _ConvOfDims(ChannelConv):
    """A convolution in some number of dimensions, made from torch's arguments."""

    dims = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        *args: Any,
        grid: ProcessGrid,
        form: Form | None = None,
        **more: Any,
    ) -> None:
        serial = SERIAL[self.dims](
            in_channels, out_channels, kernel_size, *args, **more
        )
        equal_on_all_ranks(serial, grid)
        super().__init__(serial, grid, form)


class ChannelConv1d(_ConvOfDims):
    """torch's Conv1d over a grid; see ``ChannelConv``. Collective when it is made."""

    dims = 1


class ChannelConv2d(_ConvOfDims):
    """torch's Conv2d over a grid; see ``ChannelConv``. Collective when it is made."""

    dims = 2


class ChannelConv3d(_ConvOfDims):
    """torch's Conv3d over a grid; see ``ChannelConv``. Collective when it is made."""

    dims = 3


def functional_conv(x: Tensor, weight: Tensor, bias: Any, kernel: Convolution) -> Any:
    """Return torch's convolution, with autograd of torch."""
    conv = (functional.conv1d, functional.conv2d, functional.conv3d)[x.dim() - 3]
    return conv(x, weight, bias, kernel.stride, kernel.padding, kernel.dilation)


def _symmetric(serial: Any) -> tuple[int, ...]:
    """Return the zeros on each side of each dimension of space."""
    if serial.padding == "valid":
        return (0,) * len(serial.kernel_size)
    if serial.padding == "same":
        pairs = zip(serial.kernel_size, serial.dilation, strict=True)
        return tuple(dilation * (size - 1) // 2 for size, dilation in pairs)
    return tuple(serial.padding)


def _padding_before(serial: Any) -> tuple[str, list[int]]:
    """Return the mode and sizes of padding that comes before the convolution.

    Sizes are in torch's order, the last dimension first. There are none where the
    convolution pads by itself: with as many zeros on both sides.
    """
    mode = "constant" if serial.padding_mode == "zeros" else serial.padding_mode
    sizes: list[int] = []
    is_even = True
    for size, dilation, zeros in zip(
        serial.kernel_size, serial.dilation, _symmetric(serial), strict=True
    ):
        total = dilation * (size - 1) if serial.padding == "same" else 2 * zeros
        is_even = is_even and total == 2 * zeros
        sizes = [zeros, total - zeros, *sizes]
    if mode == "constant" and is_even:
        return mode, []
    return mode, sizes
