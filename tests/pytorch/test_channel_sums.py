# SPDX-License-Identifier: Apache-2.0
"""Sums over channels by the engine's kernels and by torch, against float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commrt import _native
from commrt.layers.spatial.channel_sums import combined, gradient_sums, statistics

EXTENTS = [0, 1, 3, 7, 8, 31, 32, 33, 100, 1031]


@pytest.fixture(params=[1, 64], ids=["engine", "torch"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let one thread, or many, be torch's: the kernels are the engine's with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(rng: random.Random, shape: list[int], dtype: Any, far: float = 0.0) -> Any:
    numbers = torch.Generator().manual_seed(rng.getrandbits(60))
    return (torch.randn(shape, generator=numbers, dtype=torch.float64) + far).to(dtype)


def near(found: Any, exact: Any, dtype: Any, parts: Any) -> bool:
    """Return whether a figure is within the rounding of a sum of such parts."""
    epsilon = torch.finfo(dtype).eps
    return bool(((found - exact).abs() <= 64 * epsilon * (parts.abs() + 1e-300)).all())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_elements", EXTENTS)
def test_sums_of_channels_are_those_in_float64(
    dtype: Any, num_elements: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {num_elements} {dtype}")
    shape = [rng.randint(1, 3), rng.randint(1, 5), num_elements]
    x, gradient = drawn(rng, shape, dtype, 5.0), drawn(rng, shape, dtype)
    by_channel = [drawn(rng, shape[1:2], dtype) for _ in range(4)]
    over, wide = (0, 2), x.double()

    count, mean, deviation = statistics(x)
    assert count == shape[0] * num_elements
    if count:
        exact = wide.mean(over)
        assert near(mean, exact, dtype, exact)
        squares = (wide - exact.view(-1, 1)).square().sum(over)
        assert near(deviation, squares, dtype, squares)
    else:
        assert not mean.any()
        assert not deviation.any()

    about, a, b, c = by_channel
    off = wide - about.double().view(-1, 1)
    sums = gradient_sums(gradient, x, about)
    terms = torch.cat([gradient.double(), gradient.double() * off], dim=1)
    assert near(sums, terms.sum(over), dtype, terms.abs().sum(over))

    a, b, c = (each.view(-1, 1) for each in (a, b, c))
    parts = [a.double() * gradient.double(), b.double() * off, c.double() + 0 * wide]
    of_x = combined(gradient, x, *by_channel)
    assert of_x.dtype == dtype
    # x - mean rounds by what x and mean have, not by their difference.
    largest = sum(each.abs() for each in parts) + (b * x).abs() + (b * about[0]).abs()
    assert near(of_x, sum(parts), dtype, largest)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, ::2],
        lambda x: x[:1].expand(*x.shape),
        lambda x: x.bfloat16(),
        lambda x: torch._neg_view(x),
    ],
    ids=["channels_last", "gaps", "expanded", "bfloat16", "negated view"],
)
def test_other_kinds_of_memory_are_left_to_torch(change: Any, seed: int) -> None:
    """The engine's kernels would read them wrongly: results say that they have not."""
    rng = random.Random(seed)
    x, gradient = (change(drawn(rng, [2, 3, 8, 6], torch.float32)) for _ in range(2))
    mean = torch.zeros(3)
    plain_x, plain = (each.float().contiguous().clone() for each in (x, gradient))
    for found, exact in (
        (statistics(x)[1:], statistics(plain_x)[1:]),
        (gradient_sums(gradient, x, mean), gradient_sums(plain, plain_x, mean)),
    ):
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    of_x = combined(gradient, x, mean, *[torch.ones(3)] * 3)
    assert of_x.dtype == x.dtype
    rough = 1e-2 if x.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        of_x.float(), plain + plain_x + 1, rtol=rough, atol=rough
    )


def test_the_engine_names_a_type_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="expected float32 or float64"):
        _native.channel_norm.statistics(0, 0, 1, 1, 1, 0, 0)
