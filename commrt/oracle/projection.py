# SPDX-License-Identifier: Apache-2.0
"""``Oracle``: projected time and memory of a training, by strategy.

    oracle = Oracle(table, AlphaBeta(alpha_s=30e-6, beta_s=8e-11), samples=1_280_000)
    print(oracle.project("data", 32, batch=2048).explain())
    best = oracle.recommend(64, batch=2048, memory_nbytes=16 << 30)

The formulas are ParaDL's (Kahira et al., "An Oracle for Guiding Large-Scale
Model/Hybrid Parallel Training of Convolutional Neural Networks", HPDC'21). Computation
and communication do not overlap in them. Every number is projected, none is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commrt.errors import UsageError, shown
from commrt.oracle.layer_table import LayerTable
from commrt.oracle.step import Limit, Parts, Step
from commrt.oracle.strategies import STRATEGIES, Strategy, strategy
from commrt.oracle.transfers import AlphaBeta, CollectiveCosts, Transfer

__all__ = ["Oracle", "Projection", "Recommendation", "volume"]

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Projection:
    """One strategy on so many ranks: projected seconds of an epoch, bytes of a rank."""

    strategy: str
    ways: Mapping[str, int]
    """Ranks along each axis, the nearest ranks along the last one."""
    step: Step
    iterations: int
    """Steps of an epoch: samples over the batch, rounded up."""
    compute_s: float
    """Computation of an epoch on the slowest rank."""
    communication_s: float
    """Communication of an epoch."""
    memory_nbytes: int
    """Bytes that a rank keeps."""
    transfers: tuple[Transfer, ...]
    """The transfers that a rank takes part in during a step."""
    limits: Mapping[str, Limit]
    """The most ranks along each axis."""
    origin: str
    """Where the times of communication come from."""

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return math.prod(self.ways.values())

    @property
    def epoch_s(self) -> float:
        """Time of an epoch."""
        return self.compute_s + self.communication_s

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.epoch_s / self.iterations

    @property
    def sent_nbytes(self) -> float:
        """Bytes that a rank sends in a step, by rings and pairwise exchanges."""
        return sum(transfer.sent_nbytes for transfer in self.transfers)

    @property
    def name(self) -> str:
        """The strategy and its grid, as in ``data+filter 4x2``."""
        sizes = "x".join(map(str, self.ways.values()))
        return f"{self.strategy} {sizes}".strip()

    def explain(self) -> str:
        """Return the projection in words: its shares, and the term that limits it."""
        total = self.epoch_s or 1.0
        compute = 100 * self.compute_s / total
        sent = 100 * self.communication_s / total
        lines = [
            f"{self.name} on {self.ranks} ranks, projected: {self.epoch_s:.6g} s an "
            f"epoch of {self.iterations} steps",
            f"  computation {self.compute_s:.6g} s ({compute:.0f} %), communication "
            f"{self.communication_s:.6g} s ({sent:.0f} %)",
            f"  memory of a rank {self.memory_nbytes:,} bytes; it sends "
            f"{self.sent_nbytes:,.0f} bytes a step",
        ]
        for axis, limit in self.limits.items():
            lines.append(f"  {axis}: at most {limit.most} ranks, by {limit.reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Recommendation:
    """The fastest projection that fits, and why it is that one."""

    best: Projection
    reason: str
    ranked: tuple[Projection, ...]
    """All that fit, the fastest one first."""
    too_large: tuple[Projection, ...]
    """All that need more memory than there is, the smallest one first."""


@dataclass(frozen=True)
class Oracle:
    """Projections of one network's training.

    Raises:
        UsageError: the number of samples makes no sense.
    """

    table: LayerTable
    costs: CollectiveCosts
    samples: int
    """Samples of an epoch: D of ParaDL."""
    item_nbytes: int = 4
    """Bytes of an element."""
    reuse: float = 1.0
    """ParaDL's gamma: the part of memory that is left where buffers are used again."""
    optimizer_elements: float = 0.0
    """Elements that the optimizer keeps for each weight; ParaDL counts none."""
    segments: int = 4
    """Micro-batches of a pipeline."""
    gradients_by_layer: bool = False
    """True if each layer's gradients are summed by an allreduce of their own."""

    def __post_init__(self) -> None:
        if type(self.samples) is not int or self.samples < 1:
            raise UsageError(
                f"samples is {shown(self.samples)}; expected a whole number above 0"
            )

    def step(self, batch: int) -> Step:
        """Return the training step of a batch."""
        return Step(
            *(self.table, batch, self.item_nbytes, self.reuse),
            *(self.optimizer_elements, self.segments, self.gradients_by_layer),
        )

    def project(
        self, name: str, processes: int | Sequence[int] = (), *, batch: int
    ) -> Projection:
        """Return the projection of a strategy on a grid of ranks.

        Args:
            name: a key of ``STRATEGIES``.
            processes: ranks along each axis of the strategy, or their number where it
                has one axis.
            batch: samples of a step, over all ranks.

        Raises:
            UsageError: the strategy is unknown, or the grid does not fit it; the
                message says what limits it.
        """
        row, step = strategy(name), self.step(batch)
        axes = row.axes(self.table)
        ways = (processes,) if isinstance(processes, int) else tuple(processes)
        if not axes and ways == (1,):
            ways = ()
        if len(ways) != len(axes) or not all(
            type(each) is int and each > 0 for each in ways
        ):
            raise UsageError(
                f"{name}: processes is {shown(processes)}; expected ranks along "
                f"{', '.join(axes) or 'no axis'}"
            )
        limits = row.limits_of(step)
        for axis, places in zip(axes, ways, strict=True):
            if places > limits[axis].most:
                raise UsageError(
                    f"{name}: {places} ranks along {axis}; expected at most "
                    f"{limits[axis].most}, by {limits[axis].reason}"
                )
        return self._projected(row, step, axes, ways, limits)

    def _projected(
        self,
        row: Strategy,
        step: Step,
        axes: Sequence[str],
        ways: Sequence[int],
        limits: Mapping[str, Limit],
    ) -> Projection:
        parts: Parts = row.formula(step, axes, ways)
        iterations = -(-self.samples // step.batch)
        seconds = sum(t.times * self.costs.seconds(t) for t in parts.transfers)
        return Projection(
            *(row.name, dict(zip(axes, ways, strict=True)), step, iterations),
            self.samples * parts.sample_s + iterations * parts.step_s,
            iterations * seconds,
            *(parts.memory_nbytes, parts.transfers, limits, self.costs.origin),
        )

    def rank(
        self, ranks: int, *, batch: int, names: Sequence[str] | None = None
    ) -> list[Projection]:
        """Return all projections on exactly so many ranks, the fastest one first.

        A mixed strategy with a cut into one part is left out: it is another strategy.

        Args:
            ranks: ranks in all.
            batch: samples of a step, over all ranks.
            names: strategies; all of ``STRATEGIES``, if left out.

        Raises:
            UsageError: a strategy is unknown, or a number makes no sense.
        """
        if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
            raise UsageError(
                f"ranks is {shown(ranks)}; expected a whole number from 1 to "
                f"{MOST_RANKS:,}"
            )
        step = self.step(batch)
        found = []
        for name in STRATEGIES if names is None else names:
            row = strategy(name)
            axes = row.axes(self.table)
            limits = row.limits_of(step)
            most = [limits[axis].most for axis in axes]
            for ways in _grids(ranks, most):
                if row.is_mixed and ways[0] in (1, ranks):
                    continue
                found.append(self._projected(row, step, axes, ways, limits))
        return sorted(found, key=lambda one: (one.epoch_s, one.memory_nbytes))

    def recommend(
        self,
        ranks: int,
        *,
        batch: int,
        memory_nbytes: float | None = None,
        names: Sequence[str] | None = None,
    ) -> Recommendation:
        """Return the fastest strategy that fits into a rank's memory, with the reason.

        Args:
            ranks: ranks in all.
            batch: samples of a step, over all ranks.
            memory_nbytes: bytes that a rank may keep; None: any number.
            names: strategies; all of ``STRATEGIES``, if left out.

        Raises:
            UsageError: no strategy fits, with the least memory that one needs; or no
                strategy can use so many ranks, with what limits each.
        """
        if memory_nbytes is not None and not memory_nbytes > 0:
            raise UsageError(
                f"memory_nbytes is {shown(memory_nbytes)}; expected a number above 0"
            )
        every = self.rank(ranks, batch=batch, names=names)
        if not every:
            raise UsageError(self._nobody(ranks, batch, names))
        limit = math.inf if memory_nbytes is None else memory_nbytes
        fit = [one for one in every if one.memory_nbytes <= limit]
        large = sorted(
            (one for one in every if one.memory_nbytes > limit),
            key=lambda one: one.memory_nbytes,
        )
        if not fit:
            least = large[0]
            raise UsageError(
                f"{self.table.name}: no strategy on {ranks} ranks fits into "
                f"{limit:,.0f} bytes of memory a rank; the least is "
                f"{least.memory_nbytes:,} by {least.name}: use more ranks, or a "
                f"smaller batch than {batch}"
            )
        reason = _reason(fit, large, limit)
        return Recommendation(fit[0], reason, tuple(fit), tuple(large))

    def _nobody(self, ranks: int, batch: int, names: Sequence[str] | None) -> str:
        step = self.step(batch)
        why = []
        for name in STRATEGIES if names is None else names:
            for axis, limit in strategy(name).limits_of(step).items():
                why.append(f"{name} {axis} {limit.most} by {limit.reason}")
        return (
            f"{self.table.name}: no strategy uses exactly {ranks} ranks: "
            f"{'; '.join(why) or 'serial is one rank'}"
        )


def _reason(
    fit: Sequence[Projection], large: Sequence[Projection], limit: float
) -> str:
    best = fit[0]
    words = [
        f"{best.name} has the least projected time, {best.step_s * 1e3:.4g} ms a step "
        f"({best.compute_s / best.iterations * 1e3:.4g} ms of computation, "
        f"{best.communication_s / best.iterations * 1e3:.4g} ms of communication)"
    ]
    others = [one for one in fit if one.strategy != best.strategy]
    if others:
        other = others[0]
        times = other.epoch_s / best.epoch_s if best.epoch_s else 1.0
        words.append(f"the next strategy, {other.name}, takes {times:.4g} of its time")
    faster = [one for one in large if one.epoch_s < best.epoch_s]
    if faster:
        first = min(faster, key=lambda one: one.epoch_s)
        words.append(
            f"{first.name} would be faster, {first.step_s * 1e3:.4g} ms, and needs "
            f"{first.memory_nbytes:,} bytes of {limit:,.0f}"
        )
    tight = [
        f"{axis} to {limit.most} by {limit.reason}"
        for axis, limit in best.limits.items()
        if best.ways[axis] == limit.most > 1
    ]
    if tight:
        words.append(f"it cannot grow: {', '.join(tight)}")
    return "; ".join(words)


def _grids(ranks: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of factors within limits."""
    if not most:
        if ranks == 1:
            yield ()
        return
    if len(most) == 1:
        if ranks <= most[0]:
            yield (ranks,)
        return
    for first in range(1, min(ranks, most[0]) + 1):
        if ranks % first == 0:
            for rest in _grids(ranks // first, most[1:]):
                yield first, *rest


def volume(
    name: str, table: LayerTable, processes: int | Sequence[int], **step: Any
) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends in a step, by axis and operation.

    Args:
        name: a key of ``STRATEGIES``.
        table: the network.
        processes: ranks along each axis of the strategy.
        step: fields of ``Step``, ``batch`` among them.

    Raises:
        UsageError: as ``Oracle.project``.
    """
    batch = step.pop("batch")
    oracle = Oracle(table, AlphaBeta(0.0, 0.0), 1, **step)
    found: dict[tuple[str, str], float] = {}
    for one in oracle.project(name, processes, batch=batch).transfers:
        key = one.group.axis, one.coll
        found[key] = found.get(key, 0.0) + one.sent_nbytes
    return found
