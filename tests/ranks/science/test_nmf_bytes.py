# SPDX-License-Identifier: Apache-2.0
"""A factorisation sends the bytes of its formula, and computes meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from science_cases import cut_of, dense_kernels, sent_between_barriers

import commrt.trace
from commrt.local import run
from commrt.science.nmf import Factorization, GraphKernel, GraphNMF, factorization
from commrt.science.row_route import Coming, RowRoute

N, F, K = 41, 5, 3
KERNELS = (GraphKernel(2), GraphKernel(4, 0.5))


@pytest.mark.parametrize("tolerance", [0.0, 1e-30])
@pytest.mark.parametrize("kernels", [KERNELS, ()])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_factorisation_sends_the_bytes_of_its_formula(
    size: int, kernels: tuple[GraphKernel, ...], tolerance: float
) -> None:
    x = np.random.default_rng(1).uniform(size=(N, F))
    pieces = cut_of(N, size)
    steps, p, widest = 4, len(kernels), 4

    def main(comm: Any) -> Factorization:
        model = GraphNMF(comm, K, kernels=kernels)
        comm.barrier()
        found = model.fit(x[pieces[comm.rank]], num_steps=steps, tolerance=tolerance)
        comm.barrier()
        return found

    with commrt.trace.record() as recording:
        ranks = run(size, main)
    counts = [piece.stop - piece.start for piece in pieces]
    joined = dense_kernels(x, kernels).any(0) if kernels else np.zeros((N, N), bool)
    for rank, (found, log) in enumerate(zip(ranks, recording.logs(), strict=True)):
        own = np.zeros(N, bool)
        own[pieces[rank]] = True
        halo = int((joined[own].any(0) & ~own).sum())
        others = [np.isin(np.arange(N), np.arange(N)[piece]) for piece in pieces]
        served = sum(
            int((joined[other].any(0) & own).sum())
            for to, other in enumerate(others)
            if to != rank
        )
        assert (found.num_halo, found.num_served) == (halo, served)
        right: Counter[str] = Counter(allgather=32 * size, allreduce=16 + 48)
        if kernels:
            handed = sum(counts[(rank - turn) % size] for turn in range(size - 1))
            right["send"] = 8 * (F + 1) * handed
            right["alltoall"] = 2 * 8 * size
            right["alltoallv"] = 32 * counts[rank] * widest + 8 * halo
            right["allreduce"] += 16 * p + 48 * p + 8 * p + 24 * p
            right["alltoallv"] += (steps + 1) * 8 * served * K
        right["allreduce"] += (steps + 1) * 8 * (K * F + K * K + p)
        right["bcast"] = (steps + 1) * 8 * (K * F + p + 1)
        assert sent_between_barriers(log) == +right


def test_going_on_brings_rank_0s_factors_to_all() -> None:
    """Ranks whose processors round differently may have others."""
    x = np.random.default_rng(1).uniform(size=(N, F))
    pieces = cut_of(N, 3)

    def main(comm: Any) -> Any:
        own, p = x[pieces[comm.rank]], len(KERNELS)
        model = GraphNMF(comm, K, kernels=KERNELS)
        first = model.fit(own, num_steps=2)
        weights = np.full(p, 1.0 / p)
        weights += 0.1 * comm.rank * np.array([1.0, -1.0])
        start = Factorization(
            first.coefficients, first.components * (1.0 + comm.rank), weights
        )
        comm.barrier()
        found = model.fit(own, num_steps=0, start=start)
        comm.barrier()
        np.testing.assert_array_equal(found.kernel_weights, np.ones(p) / p)
        return first.components, found.components

    with commrt.trace.record() as recording:
        ranks = run(3, main)
    for (_, found), log in zip(ranks, recording.logs(), strict=True):
        np.testing.assert_array_equal(found, ranks[0][0])
        sent = sent_between_barriers(log)
        p = len(KERNELS)
        assert sent["bcast"] == 8 * K * F + 8 * p + 8 * (K * F + p + 1)


def test_one_rank_of_factors_sends_nothing() -> None:
    def main(comm: Any) -> None:
        comm.barrier()
        GraphNMF(comm, K, kernels=KERNELS).fit(np.ones((6, F)), tolerance=1e-9)
        comm.barrier()

    with commrt.trace.record() as recording:
        run(1, main)
    assert sent_between_barriers(recording.logs()[0]) == Counter()


def test_a_step_has_one_halo_one_sum_and_one_broadcast() -> None:
    x = np.random.default_rng(1).uniform(size=(N, F))
    pieces = cut_of(N, 3)

    def calls(steps: int) -> list[Counter[str]]:
        def main(comm: Any) -> None:
            GraphNMF(comm, K).fit(x[pieces[comm.rank]], num_steps=steps)

        with commrt.trace.record() as recording:
            run(3, main)
        return [Counter(c.op for c in log.operations) for log in recording.logs()]

    for few, many in zip(calls(2), calls(7), strict=True):
        assert many - few == Counter(alltoallv=5, allreduce=5, bcast=5)


def test_products_are_computed_while_the_halo_travels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(1).uniform(size=(N, F))
    pieces = cut_of(N, 2)
    events: dict[str, list[str]] = {"rank0": [], "rank1": []}

    def noted(event: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            events[threading.current_thread().name].append(event)
            return function(*arguments)

        return call

    start, wait = RowRoute.start_back, Coming.wait
    products = factorization.inner_products
    monkeypatch.setattr(RowRoute, "start_back", noted("start", start))
    monkeypatch.setattr(Coming, "wait", noted("wait", wait))
    monkeypatch.setattr(factorization, "inner_products", noted("products", products))
    run(2, lambda comm: GraphNMF(comm, K).fit(x[pieces[comm.rank]], num_steps=2))
    each = ["start", "products", "wait"]
    assert events == {"rank0": each * 3, "rank1": each * 3}
