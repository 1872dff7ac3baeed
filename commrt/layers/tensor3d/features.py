# SPDX-License-Identifier: Apache-2.0
"""How the features of a tensor are cut along one axis of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.layers.spatial.windows import Range, even_ranges

__all__ = ["Features"]

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Features:
    """Features in sections, each of which is cut into even pieces of whole units.

        Features((768,))                 # place i of p has i * 768 // p and on
        Features((768, 768, 768), 64)    # queries, keys and values of whole heads

    Args:
        sections: features of each section. Every rank has a piece of each.
        unit: features that stay together, such as those of a head; it divides each
            section.

    Raises UsageError for other numbers.
    """

    sections: tuple[int, ...]
    unit: int = 1

    def __post_init__(self) -> None:
        are_sizes = isinstance(self.sections, tuple) and all(
            type(size) is int and size >= 0 for size in self.sections
        )
        if not are_sizes or type(self.unit) is not int or self.unit < 1:
            raise UsageError(
                f"Features: sections={shown(self.sections)}, unit={shown(self.unit)}: "
                f"sections must be a tuple of integers, none below 0, and the unit an "
                f"integer above 0"
            )
        for size in self.sections:
            if size % self.unit:
                raise UsageError(
                    f"Features: a section of {size} features cannot be cut into units "
                    f"of {self.unit}"
                )

    @cached_property
    def size(self) -> int:
        """All features."""
        return sum(self.sections)

    def pieces(self, place: int, ranks: int) -> list[Range]:
        """Return ``(low, high)`` of each section that a place on the axis has."""
        found = []
        begins = accumulate(self.sections, initial=0)
        for begin, size in zip(begins, self.sections, strict=False):
            low, high = even_ranges(size // self.unit, ranks)[place]
            found.append((begin + low * self.unit, begin + high * self.unit))
        return found

    def count(self, place: int, ranks: int) -> int:
        """Return the number of features that a place has."""
        return sum(high - low for low, high in self.pieces(place, ranks))

    def indices(self, place: int, ranks: int) -> Tensor:
        """Return the numbers of the features that a place has, in its order."""
        ranges = [torch.arange(*piece) for piece in self.pieces(place, ranks)]
        return torch.cat(ranges)

    def taken(self, x: Tensor, dim: int, place: int, ranks: int) -> Tensor:
        """Return a place's piece of a tensor; a view where it has one section."""
        parts = [x.narrow(dim, a, b - a) for a, b in self.pieces(place, ranks)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor from the pieces of all places, in their order."""
        if len(self.sections) == 1:
            return torch.cat([*parts], dim)
        ranks = len(parts)
        found = []
        for number in range(len(self.sections)):
            for place, part in enumerate(parts):
                sizes = [b - a for a, b in self.pieces(place, ranks)]
                at = sum(sizes[:number])
                found.append(part.narrow(dim, at, sizes[number]))
        return torch.cat(found, dim)
