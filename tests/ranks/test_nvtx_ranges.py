# SPDX-License-Identifier: Apache-2.0
"""Ranges of NVTX around calls, seen by a pretended library; none where it is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvtx import begun, build, lines_of
from nccl_ranks import nccl_here

from commrt import _native, nvtx_ranges
from commrt.backends.local import run
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.errors import BackendError, CommError, UsageError


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

    chosen, _ = run(2, main, timeout_s=60)
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
        run(2, main, timeout_s=60)
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

    run(1, main, timeout_s=60)
    assert begun(said())


def test_without_a_library_the_error_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMRT_NVTX", "1")
    monkeypatch.setenv("COMMRT_NVTX_LIB", str(tmp_path / "none.so"))
    with pytest.raises(BackendError, match=r"COMMRT_NVTX=1: .*none\.so"):
        run(1, lambda comm: None, timeout_s=60)
    monkeypatch.delenv("COMMRT_NVTX_LIB")
    monkeypatch.setattr(nvtx_ranges, "SONAME", "libnvToolsExt_that_is_not.so.1")
    nvtx_ranges._library.cache_clear()
    with pytest.raises(BackendError, match="pip install nvidia-nvtx-cu12"):
        run(1, lambda comm: None, timeout_s=60)
    nvtx_ranges._library.cache_clear()


def test_where_it_is_off_methods_are_what_they_always_are() -> None:
    def main(comm: Any) -> None:
        assert comm._ranges is None
        assert "allreduce" not in vars(comm)
        bound = comm.plan.allreduce(np.ones(1))
        assert type(bound) is _native.PersistentCall

    run(1, main, timeout_s=60)
