# SPDX-License-Identifier: Apache-2.0
"""A training step on three lanes: computation, transfers out, transfers in.

The rules are those by which ``OutOfCore`` runs, so that a plan's times are predictions:

- A block's forward pass begins once its bytes fit into the budget beside all that is
  near. Tensors on their way out count as near until the last of their block has left.
- A swapped block's tensors leave after its forward pass, in the order of blocks.
- When a block's backward pass is to begin, its own tensors are asked for, then those of
  earlier blocks, as far ahead as the budget allows. One that is still on its way out
  stays. The pass begins when the block's tensors are near, or are recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from commrt.layers.out_of_core.costs import BlockCost, Link, Mode

__all__ = ["Timeline", "least_step_s", "prefetch_begins", "simulate"]


class Timeline(NamedTuple):
    """Times and bytes of a step."""

    step_s: float
    """Of forward and backward pass."""
    stall_s: float
    """In which the computation waits for transfers or for memory."""
    recompute_s: float
    """Of forward passes that are done a second time."""
    peak_nbytes: int
    """Most bytes near."""


def prefetch_begins(
    costs: Sequence[BlockCost], modes: Sequence[Mode], budget_bytes: int
) -> list[int | None] | None:
    """Return when each swapped block is asked for: before which block's backward pass.

    A block's own number: there is no room for it earlier. None in place of a number:
    nothing is swapped. None in place of the list: the budget is too small.
    """
    between = 0
    needs = []
    for cost, mode in zip(costs, modes, strict=True):
        if between + cost.forward_nbytes(mode) > budget_bytes:
            return None
        needs.append(between + cost.backward_nbytes(mode))
        between += cost.between_nbytes(mode)
    if max(needs) > budget_bytes:
        return None
    found: list[int | None] = [None] * len(costs)
    first = len(costs) - 1
    for block in reversed(range(len(costs))):
        nbytes = costs[block].saved_nbytes
        if modes[block] != "swap" or not nbytes:
            continue
        begin = block
        while begin < first and needs[begin + 1] + nbytes <= budget_bytes:
            begin += 1
            needs[begin] += nbytes
        # Blocks come back in their order, so none is asked for before a later one.
        found[block] = first = begin
    return found


def simulate(
    costs: Sequence[BlockCost], modes: Sequence[Mode], budget_bytes: int, link: Link
) -> Timeline | None:
    """Return the times of a step; None if the budget is too small for these modes."""
    begins = prefetch_begins(costs, modes, budget_bytes)
    if begins is None:
        return None
    step = _Step(costs, modes, budget_bytes, link)
    for block in range(len(costs)):
        step.forward(block)
    for block in reversed(range(len(costs))):
        step.backward(block, begins)
    recompute_s = sum(
        cost.replay_s
        for cost, mode in zip(costs, modes, strict=True)
        if mode == "recompute"
    )
    return Timeline(step.now, step.stall_s, recompute_s, step.peak)


def least_step_s(
    costs: Sequence[BlockCost], modes: Sequence[Mode], budget_bytes: int, link: Link
) -> float | None:
    """Return a time that every step takes whose first blocks have these modes.

    All that later blocks do is left out, but for their computation. None: the budget is
    too small for the first blocks alone.
    """
    begun = len(modes)
    if begun and prefetch_begins(costs[:begun], modes, budget_bytes) is None:
        return None
    step = _Step(costs, modes, budget_bytes, link)
    for block in range(begun):
        step.forward(block)
    arrival = step.now + sum(cost.forward_s for cost in costs[begun:])
    gone = {
        block
        for block in range(begun)
        if modes[block] == "swap" and step.has_left(block, arrival)
    }
    now = arrival + sum(cost.backward_s for cost in costs[begun:])
    for block in reversed(range(begun)):
        cost = costs[block]
        if block in gone and cost.saved_nbytes:
            arrival += link.in_s(cost)
            now = max(now, arrival)
        now += cost.backward_s + (cost.replay_s if modes[block] == "recompute" else 0.0)
    return now


class _Leaving(NamedTuple):
    """A block on its way out."""

    block: int
    end: float
    nbytes: int


class _Step:
    """The state of the lanes and of near memory."""

    def __init__(
        self,
        costs: Sequence[BlockCost],
        modes: Sequence[Mode],
        budget_bytes: int,
        link: Link,
    ) -> None:
        self.now = self.stall_s = 0.0
        self.peak = 0
        self._costs, self._modes = costs, modes
        self._budget, self._link = budget_bytes, link
        self._near = 0  # bytes, without those that leave
        self._leaving: deque[_Leaving] = deque()
        self._leaving_nbytes = 0
        self._out_free = self._in_free = 0.0
        self._arrivals: dict[int, float] = {}

    def forward(self, block: int) -> None:
        """Do a block's forward pass, and let its tensors leave."""
        cost, mode = self._costs[block], self._modes[block]
        self._await_room(cost.forward_nbytes(mode))
        self._see_peak(cost.forward_nbytes(mode))
        self.now += cost.forward_s
        self._near += cost.between_nbytes(mode)
        if mode == "swap" and cost.saved_nbytes:
            begin = max(self._out_free, self.now)
            self._out_free = begin + self._link.out_s(cost)
            self._leaving.append(_Leaving(block, self._out_free, cost.saved_nbytes))
            self._leaving_nbytes += cost.saved_nbytes

    def backward(self, block: int, begins: Sequence[int | None]) -> None:
        """Ask for tensors, wait for the block's own, and do its backward pass."""
        cost, mode = self._costs[block], self._modes[block]
        kept = cost.backward_nbytes(mode)
        if mode != "recompute":
            self._near += cost.output_nbytes  # the next block's, or the program's
        for other in range(block, -1, -1):
            begin = begins[other]
            if begin is None or other in self._arrivals:
                continue
            if begin < block or not self._ask_for(other, is_needed=other == block):
                break
        if block in self._arrivals:
            self._wait_until(self._arrivals[block])
        if mode == "recompute":
            more = kept - cost.resident_nbytes
            self._await_room(more)
            self._near += more
            self.now += cost.replay_s
        self._see_peak(0)
        self.now += cost.backward_s
        self._near -= kept

    def has_left(self, block: int, then: float) -> bool:
        """Return whether a block that was swapped has left at a time."""
        return all(each.block != block or each.end <= then for each in self._leaving)

    def _ask_for(self, block: int, *, is_needed: bool) -> bool:
        """Start a block's transfer in; return False if there is no room yet."""
        self._end_transfers()
        cost = self._costs[block]
        for each in self._leaving:
            if each.block == block:
                self._leaving.remove(each)
                self._leaving_nbytes -= each.nbytes
                self._near += each.nbytes
                self._arrivals[block] = each.end
                return True
        if is_needed:
            self._await_room(cost.saved_nbytes)
        elif self._near + self._leaving_nbytes + cost.saved_nbytes > self._budget:
            return False
        self._near += cost.saved_nbytes
        self._see_peak(0)
        self._in_free = max(self._in_free, self.now) + self._link.in_s(cost)
        self._arrivals[block] = self._in_free
        return True

    def _await_room(self, nbytes: int) -> None:
        self._end_transfers()
        while self._near + self._leaving_nbytes + nbytes > self._budget:
            if not self._leaving:
                break  # all else that is near belongs to the plan, which fits
            self._wait_until(self._leaving[0].end)
            self._end_transfers()

    def _wait_until(self, then: float) -> None:
        self.stall_s += max(0.0, then - self.now)
        self.now = max(self.now, then)

    def _end_transfers(self) -> None:
        while self._leaving and self._leaving[0].end <= self.now:
            self._leaving_nbytes -= self._leaving.popleft().nbytes

    def _see_peak(self, more: int) -> None:
        self._end_transfers()
        self.peak = max(self.peak, self._near + self._leaving_nbytes + more)
