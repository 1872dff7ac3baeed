# SPDX-License-Identifier: Apache-2.0
"""All of a state moves, to the bit; a fault of one rank changes no state."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tournament_cases import (
    OPTIMIZERS,
    Net,
    is_equal,
    net_of,
    snapshot,
    threads_of_torch,
    trained,
)

from commrt.errors import CommError, RefusedError, RevokedError, UsageError
from commrt.layers.embeddings import EmbeddingTable, ShardedEmbeddingBags
from commrt.layers.experts import MoE
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tournament import (
    Consensus,
    Evolution,
    Pairwise,
    Perturb,
    Selection,
    Tournament,
    Truncation,
)
from commrt.layers.tournament import tournament as tournament_module
from commrt.layers.tournament.optimizer_state import load, split_off
from commrt.layers.tournament.packing import pack, slot_of, unpack
from commrt.layers.tournament.transfer import Transfer
from commrt.local import run

RULES: dict[str, Selection] = {
    "pairwise": Pairwise(),
    "consensus": Consensus(),
    "truncation": Truncation(),
}
Change = Callable[[Any, Any], Any]
LIMIT_S = 20.0
"""Of runs whose ranks would wait for each other if an error were not told."""


def distance(net: Any, best: Any) -> float:
    """Return a score whose best model is ``best``; a tensor with a gradient is one."""
    found: Any = (net.first.weight - best.first.weight).abs().sum()
    return found


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
    found = []
    for number in (1, 2):
        with threads_of_torch(number):
            net = net_of(0)
            trained(net, OPTIMIZERS["sgd"](net), 0, 2)
            found.append(net.norm.running_mean)
    assert torch.allclose(*found, rtol=1e-12)
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
    optimizer = torch.optim.Adam(there.parameters())
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


# -- faults ----------------------------------------------------------------------------


def raising(*_: Any) -> Any:
    raise ZeroDivisionError("of the test")


def second_call_raises() -> Any:
    calls: list[int] = []

    def evaluate(_: Any) -> float:
        calls.append(1)
        return 0.0 if len(calls) == 1 else raising()

    return evaluate


class Unpicklable(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "more": lambda: None}


class Unloadable(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        raising()


def holding(tensor: Any) -> nn.Module:
    return nn.ParameterList([nn.Parameter(tensor)])


def holding_a_buffer(tensor: Any) -> nn.Module:
    made = nn.Module()
    made.register_buffer("kept", tensor)
    return made


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(1, 1)


class WithExtraState(Net):
    def get_extra_state(self) -> Any:
        return 3


FAULTS: dict[str, tuple[Change, type[Exception], str]] = {
    "evaluate raises": (
        lambda net, opt: (net, raising, opt),
        *(ZeroDivisionError, "of the test"),
    ),
    "evaluate raises for the partner's model": (
        lambda net, opt: (net, second_call_raises(), opt),
        *(ZeroDivisionError, "of the test"),
    ),
    "evaluate returns nothing": (
        lambda net, opt: (net, lambda _: None, opt),
        *(UsageError, "evaluate returned None; expected one number"),
    ),
    "evaluate returns a flag": (
        lambda net, opt: (net, lambda _: True, opt),
        *(UsageError, "evaluate returned True"),
    ),
    "evaluate returns two numbers": (
        lambda net, opt: (net, lambda _: torch.ones(2), opt),
        *(UsageError, "expected one number"),
    ),
    "no evaluate": (
        lambda net, opt: (net, 3.0, opt),
        *(UsageError, "must be callable"),
    ),
    "no model": (
        lambda net, opt: (None, lambda _: 0.0, opt),
        *(UsageError, "must be a module"),
    ),
    "no optimizer": (
        lambda net, opt: (net, lambda _: 0.0, [opt, 3]),
        *(UsageError, "must be an optimizer"),
    ),
    "another model's optimizer": (
        lambda net, opt: (
            *(net, lambda _: 0.0),
            torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0),
        ),
        *(UsageError, "not the model's"),
    ),
    "an optimizer's state that cannot be pickled": (
        lambda net, opt: (net, lambda _: 0.0, Unpicklable(net.parameters(), lr=1.0)),
        *(UsageError, "cannot be pickled"),
    ),
    "extra state": (
        lambda net, opt: (WithExtraState(), lambda _: 0.0, ()),
        *(UsageError, "neither a parameter nor a buffer"),
    ),
    "a model on the meta device": (
        lambda net, opt: (nn.Linear(1, 1, device="meta"), lambda _: 0.0, ()),
        *(UsageError, "meta device"),
    ),
    "a parameter that is expanded": (
        lambda net, opt: (holding(torch.ones(1).expand(3)), lambda _: 0.0, ()),
        *(UsageError, "elements share memory, as expand"),
    ),
    "a buffer that is expanded": (
        lambda net, opt: (holding_a_buffer(torch.ones(2, 1).expand(2, 3)), min, ()),
        *(UsageError, "elements share memory"),
    ),
    "a parameter that overlaps itself": (
        lambda net, opt: (holding(torch.ones(4).as_strided((3, 2), (1, 1))), min, ()),
        *(UsageError, r"strides \(1, 1\) for shape \(3, 2\)"),
    ),
    "a parameter made for inference": (
        lambda net, opt: (of_inference(), lambda _: 0.0, ()),
        *(UsageError, "inference_mode"),
    ),
    "a model without shapes": (
        lambda net, opt: (nn.LazyLinear(1), lambda _: 0.0, ()),
        *(UsageError, "no shape yet"),
    ),
}


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_leaves_all_states_as_they_were(
    name: str, rank: int
) -> None:
    change, kind, text = FAULTS[name]

    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = net_of(comm.rank)
            (optimizer,) = OPTIMIZERS["adam"](net)
            trained(net, [optimizer], comm.rank, 1)
            before = snapshot(net, [optimizer])
            call = net, lambda net: 1.0, optimizer
            if comm.rank == rank:
                with pytest.raises(kind, match=text):
                    tournament.step(*change(net, optimizer))
            else:
                with pytest.raises(RefusedError, match=f"rank {rank} raised"):
                    tournament.step(*call)
            assert is_equal(snapshot(net, [optimizer]), before)
            assert tournament.step(*call).round_number == 0

    run(4, main)


@pytest.mark.parametrize("rule", [Consensus(), Truncation()])
def test_a_state_that_one_rank_cannot_take_is_taken_by_none(rule: Selection) -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=rule) as tournament:
            net = net_of(comm.rank)
            kind = torch.optim.SGD
            if comm.rank == 1:
                kind = type("SGD", (Unloadable,), {"__module__": kind.__module__})
            optimizer = kind(net.parameters(), lr=1.0)
            before = snapshot(net)
            expected = ZeroDivisionError if comm.rank == 1 else RefusedError
            with pytest.raises(expected):
                tournament.step(net, lambda net: distance(net, net_of(0)), optimizer)
            assert comm.rank == 1 or is_equal(snapshot(net), before)
            assert tournament.round_number == 0

    run(2, main)


def test_a_mutation_that_fails_on_one_trainer_is_no_round() -> None:
    def main(comm: Any) -> None:
        rule, mutate = Truncation(), Perturb(("momentun",))
        with Tournament(comm, 4, selection=rule, mutate=mutate) as tournament:
            net = net_of(comm.rank)
            (optimizer,) = OPTIMIZERS["momentum"](net)
            trained(net, [optimizer], comm.rank, 1)
            before = snapshot(net, [optimizer])
            expected = UsageError if comm.rank == 3 else RefusedError
            with pytest.raises(expected, match=r"momentun|rank 3"):
                tournament.step(net, lambda _: comm.rank, optimizer)
            assert is_equal(snapshot(net, [optimizer]), before)

    run(4, main)


class MayFail(Consensus):
    """A rule of which a method raises on one rank of two, or names others there."""

    def __init__(self, rank: int, faults: dict[str, Any]) -> None:
        self.rank, self.faults = rank, faults

    def __repr__(self) -> str:
        return "MayFail()"

    def of(self, name: str, right: Any) -> Any:
        fault = self.faults.get(name) if self.rank == 1 else None
        return fault() if callable(fault) else fault or right

    def partners(self, *args: Any) -> Any:
        return self.of("partners", super().partners(*args))

    def sources(self, *args: Any) -> Any:
        return self.of("sources", super().sources(*args))


@pytest.mark.parametrize("method", ["partners", "sources"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (raising, ZeroDivisionError),
        (lambda: None, TypeError),
        (lambda: (0,), UsageError),
        (lambda: (0, "1"), UsageError),
        (lambda: (0, 1.0), UsageError),
    ],
)
def test_a_rule_that_fails_on_one_rank_is_told_on_all(
    method: str, fault: Any, kind: type[Exception]
) -> None:
    def main(comm: Any) -> None:
        rule = MayFail(comm.rank, {method: fault})
        with Tournament(comm, 2, selection=rule) as tournament:
            net = net_of(comm.rank)
            (optimizer,) = OPTIMIZERS["momentum"](net)
            trained(net, [optimizer], comm.rank, 1)
            before = snapshot(net, [optimizer])
            expected = kind if comm.rank == 1 else RefusedError
            with pytest.raises(expected):
                tournament.step(net, lambda _: 1.0, optimizer)
            assert is_equal(snapshot(net, [optimizer]), before)
            rule.faults.clear()
            assert tournament.step(net, lambda _: 1.0, optimizer).sources == (0, 0)

    run(2, main, timeout_s=LIMIT_S)


@pytest.mark.parametrize("method", ["partners", "sources"])
def test_a_rule_that_differs_between_ranks_is_refused_on_all(method: str) -> None:
    def main(comm: Any) -> None:
        rule = MayFail(comm.rank, {method: (0, 1)})
        with Tournament(comm, 2, selection=rule) as tournament:
            net = net_of(comm.rank)
            text = f"{method}.* of the rule names of rank 1 differ"
            with pytest.raises(UsageError, match=text):
                tournament.step(net, lambda _: 1.0)
            assert is_equal(snapshot(net), snapshot(net_of(comm.rank)))

    run(2, main, timeout_s=LIMIT_S)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("at", ["room", "arrival"])
@pytest.mark.parametrize("rule", [Consensus(), Truncation()])
def test_a_lack_of_memory_on_one_rank_is_told_on_all(
    rule: Selection, at: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first transfer of a round, and of the second."""

    class Scarce(Transfer):
        made = 0

        def __init__(self, comm: Any, *args: Any) -> None:
            self.is_short = False
            if comm.rank == 3:
                Scarce.made += 1
                self.is_short = Scarce.made == number
            self.check("room")
            super().__init__(comm, *args)

        def check(self, place: str) -> None:
            if self.is_short and at == place:
                raise MemoryError("of the test")

        def wait(self) -> Any:
            found = super().wait()
            self.check("arrival")
            return found

    monkeypatch.setattr(tournament_module, "Transfer", Scarce)

    def main(comm: Any) -> None:
        with Tournament(comm, 4, selection=rule) as tournament:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS["adam"](net)
            trained(net, optimizers, comm.rank, 1)
            before = snapshot(net, optimizers)
            expected = MemoryError if comm.rank == 3 else RefusedError
            with pytest.raises(expected, match=r"of the test|rank 3 raised"):
                tournament.step(net, lambda _: comm.rank, optimizers)
            assert is_equal(snapshot(net, optimizers), before)
            tournament.step(net, lambda _: comm.rank, optimizers)

    run(4, main, timeout_s=LIMIT_S)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", ["trainer_comm", "grid"])
