# SPDX-License-Identifier: Apache-2.0
"""Runs of K-FAC that stop and go on, accumulate, scale losses, or skip layers."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from kfac_cases import (
    NEAR,
    SerialKFAC,
    batch_of,
    distance,
    loss_of,
    model_of,
    own_part,
    serial_run,
)
from torch import nn
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.kfac import KFAC
from commrt.layers.kfac.gradients import bits_of
from commrt.local import run

SETTINGS: dict[str, Any] = {"inverse_every": 4, "lr": 0.05}
SAMPLES_OF = 4
"""Ranks whose samples all runs have."""


def steps_of(optimizer: Any, model: nn.Module, comm: Any, numbers: range) -> None:
    """Take steps with the samples of four ranks, dealt to those that are there."""
    for step in numbers:
        parts = [
            own_part("shared", SAMPLES_OF, rank, step)
            for rank in range(comm.rank, SAMPLES_OF, comm.size)
        ]
        x, y = (torch.cat([part[at] for part in parts]) for at in range(2))
        optimizer.zero_grad()
        if len(x):
            loss_of(model(x), y, "mean", 1).backward()
        optimizer.step()


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
@pytest.mark.parametrize(
    ("before", "after"), [((1, 1), (4, 2)), ((4, 4), (1, 1)), ((2, 1), (4, 1))]
)
def test_a_run_goes_on_with_another_number_of_ranks(
    before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    """Also between two inversions: the inverses are those of older factors."""
    right = serial_run("shared", SAMPLES_OF, 8, **SETTINGS)

    def first(comm: Any) -> Any:
        model = model_of("shared")
        with KFAC(model, comm, gradient_workers=before[1], **SETTINGS) as optimizer:
            steps_of(optimizer, model, comm, range(stop))
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
        return file.getvalue()

    saved = run(before[0], first, timeout_s=240)[-1]

    def second(comm: Any) -> nn.Module:
        model = model_of("shared", 5)
        with KFAC(model, comm, gradient_workers=after[1]) as optimizer:
            states = torch.load(io.BytesIO(saved), weights_only=True)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            steps_of(optimizer, model, comm, range(stop, 8))
        return model

    for model in run(after[0], second, timeout_s=240):
        assert distance(model, right) < NEAR


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_that_somebody_else_averages(ranks: int) -> None:
    right = serial_run("perceptron", ranks, 5, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(
            model, comm, gradients="synchronised", loss="global_mean", **SETTINGS
        ) as optimizer:
            for step in range(5):
                x, y, samples = own_part("perceptron", ranks, comm.rank, step)
                optimizer.zero_grad(set_to_none=False)
                loss_of(model(x), y, "global_mean", samples).backward()
                for each in model.parameters():
                    comm.allreduce(each.grad)
                optimizer.step()
        return model

    for model in run(ranks, main):
        assert distance(model, right) < NEAR


@pytest.mark.parametrize("ranks", [1, 3])
def test_several_backward_passes_make_one_step(ranks: int) -> None:
    serial = model_of("perceptron")
    plain = SerialKFAC(serial, **SETTINGS)
    for step in range(3):
        plain.step(*batch_of("perceptron", 6 * ranks, step))

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, **SETTINGS) as optimizer:
            for step in range(3):
                x, y = batch_of("perceptron", 6 * ranks, step)
                own = range(6 * comm.rank, 6 * comm.rank + 6, 2)
                optimizer.zero_grad()
                with optimizer.no_sync():
                    for at in own[:-1]:
                        part = slice(at, at + 2)
                        (loss_of(model(x[part]), y[part], "mean", 1) / 3).backward()
                part = slice(own[-1], own[-1] + 2)
                (loss_of(model(x[part]), y[part], "mean", 1) / 3).backward()
                optimizer.step()
        return model

    for model in run(ranks, main):
        assert distance(model, serial) < NEAR


def test_checkpointed_layers_count_once() -> None:
    """Their forward pass runs again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    right = serial_run("perceptron", 2, 4, **SETTINGS)

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
            super().__init__()
            self.inner, self.is_reentrant = inner, is_reentrant

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)

    def main(comm: Any, is_reentrant: bool) -> nn.Module:
        inner = model_of("perceptron")
        model = Checkpointed(inner, is_reentrant)
        with KFAC(model, comm, **SETTINGS) as optimizer:
            for step in range(4):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                optimizer.zero_grad()
                loss_of(model(x.requires_grad_()), y, "mean", 1).backward()
                optimizer.step()
        return inner

    for is_reentrant in (False, True):
        for model in run(2, functools.partial(main, is_reentrant=is_reentrant)):
            assert distance(model, right) < NEAR


def scaled_run(comm: Any, overflow_on: int | None) -> tuple[nn.Module, float]:
    model = model_of("perceptron")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + comm.rank))
    with KFAC(model, comm, grad_scaler=scaler, **SETTINGS) as optimizer:
        for step in range(-1, 4):
            x, y, _ = own_part("perceptron", 2, comm.rank, max(step, 0))
            optimizer.zero_grad()
            loss = loss_of(model(x), y, "mean", 1)
            if step < 0:
                if overflow_on is None:
                    continue
                loss = loss * (float("inf") if overflow_on == comm.rank else 1)
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return model, scaler.get_scale()


@pytest.mark.parametrize("overflow_on", [None, 0, 1])
def test_scaled_losses_train_alike(overflow_on: int | None) -> None:
    """Scales may differ between ranks; a step with an overflow happens on none."""
    right = serial_run("perceptron", 2, 4, **SETTINGS)
    for rank, found in enumerate(run(2, lambda comm: scaled_run(comm, overflow_on))):
        model, scale = found
        assert distance(model, right) < NEAR
        assert scale == 2.0 ** (10 + rank - (overflow_on == rank))


def test_a_scaler_that_kfac_does_not_know_is_refused() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        scaler = torch.amp.GradScaler("cpu")
        with KFAC(model, comm) as optimizer:
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            scaler.scale(loss_of(model(x), y, "mean", 1)).backward()
            with pytest.raises(UsageError, match="pass it as grad_scaler"):
                scaler.step(optimizer)

    run(2, main)


class Mixed(nn.Module):
    """Layers that K-FAC leaves to SGD: an embedding, tied, frozen and skipped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.table.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.skipped = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.depthwise = nn.Conv1d(4, 4, 1, groups=4)
        self.part = nn.Linear(3, 3)
        self.part.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Any) -> Any:
        x = self.skipped(self.frozen(self.table(tokens)))
        x = self.depthwise(x[:, :, None])[:, :, 0]
        return self.part(self.tied(x))


def test_other_parameters_take_steps_of_sgd() -> None:
    def main(comm: Any) -> None:
        torch.manual_seed(3)
        model = Mixed().double()
        with torch.no_grad():
            for each in model.parameters():
                torch.nn.init.uniform_(
                    each, generator=torch.Generator().manual_seed(each.numel())
                )
        before = copy.deepcopy(model)
        with KFAC(
            model, comm, skip=["skipped"], momentum=0.5, weight_decay=0.1
        ) as optimizer:
            assert optimizer.layer_names == ("part", "unused")
            tokens = torch.tensor([0, 1, 2, 2]) if comm.rank else torch.tensor([1])
            loss = functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            sgd = torch.optim.SGD(
                before.parameters(), 0.1, momentum=0.5, weight_decay=0.1
            )
            whole = torch.tensor([1, 0, 1, 2, 2])
            functional.cross_entropy(before(whole), whole).backward()
            sgd.step()
            expected = dict(before.named_parameters())
            for name, found in model.named_parameters():
                is_near = torch.allclose(found, expected[name], rtol=1e-12, atol=1e-14)
                assert is_near == (name != "part.weight"), name

    run(2, main)


def test_schedulers_change_steps_and_damping() -> None:
    serial = model_of("perceptron")
    plain = SerialKFAC(serial, lr=0.1, inverse_every=1)
    for step in range(4):
        plain.set["lr"], plain.set["damping"] = 0.1 * 0.5**step, 0.003 / (1 + step)
        plain.step(*batch_of("perceptron", 4, step))

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, lr=0.1, inverse_every=1) as optimizer:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for step in range(4):
                x, y = batch_of("perceptron", 4, step)
                own = slice(2 * comm.rank, 2 * comm.rank + 2)

                def closure(x: Any = x[own], y: Any = y[own]) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(model(x), y, "mean", 1)
                    loss.backward()
                    return loss

                optimizer.param_groups[0]["damping"] = 0.003 / (1 + step)
                assert optimizer.step(closure) > 0
                scheduler.step()
        return model

    for model in run(2, main):
        assert distance(model, serial) < NEAR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_have_factors_in_float32(dtype: torch.dtype) -> None:
    """Also after they are loaded, where torch makes states as narrow as weights."""

    def main(comm: Any) -> Any:
        model = model_of("perceptron").to(dtype)
        with KFAC(model, comm, **SETTINGS) as optimizer:
            for step in range(2):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                optimizer.zero_grad()
                loss_of(model(x.to(dtype)).float(), y, "mean", 1).backward()
                optimizer.step()
            before = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(before)
            again = optimizer.state_dict()
            for number, state in before["state"].items():
                for name, value in state.items():
                    other = again["state"][number][name]
                    if isinstance(value, torch.Tensor):
                        assert value.dtype == other.dtype
                        assert torch.equal(value, other)
            assert {
                each.dtype for pair in optimizer.factors().values() for each in pair
            } == {torch.float32}
        return [*model.parameters()]

    first, second = run(2, main)
    for one, other in zip(first, second, strict=True):
        assert torch.isfinite(one).all()
        assert torch.allclose(one.float(), other.float(), rtol=1e-2)


def test_a_model_trains_under_autocast() -> None:
    def main(comm: Any) -> list[float]:
        model = model_of("convolutions").float()
        losses = []
        with KFAC(model, comm, lr=0.05, kl_clip=0.01) as optimizer:
            for _ in range(12):
                x, y = batch_of("convolutions", 16, 0)
                own = slice(8 * comm.rank, 8 * comm.rank + 8)
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x[own].float())
                loss = loss_of(output.float(), y[own], "mean", 1)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    for losses in run(2, main):
        assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_under_autocast_computes_in_the_types_of_factors(workers: int) -> None:
    """A rank that keeps inverses sends directions in the type that others expect."""

    def main(comm: Any, is_on: bool) -> Any:
        model = model_of("perceptron").float()
        with KFAC(model, comm, gradient_workers=workers, **SETTINGS) as optimizer:
            for step in range(3):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                optimizer.zero_grad()
                loss_of(model(x.float()), y, "mean", 1).backward()
                with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                    optimizer.step()
        return [*model.parameters()]

    plain = run(2, functools.partial(main, is_on=False))
    within = run(2, functools.partial(main, is_on=True))
    for one, other in zip(plain, within, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("skip", [(), ("0",)])
def test_weights_that_are_computed_take_steps_of_sgd(skip: tuple[str, ...]) -> None:
    """Those of pruned layers, and of layers with a norm in the older style."""
    from torch.nn.utils import prune, spectral_norm

    def main(comm: Any) -> None:
        pruned, without = nn.Linear(5, 4), nn.Linear(4, 4)
        normed = spectral_norm(nn.Linear(4, 4))
        model = nn.Sequential(pruned, normed, without, nn.Linear(4, 3)).double()
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape))
            normed.weight_u.fill_(0.5)
            normed.weight_v.fill_(0.5)
        prune.l1_unstructured(pruned, "weight", 0.5)
        prune.l1_unstructured(without, "bias", 0.5)
        before = copy.deepcopy([*model.parameters()])
        with KFAC(model, comm, skip=skip) as optimizer:
            assert optimizer.layer_names == ("2", "3")
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            loss_of(model(x), y, "mean", 1).backward()
            optimizer.step()
            assert optimizer.placement.sides[0] == (4, 4)  # the bias is computed
        for one, other in zip(before, model.parameters(), strict=True):
            assert not torch.equal(one, other)

    run(2, main)


def test_numbers_of_gradients_tell_orders_and_signs_apart() -> None:
    """They are 0 for zeros, however many there are."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        values = torch.arange(3000, dtype=torch.float32).to(dtype).reshape(60, 50)
        seen = {bits_of([values, values + 1])}
        for others in (
            [values.flip(0), values + 1],
            [values.t().reshape(60, 50), values + 1],
            [-values, values + 1],
            [values + 1, values],
            [values, None],
            [None, values],
            [values.roll(2048 // 50, 0), values + 1],
        ):
            assert 0 < bits_of(others) < 1 << 63
            seen.add(bits_of(others))
        assert len(seen) == 8
        assert bits_of([values.t()]) == bits_of([values.t().contiguous()])
        assert bits_of([values * 0, None, values[:0]]) == 0
    big = torch.zeros((1 << 20) + 3, dtype=torch.float64)
    found = set()
    for at in (0, 1, 1 << 11, 1 << 19, 1 << 20, (1 << 20) + 2):
        big[at] = 2.0
        found.add(bits_of([big]))
        big[at] = 0.0
    assert len(found) == 6
