# SPDX-License-Identifier: Apache-2.0
"""The timing loop: sizes, expected results, statistics, and what it refuses to time."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.bench import overlap, submit_cost, timing_loop
from commrt.bench.launch import make_job
from commrt.vocabulary.operations import COLLECTIVES, OPERATIONS, operation, rule_nbytes


class _Done:
    def __init__(self, call: timing_loop.Call) -> None:
        call()

    def wait(self) -> None:
        pass

    def test(self) -> bool:
        return True


class AlonePeer:
    """A world of one rank, in numpy; ``wrong`` spoils every result."""

    rank, size = 0, 1

    def __init__(self, wrong: bool = False) -> None:
        self.num_calls = 0
        self._wrong = wrong

    def barrier(self) -> None:
        pass

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def agree(self, value: float) -> float:
        return value

    def bind(self, coll: str, x: Any, out: Any, root: int) -> timing_loop.Call:
        def call() -> None:
            self.num_calls += 1
            if out is not None:
                out[...] = x
            if self._wrong:
                (x if out is None else out)[0] += 1

        return call

    def bind_outstanding(self, coll: str, parts: Any, root: int) -> Any:
        calls = [self.bind(coll, x, out, root) for x, out in parts]
        return lambda: [call() for call in calls]

    def bind_nonblocking(self, *args: Any) -> Any:
        call = self.bind(*args)
        return lambda: _Done(call)


def _quick(coll: str, sizes: list[int], **more: Any) -> dict[str, Any]:
    limits = {"iterations": 12, "min_iterations": 3, "floor_us": 1.0, "min_s": 0.0}
    return make_job(coll, sizes, **{**limits, **more})


@pytest.mark.parametrize("coll", COLLECTIVES)
@pytest.mark.parametrize("fresh", [False, True])
def test_every_operation_is_checked_then_timed(coll: str, fresh: bool) -> None:
    peer = AlonePeer()
    rows = timing_loop.run_job(peer, _quick(coll, [4, 1000], fresh=fresh))
    assert [row["nbytes"] for row in rows] == ([0] if coll == "barrier" else [4, 1000])
    for row in rows:
        assert row["valid"]
        assert 3 <= len(row["samples_us"]) <= 12
        assert row["low_us"] <= row["median_us"] <= row["high_us"]
        assert row["link_class"] == "single"


@pytest.mark.parametrize("coll", COLLECTIVES)
def test_each_of_the_outstanding_operations_has_its_own_arrays(coll: str) -> None:
    job = make_job(coll, [64], outstanding=3)
    peer = AlonePeer()
    trial = timing_loop.Trial(peer, job, 64)
    assert len(trial.parts) == 3
    assert trial.is_right()
    assert peer.num_calls == 3
    # Alone, an exscan has no result.
    if coll != "barrier" and operation(coll).contributors(0, 1):
        x, out = trial.parts[-1]
        last = x if out is None else out
        last[-1] += 1
        assert not trial._is_expected(last)
        assert not np.shares_memory(last, trial.parts[0][0])
        assert trial._is_expected(trial.parts[0][1] if out is not None else trial.x)


def test_a_wrong_result_is_never_timed() -> None:
    peer = AlonePeer(wrong=True)
    (row,) = timing_loop.run_job(peer, _quick("allreduce", [64]))
    assert row["valid"] is False
    assert "samples_us" not in row
    assert peer.num_calls == 1


def test_sizes_below_one_element_are_skipped() -> None:
    rows = timing_loop.run_job(AlonePeer(), _quick("allreduce", [1, 2, 4]))
    assert [row["nbytes"] for row in rows] == [4]


def test_repetitions_stop_at_the_cap() -> None:
    job = _quick("allreduce", [4], max_relative_ci=0.0, iterations=25)
    (row,) = timing_loop.run_job(AlonePeer(), job)
    assert len(row["samples_us"]) == 25


def test_overlap_rows_have_every_phase() -> None:
    job = _quick("allreduce", [64], num_tests=2)
    (row,) = timing_loop.run_job(AlonePeer(), job, overlap.measure_overlap)
    assert row["valid"]
    assert {*overlap.PHASES, "pure_us", "pure_min_us", "pure_max_us"} <= set(row)
    assert 0 <= row["overlap_percent"] <= 100


def test_calls_of_the_root_are_timed_there_in_streams() -> None:
    job = _quick("bcast", [8])
    (row,) = timing_loop.run_job(AlonePeer(), job, submit_cost.measure_root_call)
    assert (row["valid"], len(row["samples_us"])) == (True, 12)
    assert row["low_us"] <= row["median_us"] <= row["high_us"]


def test_submit_is_measured_per_call() -> None:
    job = _quick("allreduce", [8])
    (row,) = timing_loop.run_job(AlonePeer(), job, submit_cost.measure_submit)
    assert (row["valid"], len(row["samples_us"])) == (True, 12)
    wrong = AlonePeer(wrong=True)
    (row,) = timing_loop.run_job(wrong, job, submit_cost.measure_submit)
    assert not row["valid"]
    assert "not timed" in row["error"]
    assert "samples_us" not in row


@pytest.mark.parametrize(
    ("overall", "compute", "test", "pure", "percent"),
    [
        (10.0, 10.0, 0.0, 10.0, 100.0),
        (20.0, 10.0, 0.0, 10.0, 0.0),
        (15.0, 10.0, 0.0, 10.0, 50.0),
        (30.0, 10.0, 0.0, 10.0, 0.0),
        (16.0, 11.0, 1.0, 10.0, 40.0),
        (1.0, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_overlap_formula(
    overall: float, compute: float, test: float, pure: float, percent: float
) -> None:
    measured = overlap.overlap_percent(overall, compute, test, pure)
    assert measured == pytest.approx(percent)


@given(
    spec=st.sampled_from(
        [one for one in OPERATIONS if one.rule_bytes not in ("none", "any")]
    ),
    blocks=st.integers(1, 1000),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    size=st.integers(1, 9),
)
def test_counts_agree_with_the_bytes_that_select_a_rule(
    spec: Any, blocks: int, itemsize: int, size: int
) -> None:
    nbytes = blocks * size * itemsize  # divisible, so that nothing is rounded
    x, out = timing_loop.element_counts(asdict(spec), nbytes, itemsize, size)
    full = (out if spec.out_count == "times_size" else x) * itemsize
    assert rule_nbytes(spec.name, full, size) == nbytes
    if spec.out_count == "div_size":
        assert out * size == x


def test_reduce_scatter_rounds_down_to_equal_blocks() -> None:
    spec = asdict(operation("reduce_scatter"))
    assert timing_loop.element_counts(spec, 1024, 4, 3) == (255, 85)
    assert timing_loop.element_counts(spec, 4, 4, 2) == (0, 0)


def _reference(coll: str, size: int, root: int, count: int) -> list[Any]:
    """Return every rank's result from every rank's input, the long way."""
    coll = operation(coll).vector_of or coll  # with blocks of equal length
    inputs = [np.arange(count) % 7 + rank + 1 for rank in range(size)]
    total = np.sum(inputs, axis=0)
    parts = [np.split(x, size) for x in inputs] if count % size == 0 else []
    if coll in ("allreduce", "reduce"):
        return [total] * size
    if coll == "reduce_scatter":
        return list(np.split(total, size))
    if operation(coll).combines_some:
        some = [operation(coll).contributors(rank, size) for rank in range(size)]
        return [sum(inputs[one] for one in each) + 0 * total for each in some]
    if coll == "bcast":
        return [inputs[root]] * size
    if coll in ("allgather", "gather"):
        return [np.concatenate(inputs)] * size
    if coll == "scatter":
        return parts[root]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(size)]


@pytest.mark.parametrize("coll", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_expected_results(coll: str, size: int) -> None:
    count, root, spec = 60, size - 1, asdict(operation(coll))
    for rank, whole in enumerate(_reference(coll, size, root, count)):
        for low, high in ((0, len(whole)), (3, min(11, len(whole)))):
            chunk = timing_loop.expected_chunk(spec, rank, size, root, count, low, high)
            np.testing.assert_array_equal(chunk, whole[low:high])


def test_median_interval_of_few_samples_is_their_range() -> None:
    assert timing_loop.median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert timing_loop.median_interval([4.0, 1.0]) == (2.5, 1.0, 4.0)


def test_median_interval_ignores_outliers() -> None:
    samples = [float(value) for value in range(100)]
    samples[99] = 1e9
    median, low, high = timing_loop.median_interval(samples)
    assert median == 49.5
    # The binomial(100, 1/2) interval: order statistics 40 and 61, counted from 1.
    assert (low, high) == (39.0, 60.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_median_interval_encloses_the_median(samples: list[float]) -> None:
    median, low, high = timing_loop.median_interval(samples)
    assert median == pytest.approx(float(np.median(samples)))
    assert min(samples) <= low <= median <= high <= max(samples)


def test_flag_barrier_keeps_ranks_within_one_epoch(tmp_path: Path) -> None:
    path = str(tmp_path / "flags")
    timing_loop.SharedFlags.create(path, 3)
    entered = [0, 0, 0]
    seen: list[int] = []

    def rank_main(rank: int) -> None:
        flags = timing_loop.SharedFlags(path, 3)
        barrier = timing_loop.FlagBarrier(flags, rank, oversubscribed=True)
        for epoch in range(1, 6):
            entered[rank] = epoch
            barrier()
            seen.append(min(entered) - epoch)

    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(seen) == 15
    assert min(seen) >= 0


def test_probe_of_a_single_rank_is_zero(tmp_path: Path) -> None:
    path = str(tmp_path / "flags")
    timing_loop.SharedFlags.create(path, 1)
    flags = timing_loop.SharedFlags(path, 1)
    assert timing_loop.probe_link(flags, 0, 0) == 0.0


@pytest.mark.parametrize(
    ("latency", "ranks", "cpus", "name"),
    [(80.0, 2, 2, "near"), (300.0, 2, 2, "far"), (0.0, 4, 2, "oversubscribed")],
)
def test_link_classes(latency: float, ranks: int, cpus: int, name: str) -> None:
    assert timing_loop.link_class_of(latency, ranks, cpus) == name


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, (2, 3)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
        ({}, (0, 1)),
    ],
)
def test_rank_is_known_before_the_library_starts(
    environ: dict[str, str], expected: tuple[int, int]
) -> None:
    assert timing_loop.rank_and_size(environ) == expected


def test_numpy_dtype_knows_bfloat16() -> None:
    pytest.importorskip("ml_dtypes")
    assert timing_loop.numpy_dtype("bfloat16").itemsize == 2


def test_result_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    timing_loop.save_result(str(path), {"rows": [1]})
    assert timing_loop.load_job(str(path)) == {"rows": [1]}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI u@h, Sep 16, 2026\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "MPICH Version: 5.0.2"),
    ],
)
def test_library_name(version: str, name: str) -> None:
    assert timing_loop.library_name(version) == name
