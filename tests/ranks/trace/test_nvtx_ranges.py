# SPDX-License-Identifier: Apache-2.0
"""Ranges of NVTX around calls, seen by a pretended library; none where it is off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvtx import begun, build, build_injection, lines_of
from nccl_ranks import nccl_here

from commrt import Block, Layout, _native
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.errors import BackendError, CommError, UsageError
from commrt.local import run
from commrt.trace import nvtx


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvtx"))


@pytest.fixture
def said(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Turn ranges on; return what gives and forgets the lines so far."""
    monkeypatch.setenv("COMMRT_NVTX", "1")
    monkeypatch.setenv("COMMRT_NVTX_LIB", str(library))
    return lines_of(library)


def test_a_range_says_operation_bytes_algorithm_and_communicator(
    said: Callable[[], list[str]],
) -> None:
    def main(comm: Any) -> str:
        x = np.ones(1000, np.float32)
        comm.allreduce(x)
        comm.allreduce(x, op="max", nonblocking=True).wait()
        comm.allgather(x[:10], out=np.empty(20, np.float32))
        comm.allreduce(x, algorithm="ring")
        comm.barrier()
        if comm.rank == 0:
            comm.send(x, dest=1)
        else:
            comm.recv(x, source=0)
        step = comm.plan.bcast(x, root=1)
        step()
        step.start().wait()
        assert "bcast" in repr(step)
        return str(comm.explain("allreduce", 4000).choice.candidate)

    chosen, _ = run(2, main, timeout_s=300)
    lines = said()
    found = begun(lines)
    assert f"begin allreduce 4000 B {chosen} local | 4000" in found
    assert "begin allreduce 4000 B ring local | 4000" in found
    assert "begin send 4000 B local | 4000" in found
    assert "begin recv 4000 B local | 4000" in found
    assert [line for line in found if line.startswith("begin barrier ")]
    assert [line for line in found if line.startswith("begin allgather 40 B ")]
    bcast = [line for line in lines if line.startswith("begin bcast 4000 B ")]
    assert len(bcast) == 2 * 2  # each run of each rank


def test_neighbours_halos_messages_and_sparse_sums_have_ranges_and_their_plans(
    said: Callable[[], list[str]],
) -> None:
    def main(comm: Any) -> None:
        cart = comm.cart((2,), (True,))
        u, v = np.zeros(6, np.float32), np.zeros(6)
        x = np.ones(4, np.float32)
        wide = np.ones((2, 4), np.float32)
        cart.halo_exchange([u, v], 1)
        cart.halo_reduce(fields=u, width=1, op="max")
        cart.plan.halo_exchange([u, v], 1)()
        cart.plan.halo_reduce(u, 1).start().wait()
        cart.neighbor_allgather(x)
        cart.neighbor_alltoall(wide)
        cart.plan.neighbor_allgather(x)()
        comm.graph([1 - comm.rank], [1 - comm.rank]).neighbor_allgather(x)
        rows = Layout((8,), (2,), (Block(0),))
        comm.redistribute(x, rows, rows)
        comm.plan.redistribute(x, rows, rows)()
        entries = np.array([1], np.int32), np.ones(1, np.float32), (9,)
        comm.sparse_allreduce(entries)
        comm.plan.sparse_allreduce(entries)()
        comm.plan.topk_allreduce(x, 2)()
        if comm.rank == 0:
            comm.plan.send(x, dest=1)()
        else:
            comm.plan.recv(x, source=0)()
        assert "halo_exchange" in dir(cart.plan)
        with pytest.raises(AttributeError, match="no collective 'allredcue'"):
            comm.plan.allredcue  # noqa: B018

    run(2, main, timeout_s=300)
    lines = said()
    assert begun(lines)

    def count(begin: str) -> int:
        return len([line for line in lines if line.startswith(f"begin {begin} ")])

    assert lines.count("begin halo_exchange 72 B local.cart1 | 72") == 2 * 2
    assert lines.count("begin halo_reduce 24 B local.cart1 | 24") == 2 * 2
    assert lines.count("begin neighbor_allgather 16 B local.cart1 | 16") == 2 * 2
    assert lines.count("begin neighbor_alltoall 32 B local.cart1 | 32") == 2
    assert lines.count("begin redistribute 16 B local | 16") == 2 * 2
    assert count("sparse_allreduce 8 B") == 2 * 2
    assert count("topk_allreduce 16 B") == 2
    assert lines.count("begin send 16 B local | 16") == 1
    assert lines.count("begin recv 16 B local | 16") == 1


