# SPDX-License-Identifier: Apache-2.0
"""The table of strategies: axes of the grid of ranks, formulas, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from commrt.errors import UsageError, shown, suggest
from commrt.oracle import cut_batches as batches
from commrt.oracle import cut_weights as weights
from commrt.oracle.layer_table import LayerTable
from commrt.oracle.step import Limit, Parts, Step

__all__ = ["STRATEGIES", "Strategy", "strategy"]

_Formula: TypeAlias = Callable[[Step, Sequence[str], Sequence[int]], Parts]
_Limit: TypeAlias = Callable[[Step, int], Limit]


@dataclass(frozen=True)
class Strategy:
    """A way to divide a training step among ranks."""

    name: str
    about: str
    """The parts that are cut, for help and tables."""
    fixed_axes: tuple[str, ...]
    """Axes of the grid of ranks, the nearest ranks along the last one."""
    formula: _Formula
    limits: tuple[_Limit, ...]
    """One for each fixed axis."""
    is_mixed: bool = False
    """True if it cuts along two axes that both need at least two parts.

    With one part along either axis, it is a strategy of a row of its own: data+filter
    on a grid of 1 x 4 ranks is filter. Such grids are left out of its projections.
    """
    cuts_space: bool = False
    """True if spatial dimensions of the table are further axes."""

    def axes(self, table: LayerTable) -> tuple[str, ...]:
        """Return the axes of the grid for a network."""
        space = batches.spatial_axes(table) if self.cuts_space else ()
        return (*self.fixed_axes, *space)

    def limits_of(self, step: Step) -> Mapping[str, Limit]:
        """Return the most ranks along each axis, with the reason."""
        axes = self.axes(step.table)
        limits = [*self.limits]
        limits += [batches.space_limit] * (len(axes) - len(limits))
        return {
            axis: limit(step, number - len(axes))
            for number, (axis, limit) in enumerate(zip(axes, limits, strict=True))
        }


_ROWS = (
    Strategy("serial", "nothing; one rank", (), batches.serial, ()),
    Strategy("data", "samples", ("data",), batches.data, (batches.batch_limit,)),
    Strategy("spatial", "space", (), batches.data_spatial, (), cuts_space=True),
    Strategy(
        *("pipeline", "layers", ("stage",), batches.pipeline, (batches.depth_limit,))
    ),
    Strategy(
        *("filter", "filters", ("filter",)),
        *(weights.filter_cut, (weights.filter_limit,)),
    ),
    Strategy(
        *("channel", "channels", ("channel",)),
        *(weights.channel, (weights.channel_limit,)),
    ),
    Strategy(
        *("data+filter", "samples and filters", ("data", "filter")),
        *(weights.data_filter, (batches.batch_limit, weights.filter_limit)),
        is_mixed=True,
    ),
    Strategy(
        *("data+spatial", "samples and space", ("data",)),
        *(batches.data_spatial, (batches.batch_limit,)),
        is_mixed=True,
        cuts_space=True,
    ),
    Strategy(
        *("tensor", "columns and rows of products in turn", ("tensor",)),
        *(weights.tensor, (weights.feature_limit,)),
    ),
    Strategy(
        *("tensor3d", "rows, columns and samples of products", ("z", "y", "x")),
        weights.tensor_3d,
        (batches.batch_limit, weights.feature_limit, weights.feature_limit),
    ),
    Strategy(
        *("zero1", "samples; optimizer", ("data",)),
        *(batches.zero_1, (batches.batch_limit,)),
    ),
    Strategy(
        *("zero2", "samples; optimizer, gradients", ("data",)),
        *(batches.zero_2, (batches.batch_limit,)),
    ),
    Strategy(
        *("zero3", "samples; optimizer, gradients, weights", ("data",)),
        *(batches.zero_3, (batches.batch_limit,)),
    ),
    Strategy(
        *("expert", "samples and experts", ("expert",)),
        *(batches.expert, (batches.expert_limit,)),
    ),
)
STRATEGIES: Mapping[str, Strategy] = {row.name: row for row in _ROWS}
"""All strategies by name."""


def strategy(name: str) -> Strategy:
    """Return a strategy; UsageError for an unknown name."""
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {shown(name)}{suggest(name, STRATEGIES)}")
    return STRATEGIES[name]
