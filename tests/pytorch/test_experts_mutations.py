# SPDX-License-Identifier: Apache-2.0
"""Comparisons with a plain loop turn red where a mixture of experts has a mistake.

The first one is the well-known one: gradients of experts summed over ranks whose tokens
they hold already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import Form, batches_of, compare
from tensor3d_cases import NEAR

from commrt.layers.experts import balance, moe, route, trips
from commrt.layers.experts.rows import Copies
from commrt.layers.tensor3d import gradients

FORM = Form(num_experts=4, top_k=2, capacity_factor=0.9)
SPLITS = (1, 4, 1), (2, 2, 1), (1, 2, 2)
Patch = Callable[[pytest.MonkeyPatch], None]
EXPERTS = {f"gradient of moe.experts.{name}" for name in ("gate", "up", "down")}


def found() -> dict[str, float]:
    """Return how far a network is from a plain loop, on three grids."""
    largest: dict[str, float] = {}
    for split in SPLITS:
        batches = batches_of(split, 4, FORM, 7)
        for name, off in compare(FORM, split, batches).items():
            largest[name] = max(largest.get(name, 0.0), off)
    return largest


def expert_gradients_are_summed_over_experts(patch: pytest.MonkeyPatch) -> None:
    """As data parallelism does that does not know of experts."""

    def along(each: Any, grid: Any) -> Any:
        if each.name.startswith("moe.experts"):
            each = each._replace(cut=None)
        return right(each, grid)

    right = gradients._summed_along
    patch.setattr(gradients, "_summed_along", along)


def expert_gradients_are_doubled(patch: pytest.MonkeyPatch) -> None:
    def along(each: Any, grid: Any) -> Any:
        axes, factor = right(each, grid)
        return axes, factor * (1 + each.name.startswith("moe.experts"))

    right = gradients._summed_along
    patch.setattr(gradients, "_summed_along", along)


def expert_gradients_are_not_summed_over_data(patch: pytest.MonkeyPatch) -> None:
    def along(each: Any, grid: Any) -> Any:
        axes, factor = right(each, grid)
        return (() if each.name.startswith("moe.experts") else axes), factor

    right = gradients._summed_along
    patch.setattr(gradients, "_summed_along", along)


def router_gradients_are_summed_over_data_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradients, "SAMPLE_AXES", ("data",))


def tokens_come_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def mirrored(self: trips.Trip) -> trips.Trip:
        return Flipped(self.comm, self._recvs, self._sends)

    class Flipped(trips.Trip):
        def wait(self) -> Any:
            return super().wait().flip(0)

    patch.setattr(trips.Trip, "mirrored", mirrored)


def weights_are_in_the_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    def computed(self: Any, rows: Any, factors: Any, arrivals: Any) -> Any:
        arrivals.order = arrivals.order.sort().values
        return right(self, rows, factors, arrivals)

    right = moe.MoE._computed
    patch.setattr(moe.MoE, "_computed", computed)


def one_copy_of_each_token_is_lost(patch: pytest.MonkeyPatch) -> None:
    def of(source: Any, num_rows: int, most: int) -> Copies:
        copies = right(source, num_rows, most)
        ordered = source[copies.order]
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        rows = torch.arange(num_rows)
        first = torch.searchsorted(ordered[is_first], rows)
        return Copies(source, copies.order[is_first], first, most)

    right = Copies.of
    patch.setattr(route.Copies, "of", of)


def experts_take_one_token_more(patch: pytest.MonkeyPatch) -> None:
    right = balance.capacity_of
    patch.setattr(moe, "capacity_of", lambda *args: right(*args) + 1)


def experts_take_one_token_less(patch: pytest.MonkeyPatch) -> None:
    right = balance.capacity_of
    patch.setattr(moe, "capacity_of", lambda *args: right(*args) - 1)


def each_rank_counts_its_own_tokens_first(patch: pytest.MonkeyPatch) -> None:
    def kept(experts: Any, load: Any, capacity: int) -> Any:
        load.before.zero_()
        return right(experts, load, capacity)

    right = balance.kept
    patch.setattr(moe, "kept", kept)


def losses_have_gradients_of_own_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        balance._SumOverRanks, "backward", staticmethod(lambda ctx, g: (g, None))
    )


def parts_of_experts_have_parts_of_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moe, "summed_backward", lambda x, grid, axes: x)


def test_nothing_is_red_without_a_mistake() -> None:
    assert max(found().values()) < NEAR


@pytest.mark.parametrize(
    ("mistake", "red"),
    [
        (expert_gradients_are_summed_over_experts, EXPERTS),
        (expert_gradients_are_doubled, EXPERTS),
        (expert_gradients_are_not_summed_over_data, EXPERTS),
        (router_gradients_are_summed_over_data_alone, {"gradient of first.weight"}),
        (tokens_come_back_in_another_order, {"output", "gradient of input"}),
        (weights_are_in_the_order_of_ranks, {"output", *EXPERTS}),
        (one_copy_of_each_token_is_lost, {"output", "gradient of input"}),
        (losses_have_gradients_of_own_tokens_alone, {"gradient of moe.router.weight"}),
        (experts_take_one_token_more, {"output", "dropped", *EXPERTS}),
        (experts_take_one_token_less, {"output", "dropped", *EXPERTS}),
        (each_rank_counts_its_own_tokens_first, {"output", *EXPERTS}),
        (parts_of_experts_have_parts_of_gradients, {"gradient of input"}),
    ],
)
def test_mistakes_of_experts_turn_the_comparison_red(
    mistake: Patch, red: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    turned = {name for name, off in found().items() if off > 1e-3}
    assert red <= turned
    if red == EXPERTS:
        assert turned == EXPERTS
