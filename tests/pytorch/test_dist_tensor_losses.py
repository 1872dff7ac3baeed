# SPDX-License-Identifier: Apache-2.0
"""torch's losses of tensors that are cut, against one process: values, gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_tensor_cases import SHAPES, draw_placement, drawn, leaf, off_by
from recorded import logs_of
from torch import nn
from torch.nn import functional

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, losses
from commrt.local import run

NEAR = 1e-12
REDUCTIONS = ("none", "mean", "sum")


def on_grids(
    seed: int, cases: int, check: Callable[[random.Random, ProcessGrid], None]
) -> None:
    """Run a check on all grids, with cases that every rank draws alike."""
    for axes in SHAPES:

        def main(comm: Any, axes: dict[str, int] = axes) -> None:
            with ProcessGrid(comm, axes) as grid:
                for case in range(cases):
                    check(random.Random(f"{seed} {axes} {case}"), grid)

        run(math.prod(axes.values()), main)


def whole_of(found: DistTensor, reduction: str) -> Any:
    """Return a loss; a number must be on every rank already."""
    if reduction == "none":
        return found.whole()
    assert found.shape == ()
    assert not found.placement.partial
    return found.local


def check_loss(
    function: Callable[..., Any],
    pairs: list[tuple[DistTensor, Any]],
    more: dict[str, Any],
    weights: Any,
) -> None:
    """Compare a loss of leaves with that of whole tensors, and their gradients."""
    expected = function(*[whole for _, whole in pairs], **more)
    found = function(*[mine for mine, _ in pairs], **more)
    reduction = more["reduction"]
    assert off_by(whole_of(found, reduction), expected) < NEAR, more
    if reduction == "none":
        (expected * weights).sum().backward()
        lying = DistTensor.from_whole(weights, found.grid, found.placement)
        (found * lying).sum().redistribute().backward()
    else:
        expected.backward()
        found.backward()
    for mine, whole in pairs:
        if whole.requires_grad:
            assert mine.grad is not None
            assert off_by(mine.grad.whole(), whole.grad) < NEAR, more


# -- of elements -----------------------------------------------------------------------

OF_ELEMENTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "mse_loss": lambda rng: {},
    "l1_loss": lambda rng: {},
    "smooth_l1_loss": lambda rng: {"beta": rng.choice((0.0, 0.3, 1.0))},
    "huber_loss": lambda rng: {"delta": rng.choice((0.4, 1.0))},
    "binary_cross_entropy": lambda rng: {},
    "binary_cross_entropy_with_logits": lambda rng: {},
}
WEIGHTED = {"mse_loss", "huber_loss", *[n for n in OF_ELEMENTS if "binary" in n]}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_losses_of_elements(name: str, seed: int) -> None:
    function = getattr(functional, name)

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
        whole, goal = drawn(rng, shape), drawn(rng, shape)
        if "binary" in name:
            goal = goal.sigmoid()
        if name == "binary_cross_entropy":
            whole = whole.sigmoid()
        placement = draw_placement(rng, grid, shape)
        x = leaf(whole, grid, placement)
        where = rng.choice((placement, Placement.replicated(len(shape))))
        y = leaf(goal, grid, where)
        more = {"reduction": rng.choice(REDUCTIONS)} | OF_ELEMENTS[name](rng)
        if name in WEIGHTED and rng.random() < 0.5:
            more["weight"] = drawn(rng, shape).abs()
        if name.endswith("logits") and rng.random() < 0.5:
            more["pos_weight"] = drawn(rng, shape[-1:]).abs()
        one, two = whole.clone().requires_grad_(), goal.clone().requires_grad_()
        weights = drawn(rng, shape)
        expected = function(one, two, **more)
        given = dict(more)
        if "weight" in more and rng.random() < 0.5:
            given["weight"] = DistTensor.from_whole(more["weight"], grid, placement)
        found = function(x, y, **given)
        reduction = more["reduction"]
        assert off_by(whole_of(found, reduction), expected) < NEAR, more
        if reduction == "none":
            (expected * weights).sum().backward()
            lying = DistTensor.from_whole(weights, found.grid, found.placement)
            (found * lying).sum().redistribute().backward()
        else:
            expected.backward()
            found.backward()
        for mine, right in ((x, one), (y, two)):
            assert mine.grad is not None
            assert off_by(mine.grad.whole(), right.grad) < NEAR, (more, x, y)

    on_grids(seed, 8, check)


def test_a_weighted_l1_loss_by_its_own_name(seed: int) -> None:
    """torch's own name loses the weight on its way to tensors that are not torch's."""

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        whole, goal, weight = (drawn(rng, (5, 3)) for _ in range(3))
        x = leaf(whole, grid, draw_placement(rng, grid, (5, 3)))
        y = DistTensor.from_whole(goal, grid, Placement(None, None))
        expected = functional.l1_loss(whole, goal, weight=weight.abs())
        found = losses.l1_loss(x, y, weight=weight.abs())
        assert off_by(found.local, expected) < NEAR

    on_grids(seed, 3, check)


# -- of classes ------------------------------------------------------------------------


def rows_and_classes(
    rng: random.Random, grid: ProcessGrid
) -> tuple[tuple[int, ...], Placement]:
    """Return a shape of logits and any placement of it, empty pieces too."""
    space = [rng.randint(1, 5) for _ in range(rng.choice((0, 0, 1, 2)))]
    # A single class has the gradient 0, which nothing can be compared with.
    shape = (rng.randint(1, 6), rng.randint(2, 9), *space)
    return shape, draw_placement(rng, grid, shape)


def class_numbers(rng: random.Random, shape: Any, classes: int, ignored: int) -> Any:
    drawn_ones = drawn(rng, shape).abs() * classes
    target = drawn_ones.long().clamp(max=classes - 1)
    return target.where(drawn(rng, shape) > -1.0, torch.tensor(ignored))


def without_classes(placement: Placement) -> Placement:
    first, _, *space = placement.dims
    return Placement(first, *space)


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_losses_of_class_numbers(name: str, seed: int) -> None:
    function = getattr(functional, name)

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape, placement = rows_and_classes(rng, grid)
        whole = drawn(rng, shape)
        ignored = rng.choice((-100, -1, 0, shape[1] + 3))
        target = class_numbers(rng, (shape[0], *shape[2:]), shape[1], ignored)
        more: dict[str, Any] = {
            "reduction": rng.choice(REDUCTIONS),
            "ignore_index": ignored,
        }
        if rng.random() < 0.5:
            more["weight"] = drawn(rng, shape[1:2]).abs()
        if name == "cross_entropy" and rng.random() < 0.5:
            more["label_smoothing"] = rng.choice((0.1, 1.0))
        rows = without_classes(placement)
        where = rng.choice((rows, Placement.replicated(target.dim())))
        x = leaf(whole, grid, placement)
        y = DistTensor.from_whole(target, grid, where)
        one = whole.clone().requires_grad_()
        if more["reduction"] == "mean" and not bool((target != ignored).any()):
            assert bool(function(one, target, **more).isnan())
            assert math.isnan(function(x, y, **more).item())
            return
        check_loss(function, [(x, one), (y, target)], more, drawn(rng, target.shape))

    on_grids(seed, 15, check)


def test_cross_entropy_of_probabilities(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape, placement = rows_and_classes(rng, grid)
        whole, goal = drawn(rng, shape), drawn(rng, shape).softmax(1)
        more: dict[str, Any] = {"reduction": rng.choice(REDUCTIONS)}
        if rng.random() < 0.5:
            more["weight"] = drawn(rng, shape[1:2]).abs()
        if rng.random() < 0.5:
            more["label_smoothing"] = 0.2
        x, y = leaf(whole, grid, placement), leaf(goal, grid, placement)
        one, two = whole.clone().requires_grad_(), goal.clone().requires_grad_()
        weights = drawn(rng, (shape[0], *shape[2:]))
        check_loss(functional.cross_entropy, [(x, one), (y, two)], more, weights)

    on_grids(seed, 8, check)


def test_a_single_row_of_classes(seed: int) -> None:
    def check(rng: random.Random, grid: ProcessGrid) -> None:
        whole = drawn(rng, (7,))
        x = leaf(whole, grid, draw_placement(rng, grid, (7,)))
        y = DistTensor.from_whole(torch.tensor(4), grid, Placement())
        one = whole.clone().requires_grad_()
        more = {"reduction": "mean"}
        pairs = [(x, one), (y, torch.tensor(4))]
        check_loss(functional.cross_entropy, pairs, more, None)

    on_grids(seed, 3, check)


def test_a_single_class_has_no_loss() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            whole = torch.tensor([[1.5], [-2.0]], dtype=torch.float64)
            x = leaf(whole, grid, Placement(None, "a"))
            y = DistTensor.from_whole(torch.zeros(2).long(), grid, Placement(None))
            loss = functional.cross_entropy(x, y, label_smoothing=0.1)
            assert abs(loss.item()) < 1e-15
            loss.backward()
            assert x.grad is not None
            assert float(x.grad.whole().abs().max()) < 1e-15

    run(2, main)


def test_softmax_over_any_dimension(seed: int) -> None:
    functions: list[Callable[..., Any]] = [
        functional.softmax,
        functional.log_softmax,
        torch.softmax,
        lambda x, dim: x.log_softmax(dim),
    ]

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        whole, weights = drawn(rng, shape), drawn(rng, shape)
        x = leaf(whole, grid, draw_placement(rng, grid, shape))
        one = whole.clone().requires_grad_()
        dim = rng.randrange(-len(shape), len(shape))
        function = rng.choice(functions)
        expected, found = function(one, dim=dim), function(x, dim=dim)
        assert off_by(found.whole(), expected) < NEAR
        (expected * weights).sum().backward()
        lying = DistTensor.from_whole(weights, grid, found.placement)
        (found * lying).sum().redistribute().backward()
        assert x.grad is not None
        assert off_by(x.grad.whole(), one.grad) < NEAR

    on_grids(seed, 8, check)


@pytest.mark.parametrize(
    ("loss", "goal"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([1, 2, 0, 2, 1])),
        (nn.NLLLoss(reduction="sum"), torch.tensor([1, 2, 0, 2, 1])),
        (nn.MSELoss(), torch.linspace(0, 1, 15).view(5, 3)),
        (nn.L1Loss(), torch.linspace(0, 1, 15).view(5, 3)),
        (nn.SmoothL1Loss(), torch.linspace(0, 1, 15).view(5, 3)),
        (nn.BCEWithLogitsLoss(), torch.linspace(0, 1, 15).view(5, 3)),
        (nn.BCELoss(), torch.linspace(0, 1, 15).view(5, 3)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_modules_of_losses_take_tensors_that_are_cut(loss: Any, goal: Any) -> None:
    whole = torch.linspace(1, 0, 15).view(5, 3)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            x = leaf(whole, grid, Placement("a", None))
            y = DistTensor.from_whole(goal, grid, Placement.replicated(goal.dim()))
            found = loss(x, y)
            assert math.isclose(found.item(), float(loss(whole, goal)), rel_tol=1e-6)
            found.backward()

    run(2, main)


def test_on_one_rank_losses_have_the_bits_of_torch() -> None:
    whole, goal = torch.linspace(-1, 2, 35).view(7, 5), torch.arange(7) % 5

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 1, "b": 1}) as grid:
            x = DistTensor.from_whole(whole, grid, Placement("a", "b"))
            y = DistTensor.from_whole(goal, grid, Placement("a"))
            for reduction in REDUCTIONS:
                more = {"reduction": reduction, "label_smoothing": 0.1}
                found = functional.cross_entropy(x, y, **more)
                right = functional.cross_entropy(whole, goal, **more)
                assert torch.equal(found.local, right)
                found = functional.mse_loss(x, x.sin(), reduction=reduction)
                right = functional.mse_loss(whole, whole.sin(), reduction=reduction)
                assert torch.equal(found.local, right)

    run(1, main)


# -- what is sent, and what is refused -------------------------------------------------

OWN = 3 * 8
"""Bytes of one number in float64 for each of a rank's three rows."""
SENT: list[tuple[tuple[Any, Any], Callable[[Any, Any, Any], Any], list[int]]] = [
    (("r", None), lambda x, y, _: functional.mse_loss(x, y), [24]),
    (("r", None), lambda x, _, y: functional.cross_entropy(x, y), [24]),
    ((None, "c"), lambda x, _, y: functional.cross_entropy(x, y), [2 * OWN, 4 * OWN]),
    (("r", "c"), lambda x, _, y: functional.cross_entropy(x, y), [24, OWN, 2 * OWN]),
    (
        ("r", "c"),
        lambda x, _, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        [24, OWN, 3 * OWN],
    ),
    (
        ("r", "c"),
        lambda x, y, _: functional.cross_entropy(x, y),
        [24, OWN, OWN, OWN, OWN],
    ),
    (("r", "c"), lambda x, _, y: functional.nll_loss(x, y), [24, OWN]),
    (("r", "c"), lambda x, y, _: x.log_softmax(1), [OWN, OWN, OWN]),
]


@pytest.mark.parametrize("case", range(len(SENT)))
def test_bytes_of_losses_are_those_of_the_docstrings(case: int) -> None:
    dims, function, expected = SENT[case]
    logits = torch.linspace(0, 1, 60, dtype=torch.float64).view(6, 10)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"r": 2, "c": 2}) as grid:
            x = leaf(logits, grid, Placement(*dims))
            goal = DistTensor.from_whole(logits, grid, Placement(*dims))
            target = DistTensor.from_whole(torch.arange(6), grid, Placement(dims[0]))
            comm.barrier()
            found = function(x, goal, target)
            found.local.backward(torch.ones_like(found.local))
            comm.barrier()

    with commrt.trace.record() as recording:
        run(4, main)
    for log in logs_of(recording):
        calls = [(call.op, call.nbytes) for call in log.operations]
        first, last = (at for at, (op, _) in enumerate(calls) if op == "barrier")
        found = calls[first + 1 : last]
        assert sorted(found) == [("allreduce", nbytes) for nbytes in sorted(expected)]


def refused(says: str, function: Callable[[ProcessGrid], Any]) -> None:
    """See that all of four ranks refuse a call, and that a next one is in step."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"r": 2, "c": 2}) as grid:
            with pytest.raises(UsageError, match=says):
                function(grid)
            grid.comm.barrier()

    run(4, main)


def cut(grid: ProcessGrid, whole: Any, *dims: Any, partial: Any = ()) -> DistTensor:
    return DistTensor.from_whole(whole, grid, Placement(*dims, partial=partial))


LOGITS = torch.linspace(0, 1, 20).view(4, 5)
NUMBERS = torch.tensor([0, 1, 9, 2])
Losses = Callable[[ProcessGrid], Any]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dims", [("r", None), ("r", "c"), (None, "c"), (None, None)])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_a_target_that_is_no_class_is_refused_on_all_ranks(
    name: str, dims: Any, reduction: str
) -> None:
    function = getattr(functional, name)

    def loss(grid: ProcessGrid) -> Any:
        x, y = cut(grid, LOGITS, *dims), cut(grid, NUMBERS, dims[0])
        return function(x, y, reduction=reduction)

    refused(r"1 targets are no classes; expected 0\.\.4, or ignore_index=-100", loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_probability_above_one_is_refused_on_all_ranks(reduction: str) -> None:
    def loss(grid: ProcessGrid) -> Any:
        x = cut(grid, LOGITS + 0.02, "r", "c")
        return functional.binary_cross_entropy(x, x, reduction=reduction)

    refused("2 elements of input or target are not from 0 to 1", loss)


REFUSED: dict[str, tuple[str, Losses]] = {
    "reduction": (
        "must be one of none, mean, sum",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, "r", None), cut(grid, LOGITS, "r", None), reduction="max"
        ),
    ),
    "old arguments": (
        "use reduction=",
        lambda grid: functional.cross_entropy(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS, "r"), reduce=False
        ),
    ),
    "shapes": (
        r"shape \(4, 5\) and target of shape \(4, 1\)",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, "r", None), cut(grid, LOGITS[:, :1], "r", None)
        ),
    ),
    "plain target": (
        "the target is no DistTensor",
        lambda grid: functional.mse_loss(cut(grid, LOGITS, "r", None), LOGITS),
    ),
    "plain input": (
        "the input is no DistTensor",
        lambda grid: functional.mse_loss(LOGITS, cut(grid, LOGITS, "r", None)),
    ),
    "open sums": (
        "has parts on several ranks",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, None, None, partial="c"), cut(grid, LOGITS, None, None)
        ),
    ),
    "target elsewhere": (
        "must lie as",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, "r", None), cut(grid, LOGITS, "c", None)
        ),
    ),
    "rows elsewhere": (
        "must lie as",
        lambda grid: functional.cross_entropy(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS % 5, "c")
        ),
    ),
    "target of floats": (
        "probabilities of shape",
        lambda grid: functional.cross_entropy(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS.float(), "r")
        ),
    ),
    "target of int32": (
        "expected class numbers in int64",
        lambda grid: functional.nll_loss(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS.int(), "r")
        ),
    ),
    "weight of classes": (
        "expected a number for each of the 5 classes",
        lambda grid: functional.nll_loss(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS, "r"), torch.ones(4)
        ),
    ),
    "cut weight of classes": (
        "must be whole on every rank",
        lambda grid: functional.nll_loss(
            cut(grid, LOGITS, "r", "c"),
            cut(grid, NUMBERS, "r"),
            cut(grid, torch.ones(5), "c"),
        ),
    ),
    "weight of elements": (
        r"weight of shape \(5,\) does not fit",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, "r", None),
            cut(grid, LOGITS, "r", None),
            weight=torch.ones(5),
        ),
    ),
    "weight with a gradient": (
        "must be a DistTensor",
        lambda grid: functional.mse_loss(
            cut(grid, LOGITS, "r", None),
            cut(grid, LOGITS, "r", None),
            weight=torch.ones(4, 5, requires_grad=True),
        ),
    ),
    "smoothing": (
        "label_smoothing=2.0 must be from 0 to 1",
        lambda grid: functional.cross_entropy(
            cut(grid, LOGITS, "r", None), cut(grid, NUMBERS, "r"), label_smoothing=2.0
        ),
    ),
    "softmax of nothing": (
        "dim=None must be a dimension",
        lambda grid: functional.softmax(cut(grid, LOGITS, "r", "c")),
    ),
    "item": (
        "must have one element",
        lambda grid: cut(grid, LOGITS, "r", "c").item(),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_losses_refuse_what_does_not_fit(case: str) -> None:
    refused(*REFUSED[case])
