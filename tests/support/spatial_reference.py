# SPDX-License-Identifier: Apache-2.0
"""Functions of cut tensors against torch's functions of whole ones.

Every rank draws the same case by a seed, takes its pieces of the tensors, and compares
its pieces of results and gradients with those of the whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from layout_cases import draw_sizes

from commrt.comm import Communicator
from commrt.layers.spatial import Cut
from commrt.local import run

NEAR = 1e-12
"""Of float64: the relative difference that reordered sums make at most."""

GRIDS = [(2,), (3,), (4,), (2, 2), (1, 3), (1, 2, 2), (1,)]
"""Ranks along each cut dimension."""


@dataclass(frozen=True)
class CutGrid:
    """Ranks in a grid, of which each axis cuts a dimension of a tensor.

    ``along`` has the communicator of each dimension that is cut.
    """

    comm: Communicator
    along: Mapping[int, Communicator]

    def cuts(
        self, rng: random.Random, extents: Mapping[int, int] | list[int], least: int = 0
    ) -> dict[int, Cut]:
        """Return cuts of a tensor of these extents, drawn: even or uneven."""
        found = {}
        for dim, comm in self.along.items():
            extent = extents[dim]
            sizes = tuple(draw_sizes(rng, extent, comm.size))
            if rng.random() < 0.4 or min(sizes) < least:
                found[dim] = Cut.even(comm, extent)
            else:
                found[dim] = Cut(comm, sizes)
        return found


def on_grids(
    seed: int,
    cases: int,
    check: Callable[[random.Random, CutGrid, int], None],
    grids: list[tuple[int, ...]] = GRIDS,
    batch: bool = True,
) -> None:
    """Run ``check(rng, grid, spatial dimensions)`` in every grid, with drawn cases.

    Each axis of a grid cuts one spatial dimension, or (with ``batch``) the batch.
    """
    for axes in grids:

        def main(comm: Any, axes: tuple[int, ...] = axes) -> int:
            names = {f"axis{number}": size for number, size in enumerate(axes)}
            mesh = comm.mesh(names)
            for case in range(cases):
                rng = random.Random(f"{seed} {axes} {case}")
                fewest = max(1, len(axes) - batch)
                dims = rng.choice([d for d in (1, 2, 2, 3) if d >= fewest])
                possible = [*range(2, 2 + dims)]
                if batch and (len(axes) > dims or rng.random() < 0.2):
                    possible.append(0)
                cut_dims = rng.sample(possible, len(axes))
                along = {
                    dim: mesh[name] for dim, name in zip(cut_dims, names, strict=True)
                }
                try:
                    check(rng, CutGrid(comm, along), dims)
                except Exception as error:
                    error.add_note(f"case {case} of grid {axes}, seed {seed}")
                    raise
            mesh.free()
            return cases

        assert run(math.prod(axes), main, timeout_s=900) == [cases] * math.prod(axes)


def drawn(rng: random.Random, shape: Any) -> Any:
    """Return a tensor in float64 with the same elements on every rank."""
    draws = np.random.default_rng(rng.randrange(1 << 30))
    return torch.from_numpy(draws.standard_normal(tuple(shape)))


def piece(whole: Any, cuts: Mapping[int, Cut]) -> Any:
    """Return this rank's piece of a tensor, a copy."""
    for dim, cut in cuts.items():
        low, high = cut.own
        whole = whole.narrow(dim, low, high - low)
    return whole.detach().clone()


def off_by(found: Any, expected: Any, scale: float | None = None) -> float:
    """Return the largest difference, relative to the largest element."""
    assert found is not None, "there is no gradient"
    assert tuple(found.shape) == tuple(expected.shape)
    found, expected = found.detach(), expected.detach()
    if expected.numel() == 0:
        return 0.0
    if scale is None:
        scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / max(scale, 1e-300)


@dataclass
class Difference:
    """The largest relative differences from torch's results, by name."""

    of: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.of.values())


def difference(
    grid: CutGrid,
    cuts: Mapping[int, Cut],
    x: Any,
    weights: list[Any],
    cut_function: Callable[..., tuple[Any, dict[int, Cut]]],
    plain_function: Callable[..., Any],
    rng: random.Random,
    *,
    are_summed: bool = False,
) -> Difference:
    """Return how far a function of pieces is from torch's function of the whole.

    Args:
        grid: the ranks; collective.
        cuts: how ``x`` is cut.
        x: the whole tensor.
        weights: further tensors, whole on every rank; None stands for itself.
        cut_function: of this rank's piece and weights; returns its piece and the cuts.
        plain_function: of whole tensors.
        rng: draws the gradient of the result, equal on all ranks.
        are_summed: ``cut_function`` sums the gradients of weights over all ranks.
    """
    whole = x.clone().requires_grad_()
    plain_weights = [_leaf(each) for each in weights]
    expected = plain_function(whole, *plain_weights)
    gradient = drawn(rng, expected.shape)
    expected.backward(gradient)

    own = piece(x, cuts).requires_grad_()
    own_weights = [_leaf(each) for each in weights]
    found, made = cut_function(own, *own_weights)
    found.backward(piece(gradient, made))
    size = float(expected.detach().abs().max())
    of = {
        "result": off_by(found, piece(expected, made), size),
        "gradient of x": off_by(
            own.grad, piece(whole.grad, cuts), float(whole.grad.abs().max())
        ),
    }
    for number, (mine, plain) in enumerate(
        zip(own_weights, plain_weights, strict=True)
    ):
        if mine is not None:
            total = mine.grad.clone()
            if not are_summed:
                grid.comm.allreduce(total)
            # One element is the sum of many, which may cancel each other.
            scale = max(float(plain.grad.abs().max()), float(gradient.norm()))
            of[f"gradient of weight {number}"] = off_by(total, plain.grad, scale)
    return Difference(of)


def _leaf(weight: Any) -> Any:
    return None if weight is None else weight.clone().requires_grad_()
