# SPDX-License-Identifier: Apache-2.0
"""Costs of a layer for a rank: seconds and bytes of a training step, by strategy.

The model is ParaDL's (Kahira et al., "An Oracle for Guiding Large-Scale Model/Hybrid
Parallel Training of Convolutional Neural Networks", HPDC'21) with the formulas of this
package's docstrings. Seconds are

    flops / rate + messages * alpha + bytes * beta

of the largest piece. Messages and bytes are those of halos (both passes), of the form
of the product over channels, of sums of weights' gradients, of statistics, and of moves
between layers. Nothing is assumed to overlap.

Bytes that a rank keeps are those of its pieces of the layers' outputs, and four times
the weights: themselves, gradients, and two numbers of the optimizer for each. Of cut
weights these are the tiles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commrt.errors import UsageError
from commrt.layers.cnn.layer_facts import LayerFacts
from commrt.layers.cnn.strategy import ParallelStrategy
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement
from commrt.layers.tensors.channels import form_of
from commrt.layers.tensors.products import received

__all__ = ["Cost", "Rates", "layer_cost", "measured_rates", "move_cost"]

ITEM = 4
OF_WEIGHTS = 4
"""The weights, their gradients, and two numbers of the optimizer for each."""


@dataclass(frozen=True)
class Rates:
    """Speeds of a rank's processor and of its messages."""

    flops_per_s: float
    alpha_s: float
    """Seconds of a message without bytes."""
    beta_s: float
    """Seconds of a byte."""


@dataclass(frozen=True)
class Cost:
    """Of one layer, or of several."""

    compute_s: float = 0.0
    sent_nbytes: float = 0.0
    messages: float = 0.0
    kept_nbytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute_s + other.compute_s,
            self.sent_nbytes + other.sent_nbytes,
            self.messages + other.messages,
            self.kept_nbytes + other.kept_nbytes,
        )

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of a step."""
        moved = self.messages * rates.alpha_s + self.sent_nbytes * rates.beta_s
        return self.compute_s + moved


def layer_cost(
    facts: LayerFacts,
    strategy: ParallelStrategy,
    grid: ProcessGrid,
    rates: Rates,
    *,
    cut_weights: bool = False,
) -> Cost:
    """Return what a layer costs under a strategy; local.

    ``cut_weights``: a rank keeps only its tile of a weight, as ``parallelize_cnn`` has
    it with the argument of this name.
    """
    try:
        return _layer_cost(facts, strategy, grid, rates, cut_weights)
    except UsageError:  # a form that these axes do not allow
        return Cost(math.inf, 0.0, 0.0, math.inf)


def _layer_cost(
    facts: LayerFacts,
    strategy: ParallelStrategy,
    grid: ProcessGrid,
    rates: Rates,
    cut_weights: bool,
) -> Cost:
    source = placed(facts.input, strategy, grid)
    sent, messages = 0.0, 0.0
    share = _share(facts.output, strategy, grid, facts.is_product)
    own = _numel(facts.input, source, grid) * ITEM
    for number, rows in enumerate(facts.reach, 2):
        cut = source.dims[number] if number < len(source.dims) else None
        if cut is not None and grid.size(cut.axes) > 1 and rows:
            piece = math.ceil(facts.input[number] / grid.size(cut.axes))
            sent += 2 * own * rows / piece
            messages += 4
    cutting = {a for n, d in enumerate(source.dims) if d and n != 1 for a in d.axes}
    shared = grid.size([*cutting])
    tile = float(facts.weights)
    if facts.is_product and len(facts.input) > 1:
        x = _without_memory(facts.input, source, grid)
        filters = tuple(a for a in strategy.filter if grid.size(a) > 1)
        if facts.output[1] < grid.size(filters):
            filters = ()
        form = form_of(x, math.prod(facts.output), filters, strategy.stationary)
        sent += form.nbytes / x.dtype.itemsize * ITEM
        ways = [cut.axes for cut in (form.channels, form.filters) if cut]
        tiles = math.prod(grid.size(axes) for axes in ways)
        messages += 2 * (form.nbytes > 0)
        tile /= tiles
        if not cut_weights:  # gradients of tiles are gathered
            messages += tiles > 1
            sent += facts.weights * (1 - 1 / tiles) * ITEM
    if facts.weights and shared > 1:
        sent += 2 * tile * (shared - 1) / shared * ITEM
        messages += 2 * math.log2(shared)
    if facts.has_statistics and shared > 1:
        numbers = 2 * facts.input[1] + 2
        sent += numbers * (shared - 1) * ITEM + 2 * numbers * ITEM
        messages += 3 * math.log2(shared)
    kept = facts.is_kept * math.prod(facts.output) / share
    return Cost(
        *(facts.flops / share / rates.flops_per_s, sent, messages),
        (kept + OF_WEIGHTS * (tile if cut_weights else facts.weights)) * ITEM,
    )


def move_cost(
    shape: Sequence[int],
    before: ParallelStrategy,
    behind: ParallelStrategy,
    grid: ProcessGrid,
) -> Cost:
    """Return what it costs to move a tensor from one strategy to another, and back."""
    source, target = placed(shape, before, grid), placed(shape, behind, grid)
    if source.is_same_as(target, grid, shape):
        return Cost()
    there = received(grid, shape, source, target)
    back = received(grid, shape, target, source)
    return Cost(0.0, (there + back) * ITEM, 2.0 * grid.num_ranks)


def placed(
    shape: Sequence[int], strategy: ParallelStrategy, grid: ProcessGrid
) -> Placement:
    """Return where a tensor lies that comes from a layer of a strategy."""
    everywhere = Placement.replicated(len(shape))
    return strategy.placement(grid, shape, everywhere, takes_channels=True)


def _share(
    shape: Sequence[int], strategy: ParallelStrategy, grid: ProcessGrid, product: bool
) -> float:
    """Return the whole over the largest piece of a layer's output."""
    space = placed(shape, strategy, grid)
    share = 1.0
    for number, (cut, extent) in enumerate(zip(space.dims, shape, strict=True)):
        axes = strategy.filter if number == 1 else cut.axes if cut else ()
        places = grid.size(axes)
        if places > 1 and (product or cut) and extent >= places:
            share *= extent / math.ceil(extent / places)
    return share


