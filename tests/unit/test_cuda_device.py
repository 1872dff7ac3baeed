# SPDX-License-Identifier: Apache-2.0
"""CUDA devices without a GPU: typed errors, and the right calls of the driver.

``tests/fake_cuda.cpp`` is a driver that does everything at once and writes down how it
was called; what streams mean is tried by tests/gpu on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_probes import NBYTES, PROBES, Rig, data

from commrt.devices import CudaDevice
from commrt.devices.cuda import why_missing
from commrt.dtypes import ReduceOp, dtype_by_name
from commrt.errors import (
    CaptureError,
    CommError,
    DeviceError,
    DeviceFailedError,
    DeviceMissingError,
    UsageError,
)

SOURCE = Path(__file__).parents[1] / "fake_cuda.cpp"
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
    subprocess.run(command, check=True, timeout=100)
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
        "cuStreamWriteValue32(5,0)",
        "cuStreamWaitValue32(6,0)",
        "cuIpcOpenMemHandle(7,1)",
        "cuIpcCloseMemHandle(20480)",
    ]


def test_kernels_are_looked_up_once_and_launched_over_their_elements(
    fake: Fake, device: CudaDevice
) -> None:
    code = dtype_by_name("bfloat16").code
    device.load_kernels(b"a module\0")
    fake.reset()
    for count in (1, 257, 10**9, 0):
        device.launch_reduce(ReduceOp.MAX, code, 64, 128, count, 0)
    device.launch_copy(64, 128, 7, 0)
    device.load_kernels(b"another\0")
    assert fake.calls == [
        "cuModuleGetFunction(commrt_max_bfloat16)",
        "cuLaunchKernel(1,256,1,0)",
        "cuLaunchKernel(2,256,257,0)",
        f"cuLaunchKernel({4 * 8},256,{10**9},0)",
        "cuModuleGetFunction(commrt_copy)",
        "cuLaunchKernel(1,256,7,0)",
        "cuModuleLoadData(another)",
        "cuModuleUnload()",
    ]


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
