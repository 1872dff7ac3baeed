# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer has the bits of the plain one, whatever cuts it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded_update_cases import (
    OPTIMIZERS,
    SHAPES,
    assert_equal_state,
    give_gradients,
    gradient_of,
    made_parameters,
    on_ranks,
    trained_alone,
    trained_together,
)

from commrt.errors import UsageError
from commrt.layers.sharded_update import GradScaler, ShardedOptimizer

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_plain_one(kind: str, ranks: int) -> None:
    expected, plain = trained_alone(kind, ranks, 4)

    def main(comm: Any) -> Any:
        found, optimizer = trained_together(comm, kind, 4)
        with optimizer:
            for mine, right in zip(found, expected, strict=True):
                assert torch.equal(mine, right)
            return optimizer.whole_state_dict()

    states = on_ranks(ranks, main)
    assert states[1:] == [None] * (ranks - 1)
    assert_equal_state(states[0], plain.state_dict())


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("cut", ["elements", "parameters"])
@pytest.mark.parametrize("nbytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_cuts_and_buckets_change_no_bit(ranks: int, nbytes: int, cut: str) -> None:
    expected, plain = trained_alone("adamw", ranks, 3)

    def main(comm: Any) -> Any:
        arguments = {"cut": cut, "bucket_nbytes": nbytes}
        found, optimizer = trained_together(comm, "adamw", 3, **arguments)
        with optimizer:
            for mine, right in zip(found, expected, strict=True):
                assert torch.equal(mine, right)
            return optimizer.whole_state_dict(None)

    for state in on_ranks(ranks, main):
        assert_equal_state(state, plain.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_without_gradients_stay_and_those_of_some_ranks_count_as_zeros(
    ranks: int,
) -> None:
    def absent(rank: int, step: int, at: int) -> bool:
        frozen = at == 1
        return frozen or at == 2 + step % 3 or (rank > 0 and at in (0, 5))

    plain_parameters = made_parameters()
    plain = torch.optim.AdamW(plain_parameters, lr=0.1)
    for step in range(4):
        give_gradients(plain_parameters, range(ranks), step, absent)
        plain.step()

    def main(comm: Any) -> Any:
        parameters = made_parameters()
        parameters[1].requires_grad_(False)
        arguments = {"op": "sum", "bucket_nbytes": 3000, "lr": 0.1}
        with ShardedOptimizer(
            parameters, comm, torch.optim.AdamW, **arguments
        ) as optimizer:
            for step in range(4):
                give_gradients(parameters, [comm.rank], step, absent)
                optimizer.step()
            for mine, right in zip(parameters, plain_parameters, strict=True):
                assert torch.equal(mine, right)
            return optimizer.whole_state_dict()

    assert_equal_state(on_ranks(ranks, main)[0], plain.state_dict())


def grouped(parameters: Any) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "lr": 0.3, "weight_decay": 0.0},
        {"params": parameters[2:6], "betas": (0.5, 0.9)},
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("gradients", ["own", "summed"])
def test_groups_types_and_schedules(ranks: int, gradients: str) -> None:
    """Two groups and a later one, three types, a scheduler, channels-last weights."""

    def made() -> list[Any]:
        found = made_parameters()
        found[0] = torch.nn.Parameter(found[0].detach().float())
        found[5] = torch.nn.Parameter(found[5].detach().bfloat16())
        image = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5) / 50
        image = image.contiguous(memory_format=torch.channels_last)
        return [*found[:2], torch.nn.Parameter(image), *found[2:]]

    def train(parameters: Any, optimizer: Any, own: Any) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": parameters[6:], "lr": 0.2})
                scheduler.base_lrs.append(0.2)
            give_gradients(parameters, own, step)
            optimizer.step()
            scheduler.step()

    expected = made()
    plain = torch.optim.AdamW(grouped(expected), lr=0.1)
    train(expected, plain, range(ranks))

    def main(comm: Any) -> Any:
        parameters = made()
        arguments = {"lr": 0.1, "op": "sum", "bucket_nbytes": 2000}
        with ShardedOptimizer(
            grouped(parameters),
            comm,
            torch.optim.AdamW,
            gradients=gradients,
            **arguments,
        ) as optimizer:
            own = [comm.rank] if gradients == "own" else range(ranks)
            train(parameters, optimizer, own)
            for mine, right in zip(parameters, expected, strict=True):
                assert torch.equal(mine, right)
                assert mine.stride() == right.stride()
            return optimizer.whole_state_dict()

    assert_equal_state(on_ranks(ranks, main)[0], plain.state_dict())


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("kind", ["adam", "sgd", "asgd", "adafactor", "muon"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 4), (4, 1), (0, 3)])
def test_states_go_to_other_numbers_of_ranks_and_plain_optimizers(
    kind: str, before: int, after: int
) -> None:
    """``before`` ranks train, then ``after`` ranks; 0 is the plain optimizer."""
    first, plain = trained_alone(kind, max(before, 1), 2)
    state = copy.deepcopy(plain.state_dict())
    if before:

        def begin(comm: Any) -> Any:
            _, optimizer = trained_together(comm, kind, 2)
            with optimizer:
                return optimizer.whole_state_dict(before - 1)

        state = on_ranks(before, begin)[before - 1]
        assert_equal_state(state, plain.state_dict())
    for step in (2, 3):
        give_gradients(first, range(after), step)
        plain.step()
    start, _ = trained_alone(kind, max(before, 1), 2)

    def go_on(comm: Any) -> Any:
        factory, arguments = OPTIMIZERS[kind]
        parameters = [torch.nn.Parameter(each.detach().clone()) for each in start]
        with ShardedOptimizer(
            parameters, comm, factory, op="sum", bucket_nbytes=3000, **arguments
        ) as optimizer:
            optimizer.load_state_dict(state)
            for step in (2, 3):
                give_gradients(parameters, [comm.rank], step)
                optimizer.step()
            for mine, right in zip(parameters, first, strict=True):
                assert torch.equal(mine, right)
            return optimizer.whole_state_dict()

    assert_equal_state(on_ranks(after, go_on)[0], plain.state_dict())


