# SPDX-License-Identifier: Apache-2.0
"""Faults of one rank with K-FAC are told on all ranks, and change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kfac_cases import NEAR, distance, loss_of, model_of, own_part, serial_run
from torch import nn

from commrt.errors import (
    ClosedError,
    CommError,
    MismatchError,
    NotFiniteError,
    RefusedError,
    UsageError,
)
from commrt.layers.data import GradientReducer
from commrt.layers.kfac import KFAC, inverses
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import Linear3d
from commrt.local import run

SHORT_S = 60
"""Seconds of tests whose ranks could wait for each other."""


def backward(model: nn.Module, comm: Any, step: int = 0) -> None:
    x, y, _ = own_part("perceptron", comm.size, comm.rank, step)
    if len(x):
        loss_of(model(x), y, "mean", 1).backward()


# -- arguments -------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "lr": {"lr": -1.0},
    "damping": {"damping": 0.0},
    "momentum": {"momentum": 1.0},
    "weight_decay": {"weight_decay": float("nan")},
    "factor_decay": {"factor_decay": 1.5},
    "factor_every": {"factor_every": 0},
    "inverse_every": {"inverse_every": 2.0},
    "kl_clip": {"kl_clip": 0},
    "gradient_workers": {"gradient_workers": 3},
    "gradients": {"gradients": "summed"},
    "loss": {"loss": "median"},
    "skip": {"skip": ["third"]},
    "samples_of": {"samples_of": 4},
    "grad_scaler": {"grad_scaler": True},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_is_told_on_all(name: str) -> None:
    def main(comm: Any) -> tuple[type[BaseException], str]:
        arguments = WRONG[name] if comm.rank == 1 else {}
        with pytest.raises(CommError) as found:
            KFAC(model_of("perceptron"), comm, **arguments)
        with KFAC(model_of("perceptron"), comm):
            pass
        return found.type, str(found.value)

    (other, text), (own, said) = run(2, main, timeout_s=SHORT_S)
    assert own is UsageError
    assert f"{name}=" in said
    assert other is RefusedError
    assert "rank 1 raised an error" in text


@pytest.mark.parametrize(
    "arguments",
    [{"lr": 0.2}, {"kl_clip": None}, {"loss": "sum"}, {"gradient_workers": 1}],
)
def test_arguments_that_differ_are_told_on_all(arguments: dict[str, Any]) -> None:
    def main(comm: Any) -> None:
        mine = arguments if comm.rank == 1 else {}
        with pytest.raises(UsageError, match="of rank 1 differ from those of rank 0"):
            KFAC(model_of("perceptron"), comm, **mine)

    run(2, main, timeout_s=SHORT_S)


def test_models_that_kfac_cannot_train_are_refused() -> None:
    def main(comm: Any) -> None:
        grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
        with ProcessGrid(comm, {"x": 2}) as grid:
            for wrong, text in (
                (grouped, "0 is a convolution in 2 groups"),
                (nn.Sequential(nn.LazyLinear(3)), "has no shape yet"),
                (nn.Linear(2, 2, device="meta"), "on the meta device"),
                (nn.Linear(2, 2).requires_grad_(False), "no parameter"),
                (Linear3d(4, 4, grid=grid), "is cut over ranks"),
                ("model", "must be a module"),
            ):
                with pytest.raises(UsageError, match=text):
                    KFAC(wrong, comm)  # type: ignore[arg-type]
        with KFAC(grouped, comm, skip=["0"]) as optimizer:
            assert optimizer.layer_names == ()
        with pytest.raises(UsageError, match="must be a communicator"):
            KFAC(nn.Linear(2, 2), grid)  # type: ignore[arg-type]

    run(2, main, timeout_s=SHORT_S)


def test_parameters_of_other_models_are_refused() -> None:
    def main(comm: Any) -> None:
        with (
            KFAC(model_of("perceptron"), comm) as optimizer,
            pytest.raises(UsageError, match="those of the model"),
        ):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    run(2, main, timeout_s=SHORT_S)


# -- steps -----------------------------------------------------------------------------


def refused_step(
    break_it: Callable[[Any, Any, Any], None],
    error: type[BaseException],
    other: type[BaseException],
    text: str,
    **settings: Any,
) -> None:
    """Take a step that rank 1 breaks, and then two right ones."""
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, **settings) as optimizer:
            groups = copy.deepcopy(optimizer.param_groups[0])
            before = copy.deepcopy(model)
            backward(model, comm)
            if comm.rank == 1:
                break_it(model, optimizer, comm)
            with pytest.raises(error if comm.rank == 1 else other) as found:
                optimizer.step()
            if comm.rank == 1:
                assert text in str(found.value)
            assert distance(model, before) == 0.0
            assert not optimizer.factors()
            for name in ("lr", "damping"):
                optimizer.param_groups[0][name] = groups[name]
            for each in model.parameters():
                each.grad = None
            for step in range(2):
                optimizer.zero_grad()
                backward(model, comm, step)
                optimizer.step()
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_a_second_backward_pass_is_told_on_all() -> None:
    refused_step(
        lambda model, optimizer, comm: backward(model, comm),
        *(UsageError, RefusedError, "within no_sync()"),
    )


def test_wrong_settings_of_one_rank_are_told_on_all() -> None:
    def damped(model: Any, optimizer: Any, comm: Any) -> None:
        optimizer.param_groups[0]["damping"] = -1.0

    refused_step(damped, UsageError, RefusedError, "damping=-1.0")


def test_settings_that_differ_are_told_on_all() -> None:
    def other(model: Any, optimizer: Any, comm: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.3

    refused_step(other, UsageError, UsageError, "settings of rank 1 differ")


def test_sparse_gradients_are_told_on_all() -> None:
    def sparse(model: Any, optimizer: Any, comm: Any) -> None:
        model.last.weight.grad = model.last.weight.grad.to_sparse()

    refused_step(sparse, UsageError, RefusedError, "last.weight is sparse")


def test_an_error_of_an_inversion_is_told_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = [True]

    def inverse_of(name: str, triangle: Any, shift: float) -> Any:
        if broken[0] and name == "last" and len(triangle) == 6:
            broken[0] = False
            raise MemoryError("none is left")
        return real(name, triangle, shift)

    real = inverses.inverse_of
    monkeypatch.setattr(inverses, "inverse_of", inverse_of)
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> tuple[type[BaseException], nn.Module]:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            backward(model, comm)
            with pytest.raises((MemoryError, RefusedError)) as found:
                optimizer.step()
            assert not optimizer.factors()
            for step in range(2):
                optimizer.zero_grad()
                backward(model, comm, step)
                optimizer.step()
        return found.type, model

    found = run(2, main, timeout_s=SHORT_S)
    assert {kind for kind, _ in found} == {MemoryError, RefusedError}
    for _, model in found:
        assert distance(model, right) < NEAR


def test_infinite_factors_are_told_on_all_and_change_nothing() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            before = copy.deepcopy(model)
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            if comm.rank == 1:
                x = x * float("inf")
            loss_of(model(x), y, "mean", 1).backward()
            with pytest.raises(NotFiniteError, match="NaN or infinity in step 0"):
                optimizer.step()
            assert distance(model, before) == 0.0
            optimizer.zero_grad()
            backward(model, comm)
            optimizer.step()
            assert distance(model, before) > 0.0

    run(2, main, timeout_s=SHORT_S)


def test_gradients_summed_before_are_refused() -> None:
    """By hand, by a reducer, and by the step before."""

    def main(comm: Any) -> None:
        model = model_of("perceptron")
        parameters = [*model.parameters()]
        with KFAC(model, comm) as optimizer:
            backward(model, comm)
            with GradientReducer(
                comm, [each.detach() for each in parameters]
            ) as reduce:
                reduce([each.grad for each in parameters])
            with pytest.raises(UsageError, match="have been summed already"):
                optimizer.step()
            optimizer.zero_grad()
            backward(model, comm)
            optimizer.step()
            backward(model, comm)  # added to what the step has summed
            with pytest.raises(UsageError, match="summed over ranks before"):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_synchronised_gradients_that_differ_are_refused() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm, gradients="synchronised") as optimizer:
            backward(model, comm)
            with pytest.raises(UsageError, match="average them before step"):
                optimizer.step()
            optimizer.zero_grad()
            backward(model, comm)
            if comm.rank == 1:
                model.last.weight.grad = None
            with pytest.raises(UsageError, match="parameters with gradients"):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_parameters_that_differ_are_refused() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron", comm.rank)
        with KFAC(model, comm) as optimizer:
            backward(model, comm)
            with pytest.raises(UsageError, match="values of parameters of rank 1"):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_a_state_that_one_rank_alone_has_loaded_is_told_on_all() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            for _ in range(2):
                start = copy.deepcopy(optimizer.state_dict())
                optimizer.zero_grad()
                backward(model, comm)
                optimizer.step()
            if comm.rank == 1:
                optimizer.load_state_dict(start)
            optimizer.zero_grad()
            backward(model, comm)
            with pytest.raises(MismatchError, match="different numbers of steps"):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_layers_that_some_ranks_do_not_use() -> None:
    """A rank that uses none of them, or has frozen one, adds nothing."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Any, uses: str) -> Any:
            return getattr(self, uses)(x)

    def main(comm: Any) -> Any:
        torch.manual_seed(1)
        model = Two().double()
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape))
        with KFAC(model, comm, gradient_workers=1, inverse_every=1) as optimizer:
            for step in range(4):
                x, y, _ = own_part("perceptron", 3, comm.rank, step)
                optimizer.zero_grad()
                uses = "left" if comm.rank == 0 or step == 0 else "right"
                if len(x):
                    loss_of(model(x, uses), y, "mean", 1).backward()
                optimizer.step()
                assert ("right" in optimizer.factors()) == (step > 0)
        return [*model.parameters()]

    first, *others = run(3, main, timeout_s=SHORT_S)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_gradients_without_a_call_of_the_model_are_refused() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            for each in model.parameters():
                each.grad = torch.full_like(each, 1.0 + comm.rank)
            with pytest.raises(UsageError, match="none of its calls was seen"):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_an_error_of_samples_of_is_told_on_all() -> None:
    def main(comm: Any) -> None:
        def samples_of(x: Any) -> int:
            if comm.rank == 1:
                raise KeyError("batch")
            return len(x)

        model = model_of("perceptron")
        with KFAC(model, comm, samples_of=samples_of) as optimizer:
            backward(model, comm)
            with pytest.raises(KeyError if comm.rank == 1 else RefusedError):
                optimizer.step()

    run(2, main, timeout_s=SHORT_S)


