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
from commrt.errors import UsageError
from commrt.hvd.current import current
from commrt.layers.data import GradientReducer
from commrt.layers.experts import MoE
from commrt.layers.process_grid import ProcessGrid
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


def test_an_optimizer_of_hvd_names_the_expert_that_it_refuses() -> None:
    def main() -> str:
        comm = current().comm
        with ProcessGrid(comm, {"expert": 0}) as grid:
            model = model_on(grid)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(UsageError) as caught:
                hvd.DistributedOptimizer(plain, model.named_parameters())
            # Frozen ones have no gradients.
            model["moe"].experts.requires_grad_(False)
            hvd.DistributedOptimizer(plain, model.named_parameters())
            return str(caught.value)

    for said in on_ranks(2, main):
        assert re.search(r"parameter moe\.experts\.gate: ranks along expert", said)
