# SPDX-License-Identifier: Apache-2.0
"""An exchange sends the bytes of the samples that change ranks, in one message."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from recorded import logs_of
from shuffle_cases import CASES, FRACTIONS, ids_of, samples_of

import commrt.trace
from commrt.layers.samples import BatchLoader, PartialShuffle
from commrt.local import run

EPOCHS = 3


def calls_of(log: Any) -> list[tuple[str, int]]:
    """Return operations and bytes after a rank's only barrier."""
    names = [call.op for call in log.operations]
    assert names.count("barrier") == 1
    after = log.operations[names.index("barrier") + 1 :]
    return [(call.op, call.nbytes) for call in after]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("counts", CASES)
def test_an_exchange_sends_the_samples_that_change_ranks(
    counts: tuple[int, ...], fraction: float, seed: int
) -> None:
    def main(comm: Any) -> tuple[list[set[int]], int]:
        own = samples_of(ids_of(counts)[comm.rank])
        with PartialShuffle(own, comm, fraction, seed) as shuffle:
            comm.barrier()
            found = [{*shuffle.read(slice(None))["id"].tolist()}]
            for _ in range(EPOCHS):
                shuffle.next_epoch()
                found.append({*shuffle.samples["id"].tolist()})
            room = int(fraction * counts[comm.rank]) if comm.size > 1 else 0
            stored = counts[comm.rank] + room
            assert shuffle.stored_nbytes == stored * shuffle.sample_nbytes
            assert stored <= (1 + fraction) * counts[comm.rank]
        return found, shuffle.sample_nbytes

    with commrt.trace.record() as recording:
        ranks = run(len(counts), main)
    does_send = len(counts) > 1 and any(int(fraction * n) for n in counts)
    for log, (held, nbytes) in zip(recording.logs(), ranks, strict=True):
        assert nbytes == 6 * 8 + 8 + 1 + 5 * 4
        left = [before - after for before, after in pairwise(held)]
        assert all(len(gone) <= int(fraction * len(held[0])) for gone in left)
        right = [("alltoallv", len(gone) * nbytes) for gone in left]
        assert calls_of(log) == (right if does_send else [])


@pytest.mark.parametrize(("size", "fraction"), [(2, 1.0), (4, 0.25), (4, 1.0)])
def test_bytes_are_those_of_the_fraction_on_average(size: int, fraction: float) -> None:
    """Q * n * b, less what is drawn and comes back: one part in ``size``."""
    number, epochs = 40, 50

    def main(comm: Any) -> None:
        with PartialShuffle(np.zeros((number, 3)), comm, fraction, 2) as shuffle:
            comm.barrier()
            for _ in range(epochs):
                shuffle.next_epoch()

    with commrt.trace.record() as recording:
        run(size, main)
    sent = [nbytes for log in recording.logs() for _, nbytes in calls_of(log)]
    assert len(sent) == size * epochs
    right = fraction * number * 24 * (1 - 1 / size)
    assert np.mean(sent) == pytest.approx(right, rel=0.05)


def test_making_a_shuffle_sends_24_bytes_for_each_rank() -> None:
    with commrt.trace.record() as recording:
        run(3, lambda comm: PartialShuffle(np.zeros(2), comm).close())
    for log in logs_of(recording):
        sent = [(call.op, call.nbytes) for call in log.operations if call.nbytes]
        assert sent == [("allgather", 24 * 3)]


@pytest.mark.parametrize(("what", "number"), [("loader", 2), ("shuffle", 1)])
def test_loading_a_state_sends_24_bytes_for_each_rank(what: str, number: int) -> None:
    """Twice for a loader; then the exchanges are repeated."""

    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(6), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2, num_epochs=1)
            next(iter(loader))
            state = loader.state_dict() if what == "loader" else shuffle.state_dict()
        with PartialShuffle(np.arange(6), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            comm.barrier()
            (loader if what == "loader" else shuffle).load_state_dict(state)

    with commrt.trace.record() as recording:
        run(3, main)
    for log in logs_of(recording):
        calls = calls_of(log)
        assert calls[:-1] == [("allgather", 24 * 3)] * number
        assert calls[-1][0] == "alltoallv"
