# SPDX-License-Identifier: Apache-2.0
"""Batches of all ranks have each sample once, in as many steps, with true weights."""

from __future__ import annotations

import functools
import operator
import threading
from typing import Any

import numpy as np
import pytest
from recorded import logs_of
from shuffle_cases import CASES, check_samples, exchanged, ids_of, samples_of

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.data import GradientReducer
from commrt.layers.samples import Batch, BatchLoader, PartialShuffle, batches
from commrt.layers.samples.records import Records
from commrt.local import run

NEAR = 1e-12


@pytest.mark.parametrize(
    ("overlap", "prefetch", "block"),
    [(None, True, 1), (1, True, 400), (0, True, 1 << 20), (None, False, 400)],
)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("counts", CASES)
def test_an_epoch_has_each_sample_once_in_as_many_steps(
    counts: tuple[int, ...],
    batch_size: int,
    overlap: int | None,
    prefetch: bool,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "_BLOCK_NBYTES", block)

    def main(comm: Any) -> list[list[tuple[list[int], int, int]]]:
        own = samples_of(ids_of(counts)[comm.rank])
        with PartialShuffle(own, comm, 0.5, 4) as shuffle:
            how: dict[str, Any] = {"overlap_steps": overlap, "prefetch": prefetch}
            loader = BatchLoader(shuffle, batch_size, **how)
            return [
                [
                    (check_samples(each.samples), each.num_samples, each.total)
                    for each in loader
                ]
                for _ in range(3)
            ]

    ranks = run(len(counts), main)
    ids = ids_of(counts)
    for epoch in range(3):
        ids = exchanged(ids, 0.5, 4, epoch + 1)
        steps = [*zip(*(found[epoch] for found in ranks), strict=True)]
        assert len(steps) == -(-max(counts) // batch_size)
        for step in steps:
            sizes = [len(numbers) for numbers, _, _ in step]
            assert max(sizes) <= batch_size
            assert [number for _, number, _ in step] == sizes
            assert {total for _, _, total in step} == {sum(sizes)}
            assert sum(sizes) > 0
        for rank, wanted in enumerate(ids):
            pieces = [numbers for numbers, _, _ in ranks[rank][epoch]]
            assert functools.reduce(operator.iadd, pieces, []) == wanted
            lengths = [len(piece) for piece in pieces]
            assert max(lengths, default=0) - min(lengths, default=0) <= 1


@pytest.mark.parametrize("counts", [(7, 9), (5, 4, 11), (3,), (0, 8), (2, 9)])
def test_batches_of_one_size_leave_the_rest_for_another_epoch(
    counts: tuple[int, ...],
) -> None:
    def main(comm: Any) -> list[list[int]]:
        own = samples_of(ids_of(counts)[comm.rank])
        with PartialShuffle(own, comm, 0.3, 4) as shuffle:
            loader = BatchLoader(shuffle, 3, drop_last=True)
            assert len(loader) == min(counts) // 3
            found = []
            for _ in range(2):
                for batch in loader:
                    assert batch.num_samples == 3
                    assert batch.total == 3 * comm.size
                    found.append(check_samples(batch.samples))
            assert shuffle.epoch == 2
        return found

    ids = ids_of(counts)
    ranks = run(len(counts), main)
    for epoch in (1, 2):
        ids = exchanged(ids, 0.3, 4, epoch)
        steps = min(counts) // 3
        for rank, wanted in enumerate(ids):
            found = ranks[rank][(epoch - 1) * steps : epoch * steps]
            assert functools.reduce(operator.iadd, found, []) == wanted[: 3 * steps]


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("counts", [(8, 8), (7, 3), (5, 0, 9), (1, 2, 12, 4), (6,)])
def test_gradients_of_uneven_batches_are_those_of_one_process(
    counts: tuple[int, ...], averages: bool
) -> None:
    """A linear model in float64, trained for three epochs by both."""
    rng = np.random.default_rng(3)
    x, start = rng.standard_normal((sum(counts), 4)), rng.standard_normal(4)
    y = np.sin(x).sum(1)

    def gradient(weights: Any, samples: Any) -> Any:
        off = samples["x"] @ weights - samples["y"]
        return samples["x"].T @ off  # of the sum of squares over two

    def main(comm: Any) -> tuple[Any, list[list[int]]]:
        own = np.array(ids_of(counts)[comm.rank], int)
        samples = {"x": x[own], "y": y[own], "id": own}
        weights, steps = start.copy(), []
        how = "avg" if averages else "sum"
        with (
            PartialShuffle(samples, comm, 0.5, 9) as shuffle,
            GradientReducer(comm, [weights], op=how) as reducer,
        ):
            loader = BatchLoader(shuffle, 2)
            for _ in range(3):
                for batch in loader:
                    own_gradient = gradient(weights, batch.samples) / batch.total
                    if averages:
                        own_gradient *= comm.size
                    (summed,) = reducer([own_gradient])
                    weights -= 0.1 * summed
                    steps.append(batch.samples["id"].tolist())
        return weights, steps

    ranks = run(len(counts), main)
    weights = start.copy()
    for step in zip(*(steps for _, steps in ranks), strict=True):
        ids = functools.reduce(operator.iadd, step, [])
        whole = gradient(weights, {"x": x[ids], "y": y[ids]}) / len(ids)
        weights -= 0.1 * whole
    for found, _ in ranks:
        assert np.abs(found - weights).max() <= NEAR * np.abs(weights).max()
    assert np.abs(weights - start).max() > 0.1


def test_samples_of_the_next_epoch_travel_beside_the_last_steps() -> None:
    def main(comm: Any) -> list[bool]:
        with PartialShuffle(np.arange(10), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2, overlap_steps=2, num_epochs=2)
            return [shuffle.is_exchanging for _ in range(2) for _ in loader]

    with commrt.trace.record() as recording:
        found = run(2, main)
    # Nothing is prepared after the second epoch, which is the last one.
    assert found == [[False] * 3 + [True] * 2 + [False] * 5] * 2
    for log in logs_of(recording):
        assert [call.op for call in log.operations].count("alltoallv") == 2


@pytest.mark.parametrize(("overlap", "first"), [(None, 0), (1, 4), (99, 0)])
def test_an_exchange_starts_as_long_before_the_end_as_asked(
    overlap: int | None, first: int
) -> None:
    def main(comm: Any) -> int:
        with PartialShuffle(np.arange(10), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2, overlap_steps=overlap)
            return [shuffle.is_exchanging for _ in loader].index(True)

    assert run(2, main) == [first] * 2


def test_a_thread_reads_the_next_batch_while_one_is_used(monkeypatch: Any) -> None:
    """The second batch is read before the first one has been given back."""
    was_read = threading.Event()
    readers: list[str] = []
    read = PartialShuffle.read_parts

    def noted(self: PartialShuffle, which: Any, ends: Any) -> Any:
        found = read(self, which, ends)
        readers.append(threading.current_thread().name)
        if len(readers) == 2:
            was_read.set()
        return found

    monkeypatch.setattr(PartialShuffle, "read_parts", noted)
    monkeypatch.setattr(batches, "_BLOCK_NBYTES", 1)

    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(6), comm) as shuffle:
            epoch = iter(BatchLoader(shuffle, 2))
            first = next(epoch)
            assert was_read.wait(300)
            assert first.step == 0
            assert [each.step for each in epoch] == [1, 2]

    run(1, main)
    assert len(readers) == 3
    assert all(name.startswith("commrt-batches") for name in readers)


