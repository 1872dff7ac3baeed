# SPDX-License-Identifier: Apache-2.0
"""Packing boxes, unpacking and combining them, by the GPU kernels' text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels_on_cpu import Buffer, OnCpu

from commrt import _native
from commrt.errors import UsageError
from commrt.grids.halo import HaloShape, halo_moves
from commrt.kernels.boxes import BoxTable, combine_table, move_table
from commrt.kernels.source import reductions
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp, dtype_by_name

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def library() -> OnCpu:
    return OnCpu()


@pytest.fixture
def on_cpu(library: OnCpu, capfd: pytest.CaptureFixture[str]) -> Iterator[OnCpu]:
    yield library
    said = capfd.readouterr().err
    assert "runtime error" not in said, said


class Field:
    """An array at any distance from a line, perhaps a view with gaps."""

    def __init__(
        self, shape: Sequence[int], itemsize: int, rng: np.random.Generator
    ) -> None:
        order = rng.permutation(len(shape)) if len(shape) else []
        gaps = [int(gap) for gap in rng.integers(0, 3, len(shape))]
        whole = [shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)]
        nbytes = math.prod(whole) * itemsize
        content = rng.integers(0, 256, nbytes, dtype=np.uint8)
        self.memory = Buffer(content, int(rng.choice([0, itemsize, 16, 1])))
        kind = np.dtype(f"V{itemsize}")
        array = self.memory.bytes.view(kind).reshape(whole)
        array = array[(*(slice(shape[axis]) for axis in order), ...)]
        self.array = array.transpose(np.argsort(order)) if len(shape) else array
        if len(shape) and rng.integers(0, 3) == 0:
            self.array = self.array[::-1]

    @property
    def address(self) -> int:
        return self.array.ctypes.data


class Grid:
    """Ranks around one another, each its own neighbour or another one."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims

    def at_offset(self, rank: int, offset: Sequence[int]) -> int | None:
        place = [
            (at + step) % extent
            for at, step, extent in zip(
                np.unravel_index(rank, self.dims), offset, self.dims, strict=True
            )
        ]
        return int(np.ravel_multi_index(place, self.dims))


def drawn_boxes(
    fields: list[Field], rng: np.random.Generator, most: int = 6
) -> list[Box]:
    """Boxes of any of the arrays, some empty."""
    boxes = []
    for _ in range(int(rng.integers(1, most))):
        number = int(rng.integers(0, len(fields)))
        ends = [
            sorted(int(at) for at in rng.integers(0, extent + 1, 2))
            for extent in fields[number].array.shape
        ]
        boxes.append(Box(number, tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    return boxes


def part(fields: list[Field], box: Box) -> Array:
    where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return fields[box.array].array[(*where, ...)]


def tables(fields: list[Field], boxes: list[Box], make: Any = move_table) -> BoxTable:
    table: BoxTable = make(
        boxes,
        [field.array.strides for field in fields],
        [field.array.itemsize for field in fields],
    )
    return table


def pack_here(on_cpu: OnCpu, fields: list[Field], boxes: list[Box], away: int) -> bytes:
    table = tables(fields, boxes)
    buffer = Buffer(np.zeros(table.nbytes, np.uint8), away)
    on_cpu.move_boxes("pack", buffer, [field.address for field in fields], table)
    buffer.check_guards()
    return buffer.bytes.tobytes()


@pytest.mark.parametrize("ndim", range(6))
def test_boxes_are_packed_as_numpy_indexes(ndim: int, on_cpu: OnCpu, seed: int) -> None:
    rng = np.random.default_rng([seed, ndim])
    for _ in range(12):
        itemsizes = rng.choice([1, 2, 4, 8, 16], 2)
        shape = tuple(int(n) for n in rng.integers(1, 7, ndim))
        fields = [Field(shape, int(size), rng) for size in itemsizes]
        boxes = drawn_boxes(fields, rng)
        expected = b"".join(part(fields, box).tobytes() for box in boxes)
        assert pack_here(on_cpu, fields, boxes, int(rng.choice([0, 1, 4]))) == expected


@pytest.mark.parametrize("ndim", range(1, 6))
def test_unpacking_is_the_reverse_and_writes_nothing_else(
    ndim: int, on_cpu: OnCpu, seed: int
) -> None:
    rng = np.random.default_rng([seed, ndim, 1])
    for _ in range(12):
        shape = tuple(int(n) for n in rng.integers(1, 7, ndim))
        field = Field(shape, int(rng.choice([1, 2, 4, 8, 16])), rng)
        (box,) = drawn_boxes([field], rng, most=2)
        table = tables([field], [box])
        message = rng.integers(0, 256, table.nbytes, dtype=np.uint8)
        before = field.memory.bytes.copy()
        into = part([field], box)
        into[...] = message.view(field.array.dtype).reshape(into.shape)
        expected = field.memory.bytes.copy()
        field.memory.bytes[:] = before
        on_cpu.move_boxes("unpack", Buffer(message, 2), [field.address], table)
        field.memory.check_guards()
        assert (field.memory.bytes == expected).all()


def halo_boxes(
    ndim: int, width: int, own: int, reverse: bool
) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """Return an array's shape, and what one rank of many sends and takes."""
    extents = (own + 2 * width,) * ndim
    grid = Grid((3,) * ndim)
    shape = HaloShape(((width, width),) * ndim, tuple(range(ndim)), True, True)
    moves = halo_moves(grid, 0, shape, [extents], reverse=reverse)
    sent = [move.source for move in moves if move.source is not None]
    taken = [move.target for move in moves if move.target is not None]
    return extents, sent, taken


@pytest.mark.parametrize("ndim", range(1, 6))
def test_one_launch_packs_a_whole_halo_exchange(
    ndim: int, on_cpu: OnCpu, seed: int
) -> None:
    """26 boxes in three dimensions, 242 in five."""
    rng = np.random.default_rng([seed, ndim, 2])
    extents, sent, taken = halo_boxes(ndim, 1, 2, reverse=False)
    assert len(sent) == len(taken) == 3**ndim - 1
    field = Field(extents, 4, rng)
    expected = b"".join(part([field], box).tobytes() for box in sent)
    message = pack_here(on_cpu, [field], sent, 0)
    assert message == expected
    table = tables([field], taken)
    assert table.nbytes == len(message)
    buffer = Buffer(np.frombuffer(message, np.uint8))
    inner = (slice(1, -1),) * ndim
    before = field.array[inner].copy()
    on_cpu.move_boxes("unpack", buffer, [field.address], table)
    got = b"".join(part([field], box).tobytes() for box in taken)
    assert got == message
    assert field.array[inner].tobytes() == before.tobytes()


def combined(dtype: DType, op: ReduceOp, own: bytes, other: bytes) -> bytes:
    """Return what the host's kernel makes of the bytes of two boxes."""
    dst = np.zeros(len(own), np.uint8)
    both = [np.frombuffer(one, np.uint8) for one in (own, other)]
    _native.kernels.combine(dtype.code, int(op), dst, both)
    return dst.tobytes()


def numbers(dtype: DType, nbytes: int, rng: np.random.Generator) -> Array:
    """Bytes of items that are no NaN."""
    count = nbytes // dtype.itemsize
    if dtype.kind == "bool":
        return rng.integers(0, 2, nbytes).astype(np.uint8)
    owner: Any = ml_dtypes if dtype.needs_ml_dtypes else np
    values = rng.integers(0, 100, count) / 8 if dtype.kind == "float" else None
    if values is None:
        values = rng.integers(0, 100, count)
    return values.astype(getattr(owner, dtype.name)).view(np.uint8)


def check_combine(
    on_cpu: OnCpu,
    dtype: DType,
    op: ReduceOp,
    fields: list[Field],
    boxes: list[Box],
    rng: np.random.Generator,
) -> None:
    """Compare one launch with the boxes combined one after the other."""
    table = tables(fields, boxes, combine_table)
    for field in fields:
        field.memory.bytes[:] = numbers(dtype, field.memory.bytes.size, rng)
    before = [field.memory.bytes.copy() for field in fields]
    message = numbers(dtype, table.nbytes, rng)
    at = 0
    for box in boxes:
        own = part(fields, box)
        nbytes = own.size * dtype.itemsize
        sent = message[at : at + nbytes].tobytes()
        result = np.frombuffer(combined(dtype, op, own.tobytes(), sent), own.dtype)
        own[...] = result.reshape(own.shape)
        at += nbytes
    assert at == table.nbytes
    expected = [field.memory.bytes.copy() for field in fields]
    for field, content in zip(fields, before, strict=True):
        field.memory.bytes[:] = content
    addresses = [field.address for field in fields]
    on_cpu.combine_boxes(dtype, op, Buffer(message, 1), addresses, table)
    for field, content in zip(fields, expected, strict=True):
        field.memory.check_guards()
        assert (field.memory.bytes == content).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_boxes_that_overlap_are_combined_in_their_order(
    dtype: DType, on_cpu: OnCpu, seed: int
) -> None:
    """float8 sums depend on the order; all reductions are in one kernel."""
    rng = np.random.default_rng([seed, dtype.code, 3])
    for op, ndim in itertools.product(reductions(dtype), (1, 2, 3)):
        shape = tuple(int(n) for n in rng.integers(1, 6, ndim))
        fields = [Field(shape, dtype.itemsize, rng) for _ in range(2)]
        boxes = drawn_boxes(fields, rng, most=8)
        check_combine(on_cpu, dtype, op, fields, boxes, rng)


@pytest.mark.parametrize("ndim", range(1, 6))
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX])
def test_one_launch_combines_a_whole_halo_exchange(
    ndim: int, op: ReduceOp, on_cpu: OnCpu, seed: int
) -> None:
    rng = np.random.default_rng([seed, ndim, 4])
    extents, _, taken = halo_boxes(ndim, 1, 3, reverse=True)
    dtype = dtype_by_name("float32")
    field = Field(extents, 4, rng)
    check_combine(on_cpu, dtype, op, [field], taken, rng)


def test_boxes_with_axes_of_their_own(on_cpu: OnCpu, seed: int) -> None:
    """As of a layout: every second column, transposed."""
    rng = np.random.default_rng(seed)
    field = Field((6, 8), 4, rng)
    box = Box(0, (1, 0), (4, 5), ((1, 2), (0, 1)))
    expected = field.array[:, ::2].T[1:4, 0:5].tobytes()
    assert pack_here(on_cpu, [field], [box], 0) == expected
    with pytest.raises(UsageError, match="one by one"):
        tables([field], [box, box], combine_table)


def test_rows_without_gaps_are_few_long_units() -> None:
    def units(shape: tuple[int, ...], start: int) -> int:
        array = np.zeros(shape, np.float32)
        box = Box(0, (start, *[0] * (len(shape) - 1)), shape)
        return move_table([box], [array.strides], [4]).units

    assert units((8, 64), 0) == 8 * 64 * 4 // 16
    assert units((8, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2), 4) == 4 * 1024 * 4 // 16
    assert units((9, 3), 1) == 8 * 3  # begins 12 bytes behind, so 4 bytes at a time


def test_nothing_to_move_is_nothing(on_cpu: OnCpu) -> None:
    field = Field((3, 3), 4, np.random.default_rng(1))
    before = field.memory.bytes.copy()
    boxes = [Box(0, (1, 1), (1, 3)), Box(0, (0, 2), (3, 2))]
    assert pack_here(on_cpu, [field], boxes, 0) == b""
    assert tables([field], [], combine_table).num_boxes == 0
    assert (field.memory.bytes == before).all()


def test_what_one_launch_does_not_take_is_refused() -> None:
    shape = (2,) * 9
    array = np.zeros((3,) * 9, np.uint8)
    box = Box(0, (0,) * 9, shape)
    with pytest.raises(UsageError, match="9 dimensions with gaps"):
        move_table([box], [array.strides], [1])
    with pytest.raises(UsageError, match="17 arrays: one launch takes 16"):
        move_table([], [(4,)] * 17, [4] * 17)
