# SPDX-License-Identifier: Apache-2.0
"""The matrix of all operations, forms and algorithms, all ranks in one thread.

A run draws 25,000 cases, others each time; ``--full`` draws 500,000. Each is compared
on every rank, with all of the memory around. A failure says how to repeat it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from matrix_cases import FORMS, Side, nbytes_needed, read
from matrix_drawing import Drawing, Where, all_algorithms
from matrix_place import PLACES, must, number_of, run_all
from matrix_stepped import Stepped
from matrix_values import Problem
from sampling import CASES

from commrt.vocabulary.operations import COLLECTIVES

Tally = Callable[[str, int], None]


@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_every_result_is_the_one_of_numpy(
    seed: int, num_cases: int, pytestconfig: pytest.Config, tally: Tally
) -> None:
    wrong: list[str] = []
    compared = 0
    plain = bool(pytestconfig.getoption("--plain-kernels"))
    for found in run_all(str(seed), num_cases, plain):
        wrong += found["wrong"]
        compared += found["compared"]
    tally("all ranks stepped from one thread", compared)
    assert not wrong, "\n".join(wrong)
    assert compared > 0.99 * num_cases


@pytest.mark.one_case
def test_one_case(case_line: str) -> None:
    trial = read(case_line)
    with Stepped(trial.case.size, trial.nodes) as ranks:
        assert ranks.run(trial) == []


def test_a_sample_has_every_algorithm_in_every_form(seed: int) -> None:
    shapes: set[tuple[str, str, str]] = set()
    lines: set[str] = set()
    drawn = 0
    for name, place in PLACES.items():
        where, number = Where(place.size, place.nodes), number_of(name, CASES)
        for trials in Drawing(where, number, str(seed), must(name, str(seed))).visits():
            drawn += len(trials)
            shapes.update(trial.shape for trial in trials)
            lines.update(trial.line() for trial in trials)
    assert drawn == len(lines) > 0.99 * CASES
    wanted = {
        (coll, name, form)
        for coll, name in {*all_algorithms(), *((c, "automatic") for c in COLLECTIVES)}
        for form in FORMS
    }
    assert wanted - shapes == set()
    for coll in ("allreduce", "allgather", "bcast", "gather", "reduce_scatter"):
        assert {(coll, "two_level", form) for form in FORMS} <= shapes


def test_the_same_seed_draws_the_same(seed: int) -> None:
    def lines(text: str) -> list[str]:
        drawing = Drawing(Where(3), 200, text)
        return [trial.line() for trials in drawing.visits() for trial in trials]

    first = lines(f"{seed}")
    assert first == lines(f"{seed}") != lines(f"{seed} other")
    assert [read(line).line() for line in first] == first


def test_a_wrong_bit_anywhere_is_seen(seed: int) -> None:
    rng = random.Random(seed)
    drawing = Drawing(Where(3), 400, str(seed), heap=False)
    seen = 0
    for trials in drawing.visits():
        for trial in trials:
            problem = Problem(trial.case, trial.kind)
            drawn = problem.draw(rng)
            if drawn.slack is not None:
                continue
            memory = np.empty(nbytes_needed(problem), np.uint8)
            for rank in range(3):
                side = Side(problem, trial, rank, memory, memory)
                side.load(drawn)
                seen += _bit_is_seen(side, rng)
    assert seen > 300


def _bit_is_seen(side: Side, rng: random.Random) -> bool:
    """Make the memory right, then wrong in one bit; return whether that is to be told.

    Equal numbers of other bits, as 0 and -0 are, count as right where a sum gives them.
    """
    memory = side.pretend()
    assert side.verdict(side.out) is None
    at = rng.randrange(memory.size)
    memory[at] ^= 1 << rng.randrange(8)
    found = side.verdict(side.out)
    if not side.problem.rounds:
        assert found is not None, (side.coll, at)
    return found is not None
