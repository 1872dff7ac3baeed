# SPDX-License-Identifier: Apache-2.0
"""Ranks of K-FAC that sum factors in other steps, or fail amid sums, come together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kfac_cases import NEAR, distance, loss_of, model_of, own_part, serial_run
from torch import nn

from commrt.errors import (
    ClosedError,
    MismatchError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.layers.kfac import KFAC
from commrt.layers.kfac.factor_sums import FactorSums, Part
from commrt.local import run

SHORT_S = 60
"""Seconds of tests whose ranks could wait for each other."""


def backward(model: nn.Module, comm: Any, step: int = 0) -> None:
    x, y, _ = own_part("perceptron", comm.size, comm.rank, step)
    if len(x):
        loss_of(model(x), y, "mean", 1).backward()


def right_steps(model: nn.Module, optimizer: Any, comm: Any, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        backward(model, comm, step)
        optimizer.step()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_setting_makes_no_rank_wait_in_the_step_after(ranks: int) -> None:
    """The rank does not sum factors then, and the others do."""
    right = serial_run("perceptron", ranks, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm) as kfac:
            group = kfac.param_groups[0]
            if comm.rank == 1:
                group["factor_every"] = 0
            for _ in range(2):
                kfac.zero_grad()
                backward(model, comm)
                with pytest.raises(UsageError if comm.rank == 1 else RefusedError):
                    kfac.step()
            group["factor_every"] = 1
            kfac.discard()
            right_steps(model, kfac, comm, range(2))
        return model

    for model in run(ranks, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_a_state_that_all_ranks_load_ends_a_mismatch() -> None:
    """One rank has sums under way, which the other does not take part in."""
    right = serial_run("perceptron", 2, 4, factor_every=2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, factor_every=2) as kfac:
            states = []
            for step in range(2):
                states.append(copy.deepcopy([kfac.state_dict(), model.state_dict()]))
                right_steps(model, kfac, comm, range(step, step + 1))
            if comm.rank == 1:
                kfac.load_state_dict(states[1][0])
            kfac.zero_grad()
            backward(model, comm, 2)
            with pytest.raises(MismatchError, match="load the same state on all"):
                kfac.step()
            kfac.load_state_dict(states[1][0])
            model.load_state_dict(states[1][1])
            right_steps(model, kfac, comm, range(1, 4))
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_a_step_is_discarded_where_one_rank_alone_has_sums() -> None:
    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, factor_every=2) as kfac:
            start = copy.deepcopy([kfac.state_dict(), model.state_dict()])
            right_steps(model, kfac, comm, range(1))
            if comm.rank == 1:
                kfac.load_state_dict(start[0])
            backward(model, comm)
            kfac.discard()
            kfac.load_state_dict(start[0])
            model.load_state_dict(start[1])
            right_steps(model, kfac, comm, range(4))
        with pytest.raises(ClosedError):
            kfac.discard()
        return model

    right = serial_run("perceptron", 2, 4, factor_every=2)
    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


@pytest.mark.parametrize("error", [UsageError, RefusedError, MemoryError])
def test_errors_of_commrt_in_a_closure_are_told_on_all(error: Any) -> None:
    right = serial_run("perceptron", 2, 2)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm) as kfac:

            def wrong() -> None:
                if comm.rank == 1:
                    raise error("no batch")
                backward(model, comm)

            with pytest.raises(error if comm.rank == 1 else RefusedError):
                kfac.step(wrong)
            right_steps(model, kfac, comm, range(2))
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_a_fault_of_communication_in_a_closure_is_raised_at_once() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as kfac:

            def wrong() -> None:
                raise TimeoutError_("late")

            if comm.rank == 1:
                with pytest.raises(TimeoutError_, match="late"):
                    kfac.step(wrong)

    run(2, main, timeout_s=SHORT_S)


@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.parametrize("where", ["hook", "step"])
def test_a_memory_error_as_a_sum_starts_is_told_on_all(
    monkeypatch: pytest.MonkeyPatch, where: str, layer: str
) -> None:
    """In the backward pass, where other ranks wait for the sum; or in ``step``."""
    broken = [True]
    right = serial_run("perceptron", 2, 2)

    def flat(self: Part, factor: float) -> Any:
        if broken[0] and self.layer.name == layer:
            broken[0] = False
            raise MemoryError("none is left")
        return real(self, factor)

    real = Part.flat
    monkeypatch.setattr(Part, "flat", flat)

    def main(comm: Any) -> tuple[type[BaseException], nn.Module]:
        model = model_of("perceptron")
        with KFAC(model, comm) as kfac:
            if where == "hook":
                backward(model, comm)
            else:
                with kfac.no_sync():
                    backward(model, comm)
            with pytest.raises((MemoryError, RefusedError)) as found:
                kfac.step()
            assert not kfac.factors()
            right_steps(model, kfac, comm, range(2))
        return found.type, model

    found = run(2, main, timeout_s=SHORT_S)
    assert {kind for kind, _ in found} == {MemoryError, RefusedError}
    for _, model in found:
        assert distance(model, right) < NEAR


@pytest.mark.parametrize("inverse_every", [1, 2])
def test_a_memory_error_in_averages_is_told_on_all(
    monkeypatch: pytest.MonkeyPatch, inverse_every: int
) -> None:
    """Also in a step that inverts nothing."""
    fails = [False, False, True]

    def results(self: FactorSums) -> Any:
        if self._comm.rank == 1 and fails.pop():
            raise MemoryError("none is left")
        return real(self)

    real = FactorSums.results
    right = serial_run("perceptron", 2, 3, inverse_every=inverse_every)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, inverse_every=inverse_every) as kfac:
            right_steps(model, kfac, comm, range(1))
            before = copy.deepcopy(model)
            comm.barrier()
            monkeypatch.setattr(FactorSums, "results", results)
            comm.barrier()
            kfac.zero_grad()
            backward(model, comm, 1)
            with pytest.raises(MemoryError if comm.rank == 1 else RefusedError):
                kfac.step()
            assert distance(model, before) == 0.0
            right_steps(model, kfac, comm, range(1, 3))
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR
