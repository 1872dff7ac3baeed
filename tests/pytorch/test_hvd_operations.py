# SPDX-License-Identifier: Apache-2.0
"""Operations of commrt.hvd give what one process computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hvd_cases import drawn, drawn_of_all, on_ranks

import commrt.hvd as hvd

SIZES = (1, 2, 3, 4)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (5,), (17, 3), (2, 0, 3))
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = {
    hvd.Sum: lambda x: x.sum(0),
    hvd.Min: lambda x: x.amin(0),
    hvd.Max: lambda x: x.amax(0),
    hvd.Product: lambda x: x.prod(0),
}


def reduced(size: int, shape: tuple[int, ...], dtype: torch.dtype, op: Any) -> Any:
    """Return the reduction of all ranks' tensors in one process."""
    everything = drawn_of_all(size, *shape)
    if op is hvd.Average:
        mean = everything.sum(0) / size
        return mean.trunc().to(dtype) if dtype in INTEGERS else mean.to(dtype)
    return OPS[op](everything).to(dtype)


@pytest.mark.full(sample=24)
@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.parametrize("op", [hvd.Average, *OPS], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, *FLOATS], ids=str)
def test_allreduce_is_the_reduction_of_one_process(
    dtype: torch.dtype, op: Any, size: int
) -> None:
    if op is hvd.Product and dtype in (torch.float16, torch.bfloat16):
        size = min(size, 2)  # products of more are not exact in these types

    def main() -> list[list[Any]]:
        rank = hvd.rank()
        found = []
        for shape in SHAPES:
            own = drawn(rank, *shape, dtype=dtype)
            kept = own.clone()
            new = hvd.allreduce(own, op=op)
            assert torch.equal(own, kept)
            assert hvd.allreduce_(own, op=op) is own
            found.append([shape, new, own])
        return found

    for shape, new, own in itertools.chain(*on_ranks(size, main)):
        right = reduced(size, shape, dtype, op)
        exact = dtype in (*INTEGERS, torch.float64) or op is not hvd.Average
        for each in (new, own):
            assert each.dtype == dtype
            assert each.shape == shape
            if exact:
                assert torch.equal(each, right)
            else:
                torch.testing.assert_close(each, right)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_short_integers_are_reduced(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 3], dtype=dtype)
    for each in on_ranks(3, lambda: hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum)):
        assert torch.equal(each, x * 6)


@pytest.mark.parametrize("size", SIZES)
def test_factors_multiply_before_and_after(size: int) -> None:
    """Integers are scaled in float64 and truncated, floats in their type."""

    def main() -> None:
        rank = hvd.rank()
        for dtype in (torch.int32, torch.float64):
            x = drawn(rank, 6, dtype=dtype)
            everything = drawn_of_all(size, 6)
            before = (everything * 0.5).to(dtype)
            right = (before.sum(0).double() * 3.5).to(dtype)
            found = hvd.allreduce(
                x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.5
            )
            assert torch.equal(found, right)
            rows = hvd.reducescatter(
                x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.5
            )
            begin = sum(6 // size + (r < 6 % size) for r in range(rank))
            assert torch.equal(rows, right[begin : begin + len(rows)])

    on_ranks(size, main)


def test_average_keeps_its_old_name() -> None:
    def main() -> None:
        x = torch.tensor([2.0 * hvd.rank()])
        assert hvd.allreduce(x, average=True).item() == 1
        assert hvd.allreduce(x, average=False).item() == 2
        assert hvd.allreduce(x, False).item() == 2
        with pytest.raises(ValueError, match="give op alone"):
            hvd.allreduce(x, average=True, op=hvd.Sum)

    on_ranks(2, main)


def test_tensors_need_not_be_contiguous() -> None:
    def main() -> None:
        rank = hvd.rank()
        x = drawn(rank, 4, 6)[:, ::2].T
        right = drawn_of_all(2, 4, 6).sum(0)[:, ::2].T
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), right)
        assert torch.equal(hvd.allgather(x)[3 * rank : 3 * rank + 3], x)
        storage = drawn(rank, 4, 6)
        view = storage[:, ::2].T
        hvd.allreduce_(view, op=hvd.Sum)
        assert torch.equal(view, right)
        assert torch.equal(storage[:, 1::2], drawn(rank, 4, 6)[:, 1::2])

    on_ranks(2, main)


