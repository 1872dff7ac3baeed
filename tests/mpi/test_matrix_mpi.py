# SPDX-License-Identifier: Apache-2.0
"""The matrix of all operations, forms and algorithms between processes.

A run compares 1,600 cases with each MPI library, others each time; ``--full`` 12,000.
Ranks are on one node,
and on pretended ones, between which messages go by MPI, or by connections of commrt's
own: the seed draws which.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from matrix_cases import FORMS, Trial, read
from matrix_drawing import Drawing, Where, all_algorithms, must_visit
from matrix_spawned import on_each_rank

import commrt
from commrt.planning import host_plans

PLACES = [
    (2, ""),
    (2, "1,1"),
    (3, ""),
    (3, "2,1"),
    (4, ""),
    (4, "2,2"),
    (5, ""),
    (5, "2,3"),
    (8, ""),
    (8, "3,1,4"),
]
NUMBER, ALL = 1600, 12_000
SYMMETRIC_FROM_NBYTES = 64


CARRIERS = ("mpi", "tcp")


def nodes(text: str, carrier: str) -> dict[str, str]:
    """Return the environment that pretends these nodes."""
    found = {"COMMRT_TIMEOUT_S": "300", "COMMRT_CARRIER": carrier}
    return {**found, "COMMRT_NODES": text} if text else found


def run_matrix(seed: int, place: int, number: int, plans: int) -> list[Any]:
    host_plans.SYMMETRIC_NBYTES = SYMMETRIC_FROM_NBYTES
    must = must_visit(str(seed), [Where(*each) for each in PLACES])[place]

    comm, where = commrt.init(), PLACES[place][1]
    drawn = f"{seed} {str(comm.mpi_library).split()[0]}"  # others for each library

    def visits(where: Where) -> Iterator[list[Trial]]:
        return Drawing(where, number, drawn, must, plans=plans).visits()

    assert comm.facts.nodes == where.count(",") + 1
    return on_each_rank(comm, where, visits)


def run_one(line: str) -> list[Any]:
    host_plans.SYMMETRIC_NBYTES = SYMMETRIC_FROM_NBYTES
    trial = read(line)
    return on_each_rank(commrt.init(), trial.nodes, lambda _: [[trial]])


def check(found: list[Any], tally: Callable[[str, int], None]) -> int:
    """Fail where a result was wrong; return how many all ranks have compared."""
    wrong = [line for lines, _ in found for line in lines]
    text = "\n".join(wrong[:9])
    repeat = "repeat one by: pytest tests/mpi/test_matrix_mpi.py --case '{...}'"
    assert not wrong, f"{text}\n{repeat}, the part in braces"
    number: int = min(compared for _, compared in found)
    assert number == max(compared for _, compared in found)
    tally("ranks that are processes", number)
    return number


@pytest.mark.whole
@pytest.mark.parametrize("place", range(len(PLACES)), ids=lambda at: str(PLACES[at]))
def test_every_result_is_the_one_of_numpy(
    mpirun: Any,
    place: int,
    seed: int,
    full: bool,
    tally: Callable[[str, int], None],
) -> None:
    size, where = PLACES[place]
    number = (ALL if full else NUMBER) // len(PLACES)
    # Few plans in a visit: even a sample goes to every algorithm of every operation.
    plans = 5 if full else 1
    arguments = {"seed": seed, "place": place, "number": number, "plans": plans}
    deadline_s = 800 if full else 100
    env = nodes(where, random.Random(f"{seed} {where}").choice(CARRIERS))
    got = mpirun(size, run_matrix, env=env, deadline_s=deadline_s, **arguments)
    assert check(got, tally) == number


@pytest.mark.one_case
@pytest.mark.parametrize("carrier", CARRIERS)
def test_one_case(
    mpirun: Any, case_line: str, tally: Callable[[str, int], None], carrier: str
) -> None:
    trial = read(case_line)
    env = nodes(trial.nodes, carrier)
    got = mpirun(trial.case.size, run_one, env=env, line=case_line)
    check(got, tally)


def test_a_sample_has_every_algorithm_in_every_form(seed: int) -> None:
    shapes = set()
    wheres = [Where(*each) for each in PLACES]
    for where, must in zip(wheres, must_visit(str(seed), wheres), strict=True):
        number = NUMBER // len(PLACES)
        for trials in Drawing(where, number, str(seed), must, plans=1).visits():
            shapes.update(trial.shape for trial in trials)
    wanted = {
        (*each, form) for each in all_algorithms((2, 3, 4, 5, 8)) for form in FORMS
    }
    assert wanted - shapes == set()
