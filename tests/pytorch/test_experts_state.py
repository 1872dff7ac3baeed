# SPDX-License-Identifier: Apache-2.0
"""States of mixtures of experts, sums of their gradients, and input that is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_tensor_cases import off_by
from expert_cases import Form, Split, axes_of, layer_of, network_of, serial_of
from recorded import logs_of
from tensor3d_cases import NEAR, drawn_in
from torch import nn

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.experts import (
    MoE,
    broadcast_parameters,
    clip_grad_norm_,
    load_state_dict,
    moe,
    state_dict,
    sync_gradients,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.gradients import cut_parameters
from commrt.local import run

FORMS = {
    "stacked": Form(num_experts=7, num_shared=2),
    "modules": Form(num_experts=3, of_modules=True),
}
SPLITS = (1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)


def ranks_of(split: Split) -> int:
    """Return the number of ranks of a split."""
    return split[0] * split[1] * split[2]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", FORMS)
def test_states_are_those_of_the_serial_layer(kind: str, split: Split) -> None:
    form = FORMS[kind]
    right = serial_of(form).state_dict()

    def main(comm: Any) -> bool:
        with ProcessGrid(comm, axes_of(split)) as grid:
            model = network_of(form, serial_of(form), grid)
            whole = state_dict(model)
            assert whole is not None
            assert {*whole} == {*right}
            for name, value in whole.items():
                assert torch.equal(value, right[name])
            own = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(own)  # this rank's shards
            again = state_dict(model, on_first_only=True)
            if again is not None:
                assert all(torch.equal(again[name], right[name]) for name in right)
            return again is not None

    kept = run(ranks_of(split), main)
    assert kept == [True] + [False] * (ranks_of(split) - 1)


@pytest.mark.parametrize("kind", FORMS)
def test_states_that_do_not_fit_are_refused(kind: str) -> None:
    form = FORMS[kind]
    state = serial_of(form).state_dict()
    name = next(each for each in state if "experts" in each and "up" in each + "up")
    missing = {key: value for key, value in state.items() if key != "first.bias"}
    wrong = state | {name: torch.zeros(2, 1)}
    more = state | {"moe.experts.9.weight": torch.zeros(1)}

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            model = network_of(form, serial_of(form), grid)
            with pytest.raises(UsageError, match=r"first\.bias is missing"):
                load_state_dict(model, missing)
            with pytest.raises(UsageError, match=r"the model has no moe\.experts\.9"):
                load_state_dict(model, more)
            if comm.rank == 0:
                with pytest.raises(UsageError, match=r"\(2, 1\)"):
                    load_state_dict(model, wrong)

    run(2, main)


def test_new_layers_are_the_same_on_every_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(comm: Any, axes: dict[str, int]) -> Any:
        with ProcessGrid(comm, axes) as grid:
            return state_dict(MoE(4, 5, 3, grid=grid, num_shared=1))

    one, *others = run(4, lambda comm: main(comm, {"expert": 2, "data": 2}))
    for found in others:
        assert all(torch.equal(found[name], one[name]) for name in one)
    # Ranks that are threads share torch's generator, so each draws another seed.
    monkeypatch.setattr(moe, "agreed_seed", lambda comm: 5)
    (right,) = run(1, lambda comm: main(comm, {"expert": 1}))
    assert len({float(value.std()) for value in right.values()}) == len(right)
    for found in run(4, lambda comm: main(comm, {"expert": 2, "tensor": 2})):
        assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("kind", FORMS)
def test_copies_work_on_the_same_ranks_with_parameters_of_their_own(kind: str) -> None:
    form = FORMS[kind]

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            model = network_of(form, serial_of(form), grid)
            other = copy.deepcopy(model)
            with torch.no_grad():
                other.first.weight.zero_()
            assert model.first.weight.any()
            x = drawn_in(comm.rank, 3, form.d_model)
            other(x).output.sum().backward()
            sync_gradients(other)
            assert all(each.grad is None for each in model.parameters())
            assert state_dict(other) is not None

    run(2, main)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("split", [(2, 2, 1), (1, 2, 2)])
def test_norms_count_each_expert_once(kind: str, split: Split) -> None:
    form = FORMS[kind]
    serial = serial_of(form)
    for number, parameter in enumerate(serial.parameters()):
        parameter.grad = drawn_in(number, *parameter.shape)
    right = copy.deepcopy(serial)
    for one, other in zip(right.parameters(), serial.parameters(), strict=True):
        one.grad = other.grad.clone()
    norm = nn.utils.clip_grad_norm_(right.parameters(), 0.5)
    clipped = {name: each.grad for name, each in right.named_parameters()}

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(split)) as grid:
            model = network_of(form, serial, grid)
            whole = dict(serial.named_parameters())
            for name, parameter, cut, _ in cut_parameters(model):
                given = whole[name].grad
                parameter.grad = given.clone() if cut is None else cut.cut(given)
            assert off_by(clip_grad_norm_(model, 0.5), norm) < NEAR
            for name, parameter, cut, _ in cut_parameters(model):
                expected = clipped[name] if cut is None else cut.cut(clipped[name])
                assert off_by(parameter.grad, expected) < 1e-6

    run(4, main)


def test_replicas_get_the_parameters_of_the_first() -> None:
    form = FORMS["stacked"]

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, axes_of((2, 2, 1))) as grid:
            model = layer_of(form, grid)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += grid.coords["data"]
            broadcast_parameters(model)
            return grid.coords["expert"], [*model.parameters()]

    ranks = run(4, main)
    for expert in (0, 1):
        one, other = (params for at, params in ranks if at == expert)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- sums of gradients -----------------------------------------------------------------


def test_a_gradient_is_never_summed_twice() -> None:
    """Not at once, not clipped, and not with a new one that is added to it."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2}) as grid:
            layer = layer_of(FORMS["stacked"], grid)
            x = drawn_in(comm.rank, 4, 6)

            def step() -> None:
                layer(x).output.sum().backward()

            step()
            step()  # several passes before the sum
            sync_gradients(layer)
            with pytest.raises(UsageError, match="summed over ranks before"):
                sync_gradients(layer)
            clip_grad_norm_(layer, 0.1)
            with pytest.raises(UsageError, match="summed over ranks before"):
                sync_gradients(layer)
            step()
            with pytest.raises(UsageError, match=r"zero_grad\(\)"):
                sync_gradients(layer)
            for set_to_none in (True, False, False):
                layer.zero_grad(set_to_none)
                step()
                sync_gradients(layer)

    run(2, main)


