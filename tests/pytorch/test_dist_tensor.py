# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors against whole ones: values and gradients, on ranks as threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_tensor_cases import SHAPES, draw_placement, drawn, leaf, off_by
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import (
    DistTensor,
    Placement,
    Sharded,
    einsum,
    plan,
    products,
)
from commrt.local import run

NEAR = 1e-12


def on_grids(
    seed: int, cases: int, check: Callable[[random.Random, ProcessGrid], None]
) -> None:
    """Run a check on all grids, with cases that every rank draws alike."""
    for axes in SHAPES:

        def main(comm: Any, axes: dict[str, int] = axes) -> int:
            with ProcessGrid(comm, axes) as grid:
                for case in range(cases):
                    check(random.Random(f"{seed} {axes} {case}"), grid)
            return cases

        assert run(math.prod(axes.values()), main) == [cases] * math.prod(axes.values())


def some_shape(rng: random.Random, least: int = 0, dims: int = 4) -> tuple[int, ...]:
    return tuple(rng.randint(least, 7) for _ in range(rng.randint(1, dims)))


def test_any_placement_becomes_any_other(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = some_shape(rng)
        source = draw_placement(rng, grid, shape, partial=True)
        target = draw_placement(rng, grid, shape, partial=True)
        whole, weights = drawn(rng, shape), drawn(rng, shape)
        x = leaf(whole, grid, source)
        y = x.redistribute(placement=target)
        assert y.placement == target
        assert tuple(y.local.shape) == target.local_shape(grid, shape)
        assert off_by(y.whole(), whole) < NEAR, (source, target)
        w = DistTensor.from_whole(weights, grid, Placement(*target.dims))
        y.local.backward(w.local)
        assert x.grad is not None
        assert off_by(x.grad.whole(), weights) < NEAR, (source, target)

    on_grids(seed, 25, check)


UNARY = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "method": lambda x: x.sigmoid().square(),
    "scaled": lambda x: 2 * (-x) / 3 - 1,
    "clamp": lambda x: torch.clamp(x, min=-0.5),
}


