# SPDX-License-Identifier: Apache-2.0
"""Attention over a grid, whose heads are cut."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.linear import Form, Linear3d
from commrt.layers.tensor3d.roles import Along, check_axes

__all__ = ["Attention3d", "attention_form", "local_heads"]

Tensor: TypeAlias = torch.Tensor


def local_heads(num_heads: int, grid: ProcessGrid, axis: str = "x") -> tuple[int, int]:
    """Return ``(low, high)`` of the heads that this rank has along an axis."""
    check_axes("local_heads", grid)
    along = Along(grid, axis)
    return Features((num_heads,)).pieces(along.place, along.size)[0]


class Attention3d(nn.Module):  # type: ignore[misc]
    """Self-attention whose heads are cut along ``x`` of a grid.

    ``qkv`` is one ``Linear3d`` to queries, keys and values, in this order, and
    ``proj`` a transposed one back. Between them each rank has whole heads, and sends
    nothing. Any number of heads, also fewer than ranks.

    Args:
        embed_dim: features D of the input and the output.
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values, a divisor of ``num_heads``, each of
            which serves as many heads of queries; None: ``num_heads``. Where it is
            less, the ranks along ``x`` must divide it.
        grid: the ranks.
        bias: whether both layers add one.
        is_causal: whether a place sees only those up to it.
        dropout: of attention's weights, when training. Each rank draws for its heads.
            UsageError on a grid with several ranks along ``y``.
        sequence_dim: 1 where the sequence is cut besides (see ``Form``), or None.
        device, dtype: of the parameters.

    Shapes: input and output (batch, sequence, D). Pattern: that of its two layers; with
    m places of a rank and no other axis than ``x``, an ``allreduce`` of mD elements
    forward, and another one backward. Source: Shoeybi et al., "Megatron-LM" (2019),
    section 3. Collective when it is made. Raises UsageError for heads that do not fit.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        grid: ProcessGrid,
        num_kv_heads: int | None = None,
        bias: bool = True,
        is_causal: bool = False,
        dropout: float = 0.0,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_axes("Attention3d", grid)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        ranks = Along(grid, "x").size
        if num_heads < 1 or embed_dim % num_heads or num_heads % max(1, kv_heads):
            raise UsageError(
                f"Attention3d: num_heads={num_heads} must divide embed_dim="
                f"{embed_dim}, and num_kv_heads={kv_heads} must divide num_heads"
            )
        if kv_heads < 1 or (kv_heads < num_heads and kv_heads % ranks):
            raise UsageError(
                f"Attention3d: num_kv_heads={kv_heads} must be divisible by the "
                f"{ranks} ranks along 'x', so that they lie with their queries"
            )
        if dropout and Along(grid, "y").size > 1:
            raise UsageError(
                f"Attention3d: dropout={dropout}: ranks along 'y' have the same heads, "
                f"and would draw masks of their own; use a grid without 'y'"
            )
        head = embed_dim // num_heads
        self.head_dim, self.is_causal, self.dropout = head, is_causal, dropout
        self.serves = num_heads // kv_heads
        of_queries, of_keys = embed_dim, kv_heads * head
        sections = of_queries, of_keys, of_keys
        more: dict[str, Any] = {"device": device, "dtype": dtype, "grid": grid}
        more |= {"bias": bias, "sequence_dim": sequence_dim}
        self.qkv = Linear3d(
            *(embed_dim, sum(sections)),
            **more,
            whole_output=False,
            outputs=Features(sections, head),
        )
        self.proj = Linear3d(
            *(embed_dim, embed_dim),
            **more,
            transpose=True,
            whole_input=False,
            inputs=Features((embed_dim,), head),
        )
        first, last = local_heads(num_heads, grid)
        keys = local_heads(kv_heads, grid)
        self.sizes = [(last - first) * head, *[(keys[1] - keys[0]) * head] * 2]

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output; collective like its layers."""
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (
            part.unflatten(-1, (part.shape[-1] // self.head_dim, self.head_dim))
            for part in parts
        )
        if self.serves > 1:
            k, v = (each.repeat_interleave(self.serves, -2) for each in (k, v))
        y = functional.scaled_dot_product_attention(
            *(each.transpose(-2, -3) for each in (q, k, v)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )
        return self.proj(y.transpose(-2, -3).flatten(-2))


def attention_form(embed_dim: int, head: int) -> tuple[Form, Form]:
    """Return the forms of an attention's two layers, for models of one's own.

    Args:
        embed_dim: features of queries, of keys and of values.
        head: features of a head.
    """
    return (
        Form(whole_output=False, outputs=Features((embed_dim,) * 3, head)),
        Form(transpose=True, whole_input=False, inputs=Features((embed_dim,), head)),
    )
