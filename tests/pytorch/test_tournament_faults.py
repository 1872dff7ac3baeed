# SPDX-License-Identifier: Apache-2.0
"""A fault of one rank is told to all ranks, and changes no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tournament_cases import (
    OPTIMIZERS,
    Net,
    distance,
    is_equal,
    net_of,
    raising,
    snapshot,
    trained,
)

from commrt.errors import RefusedError, RevokedError, UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tournament import (
    Consensus,
    Perturb,
    Selection,
    Tournament,
    Truncation,
)
from commrt.layers.tournament import tournament as tournament_module
from commrt.layers.tournament.transfer import Transfer
from commrt.local import run

Change = Callable[[Any, Any], Any]
LIMIT_S = 240.0
"""Of runs whose ranks would wait for each other if an error were not told."""


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
            text = rf"results of {method}\(\) of rank 1 differ"
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


@pytest.mark.parametrize(
    "fault", ["first raises", "second raises", "no number", "no memory"]
)
@pytest.mark.parametrize("kind", ["trainer_comm", "grid"])
def test_an_error_beside_evaluate_ends_collectives_of_its_trainer(
    kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks hear of it, also those that wait in one for the rank that failed."""

    class Scarce(Transfer):
        def __init__(self, comm: Any, *args: Any) -> None:
            super().__init__(comm, *args)
            self.is_short = comm.rank == 3 and fault == "no memory"

        def wait(self) -> Any:
            found = super().wait()
            return raising() if self.is_short else found

    monkeypatch.setattr(tournament_module, "Transfer", Scarce)

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
            faults = {1: "first raises", 2: "second raises"}
            if comm.rank == 3 and fault == faults[len(calls)]:
                raising()
            total = np.ones(1)
            used.allreduce(total)
            is_bad = comm.rank == 3 and fault == "no number"
            return None if is_bad else float(total[0])

        own = (ZeroDivisionError, UsageError)
        expected = own if comm.rank == 3 else RefusedError
        text = r"of the test|returned None|rank 3 raised.*has ended"
        with pytest.raises(expected, match=text):
            tournament.step(net, evaluate)
        assert is_equal(snapshot(net), snapshot(net_of(comm.rank)))
        if comm.rank >= 2:
            with pytest.raises(RevokedError, match=r"on rank 3 .* were evaluated"):
                used.allreduce(np.ones(1))
        monkeypatch.setattr(tournament_module, "Transfer", Transfer)
        with Tournament(comm, 2, selection=Consensus()) as again:
            again.load_state_dict(tournament.state_dict())
            sources = again.step(net, lambda _: 1.0).sources
        grid.free()
        tournament.free()
        return sources

    assert run(4, main, timeout_s=2 * LIMIT_S) == [(0, 0)] * 4


class Interrupted(nn.Linear):
    """A module whose state cannot be asked for."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["model", "evaluate", "rule"])
def test_an_interrupt_on_one_rank_ends_the_round_on_all(place: str) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    def main(comm: Any) -> None:
        is_here = comm.rank == 1
        faults = {"sources": interrupt} if place == "rule" else {}
        tournament = Tournament(comm, 2, selection=MayFail(comm.rank, faults))
        net: Any = nn.Linear(2, 2)
        if place == "model" and is_here:
            net = Interrupted(2, 2)
        before = net.weight.detach().clone()
        is_judge = place == "evaluate" and is_here
        evaluate = interrupt if is_judge else lambda _: 1.0
        with pytest.raises(KeyboardInterrupt if is_here else RevokedError):
            tournament.step(net, evaluate)
        assert torch.equal(net.weight, before)
        tournament.free()

    run(2, main, timeout_s=LIMIT_S)


def test_a_mutation_without_an_optimizer_is_refused() -> None:
    def main(comm: Any) -> None:
        net = net_of(comm.rank)
        with Tournament(comm, comm.size, mutate=Perturb()) as tournament:
            with pytest.raises(UsageError, match="no optimizer to change"):
                tournament.step(net, lambda _: 0.0)
            assert tournament.round_number == 0

    for ranks in (1, 2):
        run(ranks, main)
