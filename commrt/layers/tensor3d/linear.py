# SPDX-License-Identifier: Apache-2.0
"""Linear layers over a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.activations import cut_features, whole_features
from commrt.layers.tensor3d.depth import DepthShards
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import GridModule, equal_on_all_ranks
from commrt.layers.tensor3d.kernels import Matmul
from commrt.layers.tensor3d.overlap import Overlap
from commrt.layers.tensor3d.parameter_cut import ParameterCut, bias_cut, weight_cut
from commrt.layers.tensor3d.products import Product
from commrt.layers.tensor3d.roles import Roles

__all__ = ["Form", "Linear3d", "check_features"]

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Form:
    """How a layer meets its neighbours.

    Args:
        transpose: True: input features are cut along ``x`` and output features along
            ``y``; False: the other way round.
        whole_input: True: ranks along the axes ``x`` and ``y`` have the whole input,
            and the layer takes its features; False: it gets its features.
        whole_output: True: the layer returns all features; False: this rank's.
        inputs, outputs: how features are cut; None: into even pieces.
        sequence_dim: the dimension of the input that is cut along the axis of the
            output features, and of the output along that of the input features. None:
            no dimension is.
    """

    transpose: bool = False
    whole_input: bool = True
    whole_output: bool = True
    inputs: Features | None = None
    outputs: Features | None = None
    sequence_dim: int | None = None


class Linear3d(GridModule):
    """torch's Linear over a grid with the axes data, x, y and z.

        grid = ProcessGrid(comm, {"data": 2, "z": 1, "y": 2, "x": 2})
        up = Linear3d(512, 2048, grid=grid, whole_output=False)
        down = Linear3d(2048, 512, grid=grid, transpose=True, whole_input=False)
        y = down(gelu(up(x)))  # x and y are whole along x and y

    Ranks along ``data`` and ``z`` have samples of their own, those along ``x`` and
    ``y`` the same ones. An input needs a gradient on all ranks, or on none. Call
    ``sync_gradients(model)`` after ``backward()``.

    Args:
        in_features, out_features: of the whole layer; any number, uneven ones, too.
        bias: whether it adds one.
        grid: the ranks.
        transpose, whole_input, whole_output, inputs, outputs, sequence_dim: see
            ``Form``. torch's Linear is the one with whole input and output.
        device, dtype: of the parameters.

    Shapes: input (..., k), or (..., k / c) where it is not whole; output (..., n), or
    (..., n / r). Here c ranks lie along the axis of the input features and r along
    that of the output features. Any number of samples, which may differ along
    ``data`` and ``z``. Parameters: ``weight`` of (n / (r d), k / c) for a depth of d,
    and ``bias`` of n / r.

    Pattern, for m samples of a rank; the logical bytes of each call are those of the
    elements times the element's size e, and 2 (p - 1) / p or (p - 1) / p of it goes
    over the wire:

    - forward: ``allgatherv`` of kn / (rc) over z; ``allreduce`` of mn / r over c;
    - backward: ``allgatherv`` of kn / (rc) over z; ``allreduce`` of mk / c over r;
      ``reduce_scatterv`` of kn / (rc) and ``allreduce`` of n / r over z;
    - whole output: ``allgatherv`` of mn over r, forward;
    - whole input: ``allgatherv`` of mk over c, backward.

    ``commrt.layers.tensor3d.products`` has the source, and the pattern with a cut
    sequence. On one rank the layer is torch's, bit for bit.

    Collective when it is made: all ranks take the parameters that the first one has
    drawn, as torch's Linear draws them. Raises UsageError for a grid or features that
    do not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        grid: ProcessGrid,
        transpose: bool = False,
        whole_input: bool = True,
        whole_output: bool = True,
        inputs: Features | None = None,
        outputs: Features | None = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        form = Form(
            *(transpose, whole_input, whole_output, inputs, outputs, sequence_dim)
        )
        roles = Roles(grid, transpose)
        check_features("Linear3d", in_features, out_features, form)
        super().__init__(roles)
        serial = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        equal_on_all_ranks(serial, grid)
        self._take(serial, form)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, grid: ProcessGrid, form: Form | None = None
    ) -> Linear3d:
        """Return the layer with the parameters of a serial one; local.

        Args:
            linear: the same on all ranks.
            grid: the ranks.
            form: how it meets its neighbours; None: with whole input and output.
        """
        form = form or Form()
        check_features("Linear3d", linear.in_features, linear.out_features, form)
        made: Linear3d = cls.__new__(cls)
        GridModule.__init__(made, Roles(grid, form.transpose))
        made._take(linear, form)
        made.train(linear.training)
        return made

    def _take(self, serial: nn.Linear, form: Form) -> None:
        self.in_features, self.out_features = serial.in_features, serial.out_features
        self.form = form
        self.inputs = form.inputs or Features((self.in_features,))
        self.outputs = form.outputs or Features((self.out_features,))
        shape = self.out_features, self.in_features
        cut = weight_cut(self.roles, shape, self.outputs, self.inputs)
        self.take_parameter("weight", serial.weight, cut)
        self.take_parameter("bias", serial.bias, bias_cut(self.roles, self.outputs))
        self._prepare()

    def _prepare(self) -> None:
        """Keep what calls need, for the present roles."""
        roles, form = self.roles, self.form
        depth = DepthShards(self.cuts["weight"])
        self.product = Product(Matmul(), roles, depth, form.sequence_dim, self.overlap)
        own = self.inputs.count(roles.inputs.place, roles.inputs.size)
        self._expected = self.in_features if form.whole_input else own
        self._cut_input = form.whole_input and roles.inputs.size > 1
        self._join_output = form.whole_output and roles.outputs.size > 1
        self._is_alone = roles.is_alone

    def set_overlap(self, overlap: Overlap) -> None:
        """Take the switches of a model, which its layers share."""
        super().set_overlap(overlap)
        self.product.overlap = overlap

    def take_cut(self, name: str, cut: ParameterCut) -> bool:
        """Turn the layer where it shares its weight with one that lies so."""
        if not (self.form.whole_input and self.form.whole_output):
            return False
        turned = self.roles.turned()
        turned_cut = weight_cut(
            turned, self.cuts["weight"].shape, self.outputs, self.inputs
        )
        if name != "weight" or not cut.is_as(turned_cut):
            return False
        bias = None
        if self.bias is not None:
            bias = self.cuts["bias"].whole(self.bias)
        self.roles, self.cuts["weight"] = turned, turned_cut
        if bias is not None:
            bias.requires_grad_(self.bias.requires_grad)
            del self.bias
            self.take_parameter("bias", bias, bias_cut(turned, self.outputs))
        self._prepare()
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output; collective where the grid has several ranks.

        Raises UsageError for other features, or another type than the weight's, before
        anything is sent.
        """
        if self._is_alone:
            return functional.linear(x, self.weight, self.bias)
        self._check(x)
        if self._cut_input:
            x = cut_features(x, -1, self.inputs, self.roles.inputs)
        y = self.product(x, self.weight, self.bias)
        if self._join_output:
            y = whole_features(y, -1, self.outputs, self.roles.outputs)
        return y

    def _check(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self._expected:
            kind = "the whole input's" if self.form.whole_input else "this rank's"
            raise UsageError(
                f"Linear3d: input of shape {tuple(x.shape)} must have "
                f"{self._expected} features in its last dimension, {kind} of "
                f"{self.in_features} on the grid {self.grid.shape}"
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(
            x.device.type
        ):
            raise UsageError(
                f"Linear3d: input of type {x.dtype} meets a weight of type "
                f"{self.weight.dtype}; convert one of them, or use torch.autocast"
            )
        if self.form.sequence_dim is not None:
            self._check_sequence(x, self.form.sequence_dim)

    def _check_sequence(self, x: Tensor, dim: int) -> None:
        if not -x.dim() <= dim < x.dim() - 1 or dim == -1:
            raise UsageError(
                f"Linear3d: sequence_dim={dim} is no dimension of an input of shape "
                f"{tuple(x.shape)} before its features"
            )
        whole = x.shape[dim] * self.roles.outputs.size
        if whole % self.roles.inputs.size:
            raise UsageError(
                f"Linear3d: a sequence of {whole} elements, in dimension {dim} of the "
                f"input, cannot be cut over {self.roles.inputs.size} ranks along "
                f"{self.roles.inputs.name!r}; pad it to a multiple"
            )

    def extra_repr(self) -> str:
        """Return the layer's sizes and grid, for ``print(model)``."""
        turned = ", transpose=True" if self.roles.transpose else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{turned}, grid={self.grid.shape}"
        )


def check_features(what: str, inputs: int, outputs: int, form: Form) -> None:
    """Raise UsageError unless features and their cuts fit each other."""
    for name, size, cut in (
        ("in", inputs, form.inputs),
        ("out", outputs, form.outputs),
    ):
        if type(size) is not int or size < 0:
            raise UsageError(
                f"{what}: {name}_features={shown(size)} must be an integer, 0 or more"
            )
        if cut is not None and not isinstance(cut, Features):
            raise UsageError(f"{what}: {name}puts={shown(cut)} must be Features")
        if cut is not None and cut.size != size:
            raise UsageError(
                f"{what}: {name}puts={cut} has {cut.size} features; the layer has "
                f"{size}"
            )
