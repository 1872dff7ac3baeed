# SPDX-License-Identifier: Apache-2.0
"""Tiles of a real field, coarse and fine: what the model is given, and what it learns.

A coarse model of the weather knows the mean of each of its cells. Downscaling adds the
detail. Here the field is terrain. A cell is 2 x 2 samples, and bicubic interpolation of
the cells' means is the guess that the model must improve.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch.nn import functional

from commrt.examples.elevations import load_elevations

__all__ = ["SIDE", "Field", "Tiles", "load_field"]

Tensor: TypeAlias = torch.Tensor

SIDE = 16
"""Rows and columns of a tile."""
CELL = 2
"""Rows and columns of a coarse cell."""
STRIDE = 8
"""From one tile that is learned to the next; tiles that are tested do not overlap."""
LEARNED, TESTED = slice(0, 300), slice(304, 400)
"""Columns of the field: no sample is in tiles of both kinds."""


class Tiles(NamedTuple):
    """Tiles of one part of the field, (tiles, SIDE, SIDE) each."""

    guess: Tensor
    """The coarse field between its cells, by bicubic interpolation; mean 0."""
    detail: Tensor
    """The model adds this to the guess. Its mean square over learned tiles is 1."""


class Field(NamedTuple):
    """All tiles."""

    learned: Tiles
    tested: Tiles
    metres: float
    """One unit of ``detail``."""


def load_field(dtype: torch.dtype = torch.float64, num_tiles: int = 1 << 30) -> Field:
    """Return the tiles of the elevations; of those that are learned, the first ones."""
    field = torch.from_numpy(load_elevations()).double()
    learned = _cut(field[:, LEARNED], STRIDE)
    tested = _cut(field[:, TESTED], SIDE)
    metres = float(learned.detail.square().mean().sqrt())
    height = float(learned.guess.square().mean().sqrt())

    def scaled(tiles: Tiles, number: int) -> Tiles:
        guess, detail = tiles.guess / height, tiles.detail / metres
        return Tiles(guess[:number].to(dtype), detail[:number].to(dtype))

    return Field(scaled(learned, num_tiles), scaled(tested, len(tested.guess)), metres)


def _cut(field: Tensor, stride: int) -> Tiles:
    tiles = field.unfold(0, SIDE, stride).unfold(1, SIDE, stride)
    fine = tiles.reshape(-1, 1, SIDE, SIDE)
    cells = functional.avg_pool2d(fine, CELL)
    guess = functional.interpolate(cells, scale_factor=CELL, mode="bicubic")
    mean = cells.mean((2, 3), keepdim=True)
    return Tiles((guess - mean)[:, 0], (fine - guess)[:, 0])
