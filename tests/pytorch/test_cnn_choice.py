# SPDX-License-Identifier: Apache-2.0
"""Strategies that a model of their cost chooses."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from cnn_networks import ResNet50, UNet3d, meshnet
from dist_tensor_cases import drawn, off_by
from torch import nn

from commrt.errors import UsageError
from commrt.layers.cnn import ParallelStrategy, choose_strategies, parallelize_cnn
from commrt.layers.cnn.cost import Rates, layer_cost
from commrt.layers.cnn.layer_facts import facts_of
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

FAST = Rates(flops_per_s=1e10, alpha_s=0.0, beta_s=1e-10)
SLOW = Rates(flops_per_s=1e10, alpha_s=1e-5, beta_s=1e-7)


def test_facts_of_a_network_are_its_published_ones() -> None:
    with torch.device("meta"):
        facts = facts_of(ResNet50(), (1, 3, 224, 224))
    # He et al. count 3.8e9 multiplications for the layers before torchvision's change
    # of strides, which has 4.1e9; a step has six operations for each.
    products = sum(each.flops for each in facts if each.is_product)
    assert 4.0e9 < products / 6 < 4.2e9
    assert facts[-1].output == (1, 1000)
    assert sum(each.weights for each in facts) == 25_557_032


@pytest.mark.parametrize(
    ("shape", "memory", "role"),
    [
        # Many samples: halos and channels cost more than sums of small weights.
        ((8, 1, 16, 16, 16), None, "sample"),
        # One sample, which only space and channels can share; few bytes in halos.
        ((1, 1, 64, 16, 16), None, "depth"),
    ],
)
def test_the_cheapest_strategy_is_chosen(
    shape: tuple[int, ...], memory: float | None, role: str
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            chosen = choose_strategies(
                *(meshnet(8), grid, shape), memory_nbytes=memory, rates=FAST
            )
            convolutions = [chosen.by_path[str(n)] for n in range(0, 27, 3)]
            assert {*convolutions} == {ParallelStrategy(**{role: "a"})}

    run(2, main)


def test_large_weights_and_small_pictures_are_cut_by_channels() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            model = nn.Sequential(*[nn.Conv2d(512, 512, 3, padding=1)] * 3)
            facts = facts_of(model, (2, 512, 4, 4))[1]
            cut = ParallelStrategy(channel="a", filter="a")
            by_channel = layer_cost(facts, cut, grid, SLOW)
            by_sample = layer_cost(facts, ParallelStrategy(sample="a"), grid, SLOW)
            # Half of the weights are gathered, or all are summed.
            assert by_channel.sent_nbytes < 0.6 * by_sample.sent_nbytes

    run(2, main)


def test_memory_is_kept_within_its_limit() -> None:
    shape = (2, 2, 16, 16, 16)
    alone = _alone(UNet3d(2, 2), shape)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2, "b": 2}) as grid:
            model = UNet3d(2, 2)
            free = choose_strategies(model, grid, shape, rates=SLOW)
            whole = sum(4 * each.numel() * 4 for each in model.parameters())
            limit = max(whole + 0.6 * (free.memory_nbytes - whole), 0.28 * alone)
            tight = choose_strategies(
                model, grid, shape, memory_nbytes=limit, rates=SLOW
            )
            assert tight.memory_nbytes <= limit
            assert tight.step_s >= free.step_s
            with pytest.raises(UsageError, match=r"the least is [\d,]+: use more"):
                choose_strategies(model, grid, shape, memory_nbytes=1000, rates=SLOW)

    run(4, main)


def _alone(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Return the bytes that one process keeps for a step."""
    facts = facts_of(model, shape)
    kept = sum(torch.Size(each.output).numel() * 4 for each in facts)
    return kept + 4 * sum(each.weights * 4 for each in facts)


def test_chosen_strategies_give_the_results_of_one_process(seed: int) -> None:
    torch.manual_seed(seed)
    serial = ResNet50(4, 5).double()
    untouched = copy.deepcopy(serial)
    whole = drawn(random.Random(seed), (2, 3, 64, 64))
    expected = serial(whole)
    # Batch normalizations enlarge the roundings of reordered sums.
    again = copy.deepcopy(untouched)(whole.flip(0)).flip(0)
    bound = max(1e-12, 4 * off_by(again, expected))

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, {"a": 2, "b": 2}) as grid:
            with pytest.raises(UsageError, match="needs example"):
                parallelize_cnn(model, grid, "auto")
            parallelize_cnn(
                *(model, grid, "auto"), example=whole.shape, outputs="whole"
            )
            assert off_by(model(whole), expected) < bound

    run(4, main)


def test_shapes_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"does not run on an input of shape \(1, 2"):
        facts_of(meshnet(), (1, 2, 8, 8, 8))


def test_a_model_of_one_layer_gets_a_strategy() -> None:
    def main(comm: Any) -> None:
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))
        with ProcessGrid(comm, {"a": 2}) as grid:
            chosen = choose_strategies(model, grid, (1, 2, 32, 32), rates=FAST)
            parallelize_cnn(model, grid, chosen.by_path)

    run(2, main)


class _Pair(nn.Module):
    def forward(self, x: Any) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("model", "example"),
    [(nn.Sequential(_Pair()), (1, 2, 8, 8)), (nn.Conv2d(2, 2, 3), 16)],
)
def test_models_that_cannot_be_looked_at_are_refused_on_all_ranks(
    model: nn.Module, example: Any
) -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"a": 2}) as grid,
            pytest.raises(UsageError, match=r"cannot be looked at|does not run"),
        ):
            choose_strategies(model, grid, example, rates=FAST)

    run(2, main)
