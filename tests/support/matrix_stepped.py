# SPDX-License-Identifier: Apache-2.0
"""Runs cases with all ranks in one thread, stepped in an order drawn for each case.

Where a case blocks, one rank's call does, and a second thread steps the others.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
from fake_mpi import FakeMpi
from matrix_cases import FORMS, Go, Side, Trial, nbytes_needed, numbers_of
from matrix_drawing import Way, Where, candidates_of
from matrix_values import Problem

from commrt.comm import core_of
from commrt.local import LocalRanks
from commrt.mpi import library
from commrt.planning import host_plans

Array = np.ndarray[Any, Any]

_MOST_TURNS = 100_000
_DEADLINE_S = 300.0
_SWITCH_S = 2e-5
"""After which Python's lock changes hands: a call that blocks ends when it is done, and
not when the thread that steps the others has had its usual 5 ms."""
_HEAP_NBYTES = 3 << 19
_SYMMETRIC_FROM_NBYTES = 64
"""Symmetric arrays are used in place from here on, so that short ones show it, too."""


class Stepper:
    """Steps ranks until their requests are done, in any order."""

    def __init__(self, ranks: LocalRanks) -> None:
        self._steps = [core_of(comm).world.engine.step for comm in ranks.comms]

    def some(self, rng: random.Random, number: int) -> None:
        """Step some ranks."""
        for step in rng.choices(self._steps, k=number):
            step()

    def finish(
        self,
        requests: Mapping[Any, Any],
        rng: random.Random,
        deadline_s: float | None = None,
    ) -> None:
        """Step ranks until all requests are done; a key is a rank, or begins with it.

        With a deadline another thread has a part in it, and is let through.
        """
        pending = [key for key, one in requests.items() if not one.done]
        end = 0.0 if deadline_s is None else time.monotonic() + deadline_s
        turns = 0
        while pending:
            some = rng.choices(pending, k=min(len(pending), 32))
            ranks = [key if isinstance(key, int) else key[0] for key in some]
            if rng.random() < 0.1:
                ranks += rng.choices(ranks) * 30
            moved = [self._steps[rank]() for rank in ranks * 2]
            pending = [key for key in pending if not requests[key].done]
            turns += 1
            late = turns > _MOST_TURNS
            if deadline_s is not None:
                if not any(moved):
                    os.sched_yield()
                late = turns % 1000 == 0 and time.monotonic() > end
            assert not late, f"not done after {turns} turns: {pending[:9]}"


class _Second:
    """A second thread, which runs one function at a time."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while (function := self._todo.get()) is not None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  raised by join
                self._done.put(error)
            else:
                self._done.put(None)

    def start(self, function: Callable[[], None]) -> None:
        self._todo.put(function)

    def join(self) -> None:
        error = self._done.get(timeout=2 * _DEADLINE_S)
        if error is not None:
            raise error

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join(_DEADLINE_S)