@pytest.mark.parametrize("norm", [2.0, 1.0, 3.5, float("inf")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_clipped_by_the_norm_of_all_parts(
    ranks: int, norm: float
) -> None:
    shapes = [each for each in SHAPES if each != (0,)]  # which torch has no norm of
    expected = made_parameters(shapes)
    plain = torch.optim.SGD(expected, lr=0.1)
    norms = []
    for step in range(2):
        give_gradients(expected, range(ranks), step)
        norms.append(torch.nn.utils.clip_grad_norm_(expected, 3.0, norm))
        plain.step()

    def main(comm: Any) -> None:
        parameters = made_parameters(shapes)
        with ShardedOptimizer(
            parameters, comm, torch.optim.SGD, lr=0.1, op="sum", bucket_nbytes=2000
        ) as optimizer:
            for step in range(2):
                give_gradients(parameters, [comm.rank], step)
                found = optimizer.clip_grad_norm_(3.0, norm)
                assert abs(found - norms[step]) <= 1e-12 * norms[step]
                optimizer.step()
            for mine, right in zip(parameters, expected, strict=True):
                assert torch.allclose(mine, right, rtol=1e-12, atol=1e-12)
            huge = torch.full_like(parameters[0], float("nan"))
            parameters[0].grad = huge if comm.rank == 0 else None
            with pytest.raises(RuntimeError, match=r"nan|non-finite"):
                optimizer.clip_grad_norm_(1.0, norm, error_if_nonfinite=True)
            with pytest.raises(UsageError, match="summed already"):
                optimizer.reduce_gradients()
            optimizer.zero_grad()
            optimizer.reduce_gradients()

    on_ranks(ranks, main)


def test_gradients_of_parameters_stay_as_they_are() -> None:
    """Sums, and what is clipped, lie in memory of the optimizer."""

    def main(comm: Any) -> None:
        for gradients in ("own", "summed"):
            parameters = made_parameters()
            give_gradients(parameters, [0], 0)
            before = [each.grad.clone() for each in parameters]
            with ShardedOptimizer(
                parameters, comm, torch.optim.SGD, gradients=gradients, lr=0.1
            ) as optimizer:
                optimizer.clip_grad_norm_(1e-3)
                optimizer.step()
            for each, gradient in zip(parameters, before, strict=True):
                assert torch.equal(each.grad, gradient)

    on_ranks(2, main)


def test_averages_accumulated_passes_and_closures() -> None:
    """The mean of ranks, of gradients that two backward passes added up."""
    torch.manual_seed(3)
    serial = torch.nn.Linear(70, 3).double()
    again = copy.deepcopy(serial)
    x = torch.randn(12, 70, dtype=torch.float64)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        plain.zero_grad()
        (2 * serial(x).square().mean()).backward()
        plain.step()

    def main(comm: Any) -> None:
        model = copy.deepcopy(again)
        own = x[comm.rank * 4 : comm.rank * 4 + 4]
        with ShardedOptimizer(
            model.parameters(), comm, torch.optim.SGD, lr=0.1, momentum=0.9
        ) as optimizer:

            def closure() -> Any:
                optimizer.zero_grad()
                for half in own.split(2):
                    model(half).square().mean().backward()
                return comm.rank

            for _ in range(3):
                assert optimizer.step(closure) == comm.rank
        for mine, right in zip(model.parameters(), serial.parameters(), strict=True):
            assert torch.allclose(mine, right, rtol=1e-12, atol=1e-13)

    on_ranks(3, main)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaled_losses_skip_the_same_steps_on_all_ranks(
    ranks: int, unscales: bool
) -> None:
    """In the second step one rank overflows, in the third one only the sum does."""

    def grads(rank: int, step: int, scale: float) -> Any:
        value = gradient_of(rank, step, 0, torch.empty(300)) * scale
        if step == 1 and rank == ranks - 1:
            value[7] = float("inf")
        if step == 2:
            value[9] = 3e38 if ranks > 1 else float("inf")
        return value

    def train(parameter: Any, optimizer: Any, scaler: Any, own: Any) -> list[float]:
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            scale = float(scaler.scale(torch.ones(())))
            parameter.grad = torch.stack([grads(r, step, scale) for r in own]).sum(0)
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    given = {"init_scale": 64.0, "growth_interval": 2}
    expected = torch.nn.Parameter(torch.ones(300))
    plain = torch.optim.AdamW([expected], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **given)
    scales = train(expected, plain, scaler, range(ranks))
    assert scales[0] > scales[2]

    def main(comm: Any) -> None:
        parameter = torch.nn.Parameter(torch.ones(300))
        with ShardedOptimizer(
            [parameter], comm, torch.optim.AdamW, lr=0.1, op="sum"
        ) as optimizer:
            mine = GradScaler(comm, **given)
            assert train(parameter, optimizer, mine, [comm.rank]) == scales
            assert torch.equal(parameter, expected)
            parameter.grad = torch.ones(300)
            torchs = torch.amp.GradScaler("cpu")
            torchs.scale(torch.ones(()))
            with pytest.raises(UsageError, match="each rank by itself"):
                torchs.step(optimizer)

    on_ranks(ranks, main)


def test_parameters_may_move_and_models_may_load_states() -> None:
    expected, _ = trained_alone("adam", 2, 2)

    def main(comm: Any) -> None:
        parameters, optimizer = trained_together(comm, "adam", 1)
        for each in parameters:
            each.data = each.data.clone()
        give_gradients(parameters, [comm.rank], 1)
        optimizer.step()
        for mine, right in zip(parameters, expected, strict=True):
            assert torch.equal(mine, right)
        parameters[0].data = parameters[0].data.float()
        parameters[0].grad = None
        with pytest.raises(UsageError, match=r"is of torch\.float32 .* was of"):
            optimizer.step()
        optimizer.close()

    on_ranks(2, main)
