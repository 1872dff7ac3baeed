# SPDX-License-Identifier: Apache-2.0
"""Two-level algorithms as the engine runs them: shared memory and MPI in one plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cases import Attempt, Case
from fake_mpi import FakeMpi, settle

from commrt import algorithms
from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.vocabulary.operations import operation

COLLS = ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall")


@pytest.mark.full(sample=18)
@pytest.mark.parametrize("count", [0, 1, 257, 3000])
@pytest.mark.parametrize(
    "nodes", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 3], [1, 4, 5], [2]]]
)
@pytest.mark.parametrize("coll", COLLS)
def test_results_are_numpys_on_any_nodes(
    coll: str, nodes: list[list[int]], count: int, seed: int
) -> None:
    rng = random.Random(f"{coll} {nodes} {count} {seed}")
    with FakeMpi().ranks(nodes) as ranks:
        size = len(ranks.comms)
        layout = ranks.comms[0].facts.layout
        choices = algorithms.param_choices(coll, "two_level", size, layout)
        for in_place in (False, True):
            own = {key: rng.choice(values) for key, values in choices.items()}
            for params in ({"leaders": "all"}, {"leaders": 1}, own):
                root = rng.randrange(size) if operation(coll).has_root else 0
                case = Case(
                    *(coll, size, "two_level", {**params, "chunk": 512}, "float64"),
                    root=root,
                    count=count,
                    in_place=in_place,
                )
                tried = [Attempt(case, rank) for rank in range(size)]
                requests = [
                    one.start(comm, nonblocking=True)
                    for one, comm in zip(tried, ranks.comms, strict=True)
                ]
                settle(ranks)
                for one, request in zip(tried, requests, strict=True):
                    one.result = request.wait()
                    assert one.verdict() is None, case
        assert ranks.mpi.on_the_way() == 0


def test_it_is_a_candidate_on_several_nodes_only() -> None:
    def names(nodes: list[list[int]]) -> set[str]:
        with FakeMpi().ranks(nodes) as ranks:
            found = ranks.comms[0].candidates("allreduce", 4096)
        return {candidate.algorithm for candidate in found}

    assert "two_level" in names([[0, 1], [2, 3]])
    for nodes in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        assert "two_level" not in names(nodes)


def test_ranks_of_one_node_hear_why_it_cannot_run() -> None:
    with (
        FakeMpi().ranks([[0, 1]]) as ranks,
        pytest.raises(UsageError, match="'two_level', which does not exist or cannot"),
    ):
        ranks.comms[0].allreduce(np.zeros(3), algorithm="two_level", nonblocking=True)


def test_scratch_takes_no_more_than_what_is_touched() -> None:
    params = {"among": "recursive_doubling", "leaders": "all"}
    with FakeMpi().ranks([[0, 1, 2, 3], [4, 5, 6, 7]]) as ranks:
        ranks.comms[0].plan.allreduce(
            np.zeros(8000), algorithm="two_level", params=params
        )
        (plan,) = core_of(ranks.comms[0]).kept_plans()
        # This rank leads a fourth of the vector, and adds one other leader's to it.
        assert plan.tmp_nbytes <= 8000 * 8 // 4 + 64
