# SPDX-License-Identifier: Apache-2.0
"""All of a state moves, to the bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from tournament_cases import (
    OPTIMIZERS,
    distance,
    is_equal,
    net_of,
    raising,
    snapshot,
    threads_of_torch,
    trained,
)

from commrt.errors import RefusedError, UsageError
from commrt.layers.embeddings import EmbeddingTable, ShardedEmbeddingBags
from commrt.layers.experts import MoE
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tournament import (
    Consensus,
    Pairwise,
    Selection,
    Tournament,
    Truncation,
)
from commrt.layers.tournament.optimizer_state import load, split_off
from commrt.layers.tournament.packing import pack, slot_of, unpack
from commrt.local import run

RULES: dict[str, Selection] = {
    "pairwise": Pairwise(),
    "consensus": Consensus(),
    "truncation": Truncation(),
}


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [(2, 3), (0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_taken_state_trains_on_as_its_own_trainer_would(
    kind: str, steps: tuple[int, int], rule: str, threads: int
) -> None:
    """To the bit, also where one of the optimizers has taken no step yet."""

    def main(comm: Any) -> Any:
        with Tournament(comm, 2, selection=RULES[rule]) as tournament:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS[kind](net)
            trained(net, optimizers, comm.rank, steps[comm.rank])
            best = net_of(0)
            trained(best, OPTIMIZERS[kind](best), 0, steps[0])

            def evaluate(net: Any) -> float:
                return distance(net, best)

            outcome = tournament.step(net, evaluate, optimizers)
            assert outcome.sources == (0, 0)
            trained(net, optimizers, 5, 2)
            return snapshot(net, optimizers)

    with threads_of_torch(threads):
        reference = net_of(0)
        own = OPTIMIZERS[kind](reference)
        trained(reference, own, 0, steps[0])
        trained(reference, own, 5, 2)
        right = snapshot(reference, own)
        for found in run(2, main):
            assert is_equal(found, right)


def test_a_batch_norm_of_torch_rounds_by_its_number_of_threads() -> None:
    """So tests of bits set it: a thread of another number has other bits."""
    drawn = torch.rand(40, 6, 5, dtype=torch.float64)
    found = []
    for number in (1, 2):
        with threads_of_torch(number):
            norm = nn.BatchNorm1d(5, dtype=torch.float64)
            found.append(torch.stack([norm(each) for each in drawn]).detach())
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)
    assert not torch.equal(*found)


def test_tensors_that_a_taken_optimizer_has_are_its_own() -> None:
    """They are no parts of one message, whose memory would live with each of them."""

    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = net_of(comm.rank)
            (optimizer,) = OPTIMIZERS["adam"](net)
            trained(net, [optimizer], comm.rank, 1)
            before = [each.data_ptr() for each in net.parameters()]
            tournament.step(net, lambda _: 0.0, optimizer)
            assert [each.data_ptr() for each in net.parameters()] == before
            for state in optimizer.state.values():
                for tensor in state.values():
                    assert tensor.untyped_storage().nbytes() == tensor.nbytes

    run(2, main)


class Momentum32(torch.optim.Optimizer):
    """Keeps sums in float32 for parameters in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["sum"] = state.get("sum", 0) + each.detach().float() / 3
                each.data -= group["lr"] * state["sum"].to(each.dtype)


def test_sums_keep_the_type_that_their_optimizer_chose() -> None:
    def main(comm: Any) -> Any:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = nn.Linear(3, 2, dtype=torch.bfloat16)
            with torch.no_grad():
                net.weight.fill_(1.0 + comm.rank / 8)
                net.bias.zero_()
            optimizer = Momentum32(net.parameters())
            optimizer.step()
            before = snapshot(net, [optimizer])
            tournament.step(net, lambda _: 0.0, optimizer)
            assert optimizer.state[net.weight]["sum"].dtype == torch.float32
            return before, snapshot(net, [optimizer])

    (first, mine), (_, theirs) = run(2, main)
    assert is_equal(mine, first)
    assert is_equal(theirs, first)


