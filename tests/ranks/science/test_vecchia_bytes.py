# SPDX-License-Identifier: Apache-2.0
"""A Gaussian process sends the bytes of its formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from recorded import logs_of
from science_cases import cut_of, points_of, sent_between_barriers

import commrt.trace
from commrt.local import run
from commrt.science.vecchia import (
    Hyperparameters,
    NeighborTraffic,
    ScaledBlockVecchia,
    VecchiaModel,
)
from commrt.science.vecchia.covariances import COVARIANCES
from commrt.science.vecchia.likelihood import log_likelihood

D, N, BLOCK = 3, 90, 7
K = -(-N // BLOCK)
VALUES = Hyperparameters([0.3, 0.5, 2.0], 1.3, 0.02)


def neighbor_bytes(traffic: NeighborTraffic, size: int) -> Counter[str]:
    """Return the bytes of a search of neighbours, by the formula."""
    found: Counter[str] = Counter(alltoall=2 * 8 * size)
    found["alltoallv"] = (
        8 * traffic.num_queries * (D + 2)
        + 8 * traffic.num_answered
        + 16 * traffic.num_candidates
        + 8 * traffic.num_requested
        + 8 * traffic.num_served * (D + 1)
    )
    return found


def block_bytes(own: int, size: int) -> Counter[str]:
    """Return the bytes of making blocks, by the formula."""
    found: Counter[str] = Counter(alltoall=8 * size, allreduce=8 * K)
    found["alltoallv"] = 8 * own * (D + 3)
    found["allgatherv"] = 8 * K * D + 8 * K * (D + 1)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mean", [None, 0.5])
def test_conditioning_sends_the_bytes_of_its_formula(
    size: int, mean: float | None
) -> None:
    x, y = points_of(N, D)
    pieces = cut_of(N, size)

    def main(comm: Any) -> VecchiaModel:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=BLOCK, num_neighbors=9)
        comm.barrier()
        model = process.condition(x[own], y[own], VALUES, mean=mean)
        comm.barrier()
        return model

    with commrt.trace.record() as recording:
        models = run(size, main)
    logs = recording.logs()
    for piece, model, log in zip(pieces, models, logs, strict=True):
        right = block_bytes(piece.stop - piece.start, size)
        right += neighbor_bytes(model.traffic, size)
        right["allgather"] += 32 * size
        right["allreduce"] += 32 * (D + 3) + (32 if mean is None else 0)
        assert sent_between_barriers(log) == right
    assert sum(model.traffic.num_requested for model in models) > 0
    asked = sum(model.traffic.num_queries for model in models)
    assert asked == sum(model.traffic.num_answered for model in models)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_of_a_search_sends_a_point_and_two_sums(size: int) -> None:
    x, y = points_of(N, D)
    pieces = cut_of(N, size)

    def sent(max_steps: int) -> tuple[Counter[str], int]:
        def main(comm: Any) -> VecchiaModel:
            own = pieces[comm.rank]
            process = ScaledBlockVecchia(comm, block_size=BLOCK, num_neighbors=9)
            comm.barrier()
            model = process.fit(
                x[own], y[own], rounds=1, max_steps=max_steps, tolerance=0.0
            )
            comm.barrier()
            return model

        with commrt.trace.record() as recording:
            models = run(size, main)
        return sent_between_barriers(recording.logs()[0]), models[0].num_evaluations

    (few, first), (many, last) = sent(0), sent(6)
    assert last > first == 2
    # Points cost nothing but these; blocks are made twice in both.
    assert many["bcast"] == (last - 1 + 1) * 8 * (D + 5)
    assert few["bcast"] == (first - 1 + 1) * 8 * (D + 5)
    assert many["allreduce"] - few["allreduce"] == (last - first) * 32 * (D + 3)
    assert many["allgatherv"] == few["allgatherv"] == 2 * (8 * K * (2 * D + 1))
    assert {*many} == {
        *("allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "bcast")
    }


def test_a_likelihood_sends_sums_alone() -> None:
    def main(comm: Any) -> None:
        comm.barrier()
        log_likelihood([], COVARIANCES["matern52"], VALUES, comm)
        comm.barrier()

    with commrt.trace.record() as recording:
        run(3, main)
    logs = recording.logs()
    assert len(logs) == 3
    for log in logs:
        assert sent_between_barriers(log) == Counter(allreduce=32 * (D + 3))


@pytest.mark.parametrize("size", [2, 4])
def test_a_prediction_sends_the_bytes_of_its_formula(size: int) -> None:
    x, y = points_of(N, D)
    new, _ = points_of(40, D, seed=3)
    pieces, others = cut_of(N, size), cut_of(40, size, 1)

    def main(comm: Any) -> NeighborTraffic:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=BLOCK, num_neighbors=9)
        model = process.condition(x[own], y[own], VALUES)
        comm.barrier()
        found = model.predict(new[others[comm.rank]])
        comm.barrier()
        return found.traffic

    with commrt.trace.record() as recording:
        traffic = run(size, main)
    # Points of groups lie on ranks that no argument tells: their answers are summed.
    total: Counter[str] = Counter(allgather=32 * size * size, alltoall=8 * size * size)
    total["alltoallv"] = 40 * 8 * (D + 2) + 40 * 16
    total["allreduce"] = 8 * size
    for each in traffic:
        total += neighbor_bytes(each, size)
    found: Counter[str] = Counter()
    for log in logs_of(recording):
        found += sent_between_barriers(log)
    assert found == total


def test_one_rank_of_a_process_sends_nothing() -> None:
    x, y = points_of(20, D)

    def main(comm: Any) -> None:
        comm.barrier()
        model = ScaledBlockVecchia(comm).fit(x, y, rounds=1, max_steps=1)
        model.predict(np.zeros((2, D)))
        comm.barrier()

    with commrt.trace.record() as recording:
        run(1, main)
    assert sent_between_barriers(recording.logs()[0]) == Counter()