def test_a_step_that_is_left_out_is_discarded() -> None:
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            backward(model, comm, 7)
            optimizer.discard()
            for step in range(2):
                optimizer.zero_grad()
                backward(model, comm, step)
                optimizer.step()
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_no_samples_anywhere_change_nothing() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        before = copy.deepcopy(model)
        with KFAC(model, comm) as optimizer:
            optimizer.step()
            assert optimizer.param_groups[0]["steps"] == 0
        assert distance(model, before) == 0.0

    run(2, main, timeout_s=SHORT_S)


# -- the end ---------------------------------------------------------------------------


def test_a_freed_kfac_sees_nothing_and_refuses_steps() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        optimizer = KFAC(model, comm)
        optimizer.free()
        optimizer.free()
        assert not model._forward_hooks
        backward(model, comm)
        with pytest.raises(ClosedError):
            optimizer.step()

    run(2, main, timeout_s=SHORT_S)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("param_groups"), "no state of KFAC"),
        (lambda state: state["param_groups"][0].pop("steps"), "no state of KFAC"),
        (lambda state: state["param_groups"][0]["params"].pop(), "of 4 parameters"),
        (
            lambda state: state["state"][0].update(factor_inputs=torch.ones(3)),
            "has 3 elements; expected 21",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(change: Any, text: str) -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            backward(model, comm)
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            change(state)
            with pytest.raises(UsageError, match=text):
                optimizer.load_state_dict(state)

    run(2, main, timeout_s=SHORT_S)


def test_copies_of_a_model_have_no_part_in_its_steps() -> None:
    """Such as one whose parameters are averages over steps."""
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            for step in range(2):
                copied = copy.deepcopy(model)
                backward(copied, comm, 7)
                optimizer.zero_grad()
                backward(model, comm, step)
                backward(copied, comm, 8)
                optimizer.step()
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_an_error_of_a_closure_is_told_on_all() -> None:
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:

            def wrong() -> None:
                backward(model, comm)
                if comm.rank == 1:
                    raise KeyError("batch")

            with pytest.raises(KeyError if comm.rank == 1 else RefusedError):
                optimizer.step(wrong)
            for step in range(2):
                optimizer.zero_grad()
                optimizer.step(lambda step=step: backward(model, comm, step))
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR
