# SPDX-License-Identifier: Apache-2.0
"""Data parallelism refuses parameters of which ranks have different pieces."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hvd_cases import on_ranks
from torch import nn

import commrt.hvd as hvd
from commrt.errors import MismatchError, UsageError
from commrt.hvd.current import current
from commrt.layers.data import GradientReducer
from commrt.layers.experts import MoE
from commrt.layers.kfac.gradients import Gradients
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.sharded_update import ShardedOptimizer
from commrt.local import run


def model_on(grid: ProcessGrid, experts: int = 4, *, of_modules: bool = False) -> Any:
    made: dict[str, Any] = {"d_hidden": 5}
    if of_modules:
        made = {"expert": lambda number: nn.Linear(3, 3)}
    moe = MoE(3, experts, grid=grid, **made)
    return nn.ModuleDict({"first": nn.Linear(2, 3), "moe": moe})


@pytest.mark.parametrize("of_modules", [False, True])
def test_a_reducer_over_all_ranks_refuses_experts(of_modules: bool) -> None:
    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"expert": 0}) as grid:
            model = model_on(grid, of_modules=of_modules)
            with pytest.raises(UsageError, match="sync_gradients") as caught:
                GradientReducer(comm, model.parameters())
            comm.barrier()
            return str(caught.value)

    for rank, said in enumerate(run(2, main)):
        assert f"GradientReducer: parameter 3 of rank {rank}, of shape" in said
        assert "ranks along expert have different pieces" in said


def test_a_rank_without_experts_refuses_with_the_others() -> None:
    """Else it would wait for them until the deadline."""

    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"expert": 0}) as grid:
            model = model_on(grid, 1, of_modules=True)
            with pytest.raises(UsageError) as caught:
                GradientReducer(comm, [*model.parameters()])
            comm.barrier()
            return str(caught.value)

    said = run(2, main)
    assert any("parameter 3 of rank 1 is a piece that other ranks" in s for s in said)
    assert any("parameter 3 of rank 1, of shape (3, 3)" in each for each in said)


def test_a_reducer_over_ranks_with_the_same_experts_sums_them() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2, "expert": 2}) as grid:
            model = model_on(grid)
            experts = [*model["moe"].experts.parameters()]
            reducer = GradientReducer(grid["data",], experts, op="sum")
            for index, each in enumerate(experts):
                reducer.ready(index, torch.full_like(each, 1.0 + grid.coords["data"]))
            for total in reducer.finish():
                assert torch.equal(total, torch.full_like(total, 3.0))
            reducer.close()
            others = [model["first"].weight, model["moe"].router.weight]
            GradientReducer(comm, others).close()

    run(4, main)


def test_a_reducer_over_the_axis_that_cuts_refuses_them() -> None:
    """As many ranks as have the same experts, and yet they have different ones."""

    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"data": 2, "expert": 2}) as grid:
            experts = [*model_on(grid)["moe"].experts.parameters()]
            with pytest.raises(UsageError, match="different pieces") as caught:
                GradientReducer(grid["expert",], experts)
            comm.barrier()
            return str(caught.value)

    assert all("ranks along expert" in said for said in run(4, main))


def test_a_reducer_between_two_grids_sums_the_same_experts() -> None:
    def main(comm: Any) -> None:
        replica, place = divmod(comm.rank, 2)
        with (
            comm.split(replica) as own,
            comm.split(place) as across,
            ProcessGrid(own, {"expert": 2}) as grid,
        ):
            experts = [*model_on(grid)["moe"].experts.parameters()]
            reducer = GradientReducer(across, experts, op="sum")
            for index, each in enumerate(experts):
                reducer.ready(index, torch.full_like(each, 1.0 + replica))
            for total in reducer.finish():
                assert torch.equal(total, torch.full_like(total, 3.0))
            reducer.close()

    run(4, main)


def optimized(comm: Any, experts: list[Any]) -> Any:
    return ShardedOptimizer([x for _, x in experts], comm, torch.optim.SGD, lr=0.1)


def preconditioned(comm: Any, experts: list[Any]) -> Any:
    return Gradients(comm, experts, are_local=True, loss="mean")


@pytest.mark.parametrize("made", [optimized, preconditioned])
def test_sums_of_other_layers_refuse_them_on_all_ranks(made: Any) -> None:
    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"data": 2, "expert": 2}) as grid:
            experts = [*model_on(grid)["moe"].experts.named_parameters()]
            with pytest.raises(UsageError) as caught:
                made(grid["expert",], experts)
            made(grid["data",], experts).close()  # the same ones
            return str(caught.value)

    assert all("expert" in said for said in run(4, main))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_an_optimizer_of_hvd_refuses_different_experts_on_all_ranks(op: Any) -> None:
    def main() -> str:
        comm = current().comm
        with ProcessGrid(comm, {"expert": 0}) as grid:
            model = model_on(grid)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            made = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
            before = [each.detach().clone() for each in model.parameters()]
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            with pytest.raises(MismatchError) as caught:
                made.step()
            if op is hvd.Average:  # nothing has changed
                for each, value in zip(model.parameters(), before, strict=True):
                    assert torch.equal(each, value)
            # Frozen ones have no gradients.
            model["moe"].experts.requires_grad_(False)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            made = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
            for each in model.parameters():
                each.grad = torch.ones_like(each) if each.requires_grad else None
            made.step()
            return str(caught.value)

    for said in on_ranks(2, main):
        assert re.search(
            r"place 0 along expert.* on rank 0; .*place 1.* on rank 1", said
        )


def test_an_optimizer_of_hvd_takes_the_same_experts_of_two_grids() -> None:
    def main() -> None:
        comm = current().comm
        replica, place = divmod(comm.rank, 2)
        sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
        with comm.split(replica) as own, ProcessGrid(own, {"expert": 2}) as grid:
            experts = [*model_on(grid)["moe"].experts.named_parameters()]
            plain = torch.optim.SGD([each for _, each in experts], lr=0.1)
            made = hvd.DistributedOptimizer(
                plain, experts, op=hvd.Sum, process_set=sets[place]
            )
            for _, each in experts:
                each.grad = torch.full_like(each, 1.0 + replica)
            made.synchronize()
            for _, each in experts:
                assert torch.equal(each.grad, torch.full_like(each, 3.0))

    on_ranks(4, main)
