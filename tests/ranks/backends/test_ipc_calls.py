# SPDX-License-Identifier: Apache-2.0
"""Calls over memory of peers, end to end, on devices of threads; what runs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cases import Case, legal_pairs, sample
from ipc_ranks import IpcSimRanks, ipc_here, on_ipc_threads
from nccl_ranks import nccl_here
from staged_cases import run_on_device
from staged_ranks import Rank

import commrt
from commrt.backends.ipc import attached as ipc_calls
from commrt.comm import core_of
from commrt.devices import DeviceArray, ThreadDevice
from commrt.errors import BackendError, CaptureError, MismatchError, UsageError
from commrt.select.fingerprint import this_machine
from commrt.vocabulary.operations import OPERATIONS

SIZES = (1, 2, 3, 5)
DRAWN = 6
MOVED = [
    spec.name
    for spec in OPERATIONS
    if spec.x_count != "none" and spec.name != "alltoallv"
]


@pytest.fixture(autouse=True)
def ipc() -> Iterator[None]:
    with ipc_here():
        yield


def ones(rank: Rank, count: int = 8, dtype: str = "f4") -> DeviceArray:
    return rank.array(np.full(count, 1 + rank.rank, dtype))


def told(rank: Rank, coll: str = "allreduce", nbytes: int = 64, **asked: Any) -> str:
    return str(rank.comm.explain(coll, nbytes, device="cuda", **asked))


def _all_right(size: int, cases: list[Case], **device: Any) -> None:
    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, None)

    wrong = on_ipc_threads(size, main, **device)
    assert [line for lines in wrong for line in lines] == []


def _over_peers(case: Case) -> Case:
    """Return the case by a schedule over memory of peers, or by what runs unasked."""
    if case.algorithm is None:
        return replace(case, params={})
    return replace(case, algorithm=f"ipc/{case.algorithm}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", MOVED)
def test_sample_agrees_with_numpy(coll: str, size: int, seed: int) -> None:
    cases = [_over_peers(each) for each in sample(coll, size, seed, DRAWN)]
    _all_right(size, cases, seed=seed, max_delay_us=20)


def test_every_type_and_reduction() -> None:
    cases = [
        Case(coll, 2, "ipc/direct", {}, dtype, op, count=count, spread="ragged")
        for dtype, op in legal_pairs()
        for coll, count in (("allreduce", 37), ("reduce_scatterv", 5))
    ]
    _all_right(2, cases)


def test_long_operations_go_in_parts(seed: int) -> None:
    """More than there is room for at once, by schedules that can be cut."""
    cases = [
        Case(coll, 3, f"ipc/{name}", count=5000)
        for coll, name in [
            ("allreduce", "direct"),
            ("allreduce", "ring"),
            ("allgather", "direct"),
            ("alltoall", "direct"),
        ]
    ]
    _all_right(3, cases, seed=seed, half_nbytes=1 << 12)


def test_what_is_too_long_for_an_algorithm_says_so() -> None:
    def main(rank: Rank) -> None:
        x = rank.array(np.ones(4000, "f4"))
        with pytest.raises(BackendError, match="use another algorithm"):
            rank.comm.alltoall(x, algorithm="ipc/dissemination")
        rank.comm.alltoall(x, algorithm="ipc/direct")

    on_ipc_threads(4, main, half_nbytes=1 << 12)


def test_a_barrier_in_a_stream() -> None:
    def main(rank: Rank) -> None:
        rank.comm.barrier(stream=rank.stream)
        rank.comm.barrier(stream=rank.stream, nonblocking=True).synchronize()
        assert ": ipc/direct" in told(rank, "barrier", 0)

    on_ipc_threads(3, main)


def test_bound_calls_and_requests() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        bound = rank.comm.plan.allreduce(x, backend="ipc")
        assert bound.label.startswith("ipc/direct")
        request = bound.start()
        assert request.operation == "allreduce"
        assert request.wait() is x
        while not request.test():
            pass
        assert request.done
        assert bound() is x
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [6.0] * 8

    on_ipc_threads(2, main)


# --- what runs unasked ---


def test_ranks_that_share_a_device_read_each_other() -> None:
    """One shot for short vectors, two for long ones; not what is staged."""

    def main(rank: Rank) -> None:
        x = ones(rank)
        assert rank.comm.allreduce(x) is x
        assert ": ipc/direct{shots=1}" in told(rank)
        assert ": ipc/direct{shots=2}" in told(rank, nbytes=1 << 26)
        assert ": ipc/direct" in told(rank, "reduce_scatter")
        assert "staged/ring: memory of peers serves unless" in told(rank)
        assert ": staged/" in told(rank, "alltoallv", 0)
        assert "not    ipc/direct: no rank knows where others" in told(
            rank, "alltoallv", 0
        )
        kinds = {type(plan).__name__ for plan in core_of(rank.comm).devices.plans}
        assert kinds == {"PeerPlan"}

    on_ipc_threads(2, main)


def test_ranks_with_a_device_each_are_staged_unless_they_ask() -> None:
    def main(rank: Rank) -> list[str]:
        rank.device.uuid = f"device {rank.rank}"
        x = ones(rank)
        rank.comm.allreduce(x)
        first = told(rank)
        rank.comm.allreduce(x, backend="ipc")
        rank.comm.allreduce(x, algorithm="ipc/ring")
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [12.0] * 8
        return first.splitlines()

    lines = on_ipc_threads(2, main)[0]
    assert ": staged/" in lines[0]
    where = "memory of peers serves where a table or the call names it"
    assert any("ipc/direct" in line and where in line for line in lines)


def test_where_nccl_runs_it_goes_first() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x)
        assert ": nccl/native" in told(rank)
        rank.comm.allreduce(x, backend="ipc")
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [6.0] * 8

    with nccl_here() as nccl:
        on_ipc_threads(2, main)
        assert nccl.counter("kernels") == 2


def test_where_nccl_makes_no_communicator_memory_of_peers_serves() -> None:
    """As where two processes share a GPU, which NCCL finds as it is made."""

    def main(rank: Rank) -> None:
        rank.comm.timeout_s = 0.5  # who joins waits so long for who cannot
        x = ones(rank)
        rank.comm.allreduce(x)
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 8
        assert ": ipc/direct" in told(rank)

    with nccl_here(is_clean=False) as nccl:
        nccl.fail("ncclCommInitRankConfig", 3)
        on_ipc_threads(2, main)
        assert nccl.counter("kernels") == 0


def test_the_variable_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "allreduce:ipc/ring,bcast:staged/binomial"
    monkeypatch.setenv("COMMRT_ALGORITHM", asked)

    def main(rank: Rank) -> None:
        assert rank.comm.allreduce(np.ones(3, "f4")).tolist() == [2.0] * 3
        rank.comm.allreduce(ones(rank))
        assert "ipc/ring\n  why    COMMRT_ALGORITHM asks" in told(rank)
        assert "staged/binomial\n" in told(rank, "bcast")

    on_ipc_threads(2, main)


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
                "use": {"backend": "staged", "alg": "direct", "params": {"shots": 1}},
            },
            {
                "op": "allreduce",
                "match": {**where, "bytes": [1024, None]},
                "use": {"backend": "ipc", "alg": "ring", "params": {"chunk": 65536}},
            },
        ],
    }
    table.write_text(yaml.safe_dump(written))
    monkeypatch.setenv("COMMRT_TABLE", str(table))

    def main(rank: Rank) -> None:
        x = ones(rank, 1000)
        rank.comm.allreduce(x)
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 1000
        assert ": ipc/ring{chunk=65536}\n  why    rule 1" in told(rank, nbytes=4000)
        assert ": staged/direct{shots=1}\n  why    rule 0" in told(rank)

    on_ipc_threads(2, main)


def test_the_order_that_deterministic_mode_asks_for_is_proved() -> None:
    """Bits as on the host, where every step rounds alike; else it is staged."""

    def main(rank: Rank) -> None:
        comm = rank.comm.dup(deterministic=True)
        rng = np.random.default_rng(rank.rank)
        for dtype in ("f4", "f2"):
            values = rng.standard_normal(50).astype(dtype)
            x = rank.array(values)
            comm.allreduce(x)
            value = rank.fetch(x)
            rank.stream.synchronize()
            assert value().tobytes() == comm.allreduce(values).tobytes()
        asked = {"device": "cuda", "dtype": "float16"}
        assert ": ipc/direct" in str(comm.explain("allreduce", 64, device="cuda"))
        said = str(comm.explain("allreduce", 64, **asked))
        assert ": staged/direct" in said
        assert "add two operands at a time" in said
        comm.free()

    on_ipc_threads(3, main)


# --- what is refused ---


def test_what_devices_lack_is_told_and_staged() -> None:
    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        assert ": staged/" in told(rank)
        assert "not    ipc/direct: rank 0: its device's streams do not" in told(rank)
        with pytest.raises(BackendError, match="do not write flags"):
            rank.comm.allreduce(ones(rank), backend="ipc")
        with pytest.raises(BackendError, match=r"asks for ipc/ring.*write flags"):
            rank.comm.allreduce(ones(rank), algorithm="ipc/ring")

    on_ipc_threads(2, main, memory_flags=False)


def test_one_rank_without_kernels_lets_all_be_staged() -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            rank.device.why_no_kernels = "NVRTC is not to be found"
        rank.comm.allreduce(ones(rank))
        assert ": staged/" in told(rank)
        assert "rank 1: NVRTC is not to be found" in told(rank)

    on_ipc_threads(2, main)


def test_where_memory_cannot_be_opened_all_run_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried: one rank's driver refuses, and nobody is left with half of it."""

    class Refusing(ThreadDevice):
        refuses = False

        def ipc_open(self, handle: bytes) -> int:
            if self.refuses:
                raise commrt.errors.DeviceError("no peer access", "unsupported")
            return super().ipc_open(handle)

    monkeypatch.setattr("ipc_ranks.ThreadDevice", Refusing)

    def main(rank: Rank) -> None:
        rank.device.refuses = rank.rank == 2
        x = ones(rank)
        rank.comm.allreduce(x)
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [6.0] * 8
        assert ": staged/" in told(rank)
        assert "no peer access" in told(rank)
        with pytest.raises(BackendError, match="no peer access"):
            rank.comm.allreduce(x, backend="ipc")

    on_ipc_threads(3, main)


def test_a_users_reduction_and_other_counts_are_not_for_kernels() -> None:
    def main(rank: Rank) -> None:
        sends = [1, 2] if rank.rank == 0 else [2, 1]
        x = rank.array(np.ones(3, "f4"))
        with pytest.raises(BackendError, match="no rank knows where others publish"):
            rank.comm.alltoallv(x, send_counts=sends, recv_counts=sends, backend="ipc")
        with pytest.raises(UsageError, match="rings"):
            rank.comm.allreduce(x, algorithm="ipc/rings")

    on_ipc_threads(2, main)


def test_memory_of_peers_is_of_one_device() -> None:
    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank), backend="ipc")
        with ThreadDevice(ordinal=1) as other:
            x = DeviceArray(other, 4)
            with pytest.raises(UsageError, match="a communicator for each device"):
                rank.comm.allreduce(x, backend="ipc")

    on_ipc_threads(1, main)


def test_captured_streams_are_refused() -> None:
    ranks = IpcSimRanks(1, 0)

    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle, 2)
        with pytest.raises(CaptureError, match=r"values that are past.*nothing was"):
            rank.comm.allreduce(x, backend="ipc")
        rank.device.end_capture(rank.stream.handle)

    ranks.run(main)
    ranks.close()


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later"])
def test_check_mode_names_the_operations_where_ranks_diverge(
    monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        x = ones(rank)
        if warm:
            rank.comm.allreduce(x)
        with pytest.raises(MismatchError, match="operation=allreduce") as error:
            getattr(rank.comm, ("allreduce", "bcast")[rank.rank])(x)
        assert "operation=bcast" in str(error.value)
        with pytest.raises(MismatchError, match="algorithm="):
            rank.comm.allreduce(x, backend=("ipc", "staged")[rank.rank])
        rank.comm.allreduce(x)

    on_ipc_threads(2, main)


def test_devices_that_stand_for_none_share_nothing_by_themselves() -> None:
    ipc_calls.KINDS.clear()
    ipc_calls.KINDS.add("cuda")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        assert "processes share no memory of a threads one" in told(rank)

    on_ipc_threads(2, main)
