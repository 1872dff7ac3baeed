# SPDX-License-Identifier: Apache-2.0
"""``strategy="auto"``: strategies for the parts of a network by a model of their cost.

A part is one of the model's children, such as a stage of blocks. Every way in which the
grid's axes can cut samples, space, or channels and filters is a strategy. The chain of
parts, in the order of calls, gets the strategies that cost the fewest seconds, moves
between parts included: by dynamic programming. Where a rank's memory is limited, bytes
are given a price that is raised until they fit.

Tensors that skip parts, as those of a U-Net do, are not in the chain. So their moves
are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commrt.errors import UsageError
from commrt.layers.cnn.cost import (
    Cost,
    Rates,
    layer_cost,
    measured_rates,
    move_cost,
)
from commrt.layers.cnn.layer_facts import LayerFacts, facts_of
from commrt.layers.cnn.strategy import ParallelStrategy
from commrt.layers.process_grid import ProcessGrid

__all__ = ["ChosenStrategies", "choose_strategies"]

_MOST = 16
"""Strategies that the chain is searched with: the best ones for the whole model."""


@dataclass(frozen=True)
class ChosenStrategies:
    """Strategies for the parts of a model, and what the cost model says of them."""

    by_path: Mapping[str, ParallelStrategy]
    """For ``parallelize_cnn``."""
    step_s: float
    """Seconds of a training step."""
    memory_nbytes: float
    """Bytes of activations, weights, gradients and optimizer on a rank."""


@dataclass(frozen=True)
class _Part:
    """One child of the model: its layers' facts."""

    path: str
    layers: Sequence[LayerFacts]


def choose_strategies(
    model: Any,
    grid: ProcessGrid,
    example: Sequence[int],
    *,
    memory_nbytes: float | None = None,
    rates: Rates | None = None,
) -> ChosenStrategies:
    """Return the strategies with the least modelled time under a memory limit.

    Args:
        model: as for ``parallelize_cnn``.
        grid: the ranks; all of its axes may be used for anything.
        example: shape of the whole input.
        memory_nbytes: what a rank may keep for a step; None: anything.
        rates: of processors and messages; None: measured on the first rank.

    Collective: the first rank chooses, and all get what it chose.

    Raises UsageError where no strategy fits the limit, and says the least that does.
    """
    rates = measured_rates(grid) if rates is None else rates
    found: ChosenStrategies | UsageError | None = None
    if grid.rank == 0:
        try:
            found = _chosen(model, grid, example, memory_nbytes, rates)
        except UsageError as error:
            found = error
        except Exception as error:  # noqa: BLE001  the model's own, on all ranks alike
            found = UsageError(
                f"parallelize_cnn: strategy='auto': the model or its example cannot be "
                f"looked at: {type(error).__name__}: {error}; pass strategies instead"
            )
    found = grid.comm.bcast_object(found, root=0)
    if isinstance(found, UsageError):
        raise UsageError(str(found))
    assert isinstance(found, ChosenStrategies)
    return found