def test_experts_without_tokens_are_summed_after_zeros() -> None:
    """Their gradients stay zeros, which no backward pass has taken the mark off."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2, "expert": 2}) as grid:
            layer = layer_of(FORMS["modules"], grid)
            x = drawn_in(comm.rank, 4, 6)
            for tokens in (x, x[:0], x):
                layer.zero_grad(set_to_none=False)
                layer(tokens).output.sum().backward()
                sync_gradients(layer)

    run(4, main)


class WithBuffer(nn.Linear):  # type: ignore[misc]
    """An expert with statistics of its own, more of them the higher its number."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        for each in range(number + 1):
            self.register_buffer(f"seen{each}", torch.full((2,), float(number)))


@pytest.mark.parametrize("split", [(1, 4, 1), (2, 2, 1)])
def test_buffers_of_experts_stay_their_own(split: Split) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(split)) as grid:
            layer = MoE(4, 7, grid=grid, expert=WithBuffer)
            broadcast_parameters(layer)
            for module in layer.modules():
                if isinstance(module, WithBuffer):
                    mine = [*module.buffers()]
                    assert all((each == len(mine) - 1.0).all() for each in mine)

    run(4, main)


def test_a_copy_clips_as_the_layer_does() -> None:
    def main(comm: Any) -> list[float]:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = layer_of(FORMS["modules"], grid)
            made = copy.deepcopy(layer)
            norms = []
            for each in (layer, made):
                each(drawn_in(comm.rank, 4, 6)).output.sum().backward()
                sync_gradients(each)
                norms.append(float(clip_grad_norm_(each.parameters(), 1e9, grid=grid)))
            return norms

    for norms in run(2, main):
        assert norms[0] == norms[1] > 0