def test_an_error_of_evaluate_ends_collectives_of_its_trainer(
    kind: str, call: int
) -> None:
    """All ranks hear of it, also those that wait in one for the rank that failed."""

    def main(comm: Any) -> Any:
        tournament = Tournament(comm, 2, selection=Consensus())
        inner = tournament.trainer_comm
        inner.timeout_s = comm.timeout_s = LIMIT_S / 2
        grid = ProcessGrid(inner, {"data": 0})
        used = inner if kind == "trainer_comm" else grid["data"]
        net = net_of(comm.rank)
        calls = []

        def evaluate(_: Any) -> float:
            calls.append(1)
            if comm.rank == 3 and len(calls) == call:
                raising()
            total = np.ones(1)
            used.allreduce(total)
            return float(total[0])

        expected = ZeroDivisionError if comm.rank == 3 else RefusedError
        with pytest.raises(expected, match=r"of the test|rank 3 raised.*has ended"):
            tournament.step(net, evaluate)
        assert is_equal(snapshot(net), snapshot(net_of(comm.rank)))
        if comm.rank >= 2:
            with pytest.raises(CommError, match="evaluate raised ZeroDivisionError"):
                used.allreduce(np.ones(1))
        with Tournament(comm, 2, selection=Consensus()) as again:
            again.load_state_dict(tournament.state_dict())
            sources = again.step(net, lambda _: 1.0).sources
        grid.free()
        tournament.free()
        return sources

    assert run(4, main, timeout_s=2 * LIMIT_S) == [(0, 0)] * 4


def test_an_interrupt_on_one_rank_ends_the_round_on_all() -> None:
    def main(comm: Any) -> None:
        tournament = Tournament(comm, 2)
        net = net_of(comm.rank)

        def evaluate(_: Any) -> float:
            if comm.rank == 1:
                raise KeyboardInterrupt
            return 1.0

        expected = KeyboardInterrupt if comm.rank == 1 else RevokedError
        with pytest.raises(expected):
            tournament.step(net, evaluate)
        assert is_equal(snapshot(net), snapshot(net_of(comm.rank)))
        tournament.free()

    run(2, main, timeout_s=LIMIT_S)


def test_a_mutation_without_an_optimizer_is_refused() -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, comm.size, mutate=Perturb()) as tournament:
            with pytest.raises(UsageError, match="no optimizer to change"):
                tournament.step(net_of(comm.rank), lambda _: 0.0)

    for ranks in (1, 2):
        run(ranks, main)


def other_types(net: Any, opt: Any) -> Any:
    return net.double(), opt


def of_another_module(net: Any, opt: Any) -> Any:
    """Return an optimizer of a class that has the name of torch's, and is another."""
    kind = type("Adam", (torch.optim.Adam,), {"__module__": "elsewhere"})
    return net, kind(net.parameters(), 0.01, amsgrad=True)


OTHERS: dict[str, Change] = {
    "module of the optimizer": of_another_module,
    "types": other_types,
    "names": lambda net, opt: (nn.ModuleDict({"inner": net}), opt),
    "no optimizer": lambda net, opt: (net, ()),
    "kind of optimizer": lambda net, opt: (net, OPTIMIZERS["sgd"](net)),
    "groups": lambda net, opt: (net, OPTIMIZERS["groups"](net)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_differ_are_refused_on_all_ranks(name: str) -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2) as tournament:
            net: Any = net_of(comm.rank)
            optimizers: Any = OPTIMIZERS["adam"](net)
            if comm.rank == 3:
                net, optimizers = OTHERS[name](net, optimizers)
            with pytest.raises(UsageError, match="rank 3 differ from those of rank 1"):
                tournament.step(net, lambda _: 0.0, optimizers)

    run(4, main)


def test_ranks_of_a_trainer_may_have_different_parts() -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = nn.Linear(1 + comm.rank % 2, 3)
            tournament.step(net, lambda _: 0.0)

    run(4, main)


def test_rounds_or_seeds_that_differ_are_refused_on_all_ranks() -> None:
    def main(comm: Any) -> None:
        for key in ("seed", "round_number"):
            with Tournament(comm, 2) as tournament:
                state = tournament.state_dict()
                if comm.rank == 1:
                    tournament.load_state_dict({**state, key: 3})
                with pytest.raises(UsageError, match="seed or round of rank 1 differ"):
                    tournament.step(net_of(0), lambda _: 0.0)

    run(2, main)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a rule's class": ({"selection": Pairwise}, "must be a rule"),
    "a rule's name": ({"selection": "pairwise"}, "must be a rule"),
    "too many replaced": ({"selection": Truncation(2)}, "from 0 to 1"),
    "half a trainer": ({"selection": Truncation(0.5)}, "must be an integer"),
    "no sample": ({"selection": Evolution(0)}, "from 1 to 2"),
    "too large a sample": ({"selection": Evolution(3)}, "from 1 to 2"),
    "mode": ({"mode": "least"}, '"min" or "max"'),
    "seed": ({"seed": 1.5}, "must be an integer"),
    "mutation": ({"mutate": 0.8}, "must be callable"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_a_tournament_are_told_on_all_ranks(name: str) -> None:
    arguments, text = WRONG[name]

    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match=text):
            Tournament(comm, 2, **arguments)
        one_wrong = arguments if comm.rank == 1 else {}
        expected = UsageError if comm.rank == 1 else RefusedError
        with pytest.raises(expected, match=f"{text}|rank 1 raised"):
            Tournament(comm, 2, **one_wrong)
        with pytest.raises(UsageError, match="arguments of rank 1 differ"):
            Tournament(comm, 2, seed=comm.rank)
        Tournament(comm, 2).free()

    run(2, main)


def raised(optimizer: Any, generator: Any) -> None:
    """Stands for a mutation of a program."""


def lowered(optimizer: Any, generator: Any, factor: float = 1.0) -> None:
    """Stands for another one."""


class Unnamed:
    """A mutation whose ``repr`` has an address in memory."""

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Perturb(), None),
        (Perturb(), Perturb(factors=(0.5,))),
        (Perturb(), Perturb(names=("lr", "momentum"))),
        (raised, lowered),
        (partial(lowered, factor=2.0), partial(lowered, factor=3.0)),
        (partial(lowered, factor=2.0), partial(raised)),
        (Unnamed(), raised),
    ],
)
def test_mutations_that_differ_are_refused_on_all_ranks(one: Any, other: Any) -> None:
    def main(comm: Any) -> None:
        mutate = other if comm.rank == 1 else one
        with pytest.raises(UsageError, match="arguments of rank 1 differ"):
            Tournament(comm, 2, mutate=mutate)

    run(2, main)


def test_mutations_of_one_kind_are_taken() -> None:
    """Objects that differ between ranks are no settings, such as a communicator."""

    def main(comm: Any) -> None:
        for mutate in (
            Perturb(("lr",), (0.5, 2.0)),
            lambda *_: comm.rank,
            partial(lowered, factor=2.0),
            partial(lowered, comm),
            Unnamed(),
            Unnamed().__call__,
        ):
            Tournament(comm, 2, mutate=mutate).free()

    run(2, main)


def test_a_tournament_needs_a_communicator() -> None:
    with pytest.raises(UsageError, match="must be a communicator"):
        Tournament(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state",
    [
        *(None, {}, {"seed": 0}),
        {"trainers": 1, "seed": 0, "round_number": 0},
        {"trainers": 2, "seed": 0, "round_number": -1},
        {"trainers": 2, "seed": None, "round_number": 0},
    ],
)
def test_states_that_are_no_tournaments_are_refused(state: Any) -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, seed=4) as tournament:
            with pytest.raises(UsageError, match="load_state_dict"):
                tournament.load_state_dict(state)
            assert tournament.state_dict()["seed"] == 4

    run(2, main)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"names": "lr"}, {"names": (1,)}, {"factors": ()}),
        *({"factors": (0.0,)}, {"factors": (math.nan,)}, {"factors": [0.5]}),
    ],
)
def test_wrong_perturbations_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Perturb"):
        Perturb(**wrong)


def test_a_perturbation_draws_one_factor_for_all_groups() -> None:
    net = net_of(0)
    (optimizer,) = OPTIMIZERS["groups"](net)
    Perturb(factors=(0.5, 2.0))(optimizer, random.Random(1))
    first, second = (float(group["lr"]) for group in optimizer.param_groups)
    assert first in (0.05, 0.2)
    assert second == pytest.approx(first / 5)


@pytest.mark.parametrize("factor", [2, 0.5])
@pytest.mark.parametrize("name", ["betas", "amsgrad", "foreach", "tensor"])
def test_a_perturbation_of_what_is_no_number_is_refused(
    name: str, factor: float
) -> None:
    """And the numbers that are named before it stay as they are."""
    optimizer = torch.optim.Adam(net_of(0).parameters())
    optimizer.param_groups[0]["tensor"] = torch.ones(2)
    before = copy.deepcopy(optimizer.param_groups[0])
    mutate = Perturb(("lr", name), (factor,))
    with pytest.raises(UsageError, match=f"{name} of Adam is .* expected a number"):
        mutate(optimizer, random.Random(1))
    assert is_equal(optimizer.param_groups[0], before)


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


def test_errors_of_communication_are_not_told_again() -> None:
    """They are raised as they are: the communicator is gone."""

    def main(comm: Any) -> None:
        tournament = Tournament(comm, 2)
        tournament.free()
        with pytest.raises(CommError):
            tournament.step(net_of(0), lambda _: 0.0)

    run(2, main)
