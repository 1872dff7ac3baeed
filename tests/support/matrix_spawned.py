# SPDX-License-Identifier: Apache-2.0
"""Runs cases on one rank of several processes, each of which draws the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from matrix_cases import FORMS, MESSAGES, Side, Trial, nbytes_needed, numbers_of
from matrix_drawing import Way, Where, candidates_of
from matrix_values import Problem

Array = np.ndarray[Any, Any]

_HEAP_NBYTES = 1 << 20
NATIVE = "mpi/native"


class Spawned:
    """This rank's communicators and memory."""

    def __init__(self, comm: Any, nodes: str = "") -> None:
        self.comm, self.nodes = comm, nodes
        self.compared = 0
        """Cases whose results were compared on this rank."""
        self.wrong: list[str] = []
        self._comms: dict[tuple[bool, bool], Any] = {(False, False): comm}
        self._heaps: dict[bool, Array] = {}
        self._given = 0
        self._pending: list[tuple[Any, Side, Trial]] = []
        self._problem: tuple[Any, Problem] | None = None

    def where(self) -> Where:
        """Return these ranks, for drawing cases."""
        size, keep = self.comm.size, lru_cache(maxsize=None)
        return Where(size, self.nodes, keep(self._allowed), keep(self._also))

    def _allowed(self, coll: str, kind: str, dtype: str, root: int) -> list[Way]:
        comm = self._communicator(kind == "deterministic", False)
        return candidates_of(comm, coll, kind, dtype, root)

    def _also(self, coll: str, dtype: str, op: str) -> list[Way]:
        """Return the library's own collective, where it can do this."""
        if coll in MESSAGES:
            return []
        found = self.comm.candidates(coll, 4096, dtype=dtype, op=op)
        return [(each.name, {}) for each in found if each.name == NATIVE]

    def _communicator(self, deterministic: bool, heap: bool) -> Any:
        key = deterministic, heap
        if key not in self._comms:
            self._comms[key] = self.comm.dup(deterministic=deterministic)
            if heap:
                made = self._comms[key].empty(_HEAP_NBYTES, "uint8")
                self._heaps[deterministic] = made
        return self._comms[key]

    def run(self, trials: Iterable[Trial]) -> None:
        """Run the trials of a visit; what does not block is waited for at its end."""
        self._given = 0
        rng = random.Random(self.comm.rank)
        for trial in trials:
            self._run(trial)
        rng.shuffle(self._pending)
        while self._pending:
            request, side, trial = self._pending.pop()
            self._compare([side.verdict(request.wait())], trial)

    def _run(self, trial: Trial) -> None:
        comm = self._communicator(
            trial.kind == "deterministic", trial.memory != "plain"
        )
        problem, form = self._of(trial), FORMS[trial.form]
        side = Side(problem, trial, comm.rank, *self._memory(trial, problem))
        go = form.prepare(comm, side)
        verdicts: list[str | None] = []
        for turn, blocks in enumerate(form.blocks):
            side.load(problem.draw(numbers_of(trial, turn)))
            if blocks:
                verdicts.append(side.verdict(go(False)))
            elif len(form.blocks) == 1:
                self._pending.append((go(True), side, trial))
            else:
                verdicts.append(side.verdict(go(True).wait()))
        if verdicts:
            self._compare(verdicts, trial)

    def _compare(self, verdicts: list[str | None], trial: Trial) -> None:
        self.compared += 1
        self.wrong += [
            f"rank {self.comm.rank}: {verdict}; {trial.line()}"
            for verdict in verdicts
            if verdict
        ]

    def _of(self, trial: Trial) -> Problem:
        needs = trial.needs()
        if self._problem is None or self._problem[0] != needs:
            self._problem = needs, Problem(trial.case, trial.kind)
        return self._problem[1]

    def _memory(self, trial: Trial, problem: Problem) -> tuple[Array, Array]:
        """Return memory that no other trial of this visit has."""
        needed = nbytes_needed(problem)
        plain = np.empty(needed, np.uint8)
        end = self._given + needed
        if trial.memory == "plain" or end > _HEAP_NBYTES:
            return plain, plain
        heap = self._heaps[trial.kind == "deterministic"][self._given : end]
        self._given = -(-end // 64) * 64
        if trial.memory == "heap":
            return heap, heap
        return (heap, plain) if self.comm.rank % 2 else (plain, heap)


def on_each_rank(
    comm: Any, nodes: str, visits: Callable[[Where], Iterable[list[Trial]]]
) -> list[Any]:
    """Run what ``visits`` draws; return what was wrong, and how many were compared."""
    ranks = Spawned(comm, nodes)
    for trials in visits(ranks.where()):
        ranks.run(trials)
        if len(ranks.wrong) > 5:
            break
    return [ranks.wrong, ranks.compared]