def test_a_refused_sum_sends_nothing() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = layer_of(FORMS["modules"], grid)
            layer(drawn_in(comm.rank, 4, 6)).output.sum().backward()
            sync_gradients(layer)
            comm.barrier()
            with pytest.raises(UsageError, match="summed"):
                sync_gradients(layer)

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        assert log.operations[-1].op == "barrier"


# -- input that is refused -------------------------------------------------------------

Call = Callable[[ProcessGrid], Any]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda grid: MoE(4, 2, 3, grid=None), "grid=None must be a ProcessGrid"),
        (lambda grid: MoE(0, 2, 3, grid=grid), "d_model=0 must be an integer"),
        (lambda grid: MoE(4, 0, 3, grid=grid), "num_experts=0 must be an integer"),
        (lambda grid: MoE(4, 2, -1, grid=grid), "d_hidden=-1 must be an integer"),
        (lambda grid: MoE(4, 2, 3.0, grid=grid), r"d_hidden=3\.0 must be an integer"),
        (lambda grid: MoE(4, 2, 3, grid=grid, top_k=3), "top_k=3 is more than"),
        (lambda grid: MoE(4, 2, 3, grid=grid, top_k=0), "top_k=0 must be"),
        (lambda grid: MoE(4, 2, 3, grid=grid, num_shared=True), "num_shared=True"),
        (lambda grid: MoE(4, 2, grid=grid), "give d_hidden"),
        (lambda grid: MoE(4, 2, 3, grid=grid, expert=nn.Identity), "one of the two"),
        (lambda grid: MoE(4, 2, grid=grid, expert=4), "expert=4 must be a function"),
        (lambda grid: MoE(4, 2, grid=grid, expert=lambda n: n), "expert.0. returned 0"),
        (lambda grid: MoE(4, 2, 3, grid=grid, activation="tanh"), "activation='tanh'"),
        (
            lambda grid: MoE(4, 2, 3, grid=grid, capacity_factor=0.0),
            r"capacity_factor=0\.0 must be a number above 0",
        ),
        (
            lambda grid: MoE(4, 2, 3, grid=grid, capacity_factor=float("nan")),
            "capacity_factor=nan",
        ),
        (lambda grid: MoE(4, 2, 3, grid=grid)([1.0]), "must be a tensor"),
        (lambda grid: MoE(4, 2, 3, grid=grid)(torch.ones(2, 3)), "must have 4 feat"),
        (lambda grid: MoE(4, 2, 3, grid=grid)(torch.tensor(1.0)), "must have 4 feat"),
        (
            lambda grid: MoE(4, 2, 3, grid=grid)(torch.ones(2, 4).double()),
            "type torch.float64 meets weights of type torch.float32",
        ),
        (
            lambda grid: MoE(
                4, 1, grid=grid, expert=lambda number: nn.Linear(4, 3), num_shared=1
            )(torch.ones(2, 4)),
            r"expert 1 returned the shape \(2, 3\)",
        ),
    ],
)
def test_bad_input_of_experts_is_refused(call: Call, message: str) -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"expert": 1}) as grid,
            pytest.raises(UsageError, match=message),
        ):
            call(grid)

    run(1, main)


def test_axes_of_other_layers_are_refused() -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"data": 1, "x": 2}) as grid,
            pytest.raises(UsageError, match="the axis 'x'; its axes must be"),
        ):
            MoE(4, 2, 3, grid=grid)

    run(2, main)


def test_input_is_refused_before_anything_is_sent() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = MoE(4, 2, 3, grid=grid)
            comm.barrier()
            with pytest.raises(UsageError, match="features"):
                layer(torch.ones(2, 5))

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        assert log.operations[-1].op == "barrier"
