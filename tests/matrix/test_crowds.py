# SPDX-License-Identifier: Apache-2.0
"""Hundreds of operations in flight at once, on several communicators, and in threads.

Ranks start the operations of one communicator in one order, but each rank mixes the
communicators in an order of its own, and waits for what it started in yet another one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matrix_cases import FORMS, Side, Trial, nbytes_needed, numbers_of
from matrix_drawing import Drawing, Where, candidates_of
from matrix_stepped import Stepper
from matrix_values import Problem

from commrt.comm import core_of
from commrt.local import LocalRanks, run

Tally = Callable[[str, int], None]
IN_FLIGHT = 300
"""Operations of each communicator."""


def draw(comm: Any, seed: str, number: int, forms: tuple[str, ...]) -> list[Trial]:
    """Return trials for the ranks of a communicator, in one order for all of them."""
    where = Where(comm.size, "", lambda *what: candidates_of(comm, *what))
    drawing = Drawing(where, number, seed, forms=forms, heap=False)
    found = [
        trial
        for trials in drawing.visits()
        for trial in trials
        if trial.kind != "deterministic" and trial.case.count <= 5000
    ]
    random.Random(seed).shuffle(found)
    return found


class Part:
    """One rank's part of the trials of one communicator."""

    def __init__(self, comm: Any, trials: list[Trial]) -> None:
        self.comm = comm
        self.todo = trials[::-1]
        self.started: list[tuple[Any, Side, Trial]] = []
        self.compared = 0

    def start_one(self) -> None:
        """Start the next trial, with numbers and memory of its own."""
        trial = self.todo.pop()
        problem = Problem(trial.case, trial.kind)
        memory = np.empty(nbytes_needed(problem), np.uint8)
        side = Side(problem, trial, self.comm.rank, memory, memory)
        go = FORMS[trial.form].prepare(self.comm, side)
        side.load(problem.draw(numbers_of(trial, 0)))
        if trial.form == "blocking":
            self._compare(side, go(False), trial)
        else:
            self.started.append((go(True), side, trial))

    def end_one(self, rng: random.Random) -> None:
        """Wait for any of what was started."""
        request, side, trial = self.started.pop(rng.randrange(len(self.started)))
        self._compare(side, request.wait(), trial)

    def _compare(self, side: Side, result: Any, trial: Trial) -> None:
        verdict = side.verdict(result)
        assert verdict is None, f"rank {self.comm.rank}: {verdict}; {trial.line()}"
        self.compared += 1


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_hundreds_in_flight_on_several_communicators(
    size: int, seed: int, tally: Tally
) -> None:
    rng = random.Random(f"crowd {size} {seed}")
    forms = ("nonblocking", "persistent")
    with LocalRanks(size) as ranks:
        groups = [
            ranks.comms,
            ranks.each(lambda comm: comm.dup()),
            ranks.each(lambda comm: comm.split(comm.rank % 2, key=-comm.rank)),
        ]
        drawn: dict[tuple[int, int], list[Trial]] = {}
        parts: list[list[Part]] = [[] for _ in range(size)]
        for number, comms in enumerate(groups):
            for rank, comm in enumerate(comms):
                key = number, rank % 2 if number == 2 else 0
                text = f"{seed} {key}"
                if key not in drawn:
                    drawn[key] = draw(comm, text, IN_FLIGHT, forms)
                parts[rank].append(Part(comm, list(drawn[key])))
        stepper = Stepper(ranks)
        while any(part.todo for row in parts for part in row):
            row = parts[rng.randrange(size)]
            part = rng.choice(row)
            for _ in range(min(len(part.todo), rng.choice((1, 1, 5)))):
                part.start_one()
            stepper.some(rng, 2)
        for rank, row in enumerate(parts):
            assert sum(len(part.started) for part in row) > 500, rank
        flat = {
            (rank, at): one[0]
            for rank, row in enumerate(parts)
            for at, one in enumerate(one for part in row for one in part.started)
        }
        stepper.finish(flat, rng)
        for row in parts:
            for part in row:
                while part.started:
                    part.end_one(rng)
        tally("in flight at once", sum(part.compared for part in parts[0]))
        for comms in groups[1:]:
            for comm in comms:
                comm.free()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_of_each_rank_with_communicators_of_their_own(
    size: int, seed: int, tally: Tally
) -> None:
    forms = ("blocking", "nonblocking")

    def rank_main(comm: Any) -> int:
        comms = [comm.dup() for _ in range(3)]
        parts = [
            Part(each, draw(each, f"{seed} {number}", 100, forms))
            for number, each in enumerate(comms)
        ]
        errors: list[BaseException] = []

        def work(part: Part) -> None:
            rng = random.Random(f"{seed} {comm.rank}")
            try:
                while part.todo:
                    part.start_one()
                    while part.started and rng.random() < 0.4:
                        part.end_one(rng)
                while part.started:
                    part.end_one(rng)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                core_of(part.comm).give_up(str(error))

        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for each in comms:
            each.free()
        return sum(part.compared for part in parts)

    compared = run(size, rank_main, timeout_s=300)
    assert min(compared) == max(compared) > 200
    tally("threads of ranks", compared[0])
