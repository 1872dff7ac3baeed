# SPDX-License-Identifier: Apache-2.0
"""CUDA devices without a GPU: typed errors, and the right calls of the driver.

``fake_cuda.cpp`` in tests/support/fake_libraries is a driver that does everything at
once and writes down how it was called; what streams mean is tried by tests/gpu on a
GPU.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_nvrtc
import numpy as np
import pytest
from device_probes import NBYTES, PROBES, Rig, data
from started_operations import num_started

from commrt.devices import CudaDevice, DeviceArray, DeviceStream, cuda
from commrt.devices.cuda import open_device, why_missing
from commrt.errors import (
    BufferError_,
    CaptureError,
    CommError,
    DeviceError,
    DeviceFailedError,
    DeviceMissingError,
    KernelsMissingError,
    UsageError,
)
from commrt.kernels import nvrtc
from commrt.kernels.boxes import BoxKind, move_table
from commrt.kernels.source import modules, reductions
from commrt.local import run
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import DTYPES, ReduceOp, dtype_by_name

SOURCE = Path(__file__).parents[2] / "support/fake_libraries/fake_cuda.cpp"
NEEDS_PENDING_WORK = {
    "a_wait_keeps_the_record_that_it_saw",
    "an_event_is_ready_once_what_is_before_it_is_done",
    "a_host_thread_releases_a_stream",
    "the_legacy_stream_waits_for_blocking_streams",
    "blocking_streams_wait_for_the_legacy_stream",
    "a_host_function_must_not_call_the_device",
    "a_process_does_not_open_its_own_memory",
}


def has_no_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


@pytest.mark.skipif(not has_no_driver(), reason="here is a CUDA driver: see tests/gpu")
def test_without_a_driver_the_error_says_so_and_what_to_do() -> None:
    with pytest.raises(DeviceMissingError, match="there is no CUDA driver") as caught:
        CudaDevice()
    assert caught.value.status == "missing"
    assert "driver 525 (CUDA 12.0) or newer" in str(caught.value)
    assert why_missing() == str(caught.value)


def test_a_library_that_is_no_driver_of_today_is_refused() -> None:
    with pytest.raises(DeviceMissingError, match=r"libc\.so\.6 is too old"):
        CudaDevice(library="libc.so.6")


class Fake:
    """The library, and what it says of itself."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_log.restype = ctypes.c_char_p

    def reset(self, version: int = 12040, devices: int = 1, flags: int = 1) -> None:
        self.library.fake_reset(version, devices, flags)

    def fail(self, function: str, result: int) -> None:
        self.library.fake_fail(function.encode(), result)

    @property
    def calls(self) -> list[str]:
        text: bytes = self.library.fake_log()
        return text.decode().splitlines()


def built(folder: Path) -> Path:
    compiler = shutil.which("g++")
    assert compiler is not None, "building commrt needs g++, too"
    path = folder / "libfakecuda.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(library: Path) -> Iterator[Fake]:
    fake = Fake(library)
    fake.reset()
    yield fake
    assert fake.library.fake_depth() == 0, "a context was pushed and not popped"


@pytest.fixture
def device(fake: Fake) -> CudaDevice:
    return CudaDevice(library=fake.path)


def test_a_driver_that_is_too_old_is_named_with_its_version(
    tmp_path: Path, library: Path
) -> None:
    copy = tmp_path / "old.so"  # a driver is opened once
    shutil.copy(library, copy)
    Fake(copy).reset(version=11080)
    with pytest.raises(DeviceMissingError, match=r"is of CUDA 11\.8\. commrt needs"):
        CudaDevice(library=str(copy))


def test_a_driver_that_does_not_start_says_why(tmp_path: Path, library: Path) -> None:
    copy = tmp_path / "broken.so"
    shutil.copy(library, copy)
    Fake(copy).fail("cuInit", 100)
    with pytest.raises(DeviceMissingError, match="does not start: as it was told to"):
        CudaDevice(library=str(copy))