class Stepped:
    """All ranks of some nodes, their communicators, and memory for their arrays."""

    def __init__(self, size: int, nodes: str = "") -> None:
        self.size, self.nodes = size, nodes
        self.compared = 0
        """Cases whose results were compared on every rank."""
        self._ranks = _ranks(size, nodes)
        self._stepper = Stepper(self._ranks)
        self._second = _Second()
        self._comms: dict[tuple[bool, bool], Sequence[Any]] = {
            (False, False): self._ranks.comms
        }
        self._share_costs(self._ranks.comms)
        self._plain: list[Array] = []
        self._heaps: dict[bool, list[Array]] = {}
        self._problem: tuple[Any, Problem] | None = None

    def where(self) -> Where:
        """Return these ranks, for drawing cases."""
        return Where(self.size, self.nodes, lru_cache(maxsize=None)(self._allowed))

    def _allowed(self, coll: str, kind: str, dtype: str, root: int) -> list[Way]:
        comm = self._communicators(kind == "deterministic", False)[0]
        return candidates_of(comm, coll, kind, dtype, root)

    # -- what trials use, again and again ------------------------------------------

    def _share_costs(self, comms: Sequence[Any]) -> None:
        """Let the ranks share what the model says, a pure function of equal facts.

        Each still chooses for itself.
        """
        keep = lru_cache(maxsize=4096)
        first = core_of(comms[0]).selection.offers
        cost, floor = keep(first.predicted_us), keep(first.floor_us)
        for comm in comms:
            offers = core_of(comm).selection.offers
            offers.predicted_us, offers.floor_us = cost, floor

    def _communicators(self, deterministic: bool, heap: bool) -> Sequence[Any]:
        key = deterministic, heap
        if key not in self._comms:
            with _pretended_handles(bool(self.nodes)):
                made = self._ranks.each(lambda c: c.dup(deterministic=deterministic))
            self._comms[key] = made
            self._share_costs(made)
            if heap:
                self._heaps[deterministic] = self._ranks.each(
                    lambda comm: made[comm.rank].empty(_HEAP_NBYTES, "uint8")
                )
        return self._comms[key]

    def _memory(self, trial: Trial, problem: Problem) -> Iterator[tuple[Array, Array]]:
        """Yield two pieces of memory, or the same one twice, for each rank."""
        needed = nbytes_needed(problem)
        if not self._plain or self._plain[0].size < needed:
            self._plain = [np.empty(needed, np.uint8) for _ in range(self.size)]
        heap = self._plain
        if trial.memory != "plain" and needed <= _HEAP_NBYTES:
            heap = self._heaps[trial.kind == "deterministic"]
        for rank, (one, other) in enumerate(zip(heap, self._plain, strict=True)):
            if trial.memory != "mixed":
                yield one, one
            else:
                yield (one, other) if rank % 2 else (other, one)

    def problem(self, trial: Trial) -> Problem:
        """Return what the trial shares with the one before, or its own."""
        needs = trial.needs()
        if self._problem is None or self._problem[0] != needs:
            self._problem = needs, Problem(trial.case, trial.kind)
        return self._problem[1]

    # -- one trial -----------------------------------------------------------------

    def run(self, trial: Trial) -> list[str]:
        """Run one trial; return what was wrong, by rank."""
        heap = trial.memory != "plain"
        comms = self._communicators(trial.kind == "deterministic", heap)
        problem, form = self.problem(trial), FORMS[trial.form]
        with _short_symmetric_arrays(heap):
            sides = [
                Side(problem, trial, rank, *memory)
                for rank, memory in enumerate(self._memory(trial, problem))
            ]
            goes = [
                form.prepare(comm, side)
                for comm, side in zip(comms, sides, strict=True)
            ]
            wrong: list[str] = []
            for turn, blocks in enumerate(form.blocks):
                rng = numbers_of(trial, turn)
                drawn = problem.draw(rng)
                for side in sides:
                    side.load(drawn)
                results = (self._block if blocks else self._start)(goes, rng, trial)
                verdicts = [
                    side.verdict(result)
                    for side, result in zip(sides, results, strict=True)
                ]
                wrong += [f"rank {r}: {v}" for r, v in enumerate(verdicts) if v]
        self.compared += 1
        return wrong

    def _start(self, goes: Sequence[Go], rng: random.Random, trial: Trial) -> list[Any]:
        requests: dict[int, Any] = {}
        for rank in rng.sample(range(self.size), self.size):
            if rng.random() < 0.3:
                self._stepper.some(rng, 2)
            if trial.case.coll == "barrier":
                early = [r for r, one in requests.items() if one.done]
                assert not early, f"{early} passed a barrier before rank {rank} came"
            requests[rank] = goes[rank](True)
        self._stepper.finish(requests, rng)
        return [requests[rank].wait() for rank in range(self.size)]

    def _block(self, goes: Sequence[Go], rng: random.Random, trial: Trial) -> list[Any]:
        """Let one rank's call block, while the second thread steps the others."""
        if self.size == 1:
            return [goes[0](False)]
        order = rng.sample(range(self.size), self.size)
        blocked = order.pop()
        late = rng.choice((0, 0, 1, len(order)))
        requests = {rank: goes[rank](True) for rank in order[late:]}

        def others() -> None:
            requests.update({rank: goes[rank](True) for rank in order[:late]})
            self._stepper.finish(requests, rng, _DEADLINE_S)

        self._second.start(others)
        try:
            result = goes[blocked](False)
        finally:
            self._second.join()
        done = {rank: one.wait() for rank, one in requests.items()}
        done[blocked] = result
        return [done[rank] for rank in range(self.size)]

    # -- the end -------------------------------------------------------------------

    def __enter__(self) -> Stepped:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._second.close()
        sys.setswitchinterval(self._interval)
        if error is None:
            for comms in list(self._comms.values())[1:]:
                for comm in comms:
                    comm.free()
            self._ranks.free()


def _ranks(size: int, nodes: str) -> LocalRanks:
    if not nodes:
        return LocalRanks(size)
    numbers = iter(range(size))
    lists = [[next(numbers) for _ in range(int(n))] for n in nodes.split(",")]
    return FakeMpi().ranks(lists)


@contextmanager
def _pretended_handles(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with mock.patch.object(library, "handle", lambda comm: comm):
        yield


@contextmanager
def _short_symmetric_arrays(wanted: bool) -> Iterator[None]:
    before = host_plans.SYMMETRIC_NBYTES
    if wanted:
        host_plans.SYMMETRIC_NBYTES = _SYMMETRIC_FROM_NBYTES
    try:
        yield
    finally:
        host_plans.SYMMETRIC_NBYTES = before