class Nested(torch.optim.Optimizer):
    """Keeps sums in float32 in containers of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            sums = [each.detach().float() / number for number in range(3, 8)]
            self.state[each] = {
                "step": sums[0].sum(),
                "dict": {"inner": [sums[1], (sums[2], 3, None)]},
                "deque": deque([sums[3]], maxlen=2),
                "mean": (sums[4].double(), torch.arange(3)),
                "name": "a text",
            }


def test_types_within_containers_of_an_optimizer_are_kept() -> None:
    def main(comm: Any) -> Any:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = nn.Linear(3, 2, dtype=torch.bfloat16)
            with torch.no_grad():
                net.weight.fill_(1.0 + comm.rank / 8)
            optimizer = Nested(net.parameters())
            optimizer.step()
            before = snapshot(net, [optimizer])
            tournament.step(net, lambda _: 0.0, optimizer)
            queue = optimizer.state[net.weight]["deque"]
            assert (type(queue), queue.maxlen) == (deque, 2)
            return before, snapshot(net, [optimizer])

    (first, mine), (_, theirs) = run(2, main)
    for found in (mine, theirs):
        assert is_equal(_with_lists(found), _with_lists(first))


def _with_lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _with_lists(each) for key, each in state.items()}
    if isinstance(state, list | tuple | deque):
        return [_with_lists(each) for each in state]
    return state


def test_sums_stay_on_the_device_where_their_optimizer_keeps_them() -> None:
    """Such as the host, for parameters elsewhere."""
    there = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.SGD(there.parameters(), lr=1.0)
    for each in there.parameters():
        optimizer.state[each] = {"on": torch.ones(2), "in": [{"list": torch.ones(3)}]}
    structure, tensors = split_off([optimizer])
    load([optimizer], structure, tensors)
    for each in there.parameters():
        state = optimizer.state[each]
        assert is_equal(state, {"on": torch.ones(2), "in": [{"list": torch.ones(3)}]})


def test_without_optimizers_each_trainer_keeps_its_own() -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS["adam"](net)
            trained(net, optimizers, comm.rank, 1)
            before = snapshot(net, optimizers)
            tournament.step(net, lambda _: 0.0)
            after = snapshot(net, optimizers)
            assert is_equal(after[1], before[1])
            assert is_equal(after[0], before[0]) == (comm.rank == 0)

    run(2, main)


@pytest.mark.parametrize("rule", RULES)
def test_what_evaluate_does_to_a_model_is_undone(rule: str) -> None:
    """Such as statistics of a batch norm that it has left in training."""

    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=RULES[rule]) as tournament:
            net = net_of(comm.rank)
            before = snapshot(net)

            def evaluate(net: Any) -> float:
                net(torch.ones(4, 3, dtype=torch.float64))
                net.first.bias.data.zero_()
                return 1.0

            tournament.step(net, evaluate)
            right = snapshot(net_of(0)) if rule == "consensus" else before
            assert is_equal(snapshot(net), right)

    run(2, main)


@pytest.mark.parametrize("is_raising", [False, True])
def test_modes_that_evaluate_leaves_are_undone(is_raising: bool) -> None:
    """Each model is judged from the modes that its program has set."""

    def main(comm: Any) -> None:
        with Tournament(comm, 2) as tournament:
            net = net_of(comm.rank)
            net.norm.eval()  # a frozen norm in a model that trains
            seen = []

            def evaluate(net: Any) -> float:
                seen.append((net.training, net.norm.training, net.last.training))
                net.eval()
                net.norm.train()
                return raising() if is_raising and comm.rank == 1 else 0.0

            if is_raising:
                with pytest.raises((ZeroDivisionError, RefusedError)):
                    tournament.step(net, evaluate)
            else:
                tournament.step(net, evaluate)
            modes = net.training, net.norm.training, net.last.training
            assert {modes, *seen} == {(True, False, True)}

    run(2, main)


def test_buffers_that_are_not_saved_stay() -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = net_of(comm.rank)
            net.local.fill_(comm.rank)
            tournament.step(net, lambda _: 0.0)
            assert net.local.tolist() == [comm.rank] * 2

    run(2, main)


@pytest.mark.parametrize("tensors", [(), (torch.empty(0),)])
def test_a_model_without_elements(tensors: tuple[Any, ...]) -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2) as tournament:
            net = nn.ParameterList(tensors)
            assert tournament.step(net, lambda _: comm.rank).sources == (0, 1)

    run(2, main)


def test_packed_tensors_come_back() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = [torch.bool, torch.int8, torch.float64, torch.bfloat16, torch.complex64]
    kinds += [torch.float32, torch.complex128, torch.int16]
    tensors = [torch.tensor(7, dtype=torch.int64), torch.empty(0, 2)]
    for at, dtype in enumerate(kinds * 3):
        drawn = torch.rand(at % 4 + 1, 3, generator=generator) * 9
        tensors.append(drawn.to(dtype).t() if at % 2 else drawn.to(dtype))
    tensors.append(tensors[6].conj())
    slots = [slot_of(each) for each in tensors]
    buffers = pack(tensors)
    assert buffers["cpu"].nbytes == sum(each.nbytes for each in tensors)
    assert sum(each.nbytes for each in slots) == buffers["cpu"].nbytes
    assert is_equal(unpack(slots, buffers), tensors)


def test_schedulers_go_on_from_a_taken_step_size_or_replace_it() -> None:
    """Those that multiply it go on; those with a formula of the epoch replace it."""

    def main(comm: Any) -> tuple[float, ...]:
        found = []
        for make in (
            lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.5),
            lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda _: 0.5),
        ):
            with Tournament(comm, 2, selection=Consensus()) as tournament:
                net = net_of(comm.rank)
                optimizer = torch.optim.SGD(net.parameters(), lr=4.0 ** (comm.rank + 1))
                scheduler = make(optimizer)
                tournament.step(net, lambda _: 0.0, optimizer)
                optimizer.step()
                scheduler.step()
                found.append(optimizer.param_groups[0]["lr"])
        return tuple(found)

    assert run(2, main) == [(2.0, 2.0), (2.0, 8.0)]


# -- models on grids -------------------------------------------------------------------


def of_experts(grid: ProcessGrid) -> nn.Module:
    return MoE(4, 5, 6, grid=grid, dtype=torch.float64)


def of_tables(grid: ProcessGrid) -> nn.Module:
    tables = [
        EmbeddingTable("cut", 7, 4, sharding="row"),
        EmbeddingTable("whole", 5, 4, sharding="table"),
    ]
    return ShardedEmbeddingBags(tables, grid=grid, dtype=torch.float64)


GRIDS = {"experts": ("expert", of_experts), "tables": ("data", of_tables)}


@pytest.mark.parametrize("kind", GRIDS)
def test_a_model_on_a_grid_moves_part_by_part(kind: str) -> None:
    axis, make = GRIDS[kind]

    def main(comm: Any) -> Any:
        with (
            Tournament(comm, 2, selection=Consensus()) as tournament,
            ProcessGrid(tournament.trainer_comm, {axis: 0}) as grid,
        ):
            net = make(grid)
            with torch.no_grad():
                for at, each in enumerate(net.parameters()):
                    each.fill_(100 * comm.rank + at)
            before = snapshot(net)
            tournament.step(net, lambda _: -tournament.trainer)
            return before, snapshot(net)

    found = run(6, main)
    for rank, (_, after) in enumerate(found):
        assert is_equal(after, found[rank % 3][0])


@pytest.mark.parametrize("kind", GRIDS)
def test_a_model_on_a_grid_of_several_trainers_is_refused(kind: str) -> None:
    axis, make = GRIDS[kind]

    def main(comm: Any) -> None:
        with Tournament(comm, 2) as tournament, ProcessGrid(comm, {axis: 0}) as grid:
            net = make(grid)
            with pytest.raises(UsageError, match="ranks of several trainers"):
                tournament.step(net, lambda _: 0.0)

    run(2, main)