def test_a_device_that_is_not_there_is_missing(fake: Fake) -> None:
    for ordinal in (-1, 1):
        with pytest.raises(DeviceMissingError, match="CUDA_VISIBLE_DEVICES"):
            CudaDevice(ordinal, library=fake.path)


def test_what_the_card_is_and_whether_it_has_flags(fake: Fake) -> None:
    device = CudaDevice(library=fake.path)
    assert (device.name, device.ordinal, device.kind) == ("Fake", 0, "cuda")
    assert device.uuid == "00112233445566778899aabbccddeeff"
    assert device.memory_flags
    assert device.can_memory_flags
    refused = CudaDevice(memory_flags=False, library=fake.path)
    assert not refused.memory_flags
    assert refused.can_memory_flags
    fake.reset(flags=0)
    without = CudaDevice(library=fake.path)
    assert not without.memory_flags
    assert not without.can_memory_flags
    with pytest.raises(DeviceError, match="poll events instead"):
        without.wait_value32_geq(0, 64, 1)
    del device, refused, without
    assert fake.calls.count("cuDevicePrimaryCtxRelease()") == 3


@pytest.mark.parametrize(
    "probe",
    [one for one in PROBES if one.__name__ not in NEEDS_PENDING_WORK],
    ids=lambda probe: probe.__name__,
)
def test_the_calls_fit_together(probe: object, device: CudaDevice) -> None:
    assert callable(probe)
    probe(Rig(device, "cuda", queues=1))


def test_arguments_reach_the_driver(fake: Fake, device: CudaDevice) -> None:
    fake.reset()
    stream = device.stream_create(-3)
    device.stream_create(0, True)
    pinned = device.pinned_alloc(NBYTES)
    memory = device.alloc(0)
    device.memcpy_async(memory, pinned, 0, stream)
    device.write(pinned, data(1))
    device.memcpy_async(pinned, pinned + 8, 8, stream)
    device.event_create()
    timed = device.timed_event_create(), device.timed_event_create()
    assert device.event_elapsed(*timed) == 1500
    device.write_value32(stream, pinned, 5)
    device.wait_value32_geq(stream, pinned, 6)
    assert device.ipc_open(b"\x07" * 64) == 0x5000
    device.ipc_close(0x5000)
    assert fake.calls == [
        "cuStreamCreateWithPriority(1,-3)",
        "cuStreamCreateWithPriority(0,0)",
        f"cuMemHostAlloc({NBYTES},3)",
        "cuMemAlloc(1)",
        f"cuMemcpyAsync(8,{stream})",
        "cuEventCreate(2)",
        *["cuEventCreate(0)"] * 2,
        "cuEventElapsedTime()",
        "cuStreamWriteValue32(5,0)",
        "cuStreamWaitValue32(6,0)",
        "cuIpcOpenMemHandle(7,1)",
        "cuIpcCloseMemHandle(20480)",
    ]


FOREIGN = 0xF0E0


def test_a_stream_of_another_gpu_is_known_before_anything_is_given(
    fake: Fake, device: CudaDevice
) -> None:
    own, event = device.stream_create(), device.event_create()
    fake.library.fake_foreign(ctypes.c_uint64(FOREIGN))
    for ask in (device.is_capturing, device.capture_id):
        said = f"stream {FOREIGN} is on CUDA device 1, the array on device 0"
        with pytest.raises(UsageError, match=said):
            ask(FOREIGN)
        ask(own)
        ask(0)
    fake.reset()
    device.capture_id(own)  # it is not asked for again
    assert fake.calls == ["cuStreamGetCaptureInfo()"]
    device.stream_destroy(own)
    device.event_destroy(event)
    fake.reset()
    device.capture_id(own)  # which may be another one's by now
    assert fake.calls == ["cuStreamGetCtx()", "cuStreamGetCaptureInfo()"]
    fake.fail("cuStreamGetCtx", 400)
    with pytest.raises(UsageError, match=r"cuStreamGetCtx\(\) on CUDA device 0"):
        device.capture_id(FOREIGN + 16)
    fake.fail("cuStreamGetCtx", 801)  # of a kind that it knows nothing of
    assert device.capture_id(FOREIGN + 32) == 0


def test_a_call_in_a_stream_of_another_gpu_costs_nothing_but_itself(
    fake: Fake, device: CudaDevice
) -> None:
    """Nothing was given and nobody counts on it: the communicator goes on."""
    fake.library.fake_foreign(ctypes.c_uint64(FOREIGN))

    def main(comm: Any) -> None:
        with DeviceStream(device):
            x = DeviceArray(device, 4).put(np.arange(4))
            comm.allreduce(x, nonblocking=True).synchronize()
            seq = num_started(comm)
            for wrong in ({}, {"nonblocking": True}, {"compress": "float16"}):
                with pytest.raises(UsageError, match=f"stream {FOREIGN} is on CUDA"):
                    comm.allreduce(x, stream=FOREIGN, **wrong)
            with pytest.raises(UsageError, match=f"stream {FOREIGN} is on CUDA"):
                comm.send(x, dest=0, stream=FOREIGN)
            assert num_started(comm) == seq
            request = comm.allreduce(x, nonblocking=True)
            with pytest.raises(UsageError, match=f"stream {FOREIGN} is on CUDA"):
                request.wait(stream=FOREIGN)
            request.synchronize()
            assert x.get().tolist() == [0, 1, 2, 3]

    run(1, main)


def test_managed_memory_is_refused_and_costs_nothing(
    fake: Fake, device: CudaDevice
) -> None:
    """It moves between host and device, also while a stream waits."""

    def main(comm: Any) -> None:
        with DeviceStream(device):
            x, managed = (
                DeviceArray(device, 4).put(np.arange(4)),
                DeviceArray(device, 4),
            )
            fake.library.fake_managed(ctypes.c_uint64(managed.address))
            # As a library's own array, of which only the address tells the device.
            told = dict(managed.__cuda_array_interface__)
            foreign = SimpleNamespace(__cuda_array_interface__=told)
            comm.allreduce(x)  # like calls are started without Python from here on
            seq = num_started(comm)
            calls: list[Callable[[], Any]] = [
                lambda: comm.allreduce(foreign),
                lambda: comm.allreduce(foreign, nonblocking=True),
                lambda: comm.allreduce(x, out=foreign),
                lambda: comm.plan.allreduce(foreign),
                lambda: comm.send(foreign, dest=0),
            ]
            for call in calls:
                with pytest.raises(BufferError_, match="is in managed memory, which"):
                    call()
            assert num_started(comm) == seq
            comm.allreduce(x, nonblocking=True).synchronize()
            assert x.get().tolist() == [0, 1, 2, 3]

    run(1, main)


def test_an_error_of_the_users_own_kernel_is_told_by_calls_under_way(
    fake: Fake, device: CudaDevice
) -> None:
    """It is seen by whatever the driver is asked next; host arrays go on."""

    def main(comm: Any) -> None:
        other = comm.dup()
        with DeviceStream(device):
            x = DeviceArray(device, 4).put(np.arange(4))
            comm.allreduce(x, nonblocking=True).synchronize()
            fake.fail("cuEventRecord", 700)
            with pytest.raises(DeviceFailedError, match="end the process"):
                comm.allreduce(x)
            with pytest.raises(CommError):
                comm.allreduce(x)
            fake.fail("", 0)
            assert other.allreduce(np.ones(2)).tolist() == [1, 1]
            other.allreduce(x, nonblocking=True).synchronize()

    run(1, main)


def test_a_graph_is_captured_made_and_launched(fake: Fake, device: CudaDevice) -> None:
    stream, event = device.stream_create(), device.event_create()
    assert device.capture_id(stream) == 0
    fake.reset()
    device.begin_capture(stream, 2)
    assert device.capture_id(stream) == 77
    device.stream_wait_external(stream, event)
    device.event_record_external(event, stream)
    graph = device.end_capture(stream)
    device.graph_launch(graph, stream)
    device.graph_destroy(graph)
    assert fake.calls == [
        "cuStreamBeginCapture(2)",
        "cuStreamGetCaptureInfo()",
        "cuStreamWaitEvent(1)",
        "cuEventRecordWithFlags(1)",
        "cuStreamEndCapture()",
        "cuGraphInstantiateWithFlags(0)",
        "cuGraphDestroy()",
        f"cuGraphLaunch({stream})",
        "cuGraphExecDestroy()",
    ]


def test_what_cannot_be_made_of_a_capture_is_told_and_let_go(
    fake: Fake, device: CudaDevice
) -> None:
    stream = device.stream_create()
    device.begin_capture(stream)
    fake.reset()
    fake.fail("cuGraphInstantiateWithFlags", 2)
    with pytest.raises(DeviceError, match=r"cuGraphInstantiateWithFlags.*ERROR_2"):
        device.end_capture(stream)
    assert fake.calls[-1] == "cuGraphDestroy()"


def test_kernels_are_looked_up_once_and_launched_over_their_elements(
    fake: Fake, device: CudaDevice
) -> None:
    code = dtype_by_name("bfloat16").code
    device.load_kernels(b"a module\0")
    fake.reset()
    for count in (1, 257, 10**9, 0):
        device.launch_reduce(ReduceOp.MAX, code, 64, 128, count, 0)
    device.launch_copy(64, 128, 7, 0)
    assert fake.calls == [
        "cuModuleGetFunction(commrt_max_bfloat16)",
        "cuLaunchKernel(1,256,1,0)",
        "cuLaunchKernel(2,256,257,0)",
        f"cuLaunchKernel({4 * 8},256,{10**9},0)",
        "cuModuleGetFunction(commrt_copy)",
        "cuLaunchKernel(1,256,7,0)",
    ]


def test_kernels_that_are_named_are_ready_when_they_are_loaded(
    fake: Fake, device: CudaDevice
) -> None:
    """Looking one up at its launch could wait for the device, and so for ever."""
    fake.reset()
    device.load_kernels(b"a module\0", ["commrt_copy", "commrt_sum_int8"])
    assert fake.calls == [
        "cuModuleLoadData(a module)",
        "cuModuleGetFunction(commrt_copy)",
        "cuFuncLoad()",
        "cuModuleGetFunction(commrt_sum_int8)",
        "cuFuncLoad()",
    ]
    fake.reset()
    device.launch_copy(64, 128, 7, 0)
    device.launch_reduce(ReduceOp.SUM, dtype_by_name("int8").code, 64, 128, 7, 0)
    assert fake.calls == ["cuLaunchKernel(1,256,7,0)"] * 2


def test_modules_are_added_and_unloaded_at_the_end(fake: Fake) -> None:
    device = CudaDevice(library=fake.path)
    fake.reset()
    device.load_kernels(b"first\0", ["commrt_copy"])
    device.load_kernels(b"second\0")
    assert not any("Unload" in call for call in fake.calls)
    device.launch_copy(64, 128, 7, 0)  # of the second, which came without names
    assert fake.calls[-2:] == [
        "cuModuleGetFunction(commrt_copy)",
        "cuLaunchKernel(1,256,7,0)",
    ]
    fake.reset()
    del device
    assert fake.calls == ["cuModuleUnload()"] * 2 + ["cuDevicePrimaryCtxRelease()"]


def test_a_module_that_lacks_what_it_should_have_is_not_kept(
    fake: Fake, device: CudaDevice
) -> None:
    fake.fail("cuModuleGetFunction", 500)
    with pytest.raises(DeviceError, match=r"load_kernels\(\): commrt_copy: ") as caught:
        device.load_kernels(b"a module\0", ["commrt_copy"])
    assert caught.value.status == "no_kernels"
    assert fake.calls[-1] == "cuModuleUnload()"
    with pytest.raises(DeviceError, match="no kernels are loaded on CUDA device 0"):
        device.launch_copy(64, 128, 7, 0)


def test_a_driver_without_cu_func_load_is_enough(tmp_path: Path, library: Path) -> None:
    copy = tmp_path / "12.0.so"  # a driver is opened once
    shutil.copy(library, copy)
    fake = Fake(copy)
    fake.reset(version=12000)
    device = CudaDevice(library=str(copy))
    assert device.driver_version == 12000
    device.load_kernels(b"a module\0", ["commrt_copy"])
    assert fake.calls[-1] == "cuModuleGetFunction(commrt_copy)"


def test_the_kernels_of_commrt_are_loaded_by_default(
    fake: Fake,
    device: CudaDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All, compiled for the card, which is of compute capability 9.0."""
    monkeypatch.setattr(nvrtc, "_loaded", lambda: iter(()))
    monkeypatch.setenv(
        "COMMRT_NVRTC_LIB", str(fake_nvrtc.build(tmp_path, name=fake_nvrtc.HIDDEN))
    )
    monkeypatch.setenv("COMMRT_KERNEL_CACHE", str(tmp_path / "cache"))
    assert device.capability == 90
    assert device.why_no_kernels is not None
    fake.reset()
    device.load_kernels()
    assert device.why_no_kernels is None
    loaded = [call for call in fake.calls if call.startswith("cuModuleLoadData")]
    assert len(loaded) == len(modules())
    assert all("--gpu-architecture=sm_90" in call for call in loaded)
    names = [name for module in modules() for name in module.kernels]
    assert sum(call == "cuFuncLoad()" for call in fake.calls) == len(names)
    fake.reset()
    for op in reductions(dtype_by_name("float8_e5m2")):
        device.launch_reduce(op, dtype_by_name("float8_e5m2").code, 64, 128, 7, 0)
    device.launch_copy(64, 128, 7, 0)
    assert not any("GetFunction" in call for call in fake.calls)


@pytest.mark.parametrize("result", [200, 209, 218, 221, 222])
def test_what_the_driver_does_not_take_is_said_with_its_compiler(
    result: int,
    fake: Fake,
    device: CudaDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PTX of a newer CUDA; the device is as good as before."""
    monkeypatch.setattr(nvrtc, "_loaded", lambda: iter(()))
    monkeypatch.setenv(
        "COMMRT_NVRTC_LIB", str(fake_nvrtc.build(tmp_path, name=fake_nvrtc.HIDDEN))
    )
    monkeypatch.setenv("COMMRT_KERNEL_CACHE", str(tmp_path / "cache"))
    fake.fail("cuModuleLoadData", result)
    with pytest.raises(KernelsMissingError, match="does not take") as caught:
        device.load_kernels()
    assert f"CUDA_ERROR_{result}" in str(caught.value)
    assert "NVRTC 12.9" in str(caught.value)
    assert "for sm_90" in str(caught.value)
    assert "a newer driver" in str(caught.value)
    fake.fail("cuModuleLoadData", 700)
    with pytest.raises(DeviceFailedError):
        device.load_kernels()


def test_every_launch_has_its_kernel(fake: Fake, device: CudaDevice) -> None:
    """The names that the table looks up are those of the text."""
    device.load_kernels(b"a module\0")
    fake.reset()
    for dtype in DTYPES:
        for op in reductions(dtype):
            device.launch_reduce(op, dtype.code, 64, 128, 7, 0)
        if ReduceOp.PREMUL_SUM in reductions(dtype):
            device.launch_scaled_sum(dtype.code, 64, 128, 7, 2, 0.5, 3, 0)
        if dtype.kind in ("int", "uint"):
            device.launch_divide(dtype.code, 64, 7, 5, 0)
    device.launch_copy(64, 128, 7, 0)
    looked_up = {
        call.partition("(")[2].rstrip(")")
        for call in fake.calls
        if call.startswith("cuModuleGetFunction")
    }
    boxes = {f"commrt_boxes_{dtype.name}" for dtype in DTYPES}
    every = {name for module in modules() for name in module.kernels}
    assert looked_up == every - boxes - {"commrt_pack", "commrt_unpack"}


def test_boxes_are_launched_with_their_table(fake: Fake, device: CudaDevice) -> None:
    device.load_kernels(b"a module\0")
    table = move_table([Box(0, (0, 1), (300, 2))], [(8, 4)], [4])
    assert table.units == 300
    fake.reset()
    table.launch(device, BoxKind.PACK, 4096, [8192], 12288, 0)
    table.launch(device, BoxKind.UNPACK, 4096, [8192], 12288, 0)
    how = ReduceOp.MAX, dtype_by_name("bfloat16")
    table.launch(device, BoxKind.COMBINE, 4096, [8192], 12288, 0, how)
    launched = "cuLaunchKernel(2,256,12288,0)"  # the table comes third
    assert fake.calls == [
        "cuModuleGetFunction(commrt_pack)",
        launched,
        "cuModuleGetFunction(commrt_unpack)",
        launched,
        "cuModuleGetFunction(commrt_boxes_bfloat16)",
        launched,
    ]
    fake.reset()
    move_table([], [(8, 4)], [4]).launch(device, BoxKind.PACK, 0, [], 0, 0)
    assert fake.calls == []


def test_a_device_without_nvrtc_is_opened_and_says_why_it_has_no_kernels(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = functools.partial(CudaDevice, library=fake.path)
    monkeypatch.setattr(cuda, "CudaDevice", opened)
    monkeypatch.setattr(nvrtc, "_candidates", lambda environ: iter(()))
    device = open_device()
    assert device.why_no_kernels is not None
    assert "pip install 'commrt[cuda12]'" in device.why_no_kernels
    with pytest.raises(DeviceError, match="no kernels are loaded"):
        device.launch_copy(64, 128, 7, 0)
    with pytest.raises(KernelsMissingError):
        device.load_kernels()


def test_a_module_without_a_kernel_names_it(fake: Fake, device: CudaDevice) -> None:
    device.load_kernels(b"a module\0")
    fake.fail("cuModuleGetFunction", 500)
    for _ in range(2):
        with pytest.raises(DeviceError, match="launch of commrt_copy") as caught:
            device.launch_copy(64, 128, 7, 0)
        assert caught.value.status == "no_kernels"


@pytest.mark.parametrize(
    ("result", "error", "status"),
    [
        (1, UsageError, None),
        (2, DeviceError, "out_of_memory"),
        (400, UsageError, None),
        (700, DeviceFailedError, "failed"),
        (719, DeviceFailedError, "failed"),
        (801, DeviceError, "unsupported"),
        (900, CaptureError, "capturing"),
        (906, CaptureError, "capturing"),
        (999, DeviceFailedError, "failed"),
    ],
)
def test_errors_of_the_driver_are_typed(
    result: int,
    error: type[CommError],
    status: str | None,
    fake: Fake,
    device: CudaDevice,
) -> None:
    fake.fail("cuMemAlloc", result)
    with pytest.raises(error, match=rf"cuMemAlloc.*CUDA_ERROR_{result}, as") as caught:
        device.alloc(8)
    assert type(caught.value) is error
    assert getattr(caught.value, "status", None) == status
    assert ("end the process" in str(caught.value)) == (status == "failed")
    assert device.last_error() == str(caught.value)


def test_an_event_that_is_not_ready_is_no_error(fake: Fake, device: CudaDevice) -> None:
    event = device.event_create()
    fake.fail("cuEventQuery", 600)
    assert not device.event_query(event)
    fake.fail("cuEventQuery", 0)
    assert device.event_query(event)
