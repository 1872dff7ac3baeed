# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask is the same for any cut of the tensor.

An element is dropped by a hash of the seed and of its place in the whole tensor. So
nothing is sent, and one process drops the same elements.

The hash is the finisher of SplitMix64, in two rounds: every bit of seed and place
changes each bit of the result in half of all cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from commrt.errors import UsageError, shown
from commrt.layers.spatial.cut import Cut

__all__ = ["dropout"]

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 1 << 64
BITS = 53
"""Of the hash that are compared: as many as a float64 has."""


def dropout(
    x: Any,
    p: float = 0.5,
    *,
    seed: int,
    cuts: Mapping[int, Cut],
    training: bool = True,
    whole_channels: bool = False,
) -> Any:
    """Return ``x`` with elements set to 0, the others divided by ``1 - p``.

    Args:
        x: this rank's piece, any shape.
        p: the part of elements that are dropped, 0 to 1.
        seed: equal on all ranks; draw another one for each call.
        cuts: the dimensions of ``x`` that are cut, any of them.
        training: False returns ``x``.
        whole_channels: drop channels of samples as a whole, as Dropout2d does.

    The mask is a function of the seed and the whole shape alone. It is drawn again in
    the backward pass, not kept. Sends nothing. Raises UsageError for arguments that do
    not fit.
    """
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise UsageError(f"dropout: p={shown(p)} must be a number from 0 to 1")
    if type(seed) is not int:
        raise UsageError(f"dropout: seed={shown(seed)} must be an integer")
    for dim, cut in cuts.items():
        if not isinstance(cut, Cut) or type(dim) is not int or not 0 <= dim < x.dim():
            raise UsageError(
                f"dropout: cuts[{shown(dim)}]={shown(cut)} must be the Cut of one of "
                f"the {x.dim()} dimensions of x"
            )
        if x.shape[dim] != cut.sizes[cut.comm.rank]:
            raise UsageError(
                f"dropout: x of shape {tuple(x.shape)} does not fit cuts[{dim}]: rank "
                f"{cut.comm.rank} has {cut.sizes[cut.comm.rank]} elements of dimension "
                f"{dim} in {cut.sizes}"
            )
    if whole_channels and x.dim() < 2:
        raise UsageError(
            f"dropout: whole_channels=True needs a batch and channels; x has the shape "
            f"{tuple(x.shape)}"
        )
    if not training or p == 0:
        return x
    extents, firsts = [*x.shape], [0] * x.dim()
    for dim, cut in cuts.items():
        extents[dim], firsts[dim] = cut.extent, cut.own[0]
    dims = 2 if whole_channels else x.dim()
    return _Dropout.apply(x, p, seed, extents[:dims], firsts[:dims])


class _Dropout(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, *drawing: Any) -> Any:
        ctx.drawing = drawing
        return _dropped(x, *drawing)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return _dropped(gradient, *ctx.drawing), None, None, None, None


def _dropped(x: Any, p: float, seed: int, extents: list[int], firsts: list[int]) -> Any:
    """Return ``x`` with elements set to 0, the others divided by ``1 - p``."""
    if p == 1:
        return torch.zeros_like(x)
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, (extent, first) in enumerate(zip(extents, firsts, strict=True)):
        along = torch.arange(first, first + x.shape[dim], device=x.device)
        places = places.unsqueeze(-1) * extent + along
    keep = _hash(places, seed) >= int(p * (1 << BITS))
    keep = keep.view(*keep.shape, *[1] * (x.dim() - keep.dim()))
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros((), dtype=x.dtype))


def _hash(places: Any, seed: int) -> Any:
    """Return ``BITS`` bits for each place."""
    bits = places.mul_(_signed(GOLDEN)).add_(_signed(_scrambled(seed)))
    for _ in range(2):
        bits ^= _shifted(bits, 30)
        bits *= _signed(FIRST)
        bits ^= _shifted(bits, 27)
        bits *= _signed(SECOND)
        bits ^= _shifted(bits, 31)
    return _shifted(bits, 64 - BITS)


def _shifted(bits: Any, by: int) -> Any:
    """Return unsigned words that are shifted right."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of a word."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def _scrambled(seed: int) -> int:
    """Return a word that differs much for seeds that differ little."""
    word = (seed * GOLDEN + GOLDEN) % WORD
    word = (word ^ word >> 30) * FIRST % WORD
    word = (word ^ word >> 27) * SECOND % WORD
    return word ^ word >> 31