@pytest.mark.parametrize("size", SIZES)
def test_grouped_operations_are_the_single_ones(size: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        tensors = [
            drawn(rank, 5),
            drawn(rank, 2, 3, dtype=torch.int64),
            drawn(rank, size, 2),
        ]
        sums = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        for x, total in zip(tensors, sums, strict=True):
            assert torch.equal(total, hvd.allreduce(x, op=hvd.Sum))
        for x, rows in zip(tensors, hvd.grouped_allgather(tensors), strict=True):
            assert torch.equal(rows, hvd.allgather(x))
        pieces = hvd.grouped_reducescatter(tensors)
        for x, piece in zip(tensors, pieces, strict=True):
            assert torch.equal(piece, hvd.reducescatter(x))
        copies = [x.clone() for x in tensors]
        found = hvd.grouped_allreduce_(copies, op=hvd.Sum)
        for copy, same, total in zip(copies, found, sums, strict=True):
            assert copy is same
            assert torch.equal(copy, total)

    on_ranks(size, main)


@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32], ids=str)
def test_allgather_takes_different_numbers_of_rows(
    dtype: torch.dtype, size: int
) -> None:
    def main() -> None:
        def rows_of(rank: int) -> Any:
            return drawn(rank, rank * (rank != 2), 3, dtype=dtype)

        found = hvd.allgather(rows_of(hvd.rank()))
        assert torch.equal(found, torch.cat([*map(rows_of, range(size))]))
        assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_is_the_tensor_of_its_root(size: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        for root, shape in itertools.product(range(size), SHAPES):
            own = drawn(rank, *shape)
            found = hvd.broadcast(own, root)
            assert torch.equal(found, drawn(root, *shape))
            assert torch.equal(own, drawn(rank, *shape))
            assert hvd.broadcast_(own, root) is own
            assert torch.equal(own, found)

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("columns", [(), (2,), (0,)])
def test_alltoall_moves_rows(columns: tuple[int, ...], size: int) -> None:
    def rows(source: int, target: int) -> Any:
        return torch.full((source * target % 3, *columns), 10.0 * source + target)

    def main() -> None:
        rank = hvd.rank()
        own = torch.cat([rows(rank, target) for target in range(size)])
        splits = [len(rows(rank, target)) for target in range(size)]
        arriving = [rows(source, rank) for source in range(size)]
        for given in (splits, torch.tensor(splits), tuple(splits)):
            found, received = hvd.alltoall(own, given)
            assert torch.equal(found, torch.cat(arriving))
            assert received.tolist() == [*map(len, arriving)]
        even = torch.arange(2.0 * size) + 100 * rank
        right = [torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)]
        assert torch.equal(hvd.alltoall(even), torch.cat(right))

    on_ranks(size, main)


@pytest.mark.parametrize("size", [*SIZES, 8])
def test_reducescatter_cuts_rows(size: int) -> None:
    """The first ranks get one row more; with fewer rows than ranks some get none."""

    def main() -> None:
        rank = hvd.rank()
        for num_rows in (0, 1, size, 2 * size + 1):
            everything = drawn_of_all(size, num_rows, 3)
            begin = sum(num_rows // size + (r < num_rows % size) for r in range(rank))
            count = num_rows // size + (rank < num_rows % size)
            for op, whole in (
                (hvd.Average, everything.sum(0) / size),
                (hvd.Max, everything.amax(0)),
            ):
                found = hvd.reducescatter(drawn(rank, num_rows, 3), op=op)
                assert torch.equal(found, whole[begin : begin + count])

    on_ranks(size, main)


def test_sparse_tensors_are_added() -> None:
    def main() -> None:
        rank = hvd.rank()
        indices = torch.tensor([[0, rank + 1], [1, 0]])
        values = torch.tensor([1.0, 2.0 * rank])
        x = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)
        dense = torch.zeros(3, 5, 2)
        for r in range(3):
            dense[r, 0, 1], dense[r, r + 1, 0] = 1.0, 2.0 * r
        handle = hvd.sparse_allreduce_async(x, "x", op=hvd.Sum)
        assert torch.equal(handle().to_dense(), dense.sum(0))
        handle = hvd.sparse_allreduce_async(x, "x", hvd.Average)
        torch.testing.assert_close(hvd.synchronize(handle).to_dense(), dense.mean(0))

    on_ranks(3, main)


def test_fp16_compression_halves_what_is_sent() -> None:
    def main() -> None:
        x = torch.full((3,), 1 + 2.0**-12)
        found = hvd.allreduce(x, compression=hvd.Compression.fp16)
        assert found.dtype == torch.float32
        assert found.tolist() == [1, 1, 1]
        whole = torch.tensor([3])
        assert hvd.allreduce(whole, compression=hvd.Compression.fp16).item() == 3

    on_ranks(2, main)


def test_a_handle_is_polled_and_waited_for() -> None:
    def main() -> None:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        first = hvd.synchronize(handle)
        assert first.tolist() == [2, 2, 2]
        assert hvd.synchronize(handle) is first
        assert hvd.poll(handle)
        with pytest.raises(TypeError, match=r"hvd\.poll"):
            bool(handle)
        with pytest.raises(ValueError, match="is no handle"):
            hvd.synchronize(3)  # type: ignore[arg-type]

    on_ranks(2, main)
