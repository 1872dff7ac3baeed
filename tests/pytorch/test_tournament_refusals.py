# SPDX-License-Identifier: Apache-2.0
"""Arguments and models that do not fit are refused on all ranks."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from tournament_cases import (
    OPTIMIZERS,
    is_equal,
    net_of,
)

from commrt.errors import CommError, RefusedError, UsageError
from commrt.layers.tournament import (
    Consensus,
    Evolution,
    Pairwise,
    Perturb,
    Tournament,
    Truncation,
)
from commrt.local import run

Change = Callable[[Any, Any], Any]


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


def test_errors_of_communication_are_not_told_again() -> None:
    """They are raised as they are: the communicator is gone."""

    def main(comm: Any) -> None:
        tournament = Tournament(comm, 2)
        tournament.free()
        with pytest.raises(CommError):
            tournament.step(net_of(0), lambda _: 0.0)

    run(2, main)
