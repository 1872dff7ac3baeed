# SPDX-License-Identifier: Apache-2.0
"""A plan for each block's saved tensors: keep them, swap them, or recompute them.

Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity
with KARMA" (SC'20): swap what comes first, keep what comes last, as the capacity
allows, and recompute where a transfer would stall the backward pass. Here every choice
is judged by the time of the whole step (``timeline``). A search begins with these rules
and with pure plans, and changes one or two blocks at a time while that gains. Up to 12
blocks, all choices follow: block after block, without those whose first blocks alone
take longer than the best plan so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from commrt.errors import UsageError, shown
from commrt.layers.out_of_core.costs import MODES, BlockCost, Link, Mode, check_costs
from commrt.layers.out_of_core.timeline import (
    Timeline,
    least_step_s,
    prefetch_begins,
    simulate,
)

__all__ = ["POLICIES", "Plan", "plan"]

POLICIES = ("auto", "keep", "swap", "recompute")
"""Search, or do the same with all blocks."""

_EXACT_BLOCKS = 12
_ROUNDING = 1e-12
Modes = tuple[Mode, ...]


@dataclass(frozen=True)
class Plan:
    """A mode for each block, and the step that is expected of it."""

    modes: Modes
    """For each block ``keep``, ``swap`` or ``recompute``."""
    prefetch: tuple[int | None, ...]
    """For each swapped block: the block before whose backward pass it is asked for."""
    costs: tuple[BlockCost, ...]
    budget_bytes: int
    link: Link
    step_s: float
    """Of forward and backward pass."""
    stall_s: float
    """In which the computation waits."""
    recompute_s: float
    """Of second forward passes."""
    peak_nbytes: int
    """Most bytes near."""

    @property
    def in_core_s(self) -> float:
        """Seconds of a step whose tensors all stay near."""
        return sum(cost.forward_s + cost.backward_s for cost in self.costs)

    @property
    def in_core_nbytes(self) -> int:
        """Most bytes near in such a step."""
        return max(
            sum(each.saved_nbytes for each in self.costs[: n + 1]) + cost.output_nbytes
            for n, cost in enumerate(self.costs)
        )

    def __str__(self) -> str:
        """Return a table of blocks, and the expected step."""
        lines = [f"{'block':>5}  {'mode':<9}  {'saved MB':>9}  {'asked for':>9}"]
        for number, (mode, cost) in enumerate(zip(self.modes, self.costs, strict=True)):
            begin = self.prefetch[number]
            asked = "" if begin is None else f"{begin}"
            lines.append(
                f"{number:>5}  {mode:<9}  {cost.saved_nbytes / 1e6:>9.3f}  {asked:>9}"
            )
        lines.append(
            f"step {self.step_s * 1e3:.3f} ms: {self.in_core_s * 1e3:.3f} ms in core, "
            f"{self.recompute_s * 1e3:.3f} ms recomputing, "
            f"{self.stall_s * 1e3:.3f} ms waiting; "
            f"{self.peak_nbytes / 1e6:.3f} of {self.budget_bytes / 1e6:.3f} MB near"
        )
        return "\n".join(lines)


def plan(
    costs: Sequence[BlockCost],
    budget_bytes: int,
    link: Link,
    *,
    policy: str | Sequence[Mode] = "auto",
) -> Plan:
    """Return the plan with the shortest step under a budget.

        chosen = plan(costs, 2 << 30, Link(12e9, 12e9))
        print(chosen)

    Args:
        costs: of the blocks, in the order of the forward pass.
        budget_bytes: most bytes of saved tensors near at any time.
        link: to far memory.
        policy: ``auto`` searches; ``keep``, ``swap`` and ``recompute`` treat all blocks
            alike; a mode for each block is taken as it is.

    A search's plan is no slower than pure swapping, pure recomputation and keeping
    all, where these fit. Up to 12 blocks it is the best of all. Raises UsageError for a
    budget that is too small for a block, or for the modes that are given.
    """
    check_costs(costs, budget_bytes)
    judge = _Judge(tuple(costs), budget_bytes, link)
    if policy != "auto":
        return judge.plan_of(_fixed(policy, len(costs)))
    best = _search(judge)
    if len(costs) <= _EXACT_BLOCKS:
        best = _best_of_all(judge, best)
    if best is None:
        raise judge.refusal()
    # Of a block that saves nothing, there is nothing to move.
    return judge.plan_of(
        tuple(
            "keep" if mode == "swap" and not cost.saved_nbytes else mode
            for mode, cost in zip(best, judge.costs, strict=True)
        )
    )


def _fixed(policy: str | Sequence[Mode], count: int) -> Modes:
    """Return the modes that a policy names."""
    if isinstance(policy, str):
        for mode in MODES:
            if policy == mode:
                return (mode,) * count
        raise UsageError(
            f"plan: policy={shown(policy)}: expected one of {', '.join(POLICIES)}, or "
            f"a mode for each block"
        )
    modes = tuple(policy)
    if len(modes) != count or not {*modes} <= {*MODES}:
        raise UsageError(
            f"plan: policy={shown(policy)}: expected a mode for each of {count} "
            f"blocks, of {', '.join(MODES)}"
        )
    return modes


class _Judge:
    """Times of choices, each simulated once."""

    def __init__(
        self, costs: tuple[BlockCost, ...], budget_bytes: int, link: Link
    ) -> None:
        self.costs = costs
        self._budget_bytes, self._link = budget_bytes, link
        self._seen: dict[Modes, tuple[float, int] | None] = {}

    def key(self, modes: Modes) -> tuple[float, int] | None:
        """Return the time and the bytes moved, the less the better; None: no room."""
        if modes not in self._seen:
            found = self._simulated(modes)
            self._seen[modes] = (
                None if found is None else (found.step_s, self._moved_nbytes(modes))
            )
        return self._seen[modes]

    def least_key(self, modes: Modes) -> tuple[float, int] | None:
        """Return what no plan is below that begins with these modes; None: no room."""
        least_s = least_step_s(self.costs, modes, self._budget_bytes, self._link)
        return None if least_s is None else (least_s, self._moved_nbytes(modes))

    def plan_of(self, modes: Modes) -> Plan:
        """Return the plan of these modes; raise UsageError if there is no room."""
        found = self._simulated(modes)
        prefetch = prefetch_begins(self.costs, modes, self._budget_bytes)
        if found is None or prefetch is None:
            raise self.refusal(modes)
        return Plan(
            *(modes, tuple(prefetch), self.costs, self._budget_bytes, self._link),
            *found,
        )

    def refusal(self, modes: Modes | None = None) -> UsageError:
        """Return the error for a budget that is too small."""
        alone = [
            min(
                max(cost.forward_nbytes(mode), cost.backward_nbytes(mode))
                for mode in self.modes_of(cost)
            )
            for cost in self.costs
        ]
        largest = max(range(len(alone)), key=alone.__getitem__)
        if alone[largest] > self._budget_bytes:
            return UsageError(
                f"plan: budget_bytes={self._budget_bytes} is less than block {largest} "
                f"needs alone, {alone[largest]} bytes; give more, cut the block into "
                f"several, or take smaller batches"
            )
        which = "any choice of modes" if modes is None else f"modes {', '.join(modes)}"
        if modes is not None:
            never = [
                number
                for number, mode in enumerate(modes)
                if mode not in self.modes_of(self.costs[number])
            ]
            if never:
                return UsageError(
                    f"plan: block {never[0]} cannot be recomputed, since it changes "
                    f"its input in place; keep or swap it, or set inplace=False"
                )
        return UsageError(
            f"plan: budget_bytes={self._budget_bytes} is too small for {which}, though "
            f"each block fits alone; give more, or policy='auto'"
        )

    @staticmethod
    def modes_of(cost: BlockCost) -> tuple[Mode, ...]:
        """Return the modes that a block can have."""
        return MODES if cost.can_recompute else MODES[:2]

    def _moved_nbytes(self, modes: Modes) -> int:
        """Return the bytes that the first blocks swap."""
        return sum(
            cost.saved_nbytes
            for cost, mode in zip(self.costs, modes, strict=False)
            if mode == "swap"
        )

    def _simulated(self, modes: Modes) -> Timeline | None:
        for cost, mode in zip(self.costs, modes, strict=True):
            if mode not in self.modes_of(cost):
                return None
        return simulate(self.costs, modes, self._budget_bytes, self._link)


def _best_of_all(judge: _Judge, best: Modes | None) -> Modes | None:
    """Return the best of all choices; ``best`` is a good one, if one is known."""
    best_key = None if best is None else judge.key(best)
    begun: list[Modes] = [()]
    while begun:
        modes = begun.pop()
        least = judge.least_key(modes)
        if least is None or (best_key is not None and _is_no_less(least, best_key)):
            continue
        if len(modes) < len(judge.costs):
            allowed = judge.modes_of(judge.costs[len(modes)])
            begun += [(*modes, mode) for mode in reversed(allowed)]
            continue
        key = judge.key(modes)
        if key is not None and (best_key is None or key < best_key):
            best, best_key = modes, key
    return best


def _is_no_less(least: tuple[float, int], best: tuple[float, int]) -> bool:
    """Return whether a bound is not below a key, within the rounding of times."""
    if abs(least[0] - best[0]) <= _ROUNDING * best[0]:
        return least[1] >= best[1]
    return least[0] > best[0]


def _search(judge: _Judge) -> Modes | None:
    """Return the best choice that a local search finds from several first ones."""
    best: Modes | None = None
    best_key: tuple[float, int] | None = None
    for first in _first_choices(judge):
        found = _climbed(judge, first)
        key = None if found is None else judge.key(found)
        if key is not None and (best_key is None or key < best_key):
            best, best_key = found, key
    return best


def _first_choices(judge: _Judge) -> Iterator[Modes]:
    """Yield pure plans, and those that keep as many of the last blocks as fit."""
    count = len(judge.costs)

    def allowed(wanted: Callable[[int], Mode]) -> Modes:
        return tuple(
            mode if (mode := wanted(n)) in judge.modes_of(judge.costs[n]) else "swap"
            for n in range(count)
        )

    yield allowed(lambda n: "keep")
    for early in MODES[1:]:
        fitting: Modes | None = None
        for first_kept in reversed(range(count + 1)):
            modes = allowed(partial(_early, early, first_kept))
            if judge.key(modes) is not None:
                fitting = modes
            if first_kept == count:
                yield modes
        if fitting is not None:
            yield fitting


def _early(mode: Mode, first_kept: int, block: int) -> Mode:
    """Return the mode of the first blocks, and ``keep`` for the others."""
    return mode if block < first_kept else "keep"


def _climbed(judge: _Judge, modes: Modes) -> Modes | None:
    """Return the end of a search that changes one block, or two neighbours, a time."""
    key = judge.key(modes)
    if key is None:
        return None
    gains = True
    while gains:
        gains = False
        for other in _neighbours(judge, modes):
            found = judge.key(other)
            if found is not None and found < key:
                modes, key, gains = other, found, True
                break
    return modes


def _neighbours(judge: _Judge, modes: Modes) -> Iterator[Modes]:
    for place in range(len(modes)):
        for mode in judge.modes_of(judge.costs[place]):
            if mode != modes[place]:
                yield (*modes[:place], mode, *modes[place + 1 :])
    for place in range(len(modes) - 1):
        pair = modes[place], modes[place + 1]
        if pair[0] != pair[1]:
            swapped = (*modes[:place], pair[1], pair[0], *modes[place + 2 :])
            if judge.key(swapped) is not None:
                yield swapped
