# SPDX-License-Identifier: Apache-2.0
"""A vision transformer that adds detail to a tile: patches, attention, perceptrons.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv 2010.11929. The model is
a row of modules, so a pipeline can cut it anywhere. Heads are counted from what a layer
returns, so ranks can share them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from commrt.examples.field.tiles import SIDE

__all__ = ["BLOCKS", "HEAD", "WIDTH", "Attention", "Block", "made"]

Tensor: TypeAlias = torch.Tensor

PATCH = 4
"""Rows and columns of a patch."""
PATCHES = (SIDE // PATCH) ** 2
WIDTH, HEAD, BLOCKS = 32, 8, 3
"""Features of a patch, features of a head of attention, blocks."""
SEED = 1


class Patches(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Features of each patch, and of its place."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(PATCH * PATCH, WIDTH)
        self.places = nn.Parameter(torch.empty(PATCHES, WIDTH))

    def forward(self, guess: Tensor) -> Tensor:
        """Return (tiles, patches, features) of tiles."""
        rows = guess.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))
        patches = rows.transpose(2, 3).flatten(3).flatten(1, 2)
        found: Tensor = self.features(patches) + self.places
        return found


class Attention(nn.Module):  # type: ignore[misc]
    """Each patch takes from all patches of its tile."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each patch takes."""
        heads = self.qkv(x).unflatten(-1, (3, -1, HEAD)).transpose(1, 3)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(2))
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the block adds."""
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.perceptron(self.norm2(x))
        return found


class Pixels(nn.Module):  # type: ignore[misc]
    """The detail of each patch, put together to tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pixels = nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Return tiles."""
        rows = SIDE // PATCH
        patches = self.pixels(self.norm(x)).unflatten(2, (PATCH, PATCH))
        tiles: Tensor = patches.unflatten(1, (rows, rows)).transpose(2, 3)
        return tiles.flatten(3).flatten(1, 2)


def made(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return the model that all ranks begin with: some 40,000 parameters.

    The last layer begins with zeros. So the model adds nothing to the guess at first,
    and its loss is 1.
    """
    model = nn.Sequential(Patches(), *(Block() for _ in range(BLOCKS)), Pixels())
    draws = torch.Generator().manual_seed(SEED)
    for name, parameter in model.double().named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            std = 0.02 if name.endswith("places") else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std, generator=draws)
    nn.init.zeros_(model[-1].pixels.weight)
    return model.to(dtype)
