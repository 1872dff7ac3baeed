# SPDX-License-Identifier: Apache-2.0
"""Calls by an MPI that takes device memory, on devices of threads; what runs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cases import Case, legal_pairs, sample
from fake_device_mpi import FakeDeviceMpi
from mpi_device_ranks import mpi_here, on_mpi_threads
from nccl_ranks import nccl_here
from staged_cases import run_on_device
from staged_ranks import Rank

from commrt import _native
from commrt.backends.mpi import attached as mpi_calls
from commrt.comm import core_of
from commrt.devices import DeviceArray, ThreadDevice
from commrt.errors import BackendError, CaptureError, MismatchError, UsageError
from commrt.select.fingerprint import this_machine
from commrt.vocabulary.operations import OPERATIONS

DRAWN = 6
WITH_ARRAYS = [spec.name for spec in OPERATIONS if spec.mpi and not spec.is_empty]
UNLESS = "unless a table, COMMRT_ALGORITHM or the call says so"


@pytest.fixture(autouse=True)
def mpi() -> Iterator[FakeDeviceMpi]:
    with mpi_here() as fake:
        fake.set("needs_current", 1)
        yield fake


def ones(rank: Rank, count: int = 8, dtype: str = "f4") -> DeviceArray:
    return rank.array(np.full(count, 1 + rank.rank, dtype))


def told(rank: Rank, coll: str = "allreduce", nbytes: int = 64, **asked: Any) -> str:
    return str(rank.comm.explain(coll, nbytes, device="cuda", **asked))


def kinds(rank: Rank) -> set[str]:
    return {type(plan).__name__ for plan in core_of(rank.comm).devices.plans}


def sums(rank: Rank, x: DeviceArray, wanted: float) -> None:
    value = rank.fetch(x)
    rank.stream.synchronize()
    assert value().tolist() == [wanted] * x.shape[0]


def _all_right(size: int, cases: list[Case], **device: Any) -> None:
    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, None)

    wrong = on_mpi_threads(size, main, **device)
    assert [line for lines in wrong for line in lines] == []


def unasked(case: Case) -> Case:
    """Return the case as MPI runs it, or what runs in its stead."""
    return replace(case, algorithm=None, params={})


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("coll", WITH_ARRAYS)
def test_sample_agrees_with_numpy(
    coll: str, size: int, memory_flags: bool, seed: int, mpi: FakeDeviceMpi
) -> None:
    cases = [unasked(each) for each in sample(coll, size, seed, DRAWN)]
    # Something that MPI runs whatever was drawn, empty and odd.
    cases += [
        Case(coll, size, root=size - 1, count=count, in_place=in_place)
        for count, in_place in ((0, True), (1, False), (7, True))
    ]
    _all_right(size, cases, seed=seed, max_delay_us=20, memory_flags=memory_flags)
    if size > 1:
        assert mpi.counter("done") >= 3 * size


def test_every_type_and_reduction(mpi: FakeDeviceMpi) -> None:
    """MPI's where it keeps the rules, staged where not."""
    cases = [
        Case(coll, 2, dtype=dtype, op=op, count=count, spread="ragged")
        for dtype, op in legal_pairs()
        for coll, count in (("allreduce", 37), ("reduce_scatterv", 5))
    ]
    _all_right(2, cases)
    done = mpi.counter("done") // 2
    assert 0 < done < len(cases)


def test_unequal_blocks(seed: int) -> None:
    cases = [
        Case(coll, 3, root=1, count=6, spread=spread, in_place=in_place)
        for coll in WITH_ARRAYS
        if coll.endswith("v")
        for spread in ("ragged", "one")
        for in_place in (True, False)
    ]
    _all_right(3, cases, seed=seed)


def test_a_barrier_in_a_stream(mpi: FakeDeviceMpi) -> None:
    def main(rank: Rank) -> None:
        rank.comm.barrier(stream=rank.stream)
        rank.comm.barrier(stream=rank.stream, nonblocking=True).synchronize()
        assert ": mpi/native" in told(rank, "barrier", 0)

    on_mpi_threads(3, main)
    assert mpi.counter("MPI_Ibarrier") == 6


def test_bound_calls_and_requests() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        bound = rank.comm.plan.allreduce(x)
        assert bound.label == "mpi/native"
        request = bound.start()
        assert request.operation == "allreduce"
        assert request.wait() is x
        while not request.test():
            pass
        assert request.done
        assert bound() is x
        sums(rank, x, 6.0)

    on_mpi_threads(2, main)


def test_calls_of_several_communicators() -> None:
    def main(rank: Rank) -> None:
        others = [rank.comm.dup(), rank.comm.split(color=0)]
        x = ones(rank)
        for comm in others:
            comm.allreduce(x)
        sums(rank, x, 6.0)
        for comm in others:
            comm.free()

    on_mpi_threads(2, main)


def test_the_legacy_stream_is_not_held(mpi: FakeDeviceMpi) -> None:
    """MPI's copies may take turns with it: a call there returns when MPI is done."""

    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.stream.synchronize()
        for _ in range(3):
            before = mpi.counter("done")
            rank.comm.allreduce(x, stream=0)
            assert mpi.counter("done") > before
            request = rank.comm.allreduce(x, stream=0, nonblocking=True)
            request.wait(stream=0)
            rank.device.stream_synchronize(0)
        sums(rank, x, 3.0 * 2**5)

    mpi.set("looks", 50)
    on_mpi_threads(2, main)


# --- what runs ---


def test_what_runs_unasked_and_what_is_staged_by_rule() -> None:
    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        assert kinds(rank) == {"MpiDevicePlan"}
        assert ": mpi/native" in told(rank)
        assert f"MPI, which takes device memory, runs this {UNLESS}" in told(rank)
        for asked, why in (
            ({"op": "max"}, "the least and the largest of NaN"),
            ({"op": "avg"}, "MPI defines no avg of float32"),
            ({"dtype": "float16"}, "rounded at every step"),
            ({"dtype": "int16"}, "saturate instead of wrapping"),
            ({"nbytes": 1 << 40}, "counts in 32 bits"),
        ):
            said = told(rank, **asked)
            assert ": staged/" in said
            assert any(
                "mpi/native" in line and why in line for line in said.split("\n")
            )
        with pytest.raises(
            BackendError, match=r"asks for mpi/native.*no avg of float32"
        ):
            rank.comm.allreduce(ones(rank), op="avg", algorithm="mpi/native")
        with pytest.raises(BackendError, match="no avg of float32"):
            rank.comm.allreduce(ones(rank), op="avg", backend="mpi")
        rank.comm.allreduce(ones(rank), op="avg")
        rank.comm.allreduce(ones(rank), backend="staged")
        assert kinds(rank) == {"MpiDevicePlan", "StagedPlan"}

    on_mpi_threads(2, main)


def test_deterministic_reductions_are_staged() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup(deterministic=True)
        comm.allreduce(ones(rank))
        assert {type(each) for each in core_of(comm).devices.plans} == {
            _native.StagedPlan
        }
        comm.allgather(ones(rank))
        assert ": mpi/native" in str(comm.explain("allgather", 32, device="cuda"))
        comm.free()

    on_mpi_threads(2, main)


def test_where_nccl_runs_it_goes_first(mpi: FakeDeviceMpi) -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x)
        assert ": nccl/native" in told(rank)
        assert f"mpi/native: NCCL runs this {UNLESS}" in told(rank)
        rank.comm.allreduce(x, backend="mpi")
        sums(rank, x, 6.0)

    with nccl_here() as nccl:
        on_mpi_threads(2, main)
        assert nccl.counter("kernels") == 2
    assert mpi.counter("MPI_Iallreduce") == 2


