# SPDX-License-Identifier: Apache-2.0
"""Convolutions with channels and filters cut, against one process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from channel_cases import GRIDS, compare, draw_case
from dist_tensor_cases import drawn, leaf, off_by
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, Sharded
from commrt.layers.tensors.channels import form_of
from commrt.layers.tensors.within import Within, enter, leave
from commrt.local import run

NEAR = 1e-12


@pytest.mark.whole
def test_drawn_convolutions_are_those_of_one_process(
    seed: int, full: bool, tally: Callable[[str, int], None]
) -> None:
    cases = 225 if full else 23
    for axes in GRIDS:

        def main(comm: Any, axes: dict[str, int] = axes) -> None:
            with ProcessGrid(comm, axes) as grid:
                for number in range(cases):
                    rng = random.Random(f"{seed} {axes} {number}")
                    case = draw_case(rng, grid)
                    try:
                        found = compare(rng, grid, case)
                        assert max(found.values()) < NEAR, found
                    except Exception as error:
                        error.add_note(f"{seed=} {axes} {number}: {case}")
                        raise

        run(math.prod(axes.values()), main, timeout_s=900)
    tally("convolutions with channels and filters cut", cases * len(GRIDS))


def both_ways(
    grid: ProcessGrid, channel: Any, stationary: str, filters: tuple[str, ...]
) -> tuple[DistTensor, DistTensor, Any, Any]:
    """Return input and result of a convolution in a form, and the whole ones."""
    rng = random.Random(3)
    x, w = drawn(rng, (2, 8, 6, 5)), drawn(rng, (12, 8, 3, 3))
    own = leaf(x, grid, Placement(None, channel, None, None))
    enter(Within("here", filters, stationary, False))
    y = functional.conv2d(own, w, padding=1)
    leave()
    return own, y, x, functional.conv2d(x, w, padding=1)


@pytest.mark.parametrize(
    ("stationary", "channels", "filters", "open_sums"),
    [("x", 2, 1, ("a",)), ("y", 1, 2, ()), ("auto", 1, 2, ())],
)
def test_the_form_says_what_stays_where_it_is(
    stationary: str, channels: int, filters: int, open_sums: tuple[str, ...]
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            x = leaf(torch.ones(2, 8, 6, 5), grid, Placement(None, "a", None, None))
            form = form_of(x, 2 * 12 * 30, ("a",), stationary)
            assert grid.size(form.channels.axes if form.channels else ()) == channels
            assert grid.size(form.filters.axes if form.filters else ()) == filters
            assert form.open_sums == open_sums
            # Twice the bytes of the other rank's piece: forward and backward.
            moved = {"x": 12, "y": 8, "auto": 8}[stationary]
            assert form.nbytes == 2 * 2 * moved * 30 / 2 * x.dtype.itemsize

    run(2, main)


def test_the_w_form_computes_with_tiles_on_two_axes() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2, "b": 3}) as grid:
            own, y, _, expected = both_ways(grid, ("a", "b"), "w", ("a", "b"))
            assert off_by(y.whole(), expected) < NEAR
            # The axes take turns: a kept channels and was summed, b was gathered.
            assert y.placement.dims[1] == Sharded(("b", "a"))
            form = form_of(own, y.numel(), ("a", "b"), "w")
            assert form.channels == Sharded("a")
            assert form.filters == Sharded("b")

    run(6, main)


def test_forms_that_the_axes_do_not_allow_are_refused() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            with pytest.raises(UsageError, match="stationary='w'"):
                both_ways(grid, "a", "w", ("a",))
            leave()
            x = leaf(torch.ones(1, 1, 4, 4), grid, Placement(None, "a", None, None))
            with pytest.raises(UsageError, match="has no channel on some places"):
                functional.conv2d(x, torch.ones(1, 1, 1, 1))
            x = leaf(torch.ones(1, 3, 4, 4), grid, Placement(None, "a", None, None))
            with pytest.raises(UsageError, match="3 channels; weight"):
                functional.conv2d(x, torch.ones(3, 2, 1, 1))
            x = leaf(
                torch.ones(1, 4, 4, 4),
                grid,
                Placement(None, Sharded("a", sizes=(1, 3)), None, None),
            )
            with pytest.raises(UsageError, match="whole groups"):
                functional.conv2d(x, torch.ones(4, 2, 1, 1), groups=2)
            with pytest.raises(UsageError, match="whole groups"):
                functional.group_norm(x, 2)

    run(2, main)


class Block(nn.Module):
    """Layers that see channels cut, up to linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(6, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.groups = nn.GroupNorm(3, 6)
        self.pool = nn.AvgPool2d(2)
        self.all = nn.GroupNorm(1, 6)
        self.two = nn.Conv2d(6, 5, 1)
        self.most = nn.AdaptiveMaxPool2d((2, 1))
        self.linear = nn.Linear(10, 4)

    def forward(self, x: Any) -> Any:
        """Return four numbers for each sample."""
        x = torch.nn.functional.silu(self.norm(self.one(x)))
        x = self.all(self.pool(self.groups(self.up(x)))) * 2
        return self.linear(torch.flatten(self.most(self.two(x)), 1))


CUTS: list[tuple[dict[str, int], Placement]] = [
    ({"a": 2}, Placement(None, "a", None, None)),
    ({"a": 2, "b": 2}, Placement("b", "a", None, None)),
    ({"a": 2, "b": 3}, Placement(None, "a", "b", None)),
]


@pytest.mark.parametrize(("axes", "placement"), CUTS)
def test_companions_of_convolutions_take_cut_channels(
    axes: dict[str, int], placement: Placement, seed: int
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    serial = Block().double()
    state = {name: each.clone() for name, each in serial.state_dict().items()}
    whole = drawn(rng, (3, 6, 6, 5))
    one = whole.clone().requires_grad_()
    expected = serial(one)
    expected.square().sum().backward()

    def main(comm: Any) -> None:
        mine = Block().double()
        mine.load_state_dict(state)
        with ProcessGrid(comm, axes) as grid:
            x = leaf(whole, grid, placement)
            enter(Within("block", ("a",), "auto", True))
            y = mine(x)
            leave()
            y = y.redistribute()
            assert off_by(y.whole(), expected) < NEAR
            y.square().sum().redistribute().backward()
            assert x.grad is not None
            assert off_by(x.grad.whole(), one.grad) < NEAR
            pairs = zip(mine.named_parameters(), serial.parameters(), strict=True)
            for (name, got), right in pairs:
                if float(right.grad.abs().max()) > 1e-10:
                    assert off_by(got.grad, right.grad) < NEAR, name
            for got, right in zip(mine.buffers(), serial.buffers(), strict=True):
                assert off_by(got.double(), right.double()) < NEAR

    run(math.prod(axes.values()), main)