def test_an_iteration_that_ends_early_leaves_no_thread() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(12), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            for batch in loader:
                if batch.step == 2:
                    break
            assert shuffle.epoch == 1
            assert len([*loader]) == 6
            assert shuffle.epoch == 2

    run(2, main)
    for each in threading.enumerate():
        if each.name.startswith("commrt-batches"):
            each.join(300)  # its last read may go on for a moment
            assert not each.is_alive()


def test_an_iteration_may_be_collected_while_its_thread_waits(monkeypatch: Any) -> None:
    """Within the shuffle's lock, as the garbage collector may do: nobody waits."""
    comes = threading.Event()
    read, move_out = PartialShuffle.read_parts, Records.move_out

    def late(self: PartialShuffle, which: Any, ends: Any) -> Any:
        if which.start > 0:
            assert comes.wait(300)
        return read(self, which, ends)

    monkeypatch.setattr(PartialShuffle, "read_parts", late)
    monkeypatch.setattr(batches, "_BLOCK_NBYTES", 1)

    iterations: dict[int, Any] = {}

    def collecting(self: Records, leaving: Any) -> Any:
        if threading.get_ident() in iterations:
            comes.set()
            del iterations[threading.get_ident()]
        return move_out(self, leaving)

    monkeypatch.setattr(Records, "move_out", collecting)

    def main(comm: Any) -> list[int]:
        with PartialShuffle(np.arange(6), comm, 1.0) as shuffle:
            epoch = iter(BatchLoader(shuffle, 2, overlap_steps=0))
            next(epoch)
            iterations[threading.get_ident()] = epoch
            del epoch
            shuffle.next_epoch()
            return sorted(shuffle.samples.tolist())

    assert sum(map(len, run(2, main))) == 12


