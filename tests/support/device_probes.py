# SPDX-License-Identifier: Apache-2.0
"""What every device must do: small probes of the meaning of its calls.

The same functions run on simulated devices, on threads, and on a GPU where there is
one, so that what stands for a GPU in tests is checked against it. A probe gets a
``Rig`` and uses ``rig.device``; flags come from ``rig.flag``, and are released at the
end, so that a probe that fails leaves no stream waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from commrt.errors import CommError, DeviceError, UsageError
from commrt.kernels.boxes import BoxKind, combine_table, move_table
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

NBYTES = 256
LINE = 64
PINNED, DEVICE, UNKNOWN = 2, 1, 0


@dataclass
class Rig:
    """One device, and what a probe has taken of it."""

    device: Any
    kind: str
    queues: int = 8
    """Hardware queues, where they are known; commands behind a wait share its fate."""
    flags: list[int] = field(default_factory=list)

    @property
    def has_no_kernels(self) -> bool:
        """Whether launches find none, as on a GPU without NVRTC."""
        return getattr(self.device, "why_no_kernels", None) is not None

    def flag(self) -> int:
        """Address of a new flag of value 0."""
        address: int = self.device.pinned_alloc(LINE)
        self.device.write(address, bytes(LINE))
        self.flags.append(address)
        return address

    def release(self) -> None:
        for address in self.flags:
            value = self.device.flag_load(address)
            self.device.flag_store(address, (value + 0x3FFFFFFF) % 2**32)

    def pinned(self, data: bytes = bytes(NBYTES)) -> int:
        """Address of pinned memory that holds ``data``."""
        address: int = self.device.pinned_alloc(len(data))
        self.device.write(address, data)
        return address

    def filled(self, data: bytes) -> int:
        """Address of memory of the device that holds ``data``."""
        device = self.device
        address: int = device.alloc(len(data))
        stream = device.stream_create()
        device.memcpy_async(address, self.pinned(data), len(data), stream)
        device.stream_synchronize(stream)
        return address

    def until(self, flag: int, value: int) -> None:
        """Wait as a progress thread does."""
        while (self.device.flag_load(flag) - value) % 2**32 >= 2**31:
            self.device.pause()

    def sees(self, stream: int, flag: int) -> int:
        """What ``stream`` has when it is told to say so, by a flag that it writes."""
        self.device.write_value32(stream, flag, 1)
        self.until(flag, 1)
        return int(self.device.flag_load(flag))


def data(number: int) -> bytes:
    return bytes((number * 7 + i) % 251 for i in range(NBYTES))


def copies_go_there_and_back(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    source, target, on_device = rig.pinned(data(1)), rig.pinned(), device.alloc(NBYTES)
    device.memcpy_async(on_device, source, NBYTES, stream)
    device.memcpy_async(target, on_device, NBYTES, stream)
    device.stream_synchronize(stream)
    assert device.read(target, NBYTES) == data(1)


def commands_of_a_stream_run_in_order(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    sources = [rig.pinned(data(number)) for number in range(5)]
    target, on_device = rig.pinned(), device.alloc(NBYTES)
    for source in sources:
        device.memcpy_async(on_device, source, NBYTES, stream)
    device.memcpy_async(target, on_device, NBYTES, stream)
    device.stream_synchronize(stream)
    assert device.read(target, NBYTES) == data(4)


def nothing_is_copied_where_there_is_nothing(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    target = rig.pinned(data(2))
    device.memcpy_async(target, target, 0, stream)
    device.stream_synchronize(stream)
    assert device.read(target, NBYTES) == data(2)


def an_event_orders_streams(rig: Rig) -> None:
    device = rig.device
    first, second = device.stream_create(), device.stream_create()
    gate, event = rig.flag(), device.event_create()
    source, target, on_device = rig.pinned(data(3)), rig.pinned(), device.alloc(NBYTES)
    device.wait_value32_geq(first, gate, 1)
    device.memcpy_async(on_device, source, NBYTES, first)
    device.event_record(event, first)
    device.stream_wait_event(second, event)
    device.memcpy_async(target, on_device, NBYTES, second)
    device.flag_store(gate, 1)
    device.stream_synchronize(second)
    assert device.read(target, NBYTES) == data(3)


def an_event_without_a_record_is_not_waited_for(rig: Rig) -> None:
    device = rig.device
    stream, event = device.stream_create(), device.event_create()
    device.stream_wait_event(stream, event)
    device.stream_synchronize(stream)
    assert device.event_query(event)


def a_wait_keeps_the_record_that_it_saw(rig: Rig) -> None:
    device = rig.device
    first, second = device.stream_create(), device.stream_create()
    gate, said, event = rig.flag(), rig.flag(), device.event_create()
    device.event_record(event, first)
    device.stream_wait_event(second, event)
    device.write_value32(second, said, 1)
    device.wait_value32_geq(first, gate, 1)
    device.event_record(event, first)
    rig.until(said, 1)  # the new record has not happened
    assert not device.event_query(event)
    device.flag_store(gate, 1)
    device.stream_synchronize(first)
    assert device.event_query(event)


def an_event_is_ready_once_what_is_before_it_is_done(rig: Rig) -> None:
    device = rig.device
    stream, event, gate = device.stream_create(), device.event_create(), rig.flag()
    target, source = rig.pinned(), rig.filled(data(4))
    device.wait_value32_geq(stream, gate, 1)
    device.memcpy_async(target, source, NBYTES, stream)
    device.event_record(event, stream)
    assert not device.event_query(event)
    device.flag_store(gate, 1)
    while not device.event_query(event):
        device.pause()
    assert device.read(target, NBYTES) == data(4)


def a_flag_says_that_what_was_before_it_is_done(rig: Rig) -> None:
    device = rig.device
    stream, said = device.stream_create(), rig.flag()
    source, target, on_device = rig.pinned(data(5)), rig.pinned(), device.alloc(NBYTES)
    device.memcpy_async(on_device, source, NBYTES, stream)
    device.memcpy_async(target, on_device, NBYTES, stream)
    device.write_value32(stream, said, 7)
    rig.until(said, 7)
    assert device.flag_load(said) == 7
    assert device.read(target, NBYTES) == data(5)


def a_host_thread_releases_a_stream(rig: Rig) -> None:
    device = rig.device
    stream, gate, said = device.stream_create(), rig.flag(), rig.flag()
    source, target, on_device = rig.pinned(), rig.pinned(), device.alloc(NBYTES)
    device.wait_value32_geq(stream, gate, 3)
    device.memcpy_async(on_device, source, NBYTES, stream)
    device.memcpy_async(target, on_device, NBYTES, stream)
    device.write_value32(stream, said, 1)
    device.flag_store(gate, 2)  # not enough
    assert device.flag_load(said) == 0
    device.write(source, data(6))  # before the flag, so the copy has it
    device.flag_store(gate, 3)
    device.stream_synchronize(stream)
    assert device.read(target, NBYTES) == data(6)


def flags_order_streams(rig: Rig) -> None:
    device = rig.device
    first, second = device.stream_create(), device.stream_create()
    said = rig.flag()
    source, target, on_device = rig.pinned(data(7)), rig.pinned(), device.alloc(NBYTES)
    device.memcpy_async(on_device, source, NBYTES, first)
    device.write_value32(first, said, 1)
    device.wait_value32_geq(second, said, 1)
    device.memcpy_async(target, on_device, NBYTES, second)
    device.stream_synchronize(second)
    assert device.read(target, NBYTES) == data(7)


def a_greater_value_is_enough_and_values_go_round(rig: Rig) -> None:
    device = rig.device
    stream, flag = device.stream_create(), rig.flag()
    device.flag_store(flag, 9)
    device.wait_value32_geq(stream, flag, 5)
    device.stream_synchronize(stream)
    device.flag_store(flag, 2**32 - 2)
    device.wait_value32_geq(stream, flag, 2**32 - 3)
    device.stream_synchronize(stream)
    device.flag_store(flag, 3)  # after 2**32 - 1
    device.wait_value32_geq(stream, flag, 2**32 - 1)
    device.stream_synchronize(stream)


def a_destroyed_stream_still_does_what_it_was_given(rig: Rig) -> None:
    device = rig.device
    stream, gate, said = device.stream_create(), rig.flag(), rig.flag()
    source, target = rig.filled(data(8)), rig.pinned()
    device.wait_value32_geq(stream, gate, 1)
    device.memcpy_async(target, source, NBYTES, stream)
    device.write_value32(stream, said, 1)
    device.stream_destroy(stream)
    device.flag_store(gate, 1)
    rig.until(said, 1)
    assert device.read(target, NBYTES) == data(8)


def a_destroyed_event_still_orders(rig: Rig) -> None:
    device = rig.device
    first, second = device.stream_create(), device.stream_create()
    gate, event = rig.flag(), device.event_create()
    source, target, on_device = rig.pinned(data(9)), rig.pinned(), device.alloc(NBYTES)
    device.wait_value32_geq(first, gate, 1)
    device.memcpy_async(on_device, source, NBYTES, first)
    device.event_record(event, first)
    device.stream_wait_event(second, event)
    device.event_destroy(event)
    device.memcpy_async(target, on_device, NBYTES, second)
    device.flag_store(gate, 1)
    device.stream_synchronize(second)
    assert device.read(target, NBYTES) == data(9)


def host_functions_run_in_their_turn(rig: Rig) -> None:
    device = rig.device
    stream, said = device.stream_create(), rig.flag()
    order: list[int] = []
    for number in range(4):
        device.launch_host(stream, lambda number=number: order.append(number))
    device.write_value32(stream, said, 1)
    rig.until(said, 1)
    device.stream_synchronize(stream)
    assert order == [0, 1, 2, 3]


def a_host_function_must_not_call_the_device(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    caught: list[type[BaseException]] = []

    def calls() -> None:
        try:
            device.stream_create()
        except CommError as error:
            caught.append(type(error))

    device.launch_host(stream, calls)
    device.stream_synchronize(stream)
    assert caught == [UsageError]


def pageable_memory_is_copied_both_ways(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    source = np.frombuffer(data(10), np.uint8).copy()
    target = np.zeros(NBYTES, np.uint8)
    on_device = device.alloc(NBYTES)
    device.memcpy_async(on_device, source.ctypes.data, NBYTES, stream)
    device.write(source.ctypes.data, bytes(NBYTES))  # it was taken
    device.memcpy_async(target.ctypes.data, on_device, NBYTES, stream)
    assert device.read(target.ctypes.data, NBYTES) == data(10)


def a_copy_between_host_memory_is_done_when_it_returns(rig: Rig) -> None:
    """Pinned or not: the driver makes its caller wait for all that is before it."""
    device = rig.device
    stream = device.stream_create()
    source, target, other = rig.filled(data(13)), rig.pinned(), rig.pinned()
    ordinary = np.zeros(NBYTES, np.uint8)
    device.memcpy_async(target, source, NBYTES, stream)
    device.memcpy_async(other, target, NBYTES, stream)
    assert device.read(other, NBYTES) == data(13)
    device.memcpy_async(ordinary.ctypes.data, other, NBYTES, stream)
    assert device.read(ordinary.ctypes.data, NBYTES) == data(13)


def the_legacy_stream_waits_for_blocking_streams(rig: Rig) -> None:
    device = rig.device
    stream, gate, event = (
        device.stream_create(0, True),
        rig.flag(),
        device.event_create(),
    )
    source, target, between = rig.pinned(data(11)), rig.pinned(), device.alloc(NBYTES)
    device.wait_value32_geq(stream, gate, 1)
    device.memcpy_async(between, source, NBYTES, stream)
    device.memcpy_async(target, between, NBYTES, 0)
    device.event_record(event, 0)
    assert not device.event_query(event)
    device.flag_store(gate, 1)
    device.stream_synchronize(0)
    assert device.read(target, NBYTES) == data(11)


def blocking_streams_wait_for_the_legacy_stream(rig: Rig) -> None:
    device = rig.device
    stream, gate, event = (
        device.stream_create(0, True),
        rig.flag(),
        device.event_create(),
    )
    source, target, between = rig.pinned(data(12)), rig.pinned(), device.alloc(NBYTES)
    device.wait_value32_geq(0, gate, 1)
    device.memcpy_async(between, source, NBYTES, 0)
    device.memcpy_async(target, between, NBYTES, stream)
    device.event_record(event, stream)
    assert not device.event_query(event)
    device.flag_store(gate, 1)
    device.stream_synchronize(stream)
    assert device.read(target, NBYTES) == data(12)


def other_streams_do_not_wait_for_the_legacy_stream(rig: Rig) -> None:
    device = rig.device
    stream, gate, said = device.stream_create(), rig.flag(), rig.flag()
    device.wait_value32_geq(0, gate, 1)
    if rig.queues > 1:  # else they share its queue
        assert rig.sees(stream, said) == 1
    device.flag_store(gate, 1)
    device.stream_synchronize(0)


def memory_is_told_apart(rig: Rig) -> None:
    device = rig.device
    on_device, pinned = device.alloc(NBYTES), device.pinned_alloc(NBYTES)
    ordinary = np.zeros(NBYTES, np.uint8)
    kind, ordinal, base, nbytes = device.ptr_attributes(on_device + 100)
    assert (kind, base) == (DEVICE, on_device)
    assert ordinal >= 0
    assert nbytes >= NBYTES
    assert device.ptr_attributes(pinned + 8)[0] == PINNED
    assert device.ptr_attributes(ordinary.ctypes.data)[0] == UNKNOWN


def nothing_is_captured_unasked(rig: Rig) -> None:
    device = rig.device
    assert device.is_capturing(device.stream_create()) == 0


def the_capture_mode_is_exchanged(rig: Rig) -> None:
    device = rig.device
    before = device.exchange_capture_mode(2)
    assert device.exchange_capture_mode(1) == 2
    assert device.exchange_capture_mode(before) == 1


def a_process_does_not_open_its_own_memory(rig: Rig) -> None:
    device = rig.device
    memory = device.alloc(NBYTES)
    handle, offset = device.ipc_export(memory + 16)
    assert (len(handle), offset) == (64, 16)
    with pytest.raises(CommError):
        device.ipc_open(handle)


def freeing_nothing_is_nothing(rig: Rig) -> None:
    rig.device.free(0)
    rig.device.pinned_free(0)


def kernels_reduce_and_copy(rig: Rig) -> None:
    device = rig.device
    stream, dtype = device.stream_create(), dtype_by_name("float32")
    left = np.arange(NBYTES // 4, dtype="f4")
    right = left[::-1].copy()
    dst, src = rig.pinned(left.tobytes()), rig.pinned(right.tobytes())
    target = rig.pinned()
    if rig.has_no_kernels:
        with pytest.raises(DeviceError, match="load_kernels") as caught:
            device.launch_reduce(ReduceOp.SUM, dtype.code, dst, src, left.size, stream)
        assert caught.value.status == "no_kernels"
        return
    device.launch_reduce(ReduceOp.SUM, dtype.code, dst, src, left.size, stream)
    device.launch_reduce(ReduceOp.MAX, dtype.code, dst, src, left.size, stream)
    device.launch_copy(target, dst, NBYTES, stream)
    device.stream_synchronize(stream)
    expected = np.maximum(left + right, right)
    assert device.read(target, NBYTES) == expected.tobytes()


def kernels_scale_and_divide(rig: Rig) -> None:
    device = rig.device
    stream, dtype = device.stream_create(), dtype_by_name("float32")
    left = np.arange(NBYTES // 4, dtype="f4")
    right = left[::-1].copy()
    dst, src = rig.pinned(left.tobytes()), rig.pinned(right.tobytes())
    whole = dtype_by_name("int32")
    numbers = (np.arange(NBYTES // 4) - 20).astype("i4")
    divided = rig.pinned(numbers.tobytes())
    if rig.has_no_kernels:
        with pytest.raises(DeviceError, match="load_kernels"):
            device.launch_scaled_sum(dtype.code, dst, src, 1, 2, 0.5, 1, stream)
        with pytest.raises(DeviceError, match="load_kernels"):
            device.launch_divide(whole.code, divided, 1, 3, stream)
        return
    count = left.size
    expected = left
    for which in (0, 1, 2, 3, 6, 4):
        device.launch_scaled_sum(dtype.code, dst, src, count, which, 0.5, 1, stream)
        first = expected * 0.5 if which & 1 else expected
        second = right * 0.5 if which & 2 else right
        expected = second if which & 4 else first + second
        device.stream_synchronize(stream)
        assert device.read(dst, NBYTES) == expected.astype("f4").tobytes()
    device.launch_scaled_sum(whole.code, divided, divided, count, 6, 1.0, 5, stream)
    device.launch_divide(whole.code, divided, count, 3, stream)
    device.stream_synchronize(stream)
    toward_zero = np.trunc(numbers * 5 / 3).astype("i4")
    assert device.read(divided, NBYTES) == toward_zero.tobytes()


def an_undefined_product_or_quotient_is_refused(rig: Rig) -> None:
    device = rig.device
    real, flag = (dtype_by_name(name).code for name in ("float32", "bool"))
    memory = rig.pinned()
    for call in (
        lambda: device.launch_scaled_sum(flag, memory, memory, 1, 2, 1.0, 1, 0),
        lambda: device.launch_scaled_sum(real, memory, memory, 1, 8, 1.0, 1, 0),
        lambda: device.launch_divide(real, memory, 1, 2, 0),
        lambda: device.launch_divide(dtype_by_name("int8").code, memory, 1, 0, 0),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.status == "unsupported"


def boxes_go_through_a_buffer(rig: Rig) -> None:
    """Packed, unpacked into another array, and added to it, where two overlap."""
    device = rig.device
    stream, dtype = device.stream_create(), dtype_by_name("float32")
    field = np.arange(NBYTES // 4, dtype="f4").reshape(8, 8)
    boxes = [Box(0, (0, 2), (8, 4)), Box(0, (5, 0), (7, 8)), Box(0, (1, 1), (1, 8))]
    shape = [field.strides], [field.itemsize]
    moves, adds = move_table(boxes[:1], *shape), combine_table(boxes, *shape)
    array, other = rig.pinned(field.tobytes()), rig.pinned()
    buffer = rig.pinned(bytes(adds.nbytes))
    tables = [rig.pinned(table.content) for table in (moves, adds)]
    if rig.has_no_kernels:
        with pytest.raises(DeviceError, match="load_kernels"):
            moves.launch(device, BoxKind.PACK, buffer, [array], tables[0], stream)
        return
    moves.launch(device, BoxKind.PACK, buffer, [array], tables[0], stream)
    moves.launch(device, BoxKind.UNPACK, buffer, [other], tables[0], stream)
    device.stream_synchronize(stream)
    expected = np.zeros_like(field)
    expected[:, 2:4] = field[:, 2:4]
    assert device.read(buffer, moves.nbytes) == field[:, 2:4].tobytes()
    assert device.read(other, NBYTES) == expected.tobytes()
    message = np.arange(adds.nbytes // 4, dtype="f4")
    device.write(buffer, message.tobytes())
    how = (ReduceOp.SUM, dtype)
    adds.launch(device, BoxKind.COMBINE, buffer, [other], tables[1], stream, how)
    device.stream_synchronize(stream)
    expected[:, 2:4] += message[:16].reshape(8, 2)
    expected[5:7] += message[16:32].reshape(2, 8)
    assert device.read(other, NBYTES) == expected.tobytes()
    how = (ReduceOp.BAND, dtype)
    with pytest.raises(DeviceError, match="not defined for the type"):
        adds.launch(device, BoxKind.COMBINE, buffer, [other], tables[1], stream, how)


def an_undefined_reduction_is_refused(rig: Rig) -> None:
    device = rig.device
    code = dtype_by_name("float32").code
    memory = rig.pinned()
    with pytest.raises(DeviceError) as caught:
        device.launch_reduce(ReduceOp.BAND, code, memory, memory, 1, 0)
    assert caught.value.status == "unsupported"
    assert str(caught.value) == device.last_error()


PROBES: tuple[Callable[[Rig], None], ...] = (
    copies_go_there_and_back,
    commands_of_a_stream_run_in_order,
    nothing_is_copied_where_there_is_nothing,
    an_event_orders_streams,
    an_event_without_a_record_is_not_waited_for,
    a_wait_keeps_the_record_that_it_saw,
    an_event_is_ready_once_what_is_before_it_is_done,
    a_flag_says_that_what_was_before_it_is_done,
    a_host_thread_releases_a_stream,
    flags_order_streams,
    a_greater_value_is_enough_and_values_go_round,
    a_destroyed_stream_still_does_what_it_was_given,
    a_destroyed_event_still_orders,
    host_functions_run_in_their_turn,
    a_host_function_must_not_call_the_device,
    pageable_memory_is_copied_both_ways,
    a_copy_between_host_memory_is_done_when_it_returns,
    the_legacy_stream_waits_for_blocking_streams,
    blocking_streams_wait_for_the_legacy_stream,
    other_streams_do_not_wait_for_the_legacy_stream,
    memory_is_told_apart,
    nothing_is_captured_unasked,
    the_capture_mode_is_exchanged,
    a_process_does_not_open_its_own_memory,
    freeing_nothing_is_nothing,
    kernels_reduce_and_copy,
    kernels_scale_and_divide,
    an_undefined_product_or_quotient_is_refused,
    boxes_go_through_a_buffer,
    an_undefined_reduction_is_refused,
)


# --- what a GPU cannot be tried for: there it is undefined, or ends the process ---


def unknown_handles_are_refused(rig: Rig) -> None:
    device = rig.device
    stream = device.stream_create()
    for call in (
        lambda: device.stream_synchronize(77),
        lambda: device.event_record(77, stream),
        lambda: device.stream_wait_event(stream, 77),
        lambda: device.event_query(77),
        lambda: device.event_elapsed(77, 77),
        lambda: device.stream_destroy(0),
    ):
        with pytest.raises(UsageError):
            call()


def memory_out_of_bounds_is_refused(rig: Rig) -> None:
    device = rig.device
    memory, pinned = device.alloc(NBYTES), rig.pinned()
    with pytest.raises(UsageError, match="end behind"):
        device.memcpy_async(memory + 1, pinned, NBYTES, 0)
    with pytest.raises(UsageError, match="end behind"):
        device.launch_copy(memory, pinned + 1, NBYTES, 0)


def kernels_and_flags_need_memory_of_the_device(rig: Rig) -> None:
    device = rig.device
    ordinary, pinned = np.zeros(NBYTES, np.uint8), rig.pinned()
    with pytest.raises(UsageError, match="pageable"):
        device.launch_copy(pinned, ordinary.ctypes.data, NBYTES, 0)
    with pytest.raises(UsageError, match="pageable"):
        device.write_value32(0, ordinary.ctypes.data // 4 * 4, 1)
    with pytest.raises(UsageError, match="not aligned"):
        device.wait_value32_geq(0, pinned + 1, 1)


def memory_is_freed_once_and_by_its_counterpart(rig: Rig) -> None:
    device = rig.device
    memory = device.alloc(NBYTES)
    with pytest.raises(UsageError, match="counterpart"):
        device.pinned_free(memory)
    device.free(memory)
    with pytest.raises(UsageError, match="freed"):
        device.free(memory)


def host_threads_do_not_touch_device_memory(rig: Rig) -> None:
    memory = rig.device.alloc(NBYTES)
    with pytest.raises(UsageError, match="device memory"):
        rig.device.read(memory, 1)


STRICT_PROBES: tuple[Callable[[Rig], None], ...] = (
    unknown_handles_are_refused,
    memory_out_of_bounds_is_refused,
    kernels_and_flags_need_memory_of_the_device,
    memory_is_freed_once_and_by_its_counterpart,
    host_threads_do_not_touch_device_memory,
)
