# SPDX-License-Identifier: Apache-2.0
"""Out-of-core training has the bits of plain training, within its budget."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from out_of_core_cases import (
    ENOUGH,
    KINDS,
    MODES,
    Shared,
    Ticks,
    Timed,
    blocks_of,
    close_opened,
    made,
    results,
    same_bits,
)
from torch import nn

from commrt.layers.out_of_core import OutOfCore, ThrottledCopy


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_opened()


def least_budget(model: OutOfCore) -> int:
    """Return the bytes that the largest block needs alone."""
    return max(
        max(cost.saved_nbytes + cost.output_nbytes, cost.replayed_nbytes)
        for cost in model.plan.costs
    )


def cases() -> list[Any]:
    found = []
    for kind in KINDS:
        count = len(blocks_of(kind)[0])
        found += [(kind, modes) for modes in itertools.product(MODES, repeat=count)]
    return found


@pytest.mark.full(sample=40)
@pytest.mark.parametrize(("kind", "modes"), cases())
def test_any_modes_have_the_bits_of_plain_training(kind: str, modes: Any) -> None:
    blocks, x = blocks_of(kind)
    plain = copy.deepcopy(blocks)
    right = results(plain, x, plain)
    with ThrottledCopy(1e6, 1e-6, clock=Ticks()) as far:
        model = made(blocks, x, policy=modes, far=far)
        assert same_bits(results(model, x, model.blocks), right)
        assert model.step.peak_nbytes == model.plan.peak_nbytes
        # As many bytes as the plan, in each of two steps, both ways.
        moved = sum(
            cost.saved_nbytes
            for cost, mode in zip(model.plan.costs, modes, strict=True)
            if mode == "swap"
        )
        assert model.step.stored_nbytes == 2 * moved
        assert (model.near_nbytes, far.in_use) == (0, 0)
        model.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_tight_budgets_are_kept(kind: str, part: float) -> None:
    blocks, x = blocks_of(kind)
    plain = copy.deepcopy(blocks)
    right = results(plain, x, plain)
    whole = made(blocks, x, policy="keep")
    least = least_budget(whole)
    budget = int(least + part * (whole.plan.in_core_nbytes - least))
    model = made(blocks, x, budget_bytes=budget)
    assert same_bits(results(model, x, model.blocks), right)
    assert 0 < model.step.peak_nbytes <= budget
    assert model.near_nbytes == 0


def timed(seed: int, ticks: Ticks) -> tuple[nn.Sequential, torch.Tensor]:
    """Return blocks whose passes take random times."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [draws.randint(2, 30) for _ in range(draws.randint(2, 7))]
    blocks = []
    for a, b in itertools.pairwise(sizes):
        inner: list[nn.Module] = [nn.Linear(a, b)]
        more = [nn.Tanh(), nn.ReLU(), nn.Softmax(1)]
        inner += draws.sample(more, draws.randint(0, 3))
        times = draws.uniform(0.1, 2), draws.uniform(0.1, 3)
        blocks.append(Timed(nn.Sequential(*inner), ticks, *times))
    return nn.Sequential(*blocks), torch.randn(draws.randint(1, 20), sizes[0])


@pytest.mark.full(sample=15)
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute", "mixed"])
@pytest.mark.parametrize("seed", range(30))
def test_steps_take_the_time_that_the_plan_predicts(seed: int, policy: Any) -> None:
    """On a clock that computation and transfers alone move."""
    ticks, draws = Shared(), random.Random(seed)
    blocks, x = timed(seed, ticks)
    speed, latency = draws.uniform(100, 3000), draws.uniform(0, 0.1)
    with ThrottledCopy(speed, latency, clock=ticks) as far:
        whole = made(blocks, x, far=far, policy="keep")
        least = least_budget(whole)
        budget = least + draws.randint(0, whole.plan.in_core_nbytes)
        if policy == "mixed":
            policy = [draws.choice(MODES) for _ in blocks]
            budget += whole.plan.in_core_nbytes
        elif policy == "recompute":
            budget += sum(cost.resident_nbytes for cost in whole.plan.costs)
        model = made(blocks, x, far=far, budget_bytes=budget, policy=policy)
        for _ in range(2):
            model.zero_step()
            begin = ticks.at
            model(x).sum().backward()
            assert ticks.at - begin == pytest.approx(model.plan.step_s, rel=1e-9)
            assert model.step.stall_s == pytest.approx(model.plan.stall_s, abs=1e-9)
            assert model.step.peak_nbytes == model.plan.peak_nbytes


def test_a_mixed_plan_beats_pure_ones() -> None:
    """Later blocks stay; early ones come back, or are done again where it is short."""
    ticks = Shared()
    torch.manual_seed(0)
    seconds = [(0.1, 0.2), (0.2, 0.4), (2.0, 4.0), (2.0, 4.0), (0.1, 0.2), (1.0, 2.0)]
    blocks = nn.Sequential(
        *(
            Timed(
                nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
                ticks,
                *each,
            )
            for each in seconds
        )
    )
    x = torch.randn(32, 64)
    measured = {}
    with ThrottledCopy(12_000, clock=ticks) as far:
        for policy in ("keep", "auto", "swap", "recompute"):
            budget = ENOUGH if policy == "keep" else 70_000
            model = made(blocks, x, far=far, budget_bytes=budget, policy=policy)
            begin = ticks.at
            model(x).sum().backward()
            measured[policy] = ticks.at - begin
            assert model.plan.step_s == pytest.approx(measured[policy])
    assert measured["auto"] < measured["swap"]
    assert measured["auto"] < measured["recompute"]
    assert measured["keep"] <= measured["auto"] * (1 + 1e-9)


def test_earlier_blocks_come_back_while_later_ones_compute() -> None:
    ticks = Shared()
    blocks, x = blocks_of("mlp")
    slow = nn.Sequential(*(Timed(block, ticks, 1.0, 1.0) for block in blocks))
    with ThrottledCopy(1e4, clock=ticks) as far:
        model = made(slow, x, far=far, policy="swap")
        model(x).sum().backward()
    events = list(model.step.events)
    # Block 0 saves its output alone, which is the input of block 1. Block 3 is still on
    # its way when it is asked for, and stays.
    assert events == [
        *(("forward", 0), ("forward", 1), ("store", 1), ("forward", 2), ("store", 2)),
        *(("forward", 3), ("store", 3), ("backward", 3), ("load", 2), ("load", 1)),
        *(("backward", 2), ("backward", 1), ("backward", 0)),
    ]
    assert model.step.stall_s == pytest.approx(448 / 1e4)


# -- irregular programs ----------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "swap", "recompute", "auto"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "dropout"])
def test_several_forward_passes_before_one_backward_pass(
    kind: str, policy: str
) -> None:
    """The second pass has no room by the plan, so more leaves; its bits stay."""
    blocks, x = blocks_of(kind)
    plain = copy.deepcopy(blocks)
    whole = made(blocks, x, policy=policy)
    model = made(blocks, x, policy=policy, budget_bytes=whole.plan.peak_nbytes)

    def gradients(given: Any, own: nn.Module) -> list[Any]:
        torch.manual_seed(3)
        loss = given(x).square().sum() + given(x * 2).sum() * given(x - 1).mean()
        loss.backward()
        given(x).sum().backward()  # gradients add up
        return [p.grad for p in own.parameters()] + [*own.buffers()]

    assert same_bits(gradients(model, model.blocks), gradients(plain, plain))
    assert model.step.peak_nbytes <= whole.plan.peak_nbytes
    assert model.near_nbytes == 0


@pytest.mark.parametrize("policy", ["keep", "swap", "recompute"])
def test_a_retained_graph_runs_twice(policy: str) -> None:
    blocks, x = blocks_of("mlp")
    plain = copy.deepcopy(blocks)
    peak = made(blocks, x, policy=policy).plan.peak_nbytes
    model = made(blocks, x, policy=policy, budget_bytes=peak)
    found = []
    for given, own in ((model, model.blocks), (plain, plain)):
        loss = given(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in own.parameters()])
    assert same_bits(*found)
    assert model.step.peak_nbytes <= peak
    del loss
    gc.collect()
    assert model.near_nbytes == 0


@pytest.mark.parametrize("policy", ["keep", "swap", "recompute"])
def test_gradients_of_some_inputs_and_frozen_blocks(policy: str) -> None:
    blocks, x = blocks_of("mlp")
    blocks[1].requires_grad_(False)
    blocks[0].requires_grad_(False)
    plain = copy.deepcopy(blocks)
    model = made(blocks, x, policy=policy)
    results_of = []
    for given, own in ((model, model.blocks), (plain, plain)):
        wanted = [*own[2].parameters()]
        results_of.append(torch.autograd.grad(given(x).exp().sum(), wanted))
        given(x).sum().backward()
        results_of[-1] += tuple(p.grad for p in own[3].parameters())
        assert own[0][0].weight.grad is None
    assert same_bits(*results_of)
    assert model.near_nbytes == 0


def test_passes_without_gradients_save_nothing() -> None:
    blocks, x = blocks_of("cnn")
    ticks = Ticks()
    model = made(blocks, x, policy="swap", ticks=ticks).eval()
    with torch.no_grad():
        y = model(x)
    assert torch.equal(y, copy.deepcopy(blocks).eval()(x))
    assert model.step.events == ()
    model(x)  # in eval mode, dropped without a backward pass
    ticks.at += 1e3
    assert model.near_nbytes == 0


def test_measuring_leaves_the_model_and_the_generator_alone() -> None:
    for kind in ("cnn", "dropout", "views"):
        blocks, x = blocks_of(kind)
        before = copy.deepcopy(blocks.state_dict())
        torch.manual_seed(8)
        with ThrottledCopy(1e9) as far:
            OutOfCore(blocks, x, budget_bytes=ENOUGH, far=far)
        drawn = torch.rand(1)
        torch.manual_seed(8)
        assert torch.equal(drawn, torch.rand(1))
        after = blocks.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(p.grad is None for p in blocks.parameters())


def test_shared_weights_and_tuples_between_blocks() -> None:
    class Pair(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, value: Any) -> Any:
            x, y = value
            return self.linear(x).tanh(), y * x.sigmoid()

    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sin(), x

    class Join(nn.Module):
        def forward(self, value: Any) -> torch.Tensor:
            return value[0] * value[1]

    torch.manual_seed(2)
    linear = nn.Linear(5, 5)
    plain = nn.Sequential(Split(), Pair(linear), Pair(linear), Pair(linear), Join())
    x = torch.randn(3, 5)
    right = results(plain, x, plain)
    for modes in itertools.product(MODES, repeat=3):
        torch.manual_seed(2)
        again = nn.Linear(5, 5)
        blocks = nn.Sequential(Split(), Pair(again), Pair(again), Pair(again), Join())
        model = made(blocks, x, policy=("keep", *modes, "swap"))
        assert same_bits(results(model, x, model.blocks), right)
        assert model.near_nbytes == 0


def test_autocast_holds_in_recomputations() -> None:
    blocks, x = blocks_of("mlp")
    blocks, x = blocks.float(), x.float()
    plain = copy.deepcopy(blocks)
    model = made(blocks, x, policy="recompute")
    found = []
    for given, own in ((model, model.blocks), (plain, plain)):
        with torch.autocast("cpu", torch.bfloat16):
            y = given(x)
        y.float().square().sum().backward()
        found.append([p.grad for p in own.parameters()])
    assert same_bits(*found)


def test_a_mode_that_changes_after_the_forward_pass_is_that_of_the_forward_pass() -> (
    None
):
    blocks, x = blocks_of("dropout")
    plain = copy.deepcopy(blocks)
    model = made(blocks, x, policy="recompute")
    found = []
    for given, own in ((model, model.blocks), (plain, plain)):
        torch.manual_seed(1)
        y = given(x)
        given.eval()
        y.sum().backward()
        assert not any(module.training for module in own.modules())
        found.append([p.grad for p in own.parameters()])
    assert same_bits(*found)


# -- faults ----------------------------------------------------------------------
