# SPDX-License-Identifier: Apache-2.0
"""Streams and arrays of libraries that are not here: what is asked of them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commrt.arrays.device import as_stream, current_stream_of, is_on_device
from commrt.devices import DeviceArray, DeviceStream, SimWorld
from commrt.errors import UsageError


class NewStream:
    """With the protocol of CUDA's Python packages."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


class Attribute:
    """An older form of the protocol."""

    __cuda_stream__ = (0, 78)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1, 0),
        (2, 2),
        (1 << 40, 1 << 40),
        (NewStream(), 77),
        (Attribute(), 78),
        (SimpleNamespace(cuda_stream=79), 79),
        (SimpleNamespace(ptr=80), 80),
    ],
)
def test_streams_of_all_kinds_are_known(stream: Any, handle: int) -> None:
    assert as_stream(stream, None, "allreduce") == handle


@pytest.mark.parametrize("stream", [True, -1, 1.0, "0", object(), [1]])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(UsageError, match=r"allreduce: stream=.* must be None, the int"):
        as_stream(stream, None, "allreduce")


def test_a_stream_of_another_gpu_is_refused() -> None:
    gpu = SimpleNamespace(ordinal=1)
    of_cupy = SimpleNamespace(ptr=5, device_id=1)
    of_any_device = SimpleNamespace(ptr=5, device_id=-1)
    of_cuda_core = SimpleNamespace(
        __cuda_stream__=lambda: (0, 5), device=SimpleNamespace(device_id=1)
    )
    for each in (of_cupy, of_any_device, of_cuda_core):
        assert as_stream(each, SimpleNamespace(ordinal=1), "call") == 5
    for each in (of_cupy, of_cuda_core):
        with pytest.raises(UsageError, match=r"on device 1, the array on device 0"):
            as_stream(each, SimpleNamespace(ordinal=0), "call")
    here = SimpleNamespace(cuda_stream=5, device=SimpleNamespace(index=1))
    assert as_stream(here, gpu, "bcast") == 5
    there = SimpleNamespace(cuda_stream=5, device=SimpleNamespace(index=0))
    with pytest.raises(UsageError, match="is on device 0, the array on device 1"):
        as_stream(there, gpu, "bcast")


def test_the_current_stream_is_that_of_the_arrays_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=9))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    of_cupy = type("ndarray", (), {"__module__": "cupy"})()
    assert current_stream_of(of_cupy, None) == 9
    # Of libraries that nothing is known of: what the array says.
    exported = SimpleNamespace(__cuda_array_interface__={"stream": 12})
    assert current_stream_of(exported, None) == 12
    legacy = SimpleNamespace(__cuda_array_interface__={"stream": 1})
    assert current_stream_of(legacy, None) == 0
    silent = SimpleNamespace(__cuda_array_interface__={"stream": None})
    assert current_stream_of(silent, None) == 0


def test_with_makes_a_stream_the_current_one_of_its_thread() -> None:
    world = SimWorld()
    device, other = world.device(), world.device()
    array = DeviceArray(device, 4)
    assert current_stream_of(array, device) == 0
    with DeviceStream(device) as outer:
        with DeviceStream(other):
            assert current_stream_of(array, device) == outer.handle
            with DeviceStream(device) as inner:
                assert current_stream_of(array, device) == inner.handle
        assert array.__cuda_array_interface__["stream"] == outer.handle
    assert array.__cuda_array_interface__["stream"] == 1


def test_device_arrays_are_told_from_host_arrays() -> None:
    cuda, host = (2, 0), (1, 0)
    assert is_on_device(SimpleNamespace(__dlpack_device__=lambda: cuda))
    assert not is_on_device(SimpleNamespace(__dlpack_device__=lambda: host))
    assert is_on_device(SimpleNamespace(__cuda_array_interface__={}))
    assert not is_on_device(b"bytes")
