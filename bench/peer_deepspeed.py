# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's mixture of experts, with the weights and the rules of commrt's.

DeepSpeed sends each expert as many rows as the one with most choices gets, so rows are
padded. Its rules differ from commrt's by default, and are set alike: no token is chosen
at random, no noise is added to logits, and with two experts weights have the sum 1.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["REQUIREMENTS", "Perceptron", "begin", "layer", "load"]

Tensor: TypeAlias = torch.Tensor

REQUIREMENTS = "deepspeed einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm"
"""Packages that DeepSpeed's layer needs beside torch."""


class Perceptron(nn.Module):  # type: ignore[misc]
    """An expert: gelu(x U^T) D^T without biases."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of tokens (..., d_model)."""
        output: Tensor = self.down(functional.gelu(self.up(x)))
        return output


def begin() -> None:
    """Prepare DeepSpeed to run on the process group that there is; collective.

    Raises UsageError where DeepSpeed is not installed.
    """
    # Ranks compute on the host, also where there is a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed
    except ImportError as error:
        raise UsageError(
            f"experts: DeepSpeed cannot be imported ({error}); install it beside torch "
            f"by: DS_BUILD_OPS=0 pip install --no-build-isolation {REQUIREMENTS}"
        ) from error
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def layer(
    d_model: int,
    d_hidden: int,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup,
    *,
    capacity_factor: float | None,
) -> Any:
    """Return DeepSpeed's layer, whose experts lie on the ranks of a group.

    Args:
        d_model, d_hidden: features of a token, and hidden ones of an expert.
        num_experts: of all ranks, a multiple of their number.
        top_k: 1 or 2.
        group: the ranks.
        capacity_factor: None: no choice is dropped.
    """
    import torch.distributed as dist
    from deepspeed.moe.layer import MoE

    made = MoE(
        d_model,
        Perceptron(d_model, d_hidden),
        num_experts,
        ep_size=dist.get_world_size(group),
        k=top_k,
        capacity_factor=1.0 if capacity_factor is None else capacity_factor,
        min_capacity=0,
        drop_tokens=capacity_factor is not None,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    # As set_deepspeed_parallelism does, which makes groups of the default backend.
    made.deepspeed_moe._set_ep_group(group)
    return made


def load(made: Any, state: Mapping[str, Tensor], rank: int) -> None:
    """Give DeepSpeed's layer the weights of commrt's whole state."""
    moe = made.deepspeed_moe
    experts = moe.experts.deepspeed_experts
    with torch.no_grad():
        moe.gate.wg.weight.copy_(state["router.weight"])
        for place, expert in enumerate(experts):
            number = rank * len(experts) + place
            expert.up.weight.copy_(state["experts.up"][number])
            expert.down.weight.copy_(state["experts.down"][number].T)