def _chosen(
    model: Any,
    grid: ProcessGrid,
    example: Sequence[int],
    memory_nbytes: float | None,
    rates: Rates,
) -> ChosenStrategies:
    """Return the strategies, as one rank finds them; local."""
    parts = _parts(model, facts_of(model, example))
    strategies = _possible(grid, len(example) - 2)
    costs = {
        s: [_part_cost(part, s, grid, rates) for part in parts] for s in strategies
    }
    whole = {s: sum(each, Cost()) for s, each in costs.items()}
    by_time = sorted(strategies, key=lambda s: whole[s].seconds(rates))
    by_memory = sorted(strategies, key=lambda s: whole[s].kept_nbytes)
    some = [*dict.fromkeys([*by_time[:_MOST], *by_memory[: _MOST // 4]])]
    moves = _Moves(parts, grid, rates)
    least = sum(min(costs[s][n].kept_nbytes for s in some) for n in range(len(parts)))
    limit = float("inf") if memory_nbytes is None else memory_nbytes
    scale = whole[by_time[0]].seconds(rates) / max(whole[by_time[0]].kept_nbytes, 1)
    prices = [0.0, *(scale * 4.0**step for step in range(-5, 15))]
    for price in prices if least <= limit else []:
        chain = _cheapest(parts, some, costs, moves, rates, price)
        total = _total(parts, chain, costs, moves)
        if total.kept_nbytes <= limit:
            by_path = {"": chain[0]} | dict(
                zip((part.path for part in parts), chain, strict=True)
            )
            return ChosenStrategies(by_path, total.seconds(rates), total.kept_nbytes)
    raise UsageError(
        f"parallelize_cnn: strategy='auto': no strategy on {grid} keeps within "
        f"memory_nbytes={memory_nbytes:,.0f}; the least is {least:,.0f}: use more "
        f"ranks, or a smaller batch"
    )


def _parts(model: Any, facts: Sequence[LayerFacts]) -> list[_Part]:
    """Return the model's children in the order of their first calls."""
    children = [name for name, _ in model.named_children()]
    around = ""
    while len(children) == 1:  # a model that is wrapped in another
        inner = model.get_submodule(around + children[0])
        inside = [name for name, _ in inner.named_children()]
        if not inside:
            break
        around, children = f"{around}{children[0]}.", inside
    found: dict[str, list[LayerFacts]] = {}
    for layer in facts:
        head = layer.path.removeprefix(around).partition(".")[0]
        found.setdefault(f"{around}{head}", []).append(layer)
    return [_Part(path, layers) for path, layers in found.items()]


def _possible(grid: ProcessGrid, dims: int) -> list[ParallelStrategy]:
    """Return every strategy in which each axis has a role."""
    axes = [axis for axis in grid.axes if grid.size(axis) > 1]
    space = ("depth", "height", "width")[3 - dims :] if dims > 0 else ()
    roles = ("sample", *space, "both", "none")
    found = []
    for chosen in itertools.product(roles, repeat=len(axes)):
        named: dict[str, Any] = {}
        for axis, role in zip(axes, chosen, strict=True):
            for each in ("channel", "filter") if role == "both" else (role,):
                named.setdefault(each, []).append(axis)
        named.pop("none", None)
        found.append(ParallelStrategy(**named))
    return found


def _part_cost(
    part: _Part, strategy: ParallelStrategy, grid: ProcessGrid, rates: Rates
) -> Cost:
    every = (layer_cost(layer, strategy, grid, rates) for layer in part.layers)
    return sum(every, Cost())


class _Moves:
    """Costs of moves between neighbouring parts; each is computed once."""

    def __init__(self, parts: Sequence[_Part], grid: ProcessGrid, rates: Rates) -> None:
        self._parts, self._grid, self._rates = parts, grid, rates
        self._known: dict[Any, tuple[Cost, float]] = {}

    def before(
        self, number: int, one: ParallelStrategy, other: ParallelStrategy
    ) -> tuple[Cost, float]:
        """Return the cost of the move of a part's input, and its seconds."""
        if one is other:
            return Cost(), 0.0
        shape = self._parts[number].layers[0].input
        key = shape, id(one), id(other)
        found = self._known.get(key)
        if found is None:
            cost = move_cost(shape, one, other, self._grid)
            found = self._known[key] = cost, cost.seconds(self._rates)
        return found


def _cheapest(
    parts: Sequence[_Part],
    strategies: Sequence[ParallelStrategy],
    costs: Mapping[ParallelStrategy, Sequence[Cost]],
    moves: _Moves,
    rates: Rates,
    price: float,
) -> list[ParallelStrategy]:
    """Return the strategy of each part of the cheapest chain.

    ``price`` is that of a byte which is kept, in seconds.
    """
    best: list[tuple[float, tuple[ParallelStrategy, ...]]] = []
    for number in range(len(parts)):
        reached = []
        for strategy in strategies:
            own = costs[strategy][number]
            here = own.seconds(rates) + price * own.kept_nbytes
            options = [
                (so_far + moves.before(number, chain[-1], strategy)[1], chain)
                for so_far, chain in best
            ] or [(0.0, ())]
            least, chain = min(options, key=lambda each: each[0])
            reached.append((least + here, (*chain, strategy)))
        best = reached
    return [*min(best, key=lambda each: each[0])[1]]


def _total(
    parts: Sequence[_Part],
    chain: Sequence[ParallelStrategy],
    costs: Mapping[ParallelStrategy, Sequence[Cost]],
    moves: _Moves,
) -> Cost:
    """Return the cost of a chain."""
    total = Cost()
    for number, strategy in enumerate(chain):
        total += costs[strategy][number]
        if number:
            total += moves.before(number, chain[number - 1], strategy)[0]
    return total
