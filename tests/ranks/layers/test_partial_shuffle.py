# SPDX-License-Identifier: Apache-2.0
"""Samples that ranks exchange are those of one process, each on one rank."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from recorded import logs_of
from shuffle_cases import (
    CASES,
    FRACTIONS,
    Ids,
    check_samples,
    exchanged,
    ids_of,
    samples_of,
)

import commrt.trace
from commrt.errors import ClosedError, UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.samples import PartialShuffle
from commrt.local import run

EPOCHS = 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("counts", CASES)
def test_samples_are_those_of_lists_in_one_process(
    counts: tuple[int, ...], fraction: float, ahead: bool, seed: int
) -> None:
    def main(comm: Any) -> list[list[int]]:
        own = samples_of(ids_of(counts)[comm.rank])
        found = []
        with PartialShuffle(own, comm, fraction, seed) as shuffle:
            assert shuffle.counts == counts
            found.append(check_samples(shuffle.samples))
            for epoch in range(1, EPOCHS):
                if ahead:
                    shuffle.start_next_epoch()
                    shuffle.start_next_epoch()
                    assert shuffle.is_exchanging
                    assert shuffle.epoch == epoch - 1
                    # What leaves can still be read, in the order of its epoch.
                    assert check_samples(shuffle.samples) == found[-1]
                    shuffle.poll()
                shuffle.next_epoch()
                assert not shuffle.is_exchanging
                assert (shuffle.epoch, len(shuffle)) == (epoch, counts[comm.rank])
                found.append(check_samples(shuffle.samples))
                assert check_samples(shuffle.samples) == found[-1]
        return found

    ranks = run(len(counts), main)
    wanted = ids_of(counts)
    for epoch in range(EPOCHS):
        if epoch:
            wanted = exchanged(wanted, fraction, seed, epoch)
        assert [found[epoch] for found in ranks] == wanted
        every = sorted(each for found in ranks for each in found[epoch])
        assert every == [*range(sum(counts))]


def test_a_fraction_of_zero_keeps_samples_and_changes_their_order() -> None:
    def main(comm: Any) -> list[int]:
        own = np.arange(50) + 50 * comm.rank
        with PartialShuffle(own, comm, 0) as shuffle:
            shuffle.next_epoch()
            first = shuffle.samples.tolist()
            shuffle.next_epoch()
            assert first != shuffle.samples.tolist() != own.tolist()
            assert sorted(first) == sorted(shuffle.samples.tolist()) == own.tolist()
        return first

    run(2, main)


def test_one_rank_is_numpys_shuffle_of_all() -> None:
    def main(comm: Any) -> None:
        x = np.random.default_rng(0).standard_normal((30, 3))
        with PartialShuffle(x, comm, 1.0, seed=5) as shuffle:
            assert shuffle.stored_nbytes == x.nbytes
            for epoch in (1, 2):
                key = np.random.SeedSequence(5, spawn_key=(epoch, 1, 1))
                x = x[np.random.default_rng(key).permutation(30)]
                shuffle.next_epoch()
                np.testing.assert_array_equal(shuffle.samples, x)

    run(1, main)


def test_samples_are_copied_when_the_shuffle_is_made() -> None:
    def main(comm: Any) -> None:
        x = np.arange(5) + 5 * comm.rank
        with PartialShuffle(x, comm, 1.0) as shuffle:
            x[:] = -1
            batch = shuffle.read(slice(0, 3))
            batch[:] = -2
            shuffle.next_epoch()
            assert shuffle.samples.min() >= 0

    run(2, main)


def test_some_samples_are_read_by_their_numbers() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(samples_of(range(9)), comm) as shuffle:
            shuffle.next_epoch()
            order = check_samples(shuffle.samples)
            some = np.array([3, 3, -1, 0])
            found = check_samples(shuffle.read(some))
            assert found == [order[each] for each in some.tolist()]
            assert check_samples(shuffle.read(slice(2, 100))) == order[2:]
            assert check_samples(shuffle.read(slice(0, 0))) == []
            wrong: list[Any] = [np.array([9]), 3, np.zeros((1, 1), int), "all", None]
            wrong += [slice("a", "b"), slice(0, 9, 0), np.array([0.5])]
            for each in wrong:
                with pytest.raises(UsageError, match=r"PartialShuffle\.read"):
                    shuffle.read(each)

    run(1, main)


@pytest.mark.parametrize("alone", [False, True])
def test_parts_are_consecutive_samples(alone: bool) -> None:
    def main(comm: Any) -> None:
        samples: Any = samples_of(range(9))
        with PartialShuffle(samples["id"] if alone else samples, comm) as shuffle:
            shuffle.next_epoch()
            order = shuffle.samples if alone else shuffle.samples["id"]
            parts = shuffle.read_parts(slice(1, 8), [2, 2, 7])
            found = parts if alone else [check_samples(part) for part in parts]
            assert [[*each] for each in found] == [[*order[1:3]], [], [*order[3:8]]]
            for wrong in ([2], [2, 1, 7], [], [-1, 7], [2, 8]):
                with pytest.raises(UsageError, match="the last of them 7"):
                    shuffle.read_parts(slice(1, 8), wrong)

    run(1, main)


@pytest.mark.parametrize("counts", [(5, 6), (9, 0, 4)])
def test_a_run_goes_on_where_another_has_ended(counts: tuple[int, ...]) -> None:
    """By the exchanges again, or by the samples of the epoch."""

    def main(comm: Any) -> None:
        first = samples_of(ids_of(counts)[comm.rank])
        with PartialShuffle(first, comm, 0.5, 7) as shuffle:
            for _ in range(3):
                shuffle.next_epoch()
            shuffle.start_next_epoch()
            state, saved = shuffle.state_dict(), shuffle.samples
            shuffle.next_epoch()
            wanted = check_samples(shuffle.samples)
        release = ".".join(np.__version__.split(".")[:2])
        assert state == {
            "epoch": 3,
            "seed": 7,
            "fraction": 0.5,
            "counts": [*counts],
            "numpy": release,
        }
        with PartialShuffle(first, comm, 0.5, 7) as again:
            again.load_state_dict(state)
            assert check_samples(again.samples) == saved["id"].tolist()
            again.next_epoch()
            assert check_samples(again.samples) == wanted
        with PartialShuffle(saved, comm, 0.5, 7, epoch=3) as resumed:
            # Nothing is drawn again, so any numpy will do.
            resumed.load_state_dict({**state, "numpy": "1.17"})
            resumed.next_epoch()
            assert check_samples(resumed.samples) == wanted

    run(len(counts), main)


def test_an_axis_of_a_grid_shuffles_by_itself() -> None:
    def main(comm: Any) -> list[int]:
        with ProcessGrid(comm, {"data": 2, "tensor": 2}) as grid:
            own = np.arange(4) + 4 * grid.coords["data"]
            with PartialShuffle(own, grid["data"], 1.0, 1) as shuffle:
                shuffle.next_epoch()
                return shuffle.samples.tolist()

    first, copy, second, other = run(4, main)
    assert (first, second) == (copy, other)
    assert sorted(first + second) == [*range(8)]


# -- misuse ----------------------------------------------------------------------------


def refused(size: int, make: Any) -> list[str]:
    """Return the errors of all ranks; none has sent more than the facts."""

    def main(comm: Any) -> str:
        with pytest.raises(UsageError) as raised:
            make(comm)
        return str(raised.value)

    with commrt.trace.record() as recording:
        found = run(size, main)
    for log in logs_of(recording):
        sent = [(call.op, call.nbytes) for call in log.operations if call.nbytes]
        assert sent == [("allgather", 24 * size)]
    return found


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"samples": [1, 2]}, "expected an array"),
        ({"samples": {}}, "empty mapping"),
        ({"fraction": 1.5}, "from 0"),
        ({"fraction": float("nan")}, "from 0"),
        ({"fraction": "all"}, "number from 0 to 1"),
        ({"fraction": True}, "number from 0 to 1"),
        ({"seed": -1}, "integer from 0"),
        ({"seed": 1.0}, "integer from 0"),
        ({"epoch": -1}, "integer from 0"),
    ],
)
def test_all_ranks_refuse_what_one_passes_wrongly(
    wrong: dict[str, Any], says: str
) -> None:
    right = {"samples": np.zeros((3, 2)), "fraction": 0.5, "seed": 1}

    def make(comm: Any) -> Any:
        given = {**right, **(wrong if comm.rank == 1 else {})}
        return PartialShuffle(given.pop("samples"), comm, **given)

    first, second, third = refused(3, make)
    assert says in second
    assert first == third
    assert "rank 1 refused its arguments" in first


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"samples": np.zeros((3, 3))}, r"samples: array of dtype\('float64'\) \(3,\)"),
        ({"samples": np.zeros((3, 2), "f4")}, r"dtype\('float32'\) \(2,\)"),
        ({"samples": np.zeros((3, 2), ">f8")}, r"dtype\('>f8'\)"),
        ({"samples": {"samples": np.zeros((3, 2))}}, "mapping"),
        ({"samples": {"x": np.zeros((0, 2))}}, "x: array"),
        ({"fraction": 0.25}, "fraction=0.25"),
        ({"seed": 2}, "seed=2"),
        ({"epoch": 1}, "epoch=1"),
    ],
)
def test_all_ranks_refuse_what_differs(other: dict[str, Any], says: str) -> None:
    right = {"samples": np.zeros((4, 2)), "fraction": 0.5, "seed": 1}

    def make(comm: Any) -> Any:
        given = {**right, **(other if comm.rank == 2 else {})}
        return PartialShuffle(given.pop("samples"), comm, **given)

    found = refused(3, make)
    assert len({*found}) == 1
    assert re.search(f"rank 2 has .*{says}", found[0])
    assert "rank 0 has" in found[0]


def test_a_communicator_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"must be a communicator.*grid\['data'\]"):
        PartialShuffle(np.zeros(3), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 2}, "has seed 2"),
        ({"fraction": 0.1}, "has fraction 0.1"),
        ({"counts": [3, 4]}, r"has counts [3, 4], and this object [3, 3]"),
        ({"counts": [3]}, "has counts [3]"),
        ({"epoch": 2, "numpy": "1.17"}, "of numpy '1.17'"),
        ({"epoch": True}, "of epoch True"),
        ({"epoch": 0}, "from which none leads back"),
        ({"epoch": "2"}, "of epoch"),
        ({"more": 1}, "is no state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_all(
    changed: dict[str, Any], says: str
) -> None:
    def main(comm: Any) -> str:
        with PartialShuffle(np.zeros(3), comm, 0.5, 1) as shuffle:
            shuffle.next_epoch()
            state = {**shuffle.state_dict(), **(changed if comm.rank == 1 else {})}
            with pytest.raises(UsageError) as raised:
                shuffle.load_state_dict(state)
            assert shuffle.epoch == 1
            shuffle.next_epoch()
        return str(raised.value)

    first, second = run(2, main)
    assert says in second
    assert "rank 1 refused its arguments" in first


def test_a_state_of_other_numbers_of_samples_is_refused_by_all() -> None:
    """Though ranks have as many of them in all."""

    def main(comm: Any) -> None:
        with PartialShuffle(np.zeros(4 - comm.rank), comm, 0.5) as shuffle:
            shuffle.next_epoch()
            state = shuffle.state_dict()
        with (
            PartialShuffle(np.zeros(3 + comm.rank), comm, 0.5) as other,
            pytest.raises(UsageError, match=r"counts \[4, 3\], and .* \[3, 4\]"),
        ):
            other.load_state_dict(state)

    run(2, main)


def test_states_of_different_epochs_are_refused_by_all() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.zeros(3), comm, 0.5, 1) as shuffle:
            state = {**shuffle.state_dict(), "epoch": 2 + comm.rank}
            with pytest.raises(UsageError, match="rank 1 has a state of epoch 3"):
                shuffle.load_state_dict(state)

    run(2, main)


def test_too_many_samples_for_an_exchange_are_refused(monkeypatch: Any) -> None:
    from commrt.layers.samples import shuffle as module

    monkeypatch.setattr(module, "MOST_DRAWN", 5)
    for found in refused(2, lambda comm: PartialShuffle(np.zeros(3), comm, 1.0)):
        assert "draw 6 samples" in found


def test_one_rank_has_any_number_of_samples(monkeypatch: Any) -> None:
    """It exchanges none, so the limit of an exchange is not its own."""
    from commrt.layers.samples import shuffle as module

    monkeypatch.setattr(module, "MOST_DRAWN", 5)

    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(9), comm, 1.0) as shuffle:
            shuffle.next_epoch()
            assert sorted(shuffle.samples.tolist()) == [*range(9)]

    run(1, main)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_places_take_the_memory_that_the_page_says(fraction: float) -> None:
    """Bytes of each sample: 8, while samples travel 16, at the start at most 48."""
    number = 100_000
    slack = 0.5  # bytes of a sample: the engine's plans, and objects of Python

    def main(comm: Any) -> None:
        own = np.zeros(number if comm.rank == 0 else 1000, np.uint8)
        with PartialShuffle(own, comm, fraction) as shuffle:
            shuffle.next_epoch()  # plans are made
            comm.barrier()
            if comm.rank == 0:
                tracemalloc.start()
                shuffle.start_next_epoch()
                kept, most = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                # Both places of this epoch and of the next are new; the first were 8.
                assert kept <= (16 + slack) * number
                assert most + 8 * number <= (48 + slack) * number
            shuffle.next_epoch()

    run(2, main)


def test_a_closed_shuffle_says_so() -> None:
    def main(comm: Any) -> None:
        shuffle = PartialShuffle(np.arange(4), comm, 1.0)
        shuffle.start_next_epoch()
        shuffle.close()
        shuffle.close()
        calls: list[Any] = [shuffle.next_epoch, shuffle.start_next_epoch]
        calls.append(lambda: shuffle.samples)
        calls.append(lambda: shuffle.load_state_dict(shuffle.state_dict()))
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                call()

    run(2, main)


def test_the_reference_in_lists_moves_samples() -> None:
    """So that no test above compares what stays with what stays."""
    ids: Ids = ids_of((20, 20))
    moved = exchanged(ids, 0.5, 0, 1)
    gone = {*ids[0]} - {*moved[0]}
    assert 0 < len(gone) <= 10
    assert sorted(moved[0]) != ids[0]
