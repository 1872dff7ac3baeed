# SPDX-License-Identifier: Apache-2.0
"""A placement of factors: each has a rank that inverts it, and ranks that keep it.

Ranks form p / g groups of g neighbours. A layer belongs to one group, whose ranks keep
its inverses and precondition its gradient ("gradient workers" of Pauloski et al. 2021,
"KAISA", arXiv 2107.01739). Longest tasks are placed first, each on what has
least to do (Graham 1969, "Bounds on multiprocessing timing anomalies").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commrt.errors import UsageError, shown
from commrt.layers.kfac.triangles import packed_length

__all__ = ["Owners", "Placement", "Sides", "place"]


class Sides(NamedTuple):
    """Rows of a layer's two factors."""

    inputs: int
    """Of A: input features, and one more with a bias."""
    outputs: int
    """Of G: output features."""


class Owners(NamedTuple):
    """The ranks that invert a layer's two factors; both are of one group."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Placement:
    """Where all factors are inverted, the same on all ranks."""

    num_ranks: int
    gradient_workers: int
    """Ranks of a group; they keep the inverses of its layers."""
    sides: tuple[Sides, ...]
    """Of each layer."""
    owners: tuple[Owners, ...]
    """Of each layer."""

    def group_of(self, layer: int) -> int:
        """Return the group that keeps a layer's inverses."""
        return self.owners[layer].inputs // self.gradient_workers

    def layers_of(self, rank: int) -> list[int]:
        """Return the layers whose inverses a rank keeps."""
        group = rank // self.gradient_workers
        return [at for at in range(len(self.sides)) if self.group_of(at) == group]

    def work_of(self, rank: int) -> int:
        """Return the cost of all that a rank inverts: the sum of cubes of rows."""
        return sum(
            _cost(side)
            for sides, owners in zip(self.sides, self.owners, strict=True)
            for side, owner in zip(sides, owners, strict=True)
            if owner == rank
        )

    def factor_elements(self) -> int:
        """Return the elements of all factors, as triangles; each rank has them all."""
        return sum(packed_length(side) for sides in self.sides for side in sides)

    def inverse_elements(self, rank: int) -> int:
        """Return the elements of the inverses that a rank keeps, as whole matrices."""
        return sum(s**2 for at in self.layers_of(rank) for s in self.sides[at])

    def broadcast_inverse_elements(self, rank: int) -> int:
        """Return the elements of broadcasts of inverses in which a rank takes part."""
        if self.gradient_workers == 1:
            return 0
        mine = self.layers_of(rank)
        return sum(packed_length(s) for at in mine for s in self.sides[at])

    def gradient_elements(self) -> int:
        """Return the elements of preconditioned gradients that ranks broadcast."""
        if self.gradient_workers == self.num_ranks:
            return 0
        return sum(sides.inputs * sides.outputs for sides in self.sides)

    def report(self) -> str:
        """Return a table of what each rank inverts and keeps."""
        total = sum(map(self.work_of, range(self.num_ranks))) or 1
        lines = ["rank  factors inverted  part of the work  layers kept"]
        for rank in range(self.num_ranks):
            factors = sum(owners.count(rank) for owners in self.owners)
            part, layers = self.work_of(rank) / total, len(self.layers_of(rank))
            lines.append(f"{rank:4}  {factors:16}  {part:16.1%}  {layers:11}")
        return "\n".join(lines)


def _cost(side: int) -> int:
    """Return the cost of a Cholesky factorisation and the inverse from it."""
    return side**3


def place(
    sides: Sequence[Sides], num_ranks: int, gradient_workers: int | None = None
) -> Placement:
    """Return where to invert the factors of all layers.

    Args:
        sides: of each layer.
        num_ranks: ranks of the communicator.
        gradient_workers: ranks that keep a layer's inverses, a divisor of the ranks;
            None: all of them.

    The result depends on the arguments alone. Raises UsageError for another number.
    """
    if gradient_workers is None:
        gradient_workers = num_ranks
    is_integer = type(gradient_workers) is int
    if not is_integer or gradient_workers < 1 or num_ranks % gradient_workers:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise UsageError(
            f"KFAC: gradient_workers={shown(gradient_workers)} must divide the number "
            f"of ranks, {num_ranks}; expected one of {', '.join(map(str, fitting))}"
        )
    both = [sum(map(_cost, each)) for each in sides]
    groups = _longest_first(both, num_ranks // gradient_workers)
    owners = [[0, 0] for _ in sides]
    for group in range(num_ranks // gradient_workers):
        factors = [
            (at, which)
            for at, chosen in enumerate(groups)
            if chosen == group
            for which in range(2)
        ]
        costs = [_cost(sides[at][which]) for at, which in factors]
        ranks = _longest_first(costs, gradient_workers)
        for (at, which), rank in zip(factors, ranks, strict=True):
            owners[at][which] = group * gradient_workers + rank
    return Placement(
        *(num_ranks, gradient_workers, tuple(sides)),
        tuple(Owners(*each) for each in owners),
    )


def _longest_first(costs: Sequence[int], num_places: int) -> list[int]:
    """Return a place for each task: the longest first, to the least busy place."""
    busy = [0] * num_places
    found = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        found[task] = min(range(num_places), key=lambda at: (busy[at], at))
        busy[found[task]] += costs[task]
    return found
