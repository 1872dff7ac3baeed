# SPDX-License-Identifier: Apache-2.0
"""A grid of 208 convolutions, such as PhysicsNeMo's tests of its shard tensors have.

It holds 13 pairs of kernel and padding (1 to 7; padding 0 and half the kernel), strides
1 and 2, dilations 1 and 2, for 1-d, 2-d and 3-d convolutions and 2-d transposed ones:
13 * 2 * 2 * 4. Each is compared with torch's on 2, 3 and 4 ranks, forward and
gradients, for one cut dimension and for two.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from channel_cases import Case, compare

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import Placement
from commrt.local import run

PAIRS = [(1, 0), *((k, p) for k in range(2, 8) for p in (0, k // 2))]
KINDS = [(1, False), (2, False), (3, False), (2, True)]
GRID = [*itertools.product(KINDS, PAIRS, (1, 2), (1, 2))]
NEAR = 1e-12


def case_of(
    dims: int, is_transposed: bool, pair: tuple[int, int], *steps: int, axes: Any
) -> Case:
    """Return a case of the grid, cut along the last spatial dimensions."""
    (kernel, padding), (stride, dilation) = pair, steps
    space = (17, 15, 14)[:dims]
    cuts: list[Any] = [None] * dims
    for number, axis in enumerate(axes):
        cuts[number % dims] = (*(cuts[number % dims] or ()), axis)
    arguments = {
        "stride": stride,
        "padding": min(padding, (kernel - 1) * dilation),
        "dilation": dilation,
        "groups": 1,
    }
    return Case(
        *(is_transposed, (2, 2, *space), 3, (kernel,) * dims, arguments, True, False),
        *(Placement(None, None, *cuts), (), "auto"),
    )


def test_the_grid_has_208_cases() -> None:
    assert len({*GRID}) == 208


@pytest.mark.whole
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}])
def test_cases_of_the_grid_are_those_of_one_process(
    axes: dict[str, int], seed: int, full: bool, tally: Callable[[str, int], None]
) -> None:
    drawn = random.Random(f"{seed} {axes}").sample(GRID, len(GRID) if full else 26)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes) as grid:
            for (dims, is_transposed), pair, stride, dilation in drawn:
                case = case_of(
                    *(dims, is_transposed, pair, stride, dilation), axes=axes
                )
                found = compare(random.Random(seed), grid, case)
                assert max(found.values()) < NEAR, (found, case)

    run(math.prod(axes.values()), main, timeout_s=900)
    tally("convolutions of the grid of 208", len(drawn))
