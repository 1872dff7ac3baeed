# SPDX-License-Identifier: Apache-2.0
"""All of a state moves, to the bit; a fault of one rank changes no state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from tournament_cases import (
    OPTIMIZERS,
    Net,
    is_close,
    is_equal,
    net_of,
    snapshot,
    trained,
)

from commrt.errors import CommError, RefusedError, UsageError
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
from commrt.layers.tournament.packing import nbytes_of, pack, slot_of, unpack
from commrt.local import run

RULES: dict[str, Selection] = {
    "pairwise": Pairwise(),
    "consensus": Consensus(),
    "truncation": Truncation(),
}
Change = Callable[[Any, Any], Any]


def distance(net: Any, best: Any) -> float:
    """Return a score whose best model is ``best``; a tensor with a gradient is one."""
    found: Any = (net.first.weight - best.first.weight).abs().sum()
    return found


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [(2, 3), (0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_taken_state_trains_on_as_its_own_trainer_would(
    kind: str, steps: tuple[int, int], rule: str
) -> None:
    """Also where one of the optimizers has taken no step yet."""
    reference = net_of(0)
    own = OPTIMIZERS[kind](reference)
    trained(reference, own, 0, steps[0])
    trained(reference, own, 5, 2)
    right = snapshot(reference, own)

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

    for found in run(2, main):
        assert is_close(found, right)


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
    assert nbytes_of(slots, "cpu") == buffers["cpu"].nbytes
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
                kind = type("SGD", (Unloadable,), {"__qualname__": "SGD"})
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


def other_types(net: Any, opt: Any) -> Any:
    return net.double(), opt


OTHERS: dict[str, Change] = {
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


def test_errors_of_communication_are_not_told_again() -> None:
    """They are raised as they are: the communicator is gone."""

    def main(comm: Any) -> None:
        tournament = Tournament(comm, 2)
        tournament.free()
        with pytest.raises(CommError):
            tournament.step(net_of(0), lambda _: 0.0)

    run(2, main)
