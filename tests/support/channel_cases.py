# SPDX-License-Identifier: Apache-2.0
"""Convolutions drawn by a seed, whose batch, space, channels and filters are cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from dist_tensor_cases import drawn, leaf, off_by
from layout_cases import draw_sizes
from torch.nn import functional

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, Sharded
from commrt.layers.tensors.within import Within, enter, leave

__all__ = ["Case", "compare", "draw_case"]

GRIDS = [
    *({"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}),
    *({"a": 2, "b": 2, "c": 2}, {"a": 5}, {"a": 7}),
]


@dataclass(frozen=True)
class Case:
    """One convolution of a whole tensor, and how it is cut."""

    is_transposed: bool
    shape: tuple[int, ...]
    filters: int
    kernel: tuple[int, ...]
    arguments: dict[str, Any]
    has_bias: bool
    is_weight_cut: bool
    placement: Placement
    wanted: tuple[str, ...]
    stationary: str


def draw_case(rng: random.Random, grid: ProcessGrid) -> Case:
    """Return a case in which each axis of a grid cuts something, or nothing."""
    dims = rng.choice((1, 2, 2, 3))
    is_transposed = rng.random() < 0.25
    roles: dict[str, list[str]] = {}
    for axis in grid.axes:
        both = ["channel", "filter"]
        kinds = [*both, "both", "both", "sample", "none", *map(str, range(2, dims + 2))]
        kind = rng.choice(kinds)
        for role in both if kind == "both" else [kind]:
            roles.setdefault(role, []).append(axis)
    channel, filter_ = roles.get("channel", []), roles.get("filter", [])
    groups = rng.choice((1, 1, 1, 2, 4))
    places = max(grid.size(channel), grid.size(filter_))
    if groups > 1:
        groups = max(groups, places)
    per_group = rng.randint(1, 2) if groups > 1 else rng.randint(places, places + 4)
    channels = groups * per_group
    filters = (
        groups * rng.randint(1, 2)
        if groups > 1
        else rng.randint(max(1, places - 1), places + 4)
    )
    kernel = tuple(rng.randint(1, 3) for _ in range(dims))
    dilation = tuple(rng.randint(1, 2) for _ in range(dims))
    space = [
        (k - 1) * d + rng.randint(1, 7) for k, d in zip(kernel, dilation, strict=True)
    ]
    arguments = {
        "stride": tuple(rng.randint(1, 2) for _ in range(dims)),
        "padding": tuple(
            rng.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)
        ),
        "dilation": dilation,
        "groups": groups,
    }
    if is_transposed:
        arguments["padding"] = 0
    shape = (rng.randint(1, 4), channels, *space)
    cuts: list[Any] = []
    for number, extent in enumerate(shape):
        role = {0: "sample", 1: "channel"}.get(number, str(number))
        axes = roles.get(role)
        if not axes:
            cuts.append(None)
        elif number == 1:
            cuts.append(_channel_cut(rng, tuple(axes), grid, channels, groups))
        elif rng.random() < 0.5:
            sizes = draw_sizes(rng, extent, grid.size(axes))
            cuts.append(Sharded(tuple(axes), sizes=tuple(sizes)))
        else:
            cuts.append(Sharded(tuple(axes)))
    forms = ["auto", "x", "y"] if groups == 1 else ["auto"]
    both_axes = [a for a in channel if a in filter_ and grid.size(a) > 1]
    if len(both_axes) > 1 and groups == 1:
        forms.append("w")
    return Case(
        *(is_transposed, shape, filters, kernel, arguments, rng.random() < 0.5),
        *(rng.random() < 0.3, Placement(*cuts), tuple(filter_), rng.choice(forms)),
    )


def _channel_cut(
    rng: random.Random, axes: tuple[str, ...], grid: ProcessGrid, n: int, groups: int
) -> Sharded:
    """Return even pieces, or uneven ones of one channel at least."""
    places = grid.size(axes)
    if groups > 1 or rng.random() < 0.6:
        return Sharded(axes)
    more = draw_sizes(rng, n - places, places)
    return Sharded(axes, sizes=tuple(1 + each for each in more))


def compare(rng: random.Random, grid: ProcessGrid, case: Case) -> dict[str, float]:
    """Return how far the result and gradients are from one process; collective."""
    dims = len(case.kernel)
    groups = case.arguments["groups"]
    ends = [case.filters, case.shape[1] // groups]
    if case.is_transposed:
        ends = [case.shape[1], case.filters // groups]
    name = f"conv{'_transpose' if case.is_transposed else ''}{dims}d"
    function = getattr(functional, name)
    x, w = drawn(rng, case.shape), drawn(rng, (*ends, *case.kernel))
    b = drawn(rng, (case.filters,)) if case.has_bias else None
    plain = [
        each if each is None else each.clone().requires_grad_() for each in (x, w, b)
    ]
    expected = function(*plain, **case.arguments)
    gradient = drawn(rng, expected.shape)
    expected.backward(gradient)

    own = leaf(x, grid, case.placement)
    weight = w.clone().requires_grad_()
    bias = None if b is None else b.clone().requires_grad_()
    if case.is_weight_cut:
        spare = [a for a in grid.axes if a not in case.placement.cut_axes]
        cut = Placement(tuple(spare) or None, *[None] * (dims + 1))
        weight = leaf(w, grid, cut)
    enter(Within("drawn", case.wanted, case.stationary, False))
    y = function(own, weight, bias, **case.arguments)
    leave()
    assert y.shape == expected.shape
    assert own.placement.dims[2:] == (None,) * dims or y.placement.dims[2:]
    y.backward(DistTensor.from_whole(gradient, grid, y.placement))
    found = {"result": off_by(y.whole(), expected)}
    assert own.grad is not None
    found["gradient of x"] = off_by(own.grad.whole(), plain[0].grad)
    of_weight = weight.grad.whole() if case.is_weight_cut else weight.grad
    scale = max(
        1.0, float(gradient.norm() / max(float(plain[1].grad.abs().max()), 1e-300))
    )
    found["gradient of weight"] = off_by(of_weight, plain[1].grad) / scale
    if bias is not None:
        found["gradient of bias"] = off_by(bias.grad, plain[2].grad) / scale
    return found
