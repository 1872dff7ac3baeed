# SPDX-License-Identifier: Apache-2.0
"""Adasum of commrt.hvd is the formula, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hvd_cases import NEAR, on_ranks
from tensor3d_cases import drawn_in

import commrt.hvd as hvd


def added(a: Any, b: Any) -> Any:
    """Return the sum of two vectors by the paper's formula, in plain numbers."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    of_a, of_b = sum(x * x for x in a), sum(y * y for y in b)
    left = 1 - dot / (2 * of_a) if of_a else 1.0
    right = 1 - dot / (2 * of_b) if of_b else 1.0
    return [left * x + right * y for x, y in zip(a, b, strict=True)]


def in_one_process(vectors: list[Any]) -> Any:
    rows = [vector.flatten().tolist() for vector in vectors]
    while len(rows) > 1:
        rows = [added(*rows[i : i + 2]) for i in range(0, len(rows), 2)]
    return torch.tensor(rows[0], dtype=torch.float64).view(vectors[0].shape)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_it_is_the_formula(size: int) -> None:
    """For each tensor by itself, though they go together; also of zeros."""
    shapes = [(3,), (2, 5), (1,), (0,), (17,)]

    def of(rank: int) -> list[Any]:
        found = [drawn_in(9 * rank + n, *shape) for n, shape in enumerate(shapes)]
        return [*found, torch.zeros(4).double() if rank % 2 else drawn_in(77, 4)]

    def main() -> list[Any]:
        own = of(hvd.rank())
        found = hvd.grouped_allreduce(own, op=hvd.Adasum)
        copies = [x.clone() for x in own]
        hvd.grouped_allreduce_(copies, op=hvd.Adasum, postscale_factor=2.0)
        for x, copy in zip(found, copies, strict=True):
            assert torch.equal(2 * x, copy)
        return found

    ranks = on_ranks(size, main)
    for number, found in enumerate(ranks[0]):
        right = in_one_process([of(rank)[number] for rank in range(size)])
        torch.testing.assert_close(found, right, rtol=NEAR, atol=NEAR)
        assert all(torch.equal(found, other[number]) for other in ranks)


def test_equal_vectors_are_averaged_and_others_added() -> None:
    def main() -> None:
        same = torch.tensor([3.0, 4.0])
        assert hvd.allreduce(same, op=hvd.Adasum).tolist() == [3, 4]
        across = torch.tensor([[1.0, 0.0], [0.0, 2.0]])[hvd.rank()]
        assert hvd.allreduce(across, op=hvd.Adasum).tolist() == [1, 2]
        short = torch.full((3,), 2.0, dtype=torch.float16)
        assert hvd.allreduce(short, op=hvd.Adasum).tolist() == [2, 2, 2]

    on_ranks(2, main)


def test_it_needs_a_power_of_two_and_floating_point() -> None:
    def main() -> None:
        with pytest.raises(ValueError, match=r"it needs 2, 4, 8, .* and there are 3"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            with pytest.raises(ValueError, match="for the set of all ranks"):
                hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=pair)
        with pytest.raises(ValueError, match=r"is for hvd\.allreduce alone"):
            hvd.reducescatter(torch.ones(3), op=hvd.Adasum)

    on_ranks(3, main)
    with pytest.raises(ValueError, match="floating-point"):
        on_ranks(2, lambda: hvd.allreduce(torch.tensor([1]), op=hvd.Adasum))
