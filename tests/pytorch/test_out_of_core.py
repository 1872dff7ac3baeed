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
    Ticks,
    Timed,
    blocks_of,
    close_opened,
    made,
    results,
    same_bits,
)
from torch import nn

from commrt.errors import MemoryError_, UsageError
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


class Shared(Ticks):
    """A clock that copies of a model share."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


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


def test_budgets_below_the_largest_block() -> None:
    blocks, x = blocks_of("mlp")
    with pytest.raises(UsageError, match=r"is less than block \d needs alone"):
        made(blocks, x, budget_bytes=100)


def test_larger_inputs_leave_or_are_refused() -> None:
    blocks, x = blocks_of("mlp")
    whole = made(blocks, x, policy="keep")
    model = made(blocks, x, policy="keep", budget_bytes=whole.plan.peak_nbytes)
    more = x.repeat(2, 1)
    y = model(more)
    assert model.step.stored_nbytes > 0  # a plan to keep all, which has no room
    y.sum().backward()
    assert model.step.peak_nbytes <= whole.plan.peak_nbytes
    with pytest.raises(MemoryError_, match="a sample as large as the input"):
        model(x.repeat(20, 1))
    assert model.near_nbytes == 0
    model(x).sum().backward()


@pytest.mark.parametrize("policy", MODES)
def test_double_backward_is_refused(policy: str) -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x, policy=policy)
    loss = model(x.requires_grad_()).sum()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    model.abandon()
    assert model.near_nbytes == 0


@pytest.mark.parametrize("policy", ["keep", "swap"])
def test_saved_tensors_that_are_changed_in_place(policy: str) -> None:
    """Plain torch refuses it, too."""
    model = made(nn.Sequential(nn.Tanh(), nn.Tanh()), torch.ones(3), policy=policy)
    x = torch.ones(3, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_a_tensor_that_is_changed_while_it_leaves() -> None:
    """Its copy may have old bytes or new ones."""

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            self.kept = y.detach()
            return y.sin()

    ticks = Shared()
    with ThrottledCopy(1.0, clock=ticks) as far:
        x = torch.ones(3, requires_grad=True)
        model = made(nn.Sequential(Kept(), Kept()), x, far=far, policy="swap")
        y = model(x)
        model.blocks[0].kept.mul_(2)
        ticks.at += 1e6
        assert model.near_nbytes == 0
        with pytest.raises(UsageError, match="changed in place"):
            y.sum().backward()


def test_parameters_that_are_changed_between_the_passes() -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x, policy="swap")
    y = model(x)
    with torch.no_grad():
        model.blocks[2][0].weight.mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_blocks_that_change_their_input_are_not_recomputed() -> None:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    model = made(blocks, x)
    assert [cost.can_recompute for cost in model.plan.costs] == [True, False, True]
    with pytest.raises(UsageError, match="block 1 cannot be recomputed"):
        made(blocks, x, policy="recompute")


def test_blocks_that_do_otherwise_the_second_time() -> None:
    class Fickle(nn.Module):
        is_first = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp() if self.is_first else x.sin()

    x = torch.ones(2, requires_grad=True)
    model = made(nn.Sequential(Fickle()), x, policy="recompute")
    y = model(x)
    model.blocks[0].is_first = False
    with pytest.raises(UsageError, match="must do the same each time"):
        y.sum().backward()


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("backward", [False, True])
def test_an_error_amid_a_pass_releases_everything(policy: str, backward: bool) -> None:
    class Falls(nn.Module):
        is_on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_on and not backward:
                raise ValueError("falls")
            y = x * 1.0
            if self.is_on:
                y.register_hook(falls)
            return y

    def falls(_: Any) -> None:
        raise ValueError("falls")

    blocks, x = blocks_of("mlp")
    broken = Falls()
    model = made(nn.Sequential(*blocks[:2], broken, *blocks[2:]), x, policy=policy)
    for block in model.blocks:
        if isinstance(block, Falls):
            block.is_on = True
    with pytest.raises(ValueError, match="falls") as caught:
        model.backward(model(x).sum())
    assert model.near_nbytes == 0  # though the traceback holds the graph
    assert model._far.in_use == 0
    assert caught.value.args == ("falls",)
    model.blocks[2].is_on = False
    model.backward(model(x).sum())


def test_closed_models_and_copies() -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x)
    with pytest.raises(UsageError, match=r"copy model\.blocks"):
        copy.deepcopy(model)
    assert "modes=(keep" in repr(model)
    y = model(x)
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model(x)
    with pytest.raises(UsageError, match="closed"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"budget_bytes": 2**70}, "budget_bytes="),
        ({"repeats": 0}, "repeats=0"),
        ({"bucket_nbytes": 0}, "bucket_nbytes=0"),
        ({"far": "disk"}, "far='disk'"),
        ({"blocks": []}, "one at least"),
        ({"blocks": [len]}, "a list of modules"),
        ({"sample": 3}, "the sample is 3"),
        ({"sample": ()}, "one at least"),
    ],
)
def test_arguments_that_are_none(given: Any, message: str) -> None:
    blocks, x = blocks_of("mlp")
    with ThrottledCopy(1e9) as far:
        arguments = {"blocks": blocks, "sample": x, "budget_bytes": ENOUGH, "far": far}
        with pytest.raises(UsageError) as caught:
            OutOfCore(**{**arguments, **given})
    assert message in str(caught.value)