def test_the_variable_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what MPI cannot do it does not speak; nor MPI's schedules, of devices."""
    asked = "allreduce:mpi/native,bcast:mpi/binomial"
    monkeypatch.setenv("COMMRT_ALGORITHM", asked)

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        rank.comm.allreduce(ones(rank), op="avg")
        rank.comm.bcast(ones(rank))
        assert "mpi/native\n  why    COMMRT_ALGORITHM asks" in told(rank)
        assert ": mpi/native\n  why    nothing else runs" in told(rank, "bcast")

    on_mpi_threads(2, main)


def test_a_table_asks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "by_hand.yaml"
    here = this_machine()
    where = {"ranks": 2, "device": "cuda"}
    written = {
        "schema": "commrt-tune/1",
        "machine": {
            "fingerprint": here.fingerprint,
            "cpu": asdict(here.cpu),
            "gpus": [asdict(each) for each in here.gpus],
            "nics": [asdict(each) for each in here.nics],
        },
        "rules": [
            {
                "op": "allreduce",
                "match": {**where, "bytes": [0, 1024]},
                "use": {"backend": "staged", "alg": "ring"},
            },
            {
                "op": "allreduce",
                "match": {**where, "bytes": [1024, None]},
                "use": {"backend": "mpi", "alg": "native"},
            },
        ],
    }
    table.write_text(yaml.safe_dump(written))
    monkeypatch.setenv("COMMRT_TABLE", str(table))

    def main(rank: Rank) -> None:
        x = ones(rank, 1000)
        rank.comm.allreduce(x)
        sums(rank, x, 3.0)
        assert kinds(rank) == {"MpiDevicePlan"}
        assert ": mpi/native\n  why    rule 1" in told(rank, nbytes=4000)
        assert ": staged/ring\n  why    rule 0" in told(rank)
        # What MPI would do otherwise runs by the model.
        said = told(rank, nbytes=4000, op="avg")
        assert "rule 1 asks for mpi/native, which cannot run this here" in said

    on_mpi_threads(2, main)


@pytest.mark.parametrize("together", [True, False])
def test_a_table_lets_it_be_at_work_beside_nccl(
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mpi: FakeDeviceMpi,
) -> None:
    table = tmp_path / "by_hand.yaml"
    here = this_machine()
    written = {
        "schema": "commrt-tune/1",
        "machine": {
            "fingerprint": here.fingerprint,
            "cpu": asdict(here.cpu),
            "gpus": [asdict(each) for each in here.gpus],
            "nics": [asdict(each) for each in here.nics],
        },
        "defaults": {"tested_together": [["mpi", "nccl"]]} if together else {},
        "rules": [],
    }
    table.write_text(yaml.safe_dump(written))
    monkeypatch.setenv("COMMRT_TABLE", str(table))

    def main(rank: Rank) -> bool:
        """Whether a call of NCCL, which all have given, has run while MPI was held."""
        x, y = ones(rank), ones(rank)
        comm = rank.comm
        comm.allreduce(y)
        comm.allreduce(x, backend="mpi", nonblocking=True).synchronize()
        core_of(comm).world.bootstrap.exchange(range(2), "warm", b"", 20)
        mpi.set("hold", 1)
        held = comm.allreduce(x, backend="mpi", nonblocking=True)
        request = comm.allreduce(y, nonblocking=True)
        ended = False
        if together:
            request.synchronize()
            ended = True
        core_of(comm).world.bootstrap.exchange(range(2), "looked", b"", 20)
        ended = ended or request.done
        assert not held.done
        core_of(comm).world.bootstrap.exchange(range(2), "seen", b"", 20)
        mpi.set("hold", 0)
        held.synchronize()
        request.synchronize()
        sums(rank, y, 6.0)
        return ended

    with nccl_here():
        assert on_mpi_threads(2, main) == [together] * 2


# --- what is refused ---


def test_the_variable_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, mpi: FakeDeviceMpi
) -> None:
    monkeypatch.setenv("COMMRT_CUDA_AWARE_MPI", "off")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        assert kinds(rank) == {"StagedPlan"}
        assert "not    mpi/native: COMMRT_CUDA_AWARE_MPI is off" in told(rank)
        with pytest.raises(BackendError, match="COMMRT_CUDA_AWARE_MPI is off"):
            rank.comm.allreduce(ones(rank), backend="mpi")

    on_mpi_threads(2, main)
    assert mpi.counter("MPI_Iallreduce") == 0


