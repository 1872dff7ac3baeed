# SPDX-License-Identifier: Apache-2.0
"""Which errors of a step make the ranks go on, for ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.local import run

STEPS = 6


class Sum:
    """Adds up sums; one rank ends the communicator once, in the middle of a step."""

    def __init__(self, rank: int, wrap: type[Exception] | None) -> None:
        self.total = np.zeros(1)
        self._ends = rank == 1
        self._wrap = wrap

    def step(self, comm: Communicator, number: int) -> None:
        if self._ends and number == 3:
            self._ends = False
            comm.revoke("a try")
        try:
            self.total += comm.allreduce(np.ones(1))
        except CommError as error:
            if self._wrap is None:
                raise
            raise self._wrap(f"in a callback: {error}") from None


def goes_on(comm: Communicator, wrap: type[Exception] | None) -> list[Any]:
    mine = Sum(comm.rank, wrap)
    state = elastic.State(total=mine.total)
    comm = elastic.run(mine.step, state, until=STEPS, comm=comm)
    return [comm.name, comm.size, mine.total[0]]


@pytest.mark.parametrize("wrap", [None, RuntimeError])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_go_on_after_errors_of_a_communicator_that_has_ended(
    size: int, wrap: type[Exception] | None
) -> None:
    """Torch makes a RuntimeError of what is raised in its callbacks."""
    found = run(size, lambda comm: goes_on(comm, wrap))
    assert found == [["local.2", size, STEPS * size]] * size


def test_other_errors_are_the_programs_own() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(LookupError, match="in a callback"):
            goes_on(comm, LookupError)

    run(2, main)


def test_an_error_of_a_communicator_that_works_is_the_programs_own() -> None:
    def step(comm: Communicator, number: int) -> None:
        comm.allreduce(np.ones(1))
        if number == 2:
            raise RuntimeError("no more data")

    def main(comm: Communicator) -> None:
        state = elastic.State(total=np.zeros(1))
        with pytest.raises(RuntimeError, match="no more data"):
            elastic.run(step, state, until=STEPS, comm=comm)
        assert comm.allreduce(np.ones(1))[0] == 3

    run(3, main)
