# SPDX-License-Identifier: Apache-2.0
"""What the matrices draw: enough of what is rare by itself."""

from __future__ import annotations

import pytest
from matrix_cases import MESSAGES, Trial
from matrix_drawing import Drawing, Where
from matrix_values import Problem

from commrt import algorithms
from commrt.planning.footprint import LANE_NBYTES, footprint
from commrt.vocabulary.operations import operation


def fragments(trial: Trial) -> int | None:
    """Return into how many a call is cut; None where that follows from more."""
    case = trial.case
    if (
        case.coll in MESSAGES
        or case.algorithm is None
        or operation(case.coll).vector_of
    ):
        return None
    known = algorithms.param_choices(case.coll, case.algorithm, case.size)
    own = tuple(sorted((k, v) for k, v in case.params.items() if k in known))
    bound = footprint(case.coll, case.algorithm, case.size, case.root, own)
    problem = Problem(case, trial.kind)
    count = max([*problem.x_counts, *[each or 0 for each in problem.out_counts]])
    chunk = bound.chunk_nbytes(case.params.get("chunk", "auto"))
    return bound.fragments(count, problem.dtype.itemsize, chunk, LANE_NBYTES)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_a_third_of_the_cases_are_cut_into_fragments(size: int) -> None:
    cut, few, whole = 0, 0, 0
    for seed in range(4):
        for trials in Drawing(Where(size), 600, str(seed)).visits():
            for trial in trials:
                number = fragments(trial)
                if number is not None:
                    whole += 1
                    cut += number > 1
                    few += number <= 64
    assert whole > 1000
    assert cut > whole / 3
    assert few > 0.97 * whole  # fragments beyond that only take time


def test_vector_reductions_are_drawn_deterministic_too() -> None:
    found = {
        (trial.case.coll, trial.kind)
        for trials in Drawing(Where(3), 3000, "1").visits()
        for trial in trials
    }
    assert ("reduce_scatterv", "deterministic") in found


def test_each_library_is_given_other_cases() -> None:
    def lines(library: str) -> set[str]:
        drawing = Drawing(Where(4), 1200, f"20261122 {library}")
        return {trial.line() for trials in drawing.visits() for trial in trials}

    assert len(lines("Open") | lines("MPICH")) > 2300