def _numel(shape: Sequence[int], placement: Placement, grid: ProcessGrid) -> float:
    """Return the elements of the largest piece."""
    total = 1.0
    for cut, extent in zip(placement.dims, shape, strict=True):
        total *= math.ceil(extent / grid.size(cut.axes)) if cut else extent
    return total


def _without_memory(
    shape: Sequence[int], placement: Placement, grid: ProcessGrid
) -> DistTensor:
    local = torch.empty(placement.local_shape(grid, shape), device="meta")
    return DistTensor(local, shape, grid, placement)


# -- of this machine -------------------------------------------------------------------


def measured_rates(grid: ProcessGrid) -> Rates:
    """Return the rates that the first rank measures; collective.

    Takes some milliseconds: convolutions, and allreduces of 8 bytes and of 1 MiB.
    """
    x, w = torch.ones(1, 32, 64, 64), torch.ones(32, 32, 3, 3)

    def convolve() -> Any:
        with torch.no_grad():
            return torch.nn.functional.conv2d(x, w, padding=1)

    flops = 2 * 32 * 64 * 64 * 32 * 9 / _least(convolve)
    small, large = np.zeros(1), np.zeros(1 << 17)
    alpha = _least(lambda: grid.comm.allreduce(small))
    beta = max(_least(lambda: grid.comm.allreduce(large)) - alpha, 1e-9)
    beta /= 2 * large.nbytes * (1 - 1 / grid.num_ranks) or 1
    figures = np.array([flops, alpha, beta])
    grid.comm.bcast(figures, root=0)
    return Rates(*map(float, figures))


def _least(call: Callable[[], Any], times: int = 10) -> float:
    """Return the seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)