def test_calls_on_devices_by_each_engine(said: Callable[[], list[str]]) -> None:
    def main(comm: Any) -> None:
        with ThreadDevice() as device:
            with DeviceStream(device) as stream:
                x = DeviceArray(device, 64).put(np.ones(64))
                for _ in range(2):
                    comm.allreduce(x)
                comm.allreduce(x, backend="staged")
                stream.synchronize()
            comm.free()

    with nccl_here():
        run(2, main, timeout_s=300)
    found = begun(said())
    assert "begin allreduce 256 B nccl/native local | 256" in found
    assert "begin allreduce 256 B staged local | 256" in found


def test_a_wrong_call_ends_its_range_and_raises_its_own_error(
    said: Callable[[], list[str]],
) -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="op"):
            comm.allreduce(np.ones(3), op="sun")
        with pytest.raises(CommError, match="x"):
            comm.allreduce("no array")

    run(1, main, timeout_s=300)
    assert begun(said())


def test_without_a_library_the_error_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMRT_NVTX", "1")
    monkeypatch.setenv("COMMRT_NVTX_LIB", str(tmp_path / "none.so"))
    with pytest.raises(BackendError, match=r"COMMRT_NVTX=1: .*none\.so"):
        run(1, lambda comm: None, timeout_s=300)
    monkeypatch.delenv("COMMRT_NVTX_LIB")
    monkeypatch.setattr(nvtx, "SONAMES", ("libnvToolsExt_that_is_not.so.1",))
    nvtx._library.cache_clear()
    with pytest.raises(BackendError, match="pip install nvidia-nvtx-cu12"):
        run(1, lambda comm: None, timeout_s=300)
    nvtx._library.cache_clear()


_CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from pathlib import Path
from fake_nvtx import lines_of
import commrt
from commrt.comm import core_of
lines = lines_of(Path(sys.argv[2]))
comm = commrt.init()
comm.allreduce(np.ones(2))
comm.allreduce(np.ones(2), nonblocking=True).wait()
print(core_of(comm).ranges._library._name)
print(*lines(), sep="\\n")
"""


def test_the_real_library_hands_ranges_to_what_a_profiler_injects(
    tmp_path: Path,
) -> None:
    """From the wheel, which is found as it is installed."""
    found = [Path(each) for each in nvtx._wheel_files()]
    if not found or not (found[0].parents[1] / "include" / "nvtx3").is_dir():
        pytest.skip("no wheel of NVTX is installed here: make test installs it")
    injected = build_injection(tmp_path, found[0].parents[1] / "include")
    said = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            _CALL,
            str(Path(__file__).parents[2] / "support"),
            injected,
        ],
        env={
            **{k: v for k, v in os.environ.items() if k != "COMMRT_NVTX_LIB"},
            "COMMRT_NVTX": "1",
            "NVTX_INJECTION64_PATH": str(injected),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    library, *lines = said.stdout.splitlines()
    assert Path(library) == found[0]
    assert begun(lines)
    assert len([line for line in lines if line.startswith("begin allreduce 16 B")]) == 2


def test_where_it_is_off_methods_are_what_they_always_are() -> None:
    def main(comm: Any) -> None:
        assert core_of(comm).ranges is None
        assert "allreduce" not in vars(comm)
        bound = comm.plan.allreduce(np.ones(1))
        assert type(bound) is _native.PersistentCall

    run(1, main, timeout_s=300)
