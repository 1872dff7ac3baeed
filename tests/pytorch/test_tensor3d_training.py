# SPDX-License-Identifier: Apache-2.0
"""A small GPT on real text: losses on grids are those of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import SmallGpt, lines, trained
from tensor3d_cases import NEAR, Grid, axes_of, filled, grids_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    clip_grad_norm_,
    load_state_dict,
    overlap_communication,
    parallelize,
    state_dict,
    sync_gradients,
)
from commrt.local import run

STEPS, BATCH, MOST = 3, 8, 0.5
PAIRS = {"blocks.*.up": "blocks.*.down"}


@cache
def serial(dtype: torch.dtype = torch.float64) -> tuple[Any, list[float], Any, Any]:
    """Return a model, its losses in training, and its state and norms afterwards."""
    model = filled(SmallGpt(), 3).to(dtype)
    begin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []

    def after(loss: Any) -> float:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        return float(loss)

    batches = [lines(step, BATCH) for step in range(STEPS)]
    return begin, trained(model, optimizer, batches, after), model.state_dict(), norms


def on_grid(
    grid: Grid,
    change: Callable[[nn.Module, ProcessGrid], nn.Module],
    *,
    pairs: dict[str, str] | None = None,
    dtype: torch.dtype = torch.float64,
    by_model: bool = True,
) -> list[tuple[list[float], list[float], Any]]:
    """Return losses, norms and the whole state of each rank, after some steps."""
    begin = serial(dtype)[0]

    def main(comm: Communicator) -> tuple[list[float], list[float], Any]:
        with ProcessGrid(comm, axes_of(grid)) as places:
            model = parallelize(copy.deepcopy(begin), places, pairs=pairs)
            model = change(model, places)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            replicas = grid[0] * grid[1]
            own = places.coords["data"] * grid[1] + places.coords["z"]
            batches = [lines(step, BATCH).chunk(replicas)[own] for step in range(STEPS)]
            norms = []

            def after(loss: Any) -> float:
                sync_gradients(model)
                clipped: Any = model if by_model else model.parameters()
                norms.append(float(clip_grad_norm_(clipped, MOST)))
                comm.allreduce(loss, op="avg")
                return float(loss)

            losses = trained(model, optimizer, batches, after)
            return losses, norms, state_dict(model)

    return run(math.prod(grid), main, timeout_s=240)


def as_it_is(model: nn.Module, grid: ProcessGrid) -> nn.Module:
    """Change nothing."""
    return model


def with_overlap(model: nn.Module, grid: ProcessGrid) -> nn.Module:
    """Let all collectives run while ranks compute."""
    overlap_communication(model)
    return model


def with_checkpoints(model: Any, grid: ProcessGrid) -> nn.Module:
    """Compute each block again in the backward pass."""
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def with_both(model: Any, grid: ProcessGrid) -> nn.Module:
    """Let collectives run meanwhile, also where blocks are computed again."""
    return with_overlap(with_checkpoints(model, grid), grid)


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("pairs", [None, PAIRS])
@pytest.mark.parametrize(
    "change", [as_it_is, with_overlap, with_checkpoints, with_both]
)
@pytest.mark.parametrize("grid", grids_of(2, 4, 8))
def test_losses_norms_and_states_are_those_of_one_process(
    grid: Grid, change: Any, pairs: Any
) -> None:
    _, losses, state, norms = serial()
    by_model = change is as_it_is
    ranks = on_grid(grid, change, pairs=pairs, by_model=by_model)
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        assert found[2].keys() == state.keys()
        for name, right in state.items():
            torch.testing.assert_close(found[2][name], right, rtol=1e-7, atol=1e-9)
        assert found[2]["head.weight"] is found[2]["table.weight"]
    # All ranks clip alike, to the bit.
    assert len({tuple(found[1]) for found in ranks}) == 1


def test_losses_in_float32_are_near_those_of_one_process() -> None:
    _, losses, _, _ = serial(torch.float32)
    assert losses[-1] < losses[0]
    for found in on_grid((1, 2, 1, 2), with_overlap, dtype=torch.float32):
        assert found[0] == pytest.approx(losses, rel=1e-4)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("change", [as_it_is, with_checkpoints])
@pytest.mark.parametrize("grid", grids_of(2, 4, 8))
def test_overlap_changes_no_bit(grid: Grid, change: Any) -> None:
    def on(model: nn.Module, places: ProcessGrid) -> nn.Module:
        return with_overlap(change(model, places), places)

    one, other = on_grid(grid, change), on_grid(grid, on)
    for mine, theirs in zip(one, other, strict=True):
        assert mine[:2] == theirs[:2]
        for name, right in mine[2].items():
            assert torch.equal(theirs[2][name], right), name


@pytest.mark.parametrize("which", ["all_reduce", "reduce_scatter", "all_gather"])
def test_each_overlap_alone_changes_no_bit(which: str) -> None:
    def on(model: nn.Module, places: ProcessGrid) -> nn.Module:
        chosen = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), False)
        overlap_communication(model, **{**chosen, which: True})
        return model

    grid = (1, 2, 1, 2)
    for mine, theirs in zip(on_grid(grid, as_it_is), on_grid(grid, on), strict=True):
        assert mine[:2] == theirs[:2]


def test_gradients_of_several_passes_add_up_with_the_same_bits() -> None:
    def main(comm: Communicator) -> list[list[Any]]:
        found = []
        with ProcessGrid(comm, {"z": 2, "x": 2}) as places:
            for on in (False, True):
                model = parallelize(copy.deepcopy(serial()[0]), places)
                if on:
                    overlap_communication(model)
                for step in range(3):
                    model(lines(step, 2)).backward()
                found.append([each.grad for each in model.parameters()])
        return found

    for off, on in run(4, main):
        for one, other in zip(off, on, strict=True):
            assert torch.equal(one, other)


def test_a_state_goes_from_grid_to_grid_and_to_one_process() -> None:
    begin, _, state, _ = serial()

    def main(comm: Communicator) -> None:
        with (
            ProcessGrid(comm, {"z": 2, "y": 1, "x": 3}) as one,
            ProcessGrid(comm, {"y": 3, "x": 2}) as other,
        ):
            model = parallelize(copy.deepcopy(begin), one)
            load_state_dict(model, state)
            whole = state_dict(model)
            first = state_dict(model, on_first_only=True)
            assert whole is not None
            assert (first is None) == (comm.rank > 0)
            for found in (whole, first or whole):
                assert all(torch.equal(found[name], state[name]) for name in state)
            turned = parallelize(copy.deepcopy(begin), other)
            turned.load_state_dict(whole)
            again = state_dict(turned)
            assert again is not None
            assert all(torch.equal(again[name], state[name]) for name in state)
            shards = turned.state_dict()
            turned.load_state_dict({n: each.clone() for n, each in shards.items()})
            assert torch.equal(turned.head.weight, shards["head.weight"])
            assert turned.head.weight is turned.table.weight

    run(6, main)
    plain = copy.deepcopy(begin)
    plain.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state.update({"norm.weight": torch.ones(7)}),
            r"norm.weight has the shape \(7,\); expected \(24,\)",
        ),
        (
            lambda state: state.update({"blocks.0.up.weight": torch.ones(5, 24)}),
            r"blocks.0.up.weight has the shape \(5, 24\); expected \(72, 24\), the",
        ),
        (lambda state: state.pop("norm.bias"), "norm.bias is missing"),
        (lambda state: state.update(more=torch.ones(1)), "the model has no more"),
    ],
)
def test_states_of_other_models_are_refused(change: Any, says: str) -> None:
    begin, _, state, _ = serial()
    wrong = dict(state)
    change(wrong)

    def main(comm: Communicator) -> None:
        with ProcessGrid(comm, {"x": 2}) as places:
            model = parallelize(copy.deepcopy(begin), places)
            before = {name: each.clone() for name, each in model.state_dict().items()}
            with pytest.raises(UsageError, match=says):
                load_state_dict(model, wrong)
            after = model.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before)

    run(2, main)


def test_torch_refuses_a_state_of_another_shape_too() -> None:
    begin, _, state, _ = serial()
    wrong = {**state, "blocks.0.up.weight": torch.ones(5, 24)}

    def main(comm: Communicator) -> None:
        with ProcessGrid(comm, {"x": 2}) as places:
            model = parallelize(copy.deepcopy(begin), places)
            with pytest.raises(RuntimeError, match="the whole parameter's"):
                model.load_state_dict(wrong)

    run(2, main)


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("grid", [(1, 2, 1, 2), (2, 1, 2, 2), (1, 1, 1, 3)])
def test_the_norm_counts_each_element_once(grid: Grid, norm_type: float) -> None:
    begin = copy.deepcopy(serial()[0])
    begin(lines(1, 4)).backward()
    these = begin.parameters()
    right = float(nn.utils.clip_grad_norm_(these, 0.25, norm_type))

    def main(comm: Communicator) -> None:
        with ProcessGrid(comm, axes_of(grid)) as places:
            model = parallelize(copy.deepcopy(serial()[0]), places)
            model(lines(1, 4)).backward()
            sync_gradients(model)
            found = clip_grad_norm_(model.parameters(), 0.25, norm_type)
            assert float(found) == pytest.approx(right, rel=NEAR)

    run(math.prod(grid), main)


def test_what_no_rank_has_a_gradient_of_gets_none() -> None:
    def main(comm: Communicator) -> None:
        with ProcessGrid(comm, {"data": 2, "x": 1}) as places:
            model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
            parallelize(model, places)
            used = [0, 1] if comm.rank else [0]
            for number in used:
                model[number](torch.ones(1, 2)).sum().backward()
            sync_gradients(model)
            assert [each.weight.grad is not None for each in model] == [1, 1, 0]
            assert torch.equal(model[1].weight.grad, torch.full((2, 2), 0.5))

    run(2, main)
