# SPDX-License-Identifier: Apache-2.0
"""Operations of commrt.hvd have the gradients that Horovod gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hvd_cases import drawn, drawn_of_all, on_ranks

import commrt.hvd as hvd

SIZES = (1, 2, 3, 4)


def leaf(rank: int, *shape: int) -> Any:
    return drawn(rank, *shape).requires_grad_()


@pytest.mark.parametrize("name", [None, "x"])
@pytest.mark.parametrize("size", SIZES)
def test_allreduce_reduces_gradients_the_same_way(size: int, name: str | None) -> None:
    def main() -> None:
        rank = hvd.rank()
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
            x = leaf(rank, 4, 2)
            y = hvd.allreduce(
                x, name=name, op=op, prescale_factor=0.5, postscale_factor=4.0
            )
            y.backward(drawn(rank + 50, 4, 2))
            total = sum(drawn(r + 50, 4, 2) for r in range(size))
            torch.testing.assert_close(x.grad, total * 2 / divisor, rtol=0, atol=1e-12)

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_grouped_allreduce_has_gradients(size: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        tensors = [leaf(rank, 3), leaf(rank, 2, 2)]
        first, second = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        (first.sum() * (rank + 1) + 2 * second.sum()).backward()
        assert (tensors[0].grad == size * (size + 1) / 2).all()
        assert (tensors[1].grad == 2 * size).all()

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_gathered_rows_get_the_mean_of_the_ranks_gradients(size: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        rows = [r + 1 for r in range(size)]
        x = leaf(rank, rows[rank], 2)
        y = hvd.allgather(x)
        y.backward(drawn(rank + 50, sum(rows), 2))
        mean = drawn_of_all(50 + size, sum(rows), 2)[50:].sum(0) / size
        begin = sum(rows[:rank])
        assert torch.equal(x.grad, mean[begin : begin + rows[rank]])
        both = [leaf(rank, 2), leaf(rank, rank, 3)]
        first, second = hvd.grouped_allgather(both, "pair")
        (3 * first.sum() + second.sum()).backward()
        assert both[0].grad.tolist() == [3, 3]
        assert torch.equal(both[1].grad, torch.ones(rank, 3, dtype=torch.float64))

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_the_root_of_a_broadcast_gets_the_mean_of_gradients(size: int) -> None:
    def main() -> None:
        rank, root = hvd.rank(), size - 1
        x = leaf(rank, 5)
        hvd.broadcast(x, root, "x").backward(drawn(rank + 50, 5))
        mean = sum(drawn(r + 50, 5) for r in range(size)) / size
        assert torch.equal(x.grad, mean if rank == root else torch.zeros_like(mean))

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_alltoall_go_back(size: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        splits = [(rank + target) % 3 for target in range(size)]
        x = leaf(rank, sum(splits), 2)
        y, received = hvd.alltoall(x, splits)
        assert received.tolist() == [(source + rank) % 3 for source in range(size)]
        y.backward(3 * y.detach())
        assert torch.equal(x.grad, 3 * x)
        even = leaf(rank, 2 * size)
        hvd.alltoall(even, name="even").square().sum().backward()
        assert torch.equal(even.grad, 2 * even)

    on_ranks(size, main)


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_gathers_gradients(size: int) -> None:
    """Times the number of ranks for a sum, as Horovod has it."""

    def main() -> None:
        rank, count = hvd.rank(), 2 * size + 1
        begin = sum(count // size + (r < count % size) for r in range(rank))
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            x = leaf(rank, count, 2)
            y = hvd.reducescatter(x, op=op, prescale_factor=0.5)
            weights = drawn(99, count, 2)
            (y * weights[begin : begin + len(y)]).sum().backward()
            assert torch.equal(x.grad, weights * factor * 0.5)

    on_ranks(size, main)


@pytest.mark.parametrize("op", [hvd.Max, hvd.Min, hvd.Product, hvd.Adasum])
def test_other_reductions_have_no_gradient(op: hvd.ReduceOp) -> None:
    def main() -> None:
        y = hvd.allreduce(leaf(hvd.rank(), 3), op=op).sum()
        with pytest.raises(ValueError, match=r"op=ReduceOp\.\w+ has no gradient"):
            y.backward()

    on_ranks(2, main)


def test_compressed_tensors_have_gradients() -> None:
    def main() -> None:
        x = leaf(hvd.rank(), 3)
        y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
        (2 * y).sum().backward()
        assert x.grad.tolist() == [4, 4, 4]
        assert x.grad.dtype == torch.float64

    on_ranks(2, main)
