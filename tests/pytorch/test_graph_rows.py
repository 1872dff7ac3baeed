# SPDX-License-Identifier: Apache-2.0
"""Rows by number over ranks, against indexing in one process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import draw_sizes
from recorded import logs_of

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.graphs import RowExchange, gather, scatter
from commrt.local import run


def pieces(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("number", range(60))
def test_rows_are_gathered_and_added_as_in_one_process(number: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number}")
    ranks = rng.choice([1, 2, 3, 4, 5, 7, 8])
    rows = rng.choice([1, 2, 7, 20])
    sizes = tuple(draw_sizes(rng, rows, ranks))
    tail = rng.choice([(), (1,), (3,), (2, 2), (0,)])
    draws = np.random.default_rng(rng.randrange(1 << 30))
    whole = torch.from_numpy(draws.standard_normal((rows, *tail)))
    indices = [
        torch.from_numpy(draws.integers(0, rows, rng.choice([0, 1, 5, 30])))
        for _ in range(ranks)
    ]
    scales = [
        torch.from_numpy(draws.standard_normal((len(each), *tail))) for each in indices
    ]
    x = whole.clone().requires_grad_()
    gathered = [x[each] for each in indices]
    added = torch.zeros_like(whole)
    for each, values, scale in zip(indices, gathered, scales, strict=True):
        added = added.index_add(0, each, values * scale)
    added.square().sum().backward()

    def main(comm: Any) -> None:
        own = pieces(sizes, comm.rank)
        mine = whole[own].clone().requires_grad_()
        index, scale = indices[comm.rank], scales[comm.rank]
        exchange = RowExchange(index, sizes, comm)
        assert exchange.num_own == sizes[comm.rank]
        assert exchange.num_named == len(torch.unique(index))
        found = exchange.gather(mine)
        assert torch.equal(found, gathered[comm.rank])
        total = exchange.scatter(found * scale)
        assert torch.allclose(total, added[own], rtol=1e-12, atol=1e-12)
        total.square().sum().backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert torch.allclose(mine.grad, x.grad[own], rtol=1e-12, atol=1e-12)

    run(ranks, main)


def test_functions_do_what_an_exchange_does() -> None:
    whole = torch.arange(10.0)[:, None]

    def main(comm: Any) -> None:
        index = torch.tensor([9, 0, 9]) if comm.rank else torch.tensor([4])
        own = slice(comm.rank * 10 // 3, (comm.rank + 1) * 10 // 3)
        found = gather(whole[own], index, comm)
        assert torch.equal(found, whole[index])
        total = scatter(torch.ones(len(index), 1), index, 10, comm)
        expected = torch.zeros(10, 1)
        expected[[0, 4, 9], 0] = torch.tensor([2.0, 1.0, 4.0])
        assert torch.equal(total, expected[own])
        uneven = gather(whole[own], index, comm, num_rows=(3, 3, 4))
        assert torch.equal(uneven, found)

    run(3, main)


def test_second_derivatives_are_those_of_one_process() -> None:
    whole = torch.tensor([0.5, 1.5, -1.0, 2.0], dtype=torch.float64)
    index = torch.tensor([3, 0, 3])
    x = whole.clone().requires_grad_()
    loss = 2 * (x[index] ** 3).sum()
    [first] = torch.autograd.grad(loss, x, create_graph=True)
    first.square().sum().backward()

    def main(comm: Any) -> None:
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        mine = whole[own].clone().requires_grad_()
        loss = (gather(mine, index, comm) ** 3).sum()
        [first] = torch.autograd.grad(loss, mine, create_graph=True)
        first.square().sum().backward()
        assert mine.grad is not None
        assert x.grad is not None
        assert torch.allclose(mine.grad, x.grad[own], rtol=1e-12, atol=0)

    run(2, main)


def test_messages_have_the_bytes_of_the_formula() -> None:
    features, element = 5, 8

    def main(comm: Any) -> tuple[int, int]:
        index = torch.tensor([0, 0, 3, 5] if comm.rank else [5, 1])
        exchange = RowExchange(index, 6, comm)
        x = torch.ones(3, features, dtype=torch.float64, requires_grad=True)
        comm.barrier()
        exchange.gather(x).sum().backward()
        comm.barrier()
        return exchange.num_named, 0

    with commrt.trace.record() as recording:
        named = [count for count, _ in run(2, main)]
    for rank, log in enumerate(logs_of(recording)):
        marks = [n for n, call in enumerate(log.operations) if call.op == "barrier"]
        before = log.operations[: marks[0]]
        assert [call.nbytes for call in before if call.op == "alltoallv"] == [
            8 * named[rank]
        ]
        assert [call.nbytes for call in before if call.op == "alltoall"] == [16]
        forward, backward = log.operations[marks[0] + 1 : marks[1]]
        # Rank 0's rows 0 and 1 are named once each; rank 1's 3 once, and 5 by both.
        assert forward.nbytes == [2, 3][rank] * features * element
        assert backward.nbytes == named[rank] * features * element


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([6]),
        torch.tensor([-1]),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([[0]]),
        [0],
    ],
)
def test_a_wrong_index_of_one_rank_is_refused_on_all(index: Any) -> None:
    def main(comm: Any) -> None:
        given = index if comm.rank == 1 else torch.tensor([0])
        with pytest.raises(UsageError, match="index of rank 1 is wrong"):
            RowExchange(given, 6, comm)
        comm.barrier()

    run(3, main)


def test_rows_that_do_not_fit_are_refused() -> None:
    def main(comm: Any) -> None:
        index = torch.tensor([0, 5])
        for wrong in (-1, 2.5, (1, 2, 3), (6, -1)):
            with pytest.raises(UsageError, match="num_rows="):
                RowExchange(index, wrong, comm)  # type: ignore[arg-type]
        exchange = RowExchange(index, 6, comm)
        with pytest.raises(UsageError, match="tensor of 3 rows"):
            exchange.gather(torch.ones(2, 1))
        with pytest.raises(UsageError, match="tensor of 2 rows"):
            exchange.scatter(torch.ones(3, 1))

    run(2, main)