@pytest.mark.parametrize("stop", [1, 4, 5, 7])
@pytest.mark.parametrize("counts", [(9, 10), (3, 10, 0)])
def test_a_loader_goes_on_at_the_next_batch(counts: tuple[int, ...], stop: int) -> None:
    def main(comm: Any) -> None:
        own = samples_of(ids_of(counts)[comm.rank])

        def endless(loader: BatchLoader) -> Any:
            while True:
                yield from loader

        def seen(batch: Batch) -> tuple[list[int], int]:
            return check_samples(batch.samples), batch.step

        with PartialShuffle(own, comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            run_on = endless(loader)
            for _ in range(stop):
                next(run_on)
            state = loader.state_dict()
            wanted = [seen(next(run_on)) for _ in range(8)]
            run_on.close()
        with PartialShuffle(own, comm, 0.5) as again:
            loader = BatchLoader(again, 2)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            run_on = endless(loader)
            assert [seen(next(run_on)) for _ in range(8)] == wanted
            run_on.close()

    run(len(counts), main)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_loader_goes_on_from_the_samples_of_its_epoch(stop: int) -> None:
    """Without an exchange again."""

    def main(comm: Any) -> None:
        own = np.arange(6) + 6 * comm.rank
        with PartialShuffle(own, comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            epoch = iter(loader)
            for _ in range(stop):
                next(epoch)
            state, saved = loader.state_dict(), shuffle.samples
            rest = [each.samples.tolist() for each in epoch]
            wanted = rest + [each.samples.tolist() for each in loader]
        with PartialShuffle(saved, comm, 0.5, epoch=1) as again:
            loader = BatchLoader(again, 2)
            loader.load_state_dict(state)
            if stop < 3:
                found = [each.samples.tolist() for each in loader]
                assert again.epoch == 1
            else:
                found = []  # nothing is left of the epoch
            assert found == rest
            assert found + [each.samples.tolist() for each in loader] == wanted

    run(2, main)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_the_step_of_a_state_is_of_its_epoch(moved: int) -> None:
    """Also where other calls have ended the epoch of the last batch."""

    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(8), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            fresh = loader.state_dict()
            assert (fresh["step"], fresh["shuffle"]["epoch"]) == (4, 0)
            for batch in loader:
                if batch.step == 1:
                    break
            for _ in range(moved):
                shuffle.next_epoch()
            state = loader.state_dict()
            left = 2 if moved == 0 else 4
            assert state["step"] == (2 if moved == 0 else 4)
            wanted = None
            if moved:
                wanted = [each.samples.tolist() for each in loader]
        with PartialShuffle(np.arange(8), comm, 0.5) as again:
            loader = BatchLoader(again, 2)
            loader.load_state_dict(state)
            found = [each.samples.tolist() for each in loader]
            assert len(found) == left
            assert again.epoch == 1 + moved + (moved > 0)
            assert wanted is None or found == wanted

    run(2, main)


def test_an_epoch_that_ends_before_a_state_is_used_is_not_resumed() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(8), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            next(iter(loader))
            state = loader.state_dict()
            loader.load_state_dict(state)
            shuffle.next_epoch()
            assert [each.step for each in loader] == [0, 1, 2, 3]
            assert shuffle.epoch == 3

    run(2, main)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "counts", [(7,), (5, 5, 5), (4, 9, 4, 1), (2**40 + 1, 2**40 + 7, 2**21)]
)
def test_totals_are_those_of_integers_of_any_size(
    counts: tuple[int, ...], drop_last: bool
) -> None:
    size = max(3, max(counts) >> 21)
    found = batches._totals(counts, size, drop_last)
    if drop_last:
        assert found.tolist() == [size * len(counts)] * (min(counts) // size)
        return
    number = -(-max(counts) // size)
    assert len(found) == number
    for step in {0, 1, number // 2, number - 1}:
        ends = [sum(n * each // number for n in counts) for each in (step, step + 1)]
        assert found[step] == ends[1] - ends[0]


def test_totals_of_a_long_epoch_need_more_than_64_bits_on_the_way() -> None:
    """A step times a number of samples does."""
    counts = (2**45 - 1, 2**45 - 3)
    found = batches._totals(counts, 2**24, False)
    step, number = len(found) - 1, len(found)
    assert step * counts[0] > 2**63
    assert found[step] == sum(n - n * step // number for n in counts)
    assert found.sum() == sum(counts)


# -- misuse ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "from 1"),
        ({"batch_size": 2.0}, "from 1"),
        ({"batch_size": True}, "from 1"),
        ({"overlap_steps": -1}, "from 0"),
        ({"num_epochs": "3"}, "from 0"),
    ],
)
def test_all_ranks_refuse_a_loader_that_is_wrong_on_one(
    wrong: dict[str, Any], says: str
) -> None:
    def main(comm: Any) -> str:
        with PartialShuffle(np.arange(4), comm) as shuffle:
            given = {"batch_size": 2, **(wrong if comm.rank == 1 else {})}
            with pytest.raises(UsageError) as raised:
                BatchLoader(shuffle, **given)
            return str(raised.value)

    first, second = run(2, main)
    assert says in second
    assert "rank 1 refused its arguments" in first


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 3}, {"drop_last": True}, {"overlap_steps": 2}, {"num_epochs": 1}],
)
def test_all_ranks_refuse_loaders_that_differ(other: dict[str, Any]) -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(4), comm) as shuffle:
            given = {"batch_size": 2, **(other if comm.rank == 1 else {})}
            with pytest.raises(UsageError, match="rank 1 has"):
                BatchLoader(shuffle, **given)

    run(2, main)


def test_a_loader_needs_a_shuffle() -> None:
    with pytest.raises(UsageError, match="expected a PartialShuffle"):
        BatchLoader(np.zeros(3), 2)  # type: ignore[arg-type]


def test_an_epoch_that_another_call_ends_is_an_error() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(8), comm, 0.5) as shuffle:
            epoch = iter(BatchLoader(shuffle, 2))
            next(epoch)
            shuffle.next_epoch()
            with pytest.raises(UsageError, match="from epoch 1 to 2"):
                next(epoch)

    run(2, main)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"step": 9}, "has step 9"),
        ({"step": None}, "has step"),
        ({"step": True}, "has step True"),
        ({"num_steps": 3}, "has num_steps 3, and this loader 4"),
        ({"batch_size": 3}, "has batch_size 3, and this loader 2"),
        ({"drop_last": True}, "has drop_last True, and this loader False"),
        ({"other": 1}, "is no state"),
    ],
)
def test_all_ranks_refuse_a_place_that_does_not_fit(
    changed: dict[str, Any], says: str
) -> None:
    def main(comm: Any) -> str:
        with PartialShuffle(np.arange(8), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            next(iter(loader))
            state = {**loader.state_dict(), **(changed if comm.rank == 1 else {})}
            with pytest.raises(UsageError) as raised:
                loader.load_state_dict(state)
            return str(raised.value)

    first, second = run(2, main)
    assert says in second
    assert "rank 1 refused its arguments" in first


@pytest.mark.parametrize(
    ("number", "first", "other"),
    [
        (5, {"batch_size": 3}, {"batch_size": 4}),
        (7, {"batch_size": 3, "drop_last": True}, {"batch_size": 4}),
        (6, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}),
    ],
)
def test_a_state_of_other_batches_is_refused_though_steps_are_as_many(
    number: int, first: dict[str, Any], other: dict[str, Any]
) -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(number), comm) as shuffle:
            loader = BatchLoader(shuffle, **first)
            next(iter(loader))
            state = loader.state_dict()
        with PartialShuffle(np.arange(number), comm) as again:
            another = BatchLoader(again, **other)
            assert len(another) == len(loader)
            with pytest.raises(UsageError, match=r"has (batch_size|drop_last)"):
                another.load_state_dict(state)
            assert again.epoch == 0

    run(2, main)


def test_a_state_that_is_loaded_ends_an_iteration() -> None:
    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(8), comm, 0.5) as shuffle:
            loader = BatchLoader(shuffle, 2)
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
            next(epoch)
            loader.load_state_dict(state)
            with pytest.raises(UsageError, match="a state was loaded"):
                next(epoch)
            assert [each.step for each in loader] == [1, 2, 3]

    run(2, main)
