# SPDX-License-Identifier: Apache-2.0
"""Normalizations of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from recorded import logs_of
from spatial_reference import NEAR, CutGrid, difference, drawn, off_by, on_grids
from torch.nn import functional

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial.normalization import batch_norm, group_norm
from commrt.local import run


def draw_tensors(rng: random.Random, dims: int, channels: int) -> tuple[Any, list[Any]]:
    """Return x, whose mean is far from 0, and weight and bias or None.

    Of two values the gradient is all but 0: what is left of a difference.
    """
    shape = [rng.randint(1, 4), channels, *(rng.randint(4, 7) for _ in range(dims))]
    x = drawn(rng, shape) + 10 * drawn(rng, (channels, *[1] * dims))
    weights = [drawn(rng, [channels]), drawn(rng, [channels])]
    return x, rng.choice((weights, [None, None]))


def check_batch_norm(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn batch normalization is from torch's."""
    x, weights = draw_tensors(rng, dims, rng.randint(1, 3))
    channels = x.shape[1]
    mean, variance = drawn(rng, [channels]), drawn(rng, [channels]).square()
    running = [mean.clone(), variance.clone()]
    training = rng.random() < 0.8
    if training and rng.random() < 0.2:
        running = [None, None]
    expected = [mean, variance]
    cuts = grid.cuts(rng, [*x.shape])
    over = grid.comm if rng.random() < 0.5 else None
    found = difference(
        *(grid, cuts, x, weights),
        lambda x, w, b: (
            batch_norm(
                *(x, *running, w, b),
                comms=[*grid.along.values()],
                training=training,
                momentum=0.3,
                sum_weight_gradients_over=over,
            ),
            cuts,
        ),
        lambda x, w, b: functional.batch_norm(x, *expected, w, b, training, 0.3),
        rng,
        are_summed=over is not None,
    )
    if running[0] is not None:
        found.of["running mean"] = off_by(running[0], expected[0])
        found.of["running variance"] = off_by(running[1], expected[1])
    # The mean, 10 times the deviation, is rounded.
    assert found.largest < 10 * NEAR, (found.of, x.shape, cuts)
    return found.largest


def check_group_norm(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn group normalization is from torch's."""
    groups = rng.randint(1, 3)
    x, weights = draw_tensors(rng, dims, groups * rng.randint(1, 2))
    cuts = grid.cuts(rng, [*x.shape])
    comms = [comm for dim, comm in grid.along.items() if dim >= 2]
    found = difference(
        *(grid, cuts, x, weights),
        lambda x, w, b: (group_norm(x, groups, w, b, comms=comms), cuts),
        lambda x, w, b: functional.group_norm(x, groups, w, b),
        rng,
    )
    assert found.largest < 10 * NEAR, (found.of, x.shape, groups, cuts)
    return found.largest


@pytest.mark.parametrize("check_norm", [check_batch_norm, check_group_norm])
def test_any_normalization_is_that_of_the_whole(check_norm: Any, seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_norm(rng, grid, dims)

    on_grids(seed, 20, check)


@pytest.mark.parametrize("check_norm", [check_batch_norm, check_group_norm])
def test_one_rank_has_the_bits_of_torch(check_norm: Any, seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_norm(rng, grid, dims) == 0

    on_grids(seed, 10, check, [(1,)])


def test_bytes_are_those_of_the_formula() -> None:
    channels, element = 5, 8

    def main(comm: Communicator) -> None:
        x = torch.arange(2.0 * channels * 6, dtype=torch.float64).view(2, channels, 6)
        y = batch_norm(x.requires_grad_(), comms=[comm], training=True)
        y.sum().backward()

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        volume = log.volume(("op",))
        assert volume["allreduce",].nbytes == 2 * channels * element
        gathered = volume["allgather",]
        assert gathered.wire_nbytes == (2 * channels + 2) * element


def test_one_value_for_each_channel_is_refused_on_all_ranks() -> None:
    def main(comm: Communicator) -> None:
        x = torch.zeros(1 - comm.rank, 3, 1, dtype=torch.float64)
        with pytest.raises(UsageError, match="x has 1 value"):
            batch_norm(x, comms=[comm], training=True)

    run(2, main)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2)}, r"weight of shape \(2,\)"),
        ({"running_var": torch.zeros(4)}, r"running_var of shape \(4,\)"),
        ({"training": False}, "training=False needs running_mean"),
        ({"comms": [5]}, "comms has 5"),
        ({"x": torch.zeros(3)}, r"x of shape \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.zeros(2, 3, 4), "training": True, **change}
    with pytest.raises(UsageError, match=message):
        batch_norm(**arguments)


def test_groups_that_do_not_divide_the_channels() -> None:
    with pytest.raises(UsageError, match="num_groups=2"):
        group_norm(torch.zeros(1, 3, 4), 2)
