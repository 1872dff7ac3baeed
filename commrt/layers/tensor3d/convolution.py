# SPDX-License-Identifier: Apache-2.0
"""Convolutions over a grid, whose channels are cut, or groups of channels."""

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
from commrt.layers.tensor3d.parameter_cut import FeatureCut, ParameterCut
from commrt.layers.tensor3d.products import Product
from commrt.layers.tensor3d.roles import Along, GroupRoles, Roles

__all__ = [
    "TRANSPOSED",
    "ChannelConv",
    "ChannelConv1d",
    "ChannelConv2d",
    "ChannelConv3d",
]

Tensor: TypeAlias = torch.Tensor
SERIAL = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


class ChannelConv(GridModule):
    """torch's convolution over a grid with the axes data, x, y and z; transposed ones.

    Input channels are cut along ``y`` and output channels along ``x``; space is whole.
    It is the layer of ``Linear3d`` with k input and n output channels: the weight has
    kn times the kernel's elements, and the m samples count once for each place of the
    input's space, or of the output's. Bytes follow from these numbers by the formulas
    of ``Linear3d``.

    Groups of channels are cut along ``x`` and ``y`` together, and no sum is made. Input
    and output are whole then. For p ranks along both and n outputs: an ``allgatherv``
    of mn forward and one of mk backward, over p; and over z those of ``Linear3d``, of a
    weight of kn / (groups p). With fewer groups than ranks some ranks have none.

    Args:
        serial: torch's Conv1d, Conv2d or Conv3d, or ConvTranspose1d, ..., the same on
            all ranks.
        grid: the ranks.
        form: how the layer meets its neighbours; None: with whole input and output.

    Shapes: those of torch's layer, with this rank's channels where they are not whole.
    Local when it is made; collective where ``x`` and ``y`` cut groups. Raises
    UsageError for a form that does not fit.
    """

    def __init__(
        self, serial: Any, grid: ProcessGrid, form: Form | None = None
    ) -> None:
        form = form or Form()
        what = type(self).__name__
        is_grouped = serial.groups != 1
        super().__init__(
            GroupRoles(grid) if is_grouped else Roles(grid, form.transpose)
        )
        if is_grouped:
            _check_groups(what, serial.groups, form)
        if form.sequence_dim is not None:
            raise UsageError(f"{what}: sequence_dim must be None")
        check_features(what, serial.in_channels, serial.out_channels, form)
        self.in_channels, self.out_channels = serial.in_channels, serial.out_channels
        self.form = form
        is_transposed = isinstance(serial, TRANSPOSED)
        self.inputs = form.inputs or _even(self.in_channels, serial.groups)
        self.outputs = form.outputs or _even(self.out_channels, serial.groups)
        along_inputs, along_outputs = self._channel_axes()
        ends = (
            FeatureCut(self.outputs, along_outputs),
            FeatureCut(self.inputs, along_inputs),
        )
        dims = ends[::-1] if is_transposed else ends
        shape = (*serial.weight.shape,)
        cut = ParameterCut(
            grid, shape, dims[:1] if is_grouped else dims, self.roles.depth
        )
        self.take_parameter("weight", serial.weight, cut)
        self.take_parameter("bias", serial.bias, _bias_cut(grid, ends[0]))
        self._dims = len(serial.kernel_size)
        self._pad_mode, self._pad = _padding_before(serial)
        inner = (0,) * self._dims if self._pad else _symmetric(serial)
        own = Features((serial.groups,)).count(along_outputs.place, along_outputs.size)
        kernel = Convolution(
            *((*serial.stride,), inner, (*serial.dilation,)),
            groups=own if is_grouped else 1,
            more=(*serial.output_padding,) if is_transposed else None,
        )
        depth = DepthShards(self.cuts["weight"])
        self.product = Product(kernel, self.roles, depth, None, self.overlap)
        self.train(serial.training)

    def _channel_axes(self) -> tuple[Along, Along]:
        """Return the axes that cut input channels, and output channels."""
        if isinstance(self.roles, GroupRoles):
            return self.roles.groups, self.roles.groups
        return self.roles.inputs, self.roles.outputs

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
        along_inputs, along_outputs = self._channel_axes()
        if self.form.whole_input:
            x = cut_features(x, 1, self.inputs, along_inputs)
        if self._pad:
            x = self._padded(x)
        if roles.is_alone:
            kernel: Any = self.product.kernel
            y = functional_conv(x, self.weight, self.bias, kernel)
        else:
            y = self.product(x, self.weight, self.bias)
        if self.form.whole_output:
            y = whole_features(y, 1, self.outputs, along_outputs)
        return y.squeeze(0) if is_single else y

    def _padded(self, x: Tensor) -> Tensor:
        """Return the padded input; torch itself pads no tensor without channels."""
        if x.shape[1]:
            return functional.pad(x, self._pad, mode=self._pad_mode)
        return functional.pad(x, self._pad)

    def _check(self, x: Tensor) -> None:
        inputs, _ = self._channel_axes()
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
    dims, stride, padding = x.dim() - 2, kernel.stride, kernel.padding
    if kernel.more is None:
        conv = getattr(functional, f"conv{dims}d")
        return conv(x, weight, bias, stride, padding, kernel.dilation, kernel.groups)
    conv = getattr(functional, f"conv_transpose{dims}d")
    return conv(
        *(x, weight, bias, stride, padding),
        *(kernel.more, kernel.groups, kernel.dilation),
    )


def _even(channels: int, groups: int) -> Features:
    """Return channels that are cut into even pieces of whole groups."""
    return Features((channels,), channels // groups if groups > 1 else 1)


def _bias_cut(grid: ProcessGrid, outputs: FeatureCut) -> ParameterCut:
    return ParameterCut(grid, (outputs.features.size,), (outputs,), None)


def _check_groups(what: str, groups: int, form: Form) -> None:
    """Raise UsageError for a form that a convolution with groups cannot have."""
    is_whole = form.whole_input and form.whole_output
    if not is_whole or form.inputs is not None or form.outputs is not None:
        raise UsageError(
            f"{what}: groups={groups}: input and output must be whole, and groups are "
            f"cut into even pieces: use Form() without inputs and outputs"
        )


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
