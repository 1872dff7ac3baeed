# SPDX-License-Identifier: Apache-2.0
"""Experts that are two-layer perceptrons, whose weights are stacked.

Along ``expert`` ranks have whole experts, along ``tensor`` parts of each one's hidden
features: the first product is cut by columns, the second one by rows (Shoeybi et al.,
"Megatron-LM", section 3). So what the ranks along ``tensor`` return are summands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.experts.roles import ExpertRoles
from commrt.layers.experts.stacked import stacked_mlp
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import GridModule
from commrt.layers.tensor3d.parameter_cut import FeatureCut, ParameterCut
from commrt.layers.tensor3d.roles import Along

__all__ = ["ACTIVATIONS", "MlpExperts"]

Tensor: TypeAlias = torch.Tensor

ACTIVATIONS = ("swiglu", "gelu", "relu")
"""The activation between an expert's two products."""


class MlpExperts(GridModule):
    """Stacked perceptrons without biases; local.

    For one expert and its tokens x, ``"swiglu"`` is (silu(x G^T) * (x U^T)) D (Shazeer,
    "GLU variants improve Transformer"), ``"gelu"`` is gelu(x U^T) D.

    Args:
        num_experts: of all ranks.
        d_model, d_hidden: features of a token, and hidden ones; ranks along ``tensor``
            have pieces of these as even as can be.
        roles: the axes.
        along: the axis that cuts the experts; along others ranks have the same ones.
        activation: one of ``ACTIVATIONS``.
        seed: draws the weights, each expert's by itself, so that they are the same on
            every grid.
        device, dtype: of the weights.

    Parameters: ``gate`` (with ``"swiglu"``), ``up`` and ``down``, each of
    (experts, d_hidden, d_model) and cut by experts and hidden features.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        roles: ExpertRoles,
        along: Along,
        activation: str = "swiglu",
        seed: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise UsageError(
                f"MoE: activation={shown(activation)} must be one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        super().__init__(roles)
        self.num_experts, self.activation = num_experts, activation
        shape = num_experts, d_hidden, d_model
        samples = ("data", "expert")
        cut = ParameterCut(
            grid=roles.grid,
            shape=shape,
            dims=(
                FeatureCut(Features((num_experts,)), along),
                FeatureCut(Features((d_hidden,)), roles.tensor),
            ),
            depth=None,
            sums=tuple(axis for axis in samples if axis not in along.axes),
        )
        names = ["gate", "up", "down"] if activation == "swiglu" else ["up", "down"]
        own = range(num_experts)[_slice_of(num_experts, along)]
        hidden = _slice_of(d_hidden, roles.tensor)
        self.cuts = {}
        for number, name in enumerate(names):
            shard = torch.empty(cut.shard_shape, dtype=dtype)
            bound = 1.0 / math.sqrt(max(d_hidden if name == "down" else d_model, 1))
            for place, expert in enumerate(own):
                draws = torch.Generator().manual_seed(seed + expert * 4 + number)
                whole = torch.empty(shape[1:], dtype=dtype)
                nn.init.uniform_(whole, -bound, bound, generator=draws)
                shard[place] = whole[hidden]
            self.register_parameter(name, nn.Parameter(shard.to(device)))
            self.cuts[name] = cut
        self.mark()

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs, or this rank's summands of them.

        Args:
            x: (n, d_model), the tokens of the first expert of this rank, then of the
                second one, and so on.
            counts: the tokens of each expert of this rank.
        """
        if not counts:
            return x
        whole = [getattr(self, name) for name in self.cuts]
        kinds = {each.dtype for each in (x, *whole)}
        if len(kinds) == 1 and not torch.is_autocast_enabled(x.device.type):
            return stacked_mlp(x, counts, self.activation, whole)
        # unbind, not an index for each expert, whose gradients have the whole's size.
        weights = zip(*(each.unbind() for each in whole), strict=True)
        pieces = zip(x.split([*counts]), weights, strict=True)
        return torch.cat([self._one(tokens, *own) for tokens, own in pieces])

    def _one(self, x: Tensor, *weights: Tensor) -> Tensor:
        *gate, up, down = weights
        hidden = functional.linear(x, up)
        if gate:
            hidden = functional.silu(functional.linear(x, *gate)) * hidden
        else:
            hidden = getattr(functional, self.activation)(hidden)
        return hidden @ down

    def extra_repr(self) -> str:
        """Return the experts' sizes and grid, for ``print(model)``."""
        num_experts, d_hidden, d_model = self.cuts["up"].shape
        return (
            f"{num_experts}, {d_model}, hidden={d_hidden}, "
            f"activation={self.activation!r}, grid={self.grid.shape}"
        )


def _slice_of(size: int, along: Along) -> slice:
    """Return the numbers that this rank has of those cut along an axis."""
    ((low, high),) = Features((size,)).pieces(along.place, along.size)
    return slice(low, high)
