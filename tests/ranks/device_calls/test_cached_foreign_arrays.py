# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch, of cupy, and of libraries with an interface, read natively.

What the engine reads is what ``commrt/arrays/device.py`` reads; what is out of the
ordinary it leaves to that. Calls that are known take the library's current stream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_call_cache import calls_of_python, said, without_python
from dlpack_producer import OnlyDlpack
from foreign_arrays import Exported, cupy_here, torch_here
from staged_ranks import Rank, SimRanks, forget_ranks, on_threads

from commrt import _native
from commrt.arrays.device import current_stream_of, see
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice, registry
from commrt.request import DeviceRequest
from commrt.vocabulary.dtypes import DTYPES


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    """Give a device that is known by its number."""
    with ThreadDevice() as gpu:
        monkeypatch.setitem(registry._CUDA, 0, gpu)
        yield gpu


def seen_by_python(array: Any) -> tuple[Any, ...]:
    found = see(array, "x")
    return (
        found.address,
        found.count,
        found.dtype.code,
        found.writable,
        found.device,
        current_stream_of(array, found.device),
        found.stream,
    )


def same_view(array: Any) -> None:
    assert _native.view_on_device(array) == seen_by_python(array)


NUMPY_TYPES = [each.name for each in DTYPES if not each.needs_ml_dtypes]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_arrays_of_all_types_are_seen_as_by_python(
    dtype: str, device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [DeviceArray(device, shape, dtype) for shape in (1, 7, (2, 3), ())]
    tensor, _ = torch_here(monkeypatch, {0: device})
    ndarray, _ = cupy_here(monkeypatch, lambda: device)
    DeviceStream(device)  # whose number interfaces have for the legacy stream
    with DeviceStream(device) as stream:
        pass
    for current in (nullcontext(), stream):
        with current:
            for array in arrays:
                same_view(array)
                same_view(tensor(array))
                same_view(ndarray(array))
                same_view(Exported(array))
                same_view(Exported(array, stream=None))
                same_view(Exported(array, stream=77))
                same_view(Exported(array, data=(array.address, True)))
    for array in arrays:
        array.free()


def test_the_stream_of_an_array_of_cupy_is_that_of_its_own_device(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cupy's current device, of which its interface speaks, may be another one."""
    ndarray, streams = cupy_here(monkeypatch, lambda: device)
    device.ordinal = 1  # type: ignore[attr-defined]
    streams.elsewhere = 77
    array = DeviceArray(device, 8)
    with DeviceStream(device) as stream:
        same_view(ndarray(array))
        seen = see(ndarray(array), "x")
        assert seen.stream == stream.handle
        assert current_stream_of(ndarray(array), device) == stream.handle
    array.free()
    stream.destroy()


def test_types_that_numpy_has_not_are_known_of_tensors(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _ = torch_here(monkeypatch, {0: device})
    array = DeviceArray(device, 8, "uint8")
    for dtype in DTYPES:
        same_view(tensor(array, dtype=dtype.name))
    array.free()


def test_empty_arrays_are_seen_as_by_python(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _ = torch_here(monkeypatch, {0: device})
    ndarray, _ = cupy_here(monkeypatch, lambda: device)
    array = DeviceArray(device, 0)
    same_view(array)
    same_view(tensor(array))
    # Without an address it is not known where they are.
    assert _native.view_on_device(ndarray(array)) is None
    assert _native.view_on_device(Exported(array)) is None
    array.free()


def test_arrays_with_rows_of_one_element_may_have_any_strides(
    device: ThreadDevice,
) -> None:
    array = DeviceArray(device, (3, 1))
    for strides in (None, (4, 4), (4, 400)):
        same_view(Exported(array, strides=strides))
    for strides in ((8, 4), (4,), (-4, 4), "no"):
        assert _native.view_on_device(Exported(array, strides=strides)) is None
    array.free()


def test_what_is_out_of_the_ordinary_is_left_to_python(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _ = torch_here(monkeypatch, {0: device})
    ndarray, _ = cupy_here(monkeypatch, lambda: device)
    array = DeviceArray(device, 8)
    freed = DeviceArray(device, 8)
    freed.free()
    jax = type("ArrayImpl", (Exported,), {"__module__": "jaxlib._jax"})
    complex_array = DeviceArray(device, 4, "complex64")
    left: list[Any] = [
        *(None, 3, "text", [1.0], np.ones(3), np.ones((3, 3)).T, object()),
        freed,
        jax(array),
        OnlyDlpack(array),
        tensor(array, type="cpu"),
        tensor(array, sparse=True),
        tensor(array, contiguous=False),
        tensor(array, neg=True),
        tensor(complex_array, conj=True),
        tensor(array, dtype="qint8"),
        tensor(array, error=RuntimeError("no data")),
        tensor(array, index=5),  # a device that is not open
        ndarray(array, strides=(8,)),
        ndarray(array, dtype=">f4"),
        ndarray(array, dtype="M8[s]"),
        ndarray(freed_of(array)),
        Exported(array, mask=array),
        Exported(array, typestr=">f4"),
        Exported(array, typestr="<M8[s]"),
        Exported(array, typestr=7),
        Exported(array, stream=0),
        Exported(array, stream="fast"),
        Exported(array, shape=[8]),
        Exported(array, shape=(8.0,)),
        Exported(array, strides=(8,)),
        Exported(array, data=(0, False)),
        Exported(array, data=(64, False)),
        Exported(array, data=array.address),
        SimpleNamespace(__cuda_array_interface__=None),
        SimpleNamespace(__cuda_array_interface__={}),
    ]
    for one in left:
        assert _native.view_on_device(one) is None, one
    for each in (array, complex_array):
        each.free()


def freed_of(array: DeviceArray) -> Any:
    """Return what says that it lies where nothing is."""
    return SimpleNamespace(
        dtype=array.dtype,
        shape=array.shape,
        size=array.size,
        address=64,
        device=array.device,
    )


def test_what_is_no_error_of_an_array_is_not_taken_for_one(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _ = torch_here(monkeypatch, {0: device})
    array = DeviceArray(device, 8)
    with pytest.raises(KeyboardInterrupt):
        _native.view_on_device(tensor(array, error=KeyboardInterrupt()))
    array.free()


def test_another_torch_is_looked_at_anew(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = DeviceArray(device, 8)
    first, first_streams = torch_here(monkeypatch, {0: device})
    same_view(first(array))
    second, streams = torch_here(monkeypatch, {0: device}, has_raw=False)
    streams.handle = 99
    same_view(second(array))
    before = first_streams.asked
    assert _native.view_on_device(second(array))[5] == 99
    assert first_streams.asked == before
    # What is no longer torch's is known by nothing.
    assert _native.view_on_device(first(array)) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert _native.view_on_device(second(array)) is None
    array.free()


def test_many_types_of_arrays_are_told_apart(device: ThreadDevice) -> None:
    array = DeviceArray(device, 8)
    kinds = [type(f"Kind{number}", (Exported,), {}) for number in range(20)]
    for _ in range(2):
        for kind in kinds:
            same_view(kind(array))
    array.free()


# --- calls ---


def on_ranks(function: Callable[[Rank], None]) -> None:
    """Run a function on two ranks, whose devices are known by their numbers."""
    devices: dict[int, Any] = {}
    ready = threading.Barrier(2)

    def main(rank: Rank) -> None:
        devices[rank.rank] = registry._CUDA[rank.rank] = rank.device
        ready.wait(300)
        try:
            function(rank)
        finally:
            rank.stream.synchronize()
            ready.wait(300)
            registry._CUDA.pop(rank.rank)

    on_threads(2, main)


def filled(rank: Rank, count: int = 8) -> DeviceArray:
    return rank.array(np.full(count, 1.0 + rank.rank, "f4"))


def check(rank: Rank, array: DeviceArray, expected: float) -> None:
    value = rank.fetch(array)
    rank.stream.synchronize()
    assert value().tolist() == [expected] * array.size


@pytest.fixture(params=["torch", "torch without raw streams", "cupy", "others"])
def wrap(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Rank, DeviceArray], Any]:
    """Return what makes an array of a library of a rank's."""
    if request.param == "others":
        return lambda rank, array: Exported(array)
    if request.param == "cupy":
        ndarray, _ = cupy_here(monkeypatch, lambda: CURRENT.device)
        return lambda rank, array: ndarray(array)
    has_raw = request.param == "torch"
    tensor, _ = torch_here(monkeypatch, registry._CUDA, has_raw=has_raw)
    return lambda rank, array: tensor(array, rank.rank)


CURRENT = threading.local()


def test_later_calls_are_made_without_python(
    wrap: Callable[[Rank, DeviceArray], Any],
) -> None:
    def main(rank: Rank) -> None:
        CURRENT.device = rank.device
        comm = rank.comm
        for turn in range(3):
            memory, other = filled(rank), filled(rank)
            x, out = wrap(rank, memory), wrap(rank, other)
            with calls_of_python(comm) as looked_at:
                assert comm.allreduce(x, out=out) is out
                request = comm.allreduce(x, nonblocking=True)
                assert isinstance(request, DeviceRequest)
                assert request.stream == rank.stream.handle
                assert request.wait() is x
                assert comm.bcast(x, root=1) is x
            expected = ["allreduce", "allreduce", "bcast"] if turn == 0 else []
            assert looked_at == expected
            check(rank, memory, 3.0)
            check(rank, other, 3.0)
        rank.finish()

    on_ranks(main)


def test_a_call_comes_in_the_current_stream_of_the_arrays_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, streams = torch_here(monkeypatch, registry._CUDA)
    mine: dict[int, DeviceStream] = {}

    def main(rank: Rank) -> None:
        comm = rank.comm
        x = tensor(filled(rank), rank.rank)
        comm.allreduce(x, nonblocking=True).synchronize()
        with DeviceStream(rank.device) as other:
            with without_python(comm):
                request = comm.allreduce(x, nonblocking=True)
            assert request.stream == other.handle
            request.wait()
        request.synchronize()
        mine[rank.rank] = other
        rank.finish()

    on_ranks(main)
    assert streams.asked >= 6


def test_a_call_comes_after_the_stream_that_its_output_names() -> None:
    """What that stream still does to the output is over before the result comes."""

    def main(rank: Rank) -> None:
        comm, other = rank.comm, others[rank.rank]
        x, out = filled(rank), filled(rank)
        comm.allreduce(x, out=out)
        old = rank.pin(out.nbytes)
        rank.stream.synchronize()
        with without_python(comm):
            for _ in range(3):
                rank.device.memcpy_async(out.address, old, out.nbytes, other.handle)
                given = Exported(out, stream=other.handle)
                assert comm.allreduce(x, out=given) is given
                check(rank, out, 3.0)
        rank.finish()

    for seed in range(5):
        ranks = SimRanks(2, seed)
        others = [DeviceStream(rank.device) for rank in ranks.ranks]
        ranks.run(main)  # the order of all accesses is checked
        ranks.close()


def test_what_is_wrong_is_said_as_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, _ = torch_here(monkeypatch, registry._CUDA)

    def main(rank: Rank) -> None:
        comm, memory = rank.comm, filled(rank)
        index = rank.rank

        def wrong() -> list[str]:
            given: list[Any] = [
                tensor(memory, index, contiguous=False),
                tensor(memory, index, neg=True),
                tensor(memory, index, sparse=True),
                tensor(memory, index, dtype="qint8"),
                tensor(memory, index, error=RuntimeError("no data")),
                tensor(memory, index, storage_nbytes=0),
                tensor(memory, index, storage_nbytes=4),
                Exported(memory, mask=memory),
                Exported(memory, stream=0),
                Exported(memory, data=(memory.address, True)),
                Exported(memory, data=(64, False)),
            ]
            return [said(lambda x=x: comm.allreduce(x)) for x in given]

        # Of an address that nobody knows.
        first = wrong()
        x = tensor(memory, index)
        comm.allreduce(x)
        comm.allreduce(Exported(memory))
        assert wrong() == first
        comm.allreduce(x)  # the ranks have refused the last one before it
        with without_python(comm):
            comm.allreduce(x)
        rank.finish()

    on_ranks(main)


def test_a_device_that_is_served_is_found(
    device: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry._CUDA, 0)
    array = DeviceArray(device, 8)
    exported = Exported(array, stream=None)
    assert _native.view_on_device(exported) is None
    registry.serve(device)
    try:
        same_view(exported)
    finally:
        registry.stop_serving(device)
    with DeviceStream(device):
        same_view(exported)
    array.free()
