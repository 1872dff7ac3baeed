# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels' text on arrays whose places need more than 32 bits.

Of a launch as a big card has it one thread is run, in memory of which only what that
thread touches is there. What it was to do is known by its number.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernels_on_cpu import OnCpu

from commrt.kernels.boxes import combine_table, move_table
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

Array = np.ndarray[Any, Any]

THREADS = 256
BLOCKS = 132 * 8
"""Of a card with 132 multiprocessors."""
COUNT = THREADS * BLOCKS
_NORESERVE = 0x4000
SUM = ReduceOp.SUM


class Thread(ctypes.Structure):
    """One of a launch; by default the last one of all."""

    _fields_ = (
        ("blocks", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("thread", ctypes.c_uint),
    )

    def __init__(self) -> None:
        super().__init__(BLOCKS, BLOCKS - 1, THREADS - 1)

    number = COUNT - 1


class Untouched:
    """Zeros, which take memory where they are touched only."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, nbytes + 4096, flags=flags)
        self.bytes = np.frombuffer(self._map, np.uint8)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


@pytest.fixture(scope="module")
def library() -> OnCpu:
    return OnCpu()


@pytest.fixture
def run(
    library: OnCpu, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., None]]:
    def run(launch: str, kernel: str, *arguments: Any) -> None:
        library._launch_one(launch, kernel, Thread(), *arguments)

    yield run
    said = capfd.readouterr().err
    assert "runtime error" not in said, said


def around(nbytes: int, first: int, step: int) -> list[int]:
    """Return places that the thread comes to: about 2^31 and 2^32, and at both ends."""
    turns = (nbytes - 1 - first) // step
    wanted = [k for limit in (1 << 31, 1 << 32) for k in _beside(limit, first, step)]
    found = {first + k * step for k in (0, 1, turns - 1, turns, *wanted) if k <= turns}
    assert max(found) >= 1 << 32
    return sorted(found)


def _beside(limit: int, first: int, step: int) -> tuple[int, int]:
    below = (limit - first) // step
    return below, below + 1


@pytest.mark.parametrize("away", [(0, 1), (1, 0), (3, 8)])
def test_items_one_by_one(away: tuple[int, int], run: Callable[..., None]) -> None:
    nbytes = (1 << 32) + 3 * COUNT + 17
    to, source = (Untouched(nbytes + 64) for _ in range(2))
    places = around(nbytes, Thread.number, COUNT)
    for number, place in enumerate(places):
        to.bytes[away[0] + place], source.bytes[away[1] + place] = 10 + number, 100
    run(
        "run_reduce",
        "commrt_sum_uint8",
        ctypes.c_void_p(to.address + away[0]),
        ctypes.c_void_p(source.address + away[1]),
        ctypes.c_uint64(nbytes),
    )
    for number, place in enumerate(places):
        assert to.bytes[away[0] + place] == 110 + number, place
        beside = to.bytes[away[0] + place + 1]
        assert beside == 0 or place + 1 in places


@pytest.mark.parametrize("kernel", ["commrt_sum_uint8", "commrt_copy"])
def test_lines_of_more_than_64_gib(kernel: str, run: Callable[..., None]) -> None:
    """Of lines there are more than 2^32, too; head and tail are not whole ones."""
    away = 5
    lines = (1 << 32) + COUNT + 3
    nbytes = (16 - away) + 16 * lines + 7
    to, source = (Untouched(nbytes + 64) for _ in range(2))
    begin = 16  # where the first whole line lies
    places = [begin + 16 * line for line in around(lines, Thread.number, COUNT)]
    for number, place in enumerate(places):
        to.bytes[place + 15], source.bytes[place + 15] = 10 + number, 100
    run(
        "run_reduce",
        kernel,
        ctypes.c_void_p(to.address + away),
        ctypes.c_void_p(source.address + away),
        ctypes.c_uint64(nbytes),
    )
    for number, place in enumerate(places):
        want = 100 if kernel == "commrt_copy" else 110 + number
        assert to.bytes[place + 15] == want, place
        assert to.bytes[place + 16] == 0


class _Strided:
    """Two boxes, one behind the other: units beyond 2^32 are in the second one."""

    rows, row = 2, (1 << 32) + 5  # an odd row is moved byte by byte
    offset = 9

    def __init__(self) -> None:
        first = Box(0, (0,), (self.offset,))
        self.boxes = [first, Box(1, (0, 0), (self.rows, self.row))]
        # Rows in the array's memory are the same ones: these need no room of their own.
        self.strides = [(1,), (0, 1)]
        self.units = self.offset + self.rows * self.row

    def place(self, unit: int) -> tuple[int, int]:
        """Return where a unit lies in the second array, and in the buffer."""
        return (unit - self.offset) % self.row, unit


def test_boxes_of_more_units(run: Callable[..., None], library: OnCpu) -> None:
    case = _Strided()
    table = move_table(case.boxes, case.strides, [1, 1])
    assert table.units == case.units
    small, array = Untouched(4096), Untouched(case.row)
    buffer = Untouched(table.nbytes)
    units = around(case.units, Thread.number, COUNT)
    for number, unit in enumerate(units):
        array.bytes[case.place(unit)[0]] = 10 + number
    run(
        "run_boxes",
        "commrt_pack",
        ctypes.c_void_p(buffer.address),
        *library.box_arguments([small.address, array.address], table),
    )
    for unit in units:
        inside, at = case.place(unit)
        assert buffer.bytes[at] == array.bytes[inside] != 0, unit
        assert buffer.bytes[at + 1] == 0


def test_combined_boxes_of_more_units(run: Callable[..., None], library: OnCpu) -> None:
    case = _Strided()
    row = case.row + 2 * COUNT
    boxes = [case.boxes[0], Box(1, (0,), (row,))]
    table = combine_table(boxes, [(1,), (1,)], [1, 1])
    assert table.units == case.offset + row
    small, array = Untouched(4096), Untouched(row)
    buffer = Untouched(table.nbytes)
    units = around(table.units, Thread.number, COUNT)
    for number, unit in enumerate(units):
        array.bytes[unit - case.offset], buffer.bytes[unit] = 10 + number, 100
    run(
        "run_combine",
        f"commrt_boxes_{dtype_by_name('uint8').name}",
        ctypes.c_void_p(buffer.address),
        *library.box_arguments([small.address, array.address], table),
        ctypes.c_uint32(int(SUM)),
    )
    for number, unit in enumerate(units):
        assert array.bytes[unit - case.offset] == 110 + number, unit