def test_functions_of_elements(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = some_shape(rng, 1)
        other = tuple(rng.choice((extent, 1)) for extent in shape)[rng.randint(0, 1) :]
        whole, second = drawn(rng, shape), drawn(rng, other)
        x = leaf(whole, grid, draw_placement(rng, grid, shape))
        dims = [
            rng.choice((cut, None)) if extent != 1 else None
            for extent, cut in zip(
                other, x.placement.dims[len(shape) - len(other) :], strict=True
            )
        ]
        fits = all(a != 1 for a in shape)
        y = leaf(
            second, grid, Placement(*dims) if fits else Placement(*[None] * len(other))
        )
        name = rng.choice([*UNARY])
        one, two = whole.clone().requires_grad_(), second.clone().requires_grad_()
        function = rng.choice((torch.add, torch.sub, torch.mul, torch.maximum))
        expected = function(UNARY[name](one), two)
        found = function(UNARY[name](x), y)
        assert off_by(found.whole(), expected) < NEAR
        (expected * expected).sum().backward()
        (found * found).sum().redistribute().backward()
        for mine, whole_one in ((x, one), (y, two)):
            assert mine.grad is not None
            assert off_by(mine.grad.whole(), whole_one.grad) < NEAR, (name, x, y)

    on_grids(seed, 20, check)


def test_reductions(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = some_shape(rng, 1)
        whole = drawn(rng, shape, whole_numbers=rng.random() < 0.5)
        x = leaf(whole, grid, draw_placement(rng, grid, shape))
        one = whole.clone().requires_grad_()
        dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
        keepdim = rng.random() < 0.5
        function = rng.choice((torch.sum, torch.mean, torch.amax, torch.amin))
        expected = function(one, dims, keepdim)
        found = function(x, dims, keepdim)
        assert found.shape == expected.shape
        again = found.redistribute()
        assert off_by(again.whole(), expected) < NEAR
        weights = drawn(rng, expected.shape)
        (expected * weights).sum().backward()
        lying = DistTensor.from_whole(weights, grid, again.placement)
        (again * lying).sum().redistribute().backward()
        assert x.grad is not None
        assert off_by(x.grad.whole(), one.grad) < NEAR, (function, x, dims)

    on_grids(seed, 20, check)


def test_shapes_that_keep_blocks(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = (12, rng.randint(1, 4), 6)
        whole = drawn(rng, shape)
        x = leaf(whole, grid, Placement("a", None, *([None] * 1)))
        changes: list[Callable[[Any], Any]] = [
            lambda t: t.permute(2, 0, 1),
            lambda t: t.transpose(0, 2).unsqueeze(1),
            lambda t: torch.flatten(t),
            lambda t: t.flatten(1).t(),
            lambda t: t.reshape(12, -1, 2, 3),
            lambda t: t.unsqueeze(0).squeeze(0),
            lambda t: t.view(-1, 6),
        ]
        for change in changes:
            found, expected = change(x), change(whole)
            assert found.shape == expected.shape
            assert off_by(found.whole(), expected) == 0

    on_grids(seed, 3, check)


def test_products(seed: int) -> None:
    specs = ["ij,jk->ik", "bse,ehd->bshd", "ij,ij->", "ij,jk,kl->il", "i,j->ij"]

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        spec = rng.choice(specs)
        words, result = spec.split("->")[0].split(","), spec.split("->")[1]
        extents = {letter: rng.randint(1, 7) for letter in "bdehijkls"}
        wholes = [drawn(rng, [extents[c] for c in word]) for word in words]
        mine = [
            leaf(whole, grid, draw_placement(rng, grid, whole.shape, partial=True))
            for whole in wholes
        ]
        ones = [whole.clone().requires_grad_() for whole in wholes]
        expected = torch.einsum(spec, *ones)
        shape = [extents[letter] for letter in result]
        out = rng.choice((None, draw_placement(rng, grid, shape)))
        found = einsum(spec, *mine, out=out)
        assert out is None or found.placement == out
        assert off_by(found.whole(), expected) < NEAR, (spec, mine, out)
        weights = drawn(rng, shape)
        expected.backward(weights)
        found.backward(
            DistTensor.from_whole(weights, grid, Placement(*[None] * len(shape)))
        )
        for x, one in zip(mine, ones, strict=True):
            assert x.grad is not None
            assert off_by(x.grad.whole(), one.grad) < NEAR, (spec, x, out)

    on_grids(seed, 20, check)


def test_the_cheapest_product_moves_the_small_operand() -> None:
    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"a": 2}) as grid:
            big = DistTensor.from_whole(torch.ones(64, 8), grid, Placement("a", None))
            small = DistTensor.from_whole(torch.ones(8, 4), grid, Placement("a", None))
            rows = plan("ij,jk->ik", big, small)
            sums = plan("ij,jk->ik", big.redistribute(None, "a"), small)
            return rows, sums

    rows, sums = run(2, main)[0]
    assert rows.operands[0] == Placement("a", None)
    assert rows.operands[1] == Placement(None, None)
    assert rows.nbytes == 8 * 4 / 2 * 4  # the half of the small one that it lacks
    assert sums.nbytes == 0
    assert sums.result == Placement(None, None, partial="a")


def test_equal_products_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []

    def counted(spec: str, *operands: Any, out: Any = None) -> Any:
        planned.append(spec)
        return plan(spec, *operands, out=out)

    monkeypatch.setattr(products, "plan", counted)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 1}) as grid:
            x = DistTensor.from_whole(torch.ones(4, 4), grid, Placement("a", None))
            for _ in range(3):
                assert (x @ x).shape == (4, 4)
                einsum("ij,jk->ik", x, x, out=Placement(None, "a"))
            x.redistribute(None, "a") @ x
            wide = DistTensor.from_whole(torch.ones(4, 9), grid, Placement("a", None))
            assert (x @ wide).shape == (4, 9)

    run(1, main)
    assert len(planned) == 4