def test_the_variable_lets_no_stream_be_held(
    monkeypatch: pytest.MonkeyPatch, mpi: FakeDeviceMpi
) -> None:
    """Who waits is blocked until MPI is done, though streams have flags."""
    monkeypatch.setenv("COMMRT_CUDA_AWARE_MPI", "events")

    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x)
        before = mpi.counter("done")
        request = rank.comm.allreduce(x, nonblocking=True)
        request.wait()
        assert mpi.counter("done") > before
        sums(rank, x, 6.0)

    mpi.set("looks", 50)
    on_mpi_threads(2, main)


def test_one_rank_whose_library_takes_none_lets_all_be_staged(
    monkeypatch: pytest.MonkeyPatch, mpi: FakeDeviceMpi
) -> None:
    lacks = iter(["", "the MPI library takes no CUDA memory: it says no"])
    monkeypatch.setattr(mpi_calls, "_lacks", lambda kind: next(lacks))

    def main(rank: Rank) -> str:
        rank.comm.allreduce(ones(rank))
        assert kinds(rank) == {"StagedPlan"}
        with pytest.raises(BackendError, match="takes no CUDA memory: it says no"):
            rank.comm.allreduce(ones(rank), backend="mpi")
        return core_of(rank.comm).attached["mpi"].facts.why

    whys = on_mpi_threads(2, main)
    assert whys[0] == whys[1]
    assert whys[0].startswith("rank ")
    assert mpi.counter("MPI_Iallreduce") == 0


def test_a_kind_of_device_that_no_library_takes() -> None:
    mpi_calls.KINDS.discard("threads")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        assert kinds(rank) == {"StagedPlan"}
        assert "no MPI library takes memory of a threads device" in told(rank)

    on_mpi_threads(2, main)


def test_without_an_mpi_communicator_all_are_staged() -> None:
    def main(rank: Rank) -> None:
        lender: Any = core_of(rank.comm).world.native_comms
        lender.left = 0
        rank.comm.allreduce(ones(rank))
        assert kinds(rank) == {"StagedPlan"}
        assert "no MPI communicator is left for its collectives" in told(rank)

    on_mpi_threads(2, main)


def test_the_library_has_memory_of_one_device() -> None:
    def main(rank: Rank) -> None:
        comm, other = rank.comm, rank.comm.dup()
        comm.allreduce(ones(rank))
        with ThreadDevice() as second:
            x = DeviceArray(second, 4).put(np.ones(4, "f4"))
            with pytest.raises(UsageError, match="use a communicator for each device"):
                comm.allreduce(x)
            with pytest.raises(UsageError, match="another device of this process"):
                other.allreduce(x)
            other.allreduce(x, backend="staged", nonblocking=True).synchronize()
            assert x.get().tolist() == [2.0] * 4
            x.free()
            other.free()
        comm.allreduce(ones(rank))

    on_mpi_threads(2, main)


def test_a_captured_stream_is_refused() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x)
        rank.device.begin_capture(rank.stream.handle)
        with pytest.raises(CaptureError, match=r"allreduce on .*the host calls MPI at"):
            rank.comm.allreduce(x)
        graph = rank.device.end_capture(rank.stream.handle)
        rank.device.graph_destroy(graph)
        rank.comm.allreduce(x)
        sums(rank, x, 6.0)

    on_mpi_threads(2, main)


def test_check_mode_names_calls_that_differ(
    monkeypatch: pytest.MonkeyPatch, mpi: FakeDeviceMpi
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        with pytest.raises(MismatchError):
            rank.comm.allreduce(ones(rank, 8 + rank.rank))

    on_mpi_threads(2, main)
    assert mpi.counter("MPI_Iallreduce") == 2
