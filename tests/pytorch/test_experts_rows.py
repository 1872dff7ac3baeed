# SPDX-License-Identifier: Apache-2.0
"""Copies of rows and stacked perceptrons are those of plain loops, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.experts import MoE
from commrt.layers.experts.rows import Copies, collect, collect_weighted, spread
from commrt.layers.experts.stacked import stacked_mlp
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

DTYPES = torch.float32, torch.float64, torch.bfloat16
SOURCES: dict[str, tuple[list[int], int]] = {
    "some rows have none": ([3, 0, 3, 1, 0, 3], 5),
    "one of each": ([2, 0, 1], 3),
    "no copies": ([], 3),
    "no rows": ([], 0),
}
ACTIVATIONS = "swiglu", "gelu", "relu"
COUNTS = 3, 0, 1, 4


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)


def summed(x: Any, source: list[int], num_rows: int) -> Any:
    """Return the sums of copies, added one by one."""
    rows = [torch.zeros(x.shape[1:], dtype=x.dtype) for _ in range(num_rows)]
    for copy, row in zip(x, source, strict=True):
        rows[row] = rows[row] + copy
    return torch.stack(rows) if rows else x.new_zeros((0, *x.shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SOURCES)
def test_copies_come_back_as_sums_in_their_order(kind: str, dtype: Any) -> None:
    source, num_rows = SOURCES[kind]
    copies = Copies.of(torch.tensor(source, dtype=torch.int64), num_rows, 3)
    for shape in ((5,), (2, 3), (0,)):
        x = drawn(len(source), *shape, dtype=dtype)
        assert torch.equal(collect(x, copies), summed(x, source, num_rows))
        if len(source) and x.numel():
            # Rows that lie apart in memory.
            apart = x.repeat(1, 2, *[1] * (x.dim() - 2))[:, : x.shape[1]]
            assert torch.equal(collect(apart, copies), summed(x, source, num_rows))


@pytest.mark.parametrize("kind", SOURCES)
def test_spread_collect_and_weights_have_the_gradients_of_torch(kind: str) -> None:
    source, num_rows = SOURCES[kind]
    index = torch.tensor(source, dtype=torch.int64)
    copies = Copies.of(index, num_rows, 3)
    rows = drawn(num_rows, 4, seed=1).requires_grad_()
    weights = drawn(len(source), seed=2).requires_grad_()
    gradient = drawn(num_rows, 4, seed=3)
    found = collect_weighted(spread(rows, copies), weights, copies)
    right = rows.new_zeros(rows.shape).index_add(
        *(0, index, rows[index] * weights[:, None])
    )
    assert torch.equal(found, right)
    for gradients in (gradient, gradient[:1, :1].expand(num_rows, 4)):
        if num_rows == 0:
            gradients = gradient
        ours = torch.autograd.grad(found, (rows, weights), gradients, True)
        theirs = torch.autograd.grad(right, (rows, weights), gradients, True)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_that_come_in_are_not_written_over() -> None:
    copies = Copies.of(torch.tensor([0, 1]), 2, 1)
    x, weights = drawn(2, 3).requires_grad_(), drawn(2, seed=1).requires_grad_()
    gradient = torch.ones(2, 3, dtype=torch.float64)
    collect_weighted(x, weights, copies).backward(gradient)
    assert torch.equal(gradient, torch.ones_like(gradient))


def looped(x: Any, activation: str, weights: list[Any]) -> Any:
    outputs = []
    for number, tokens in enumerate(x.split(COUNTS)):
        *gate, up, down = (each[number] for each in weights)
        hidden = functional.linear(tokens, up)
        if gate:
            hidden = functional.silu(functional.linear(tokens, *gate)) * hidden
        else:
            hidden = getattr(functional, activation)(hidden)
        outputs.append(hidden @ down)
    return torch.cat(outputs)


def stack(activation: str, dtype: Any = torch.float64) -> list[Any]:
    number = 3 if activation == "swiglu" else 2
    return [drawn(4, 5, 6, seed=seed, dtype=dtype) for seed in range(number)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stacked_experts_have_the_bits_of_a_loop(activation: str, dtype: Any) -> None:
    x, weights = drawn(8, 6, seed=9, dtype=dtype), stack(activation, dtype)
    found = stacked_mlp(x, COUNTS, activation, weights)
    assert torch.equal(found, looped(x, activation, weights))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2, 3)])
def test_stacked_experts_have_the_gradients_of_a_loop(
    activation: str, trained: tuple[int, ...]
) -> None:
    """Also where the tokens, or some weights, need none."""
    x, weights = drawn(8, 6, seed=9), stack(activation)
    leaves = [x, *weights]
    wanted = [leaves[at].requires_grad_() for at in trained if at < len(leaves)]
    for gradient in (drawn(8, 6, seed=5), drawn(8, 1, seed=5).expand(8, 6)):
        found = stacked_mlp(x, COUNTS, activation, weights)
        right = looped(x, activation, weights)
        ours = torch.autograd.grad(found, wanted, gradient)
        theirs = torch.autograd.grad(right, wanted, gradient)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert all(each.is_contiguous() for each in ours[-1:])


def test_stacked_experts_without_hidden_features_or_tokens() -> None:
    none = [torch.zeros(2, 0, 3, requires_grad=True) for _ in range(2)]
    found = stacked_mlp(torch.ones(3, 3), (1, 2), "relu", none)
    assert torch.equal(found, torch.zeros(3, 3))
    weights = [drawn(2, 4, 3).requires_grad_() for _ in range(2)]
    stacked_mlp(drawn(0, 3), (0, 0), "gelu", weights).sum().backward()
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in weights)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_gradients_are_refused_on_all_ranks(ranks: int) -> None:
    """Of a loss that is linear in the output: torch alone would leave them out."""

    def main(comm: Any) -> list[str]:
        with ProcessGrid(comm, {"expert": 0}) as grid:
            moe = MoE(6, 4, 8, grid=grid, top_k=2).double()
            x = drawn(5, 6, seed=comm.rank).requires_grad_()
            output = moe(x).output
            with pytest.raises(UsageError, match="create_graph=True") as caught:
                torch.autograd.grad(output.sum(), x, create_graph=True)
            moe(x).output.sum().backward()  # and once they can be had
            assert x.grad is not None
            return [str(caught.value)]

    found = run(ranks, main, timeout_s=300)
    assert found == [found[0]] * ranks