def test_a_linear_layer_with_a_bias(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shapes = (rng.randint(1, 6), rng.randint(1, 6)), (5, 0), (5,)
        shapes = (shapes[0], (5, shapes[0][1]), (5,))
        wholes = [drawn(rng, shape) for shape in shapes]
        mine = [
            leaf(whole, grid, draw_placement(rng, grid, whole.shape))
            for whole in wholes
        ]
        mine[2] = leaf(wholes[2], grid, Placement(None))
        ones = [whole.clone().requires_grad_() for whole in wholes]
        expected, found = functional.linear(*ones), functional.linear(*mine)
        assert off_by(found.whole(), expected) < NEAR
        expected.square().mean().backward()
        found.square().mean().redistribute().backward()
        for x, one in zip(mine, ones, strict=True):
            assert x.grad is not None
            assert off_by(x.grad.whole(), one.grad) < NEAR

    on_grids(seed, 10, check)


X = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda g, x: x.redistribute("c", None), "no axis 'c'"),
        (lambda g, x: x.redistribute("a"), "has 1 dimensions, and the tensor 2"),
        (lambda g, x: Placement("a", "a"), "more than once"),
        (lambda g, x: Placement("a", partial="a"), "more than once"),
        (lambda g, x: Placement("a", partial=3), "partial=3 must be the name"),
        (lambda g, x: Sharded("a", block=0), "block=0"),
        (lambda g, x: Sharded(3), "axes=3 must be the name"),
        (lambda g, x: x.redistribute(Sharded("a", sizes=(1, 1)), None), "do not cover"),
        (
            lambda g, x: DistTensor(X, (4, 6), g, Placement("a", None)),
            "expected \\(2, 6",
        ),
        (lambda g, x: x + torch.ones(6), "plain tensor of shape"),
        (lambda g, x: x + x.redistribute(None, "a"), "same axis"),
        (lambda g, x: x.sum(0).relu(), "redistribute\\(\\) it first"),
        (lambda g, x: x.sum(0) + 1, "redistribute\\(\\) it first"),
        (lambda g, x: x.sum(7), "no dimension"),
        (lambda g, x: x.t().flatten(), "redistribute\\(\\) so that it is whole"),
        (lambda g, x: x.reshape(5, 5), "does not fit"),
        (lambda g, x: torch.cumsum(x, 0), "none of the functions"),
        (lambda g, x: einsum("ij,jk", x, x), "spec='ij,jk'"),
        (lambda g, x: einsum("ij,jk->ik", x, x), "'j' has 6 elements"),
        (lambda g, x: einsum("ii->i", x), "different letters"),
        (lambda g, x: einsum("ij,jk->ik", x, X), "is no DistTensor"),
        (lambda g, x: x.backward(), "pass a gradient"),
        (lambda g, x: ProcessGrid(X, {"a": 2}), "must be a communicator"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(call: Any, says: str) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2, "b": 1}) as grid:
            x = DistTensor.from_whole(X, grid, Placement("a", None))
            with pytest.raises(UsageError, match=says):
                call(grid, x)
            assert x.sum().redistribute().local == 24  # all are in step

    run(2, main)


def test_a_world_of_one_has_torchs_bits(seed: int) -> None:
    rng = random.Random(seed)
    wholes = drawn(rng, (9, 7)), drawn(rng, (5, 7)), drawn(rng, (5,))

    def main(comm: Any) -> list[Any]:
        with ProcessGrid(comm, {"a": 1, "b": 1}) as grid:
            cuts = Placement("a", "b"), Placement("a", "b"), Placement("b")
            mine = [leaf(t, grid, p) for t, p in zip(wholes, cuts, strict=True)]
            loss = functional.gelu(functional.linear(*mine)).square().mean()
            loss.redistribute().backward()
            return [loss.local, *(x.local.grad for x in mine)]

    ones = [whole.clone().requires_grad_() for whole in wholes]
    loss = functional.gelu(functional.linear(*ones)).square().mean()
    loss.backward()
    for found, expected in zip(
        run(1, main)[0], [loss, *(one.grad for one in ones)], strict=True
    ):
        assert torch.equal(found, expected)


def test_a_name_that_is_no_method_is_an_attribute_error() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 1}) as grid:
            x = DistTensor.from_whole(X, grid, Placement("a", None))
            with pytest.raises(AttributeError, match="has no 'rellu'; did you mean"):
                _ = x.rellu

    run(1, main)
