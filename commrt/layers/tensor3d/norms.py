# SPDX-License-Identifier: Apache-2.0
"""Normalizations over features that an axis of the grid cuts."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import GridModule
from commrt.layers.tensor3d.parameter_cut import FeatureCut, ParameterCut
from commrt.layers.tensor3d.roles import Along, Roles
from commrt.layers.tensors.feature_norms import normalized
from commrt.layers.tensors.moves import summed_backward

__all__ = ["FeatureNorm"]

Tensor: TypeAlias = torch.Tensor


class FeatureNorm(GridModule):
    """torch's LayerNorm or RMSNorm of features that ranks along an axis have cut.

        up = Linear3d(512, 2048, grid=grid, whole_output=False)  # cut along x
        norm = FeatureNorm(nn.LayerNorm(2048), grid, "x")
        down = Linear3d(2048, 512, grid=grid, transpose=True, whole_input=False)
        y = down(norm(up(x)))

    Args:
        serial: torch's LayerNorm or RMSNorm over one dimension, the same on all ranks.
        grid: the ranks.
        axis: ``"x"`` behind a layer and before a transposed one; ``"y"`` behind a
            transposed layer.
        features: how features are cut; None: into even pieces.

    Shapes: input and output (..., k / c) for c ranks along the axis. Local when it is
    made. The pattern over the axis is that of ``commrt.layers.tensors.feature_norms``;
    over z there is an ``allreduce`` of the gradient of each parameter, k / c elements.
    Raises UsageError for another module, axis or number of features.
    """

    def __init__(
        self,
        serial: Any,
        grid: ProcessGrid,
        axis: str = "x",
        features: Features | None = None,
    ) -> None:
        if type(serial) not in (nn.LayerNorm, nn.RMSNorm):
            raise UsageError(
                f"FeatureNorm: {shown(serial)} must be torch's LayerNorm or RMSNorm"
            )
        if len(serial.normalized_shape) != 1 or axis not in ("x", "y"):
            raise UsageError(
                f"FeatureNorm: normalized_shape={serial.normalized_shape} and axis="
                f"{shown(axis)}: expected one dimension of features, and 'x' or 'y'"
            )
        super().__init__(Roles(grid))
        (self.num_features,) = serial.normalized_shape
        self.features = features or Features((self.num_features,))
        if self.features.size != self.num_features:
            raise UsageError(
                f"FeatureNorm: features={self.features} has {self.features.size} "
                f"features; the layer has {self.num_features}"
            )
        self.along = Along(grid, axis)
        self.is_centered = isinstance(serial, nn.LayerNorm)
        self.eps: float | None = serial.eps
        dims = (FeatureCut(self.features, self.along),)
        cut = ParameterCut(grid, (self.num_features,), dims, None)
        self.take_parameter("weight", serial.weight, cut)
        self.take_parameter("bias", getattr(serial, "bias", None), cut)
        self.train(serial.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features, normalized by all; collective along the axis.

        Raises UsageError for other features, before anything is sent.
        """
        own = self.features.count(self.along.place, self.along.size)
        if x.dim() == 0 or x.shape[-1] != own:
            raise UsageError(
                f"FeatureNorm: input of shape {tuple(x.shape)} must have {own} "
                f"features in its last dimension, this rank's of {self.num_features} "
                f"along {self.along.name!r} on the grid {self.grid.shape}"
            )
        weight, bias = (
            None if each is None else summed_backward(each, self.grid, ("z",))
            for each in (self.weight, self.bias)
        )
        if self.along.comm is None and self.is_centered:
            return functional.layer_norm(x, (own,), weight, bias, self.eps)
        if self.along.comm is None:
            return functional.rms_norm(x, (own,), weight, self.eps)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = normalized(
            *(x, 1, self.along.comm, self.num_features, eps),
            is_centered=self.is_centered,
        )
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Return the layer's size and axis, for ``print(model)``."""
        return f"{self.num_features}, eps={self.eps}, along {self.along.name!r}"
