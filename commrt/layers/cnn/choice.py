# SPDX-License-Identifier: Apache-2.0
"""``strategy="auto"``: strategies for the parts of a network by a model of their cost.

A part is one of the model's children, such as a stage of blocks. Every way in which the
grid's axes can cut samples, space, or channels and filters is a strategy. The parts get
the strategies that cost the fewest seconds, and so do the moves of tensors between
them: of inputs, and of what skips parts, as in a U-Net or a residual network. Where a
rank's memory is limited, bytes are given a price that is raised until they fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import UsageError
from commrt.layers.cnn.cost import (
    Cost,
    Rates,
    layer_cost,
    measured_rates,
    move_cost,
)
from commrt.layers.cnn.labelling import cheapest_labels, price_of
from commrt.layers.cnn.layer_facts import LayerFacts, facts_of
from commrt.layers.cnn.strategy import ParallelStrategy
from commrt.layers.cnn.tensor_flow import Flow, flows_of
from commrt.layers.process_grid import ProcessGrid

__all__ = ["ChosenStrategies", "choose_strategies"]

_MOST = 16
"""Strategies that are searched: the best ones for the whole model."""


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
    cut_weights: bool = False,
) -> ChosenStrategies:
    """Return the strategies with the least modelled time under a memory limit.

    Args:
        model: as for ``parallelize_cnn``.
        grid: the ranks; all of its axes may be used for anything.
        example: shape of the whole input.
        memory_nbytes: what a rank may keep for a step; None: anything.
        rates: of processors and messages; None: measured on the first rank.
        cut_weights: as for ``parallelize_cnn``: a rank keeps its tiles of weights.

    Collective: the first rank chooses, and all get what it chose.

    Raises UsageError where no strategy fits the limit, and says the least that does.
    """
    rates = measured_rates(grid) if rates is None else rates
    found: ChosenStrategies | UsageError | None = None
    if grid.rank == 0:
        try:
            found = _chosen(model, grid, example, memory_nbytes, rates, cut_weights)
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
    cut_weights: bool,
) -> ChosenStrategies:
    """Return the strategies, as one rank finds them; local."""
    parts = _parts(model, facts_of(model, example))
    flows = flows_of(model, example, [part.path for part in parts])
    strategies = _possible(grid, len(example) - 2)
    costs = {
        s: [_part_cost(part, s, grid, rates, cut_weights) for part in parts]
        for s in strategies
    }
    whole = {s: sum(each, Cost()) for s, each in costs.items()}
    by_time = sorted(strategies, key=lambda s: whole[s].seconds(rates))
    by_memory = sorted(strategies, key=lambda s: whole[s].kept_nbytes)
    some = [*dict.fromkeys([*by_time[:_MOST], *by_memory[: _MOST // 4]])]
    numbers = {part.path: number for number, part in enumerate(parts)}
    moves = _moves(flows, numbers, some, grid, rates)
    kept = np.array([[costs[s][n].kept_nbytes for s in some] for n in numbers.values()])
    took = np.array(
        [[costs[s][n].seconds(rates) for s in some] for n in numbers.values()]
    )
    least = kept.min(axis=1).sum()
    limit = float("inf") if memory_nbytes is None else memory_nbytes
    scale = whole[by_time[0]].seconds(rates) / max(whole[by_time[0]].kept_nbytes, 1)
    prices = [0.0, *(scale * 4.0**step for step in range(-5, 15))]
    each = np.arange(len(parts))
    for price in prices if least <= limit else []:
        priced = took + price * kept if price else took
        labels = cheapest_labels([*priced], moves)
        if kept[each, labels].sum() <= limit:
            chosen = [some[label] for label in labels]
            by_path = {"": chosen[0]} | dict(zip(numbers, chosen, strict=True))
            step_s = price_of(labels, [*took], moves)
            return ChosenStrategies(by_path, step_s, float(kept[each, labels].sum()))
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
    part: _Part,
    strategy: ParallelStrategy,
    grid: ProcessGrid,
    rates: Rates,
    cut_weights: bool,
) -> Cost:
    every = (
        layer_cost(layer, strategy, grid, rates, cut_weights=cut_weights)
        for layer in part.layers
    )
    return sum(every, Cost())


def _moves(
    flows: Sequence[Flow],
    numbers: Mapping[str, int],
    both: Sequence[ParallelStrategy],
    grid: ProcessGrid,
    rates: Rates,
) -> dict[tuple[int, int], Any]:
    """Return the seconds of moves between parts, by the numbers of ``both``'s."""
    known: dict[tuple[int, ...], Any] = {}
    found: dict[tuple[int, int], Any] = {}
    for flow in flows:
        if flow.shape not in known:
            every = [[move_cost(flow.shape, a, b, grid) for b in both] for a in both]
            known[flow.shape] = np.array(
                [[each.seconds(rates) for each in row] for row in every]
            )
        table = known[flow.shape]
        pair = numbers[flow.source], numbers[flow.target]
        if pair[::-1] in found:
            pair, table = pair[::-1], table.T
        found[pair] = found.get(pair, 0) + table
    return found
