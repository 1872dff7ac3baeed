# SPDX-License-Identifier: Apache-2.0
"""Elements of a cut dimension that other ranks have: values, gradients, errors."""

from __future__ import annotations

import random

import pytest
import torch
from spatial_reference import CutGrid, drawn, off_by, on_grids, piece

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.exchange import fetch, window
from commrt.layers.spatial.windows import clipped, wrapped
from commrt.local import run


def test_every_rank_gets_the_elements_it_needs(seed: int) -> None:
    """Ranges overlap, reach over several pieces, and may be empty."""

    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        shape = [rng.randint(1, 9) for _ in range(dims + 2)]
        (dim,) = grid.along
        (cut,) = (cuts := grid.cuts(rng, shape)).values()
        needs = []
        for _ in range(cut.comm.size):
            low = rng.randint(0, cut.extent)
            needs.append((low, rng.randint(low, cut.extent)))
        whole = drawn(rng, shape).requires_grad_()
        own = piece(whole, cuts).requires_grad_()
        expected = [whole.narrow(dim, low, high - low) for low, high in needs]
        gradients = [drawn(rng, each.shape) for each in expected]
        torch.autograd.backward(expected, gradients)
        found = fetch(own, dim, cut, needs)
        rank = cut.comm.rank
        assert off_by(found, expected[rank]) == 0
        found.backward(gradients[rank])
        assert off_by(own.grad, piece(whole.grad, cuts)) < 1e-14

    on_grids(seed, 40, check, [(2,), (3,), (4,)])


def test_gradients_can_be_derived_again(seed: int) -> None:
    """The sum of squares of the gradient of a cubic function, by double backward."""

    def main(comm: Communicator) -> None:
        cut = Cut.even(comm, 6)
        low, high = cut.own
        values = drawn(random.Random(seed), (6,))
        own = values[low:high].clone().requires_grad_()
        found = window(own, 0, cut, [wrapped(-1, 4, 6), wrapped(2, 7, 6)])
        (gradient,) = torch.autograd.grad(found.pow(3).sum(), own, create_graph=True)
        gradient.square().sum().backward()
        times = torch.zeros(6, dtype=values.dtype)
        for place in [*range(-1, 4), *range(2, 7)]:
            times[place % 6] += 1
        expected = 2 * (3 * values.square() * times) * 6 * values * times
        assert off_by(own.grad, expected[low:high]) < 1e-14

    run(2, main)


def test_what_a_rank_has_is_not_copied() -> None:
    def main(comm: Communicator) -> None:
        x = torch.zeros(2, 3)
        assert fetch(x, 1, Cut(comm, (3, 3)), [(0, 3), (3, 6)]) is x

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []


def test_bytes_are_those_of_the_formula() -> None:
    """Rank 0 needs 2 rows of rank 1 and 1 of rank 2; they need nothing."""

    def main(comm: Communicator) -> None:
        x = torch.zeros(3, 2, 5, dtype=torch.float64, requires_grad=True)
        needs = [(4, 7), (3, 6), (6, 9)]
        y = fetch(x, 0, Cut(comm, (3, 3, 3)), needs)
        y.sum().backward()

    with commrt.trace.record() as recording:
        run(3, main)
    row = 2 * 5 * 8
    sent = sorted(log.volume(("op",))["send",].nbytes for log in recording.logs())
    # Two rows forward, one row forward, three rows of gradients back.
    assert sent == [row, 2 * row, 3 * row]


def test_room_is_filled() -> None:
    def main(comm: Communicator) -> None:
        x = torch.ones(2)
        windows = [clipped(-1, 2, 4), clipped(3, 6, 4)]
        found = window(x, 0, Cut(comm, (2, 2)), windows, fill=7.0)
        assert found.tolist() == [[7, 1, 1], [1, 7, 7]][comm.rank]

    run(2, main)


def test_wrong_arguments_are_named_before_anything_is_sent() -> None:
    def main(comm: Communicator) -> None:
        x, cut = torch.zeros(2, 3), Cut(comm, (3, 3))
        with pytest.raises(UsageError, match=r"needs=\[\(0, 3\)\]"):
            fetch(x, 1, cut, [(0, 3)])
        with pytest.raises(UsageError, match=r"needs\[1\]=\(3, 7\)"):
            fetch(x, 1, cut, [(0, 3), (3, 7)])
        with pytest.raises(UsageError, match=r"x of shape \(2, 3\)"):
            fetch(x, 0, cut, [(0, 4), (3, 6)])

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []
