# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from spatial_reference import NEAR, CutGrid, difference, drawn, on_grids

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.transposed_convolution import PLAIN, conv_transpose
from commrt.local import run


def draw_transposed(
    rng: random.Random, dims: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return shapes of x and weight, and arguments; the result is not empty."""
    while True:
        groups = rng.choice((1, 1, 2))
        channels, filters = groups * rng.randint(1, 2), rng.randint(1, 2)
        extents = [rng.randint(1, 9 if dims < 3 else 5) for _ in range(dims)]
        kernel = [rng.randint(1, 5) for _ in range(dims)]
        stride = [rng.randint(1, 4) for _ in range(dims)]
        dilation = [rng.randint(1, 3) for _ in range(dims)]
        arguments = {
            "stride": stride,
            "padding": [rng.randint(0, 4) for _ in range(dims)],
            "output_padding": [
                rng.randint(0, max(s, d) - 1)
                for s, d in zip(stride, dilation, strict=True)
            ],
            "groups": groups,
            "dilation": dilation,
        }
        outputs = [
            (n - 1) * s - 2 * p + (k - 1) * d + m + 1
            for n, k, s, d, p, m in zip(
                *(extents, kernel, stride, dilation),
                *(arguments["padding"], arguments["output_padding"]),
                strict=True,
            )
        ]
        if min(outputs) > 0:
            shape = [rng.randint(1, 2), channels, *extents]
            return shape, [channels, filters, *kernel], arguments


def check_transposed(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn transposed convolution is from torch's."""
    shape, of_weight, arguments = draw_transposed(rng, dims)
    cuts = grid.cuts(rng, shape)
    x, weight = drawn(rng, shape), drawn(rng, of_weight)
    filters = of_weight[1] * arguments["groups"]
    bias = drawn(rng, [filters]) if rng.random() < 0.5 else None
    over = grid.comm if rng.random() < 0.5 else None
    overlap = rng.random() < 0.6
    found = difference(
        *(grid, cuts, x, [weight, bias]),
        lambda x, weight, bias: conv_transpose(
            *(x, weight, bias),
            cuts=cuts,
            overlap=overlap,
            sum_weight_gradients_over=over,
            **arguments,
        ),
        lambda x, weight, bias: PLAIN[dims](x, weight, bias, **arguments),
        rng,
        are_summed=over is not None,
    )
    what = found.of, shape, of_weight, arguments, cuts, overlap
    assert found.largest < NEAR, what
    return found.largest


def test_any_transposed_convolution_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_transposed(rng, grid, dims)

    on_grids(seed, 40, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_transposed(rng, grid, dims) == 0

    on_grids(seed, 20, check, [(1,)])


@pytest.mark.parametrize(("kernel", "rows"), [(2, 0), (4, 2)])
def test_bytes_are_those_of_the_formula(kernel: int, rows: int) -> None:
    """A kernel as long as the stride needs nothing of other ranks."""

    def main(comm: Communicator) -> None:
        x, weight = torch.zeros(1, 3, 4, 6), torch.zeros(3, 2, kernel, kernel)
        padding = (kernel - 2) // 2
        conv_transpose(
            x, weight, stride=2, padding=padding, cuts={2: Cut.even(comm, 8)}
        )

    with commrt.trace.record() as recording:
        run(2, main)
    sent = [log.volume(("op",))["send",].nbytes for log in recording.logs()]
    assert sum(sent) == rows * 3 * 6 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_padding": 1}, "output_padding=1"),
        ({"padding": 9}, "empty result"),
        ({"bias": torch.zeros(3)}, r"bias of shape \(3,\)"),
        ({"x": torch.zeros(1, 2, 4, 8)}, "takes 3"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    change: dict[str, Any], message: str
) -> None:
    def main(comm: Communicator) -> None:
        arguments = {
            "x": torch.zeros(1, 3, 4, 8),
            "weight": torch.zeros(3, 2, 3, 3),
            "cuts": {2: Cut.even(comm, 8)},
            **change,
        }
        with pytest.raises(UsageError, match=message):
            conv_transpose(**arguments)

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []
