# SPDX-License-Identifier: Apache-2.0
"""Rounds of a tournament give each trainer the model that its rule names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tournament_cases import (
    OPTIMIZERS,
    is_equal,
    net_of,
    snapshot,
    trained,
)

from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.layers.tournament import (
    Consensus,
    Draws,
    Evolution,
    Judgement,
    Outcome,
    Pairwise,
    Perturb,
    Selection,
    Standing,
    Tournament,
    Truncation,
)
from commrt.local import run

RULES: dict[str, Selection] = {
    "pairwise": Pairwise(),
    "consensus": Consensus(),
    "truncation": Truncation(),
    "evolution": Evolution(),
}
GROUPS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 4)]
"""Ranks and trainers."""


def quality(net: Any, trainer: int) -> float:
    """Return a score that depends on the model and on who judges."""
    sign = -1.0 if trainer % 3 == 2 else 1.0  # one in three likes what others do not
    return sign * net.first.weight.sum().item()


def play(
    ranks: int, trainers: int, rounds: int = 1, kind: str = "adam", **more: Any
) -> list[tuple[list[Any], list[Outcome]]]:
    """Return each rank's states before and after each round, and the outcomes."""

    def main(comm: Any) -> tuple[list[Any], list[Outcome]]:
        with Tournament(comm, trainers, **more) as tournament:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS[kind](net)
            trained(net, optimizers, comm.rank, 1 + tournament.trainer)
            states, outcomes = [snapshot(net, optimizers)], []
            for _ in range(rounds):
                outcomes.append(
                    tournament.step(
                        net, lambda net: quality(net, tournament.trainer), optimizers
                    )
                )
                states.append(snapshot(net, optimizers))
        return states, outcomes

    return run(ranks, main)


def expected_scores(
    states: Sequence[Any], outcome: Outcome, width: int
) -> tuple[Judgement, ...]:
    """Return the scores of a round by models of torch alone."""

    def score(judge: int, of: int) -> float:
        found = []
        for place in range(width):
            net = net_of(0)
            net.load_state_dict(states[of * width + place][0])
            found.append(quality(net, judge))
        return sum(found) / width

    return tuple(
        Judgement(
            None if partner is None else score(judge, judge),
            None if partner in (None, judge) else score(judge, partner),
        )
        for judge, partner in enumerate(outcome.partners)
    )


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("ranks", "trainers"), GROUPS)
@pytest.mark.parametrize("rule", RULES)
def test_each_trainer_goes_on_with_the_model_of_its_rule(
    rule: str, ranks: int, trainers: int, mode: str
) -> None:
    found = play(ranks, trainers, 3, selection=RULES[rule], mode=mode, seed=7)
    width = ranks // trainers
    for number in range(3):
        before = [states[number] for states, _ in found]
        first = found[0][1][number]
        if trainers > 1:
            judged = expected_scores(before, first, width)
            assert first.judgements == judged
            standing = Standing(judged, mode)
            right = RULES[rule].sources(Draws(7, number), standing)
            assert first.sources == right
        for rank, (states, outcomes) in enumerate(found):
            outcome = outcomes[number]
            assert outcome.trainer == rank // width
            assert outcome.round_number == number
            assert (outcome.sources, outcome.judgements, outcome.partners) == (
                *(first.sources, first.judgements, first.partners),
            )
            source = outcome.source * width + rank % width
            assert is_equal(states[number + 1], before[source])


@pytest.mark.parametrize("rule", RULES)
def test_models_move_at_all(rule: str) -> None:
    found = play(4, 4, 4, selection=RULES[rule], seed=7)
    taken = sum(each.has_taken for _, outcomes in found for each in outcomes)
    assert 2 <= taken < 16


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_winners_state_is_the_same_on_both_sides(ranks: int) -> None:
    """To the bit, with scores that both exchange."""
    found = play(ranks, 4, selection=Consensus(), seed=3)
    width = ranks // 4
    sources = found[0][1][0].sources
    pairs = Draws(3, 0).pairs(4)
    assert [sources[one] for one, _ in pairs] == [sources[other] for _, other in pairs]
    for one, other in pairs:
        for place in range(width):
            states = (found[each * width + place][0][1] for each in (one, other))
            assert is_equal(*states)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_both_of_a_pair_may_take_the_others_model(mode: str) -> None:
    """Each judges on its own data, and may like what the other one does not."""

    def main(comm: Any) -> Outcome:
        with Tournament(comm, 2, mode=mode) as tournament:
            net = net_of(comm.rank)
            mine = net.first.weight.detach().clone()
            better = 0.0 if mode == "min" else 2.0

            def evaluate(net: Any) -> float:
                return 1.0 if torch.equal(net.first.weight, mine) else better

            return tournament.step(net, evaluate)

    assert [each.sources for each in run(2, main)] == [(1, 0)] * 2


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("sick", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_a_model_of_nan_loses(rule: str, sick: int, mode: str) -> None:
    """A partner of NaN takes no healthy model's place, and a sick one is healed."""
    selection = Evolution(2) if rule == "evolution" else RULES[rule]

    def main(comm: Any) -> Any:
        with Tournament(comm, 2, selection=selection, mode=mode) as tournament:
            net = net_of(comm.rank)
            if comm.rank == sick:
                net.first.weight.data.fill_(math.nan)
            for _ in range(2):  # evolution replaces trainers in turn
                found = tournament.step(net, lambda net: net.first.weight.sum().item())
            return snapshot(net), found

    healthy = snapshot(net_of(1 - sick))
    for state, _ in run(2, main):
        assert is_equal(state, healthy)


@pytest.mark.parametrize("rule", RULES)
def test_equal_scores_change_nothing(rule: str) -> None:
    """But for a consensus, whose pairs go on with the lower trainer's model."""

    def main(comm: Any) -> tuple[int, ...]:
        with Tournament(comm, 4, selection=RULES[rule], seed=1) as tournament:
            return tournament.step(net_of(comm.rank), lambda _: 1.5).sources

    sources = run(4, main)[0]
    if rule == "consensus":
        pairs = Draws(1, 0).pairs(4)
        assert all({sources[a], sources[b]} == {min(a, b)} for a, b in pairs)
    elif rule == "evolution":  # of equal ones the lowest of the sample
        assert sources == (min(Draws(1, 0).shuffled(4)[:2]), 1, 2, 3)
    else:
        assert sources == (0, 1, 2, 3)


@pytest.mark.parametrize("rule", ["pairwise", "consensus"])
def test_an_odd_trainer_idles(rule: str) -> None:
    def main(comm: Any) -> tuple[int, Outcome]:
        calls = []
        with Tournament(comm, 3, selection=RULES[rule], seed=2) as tournament:
            outcome = tournament.step(
                net_of(comm.rank), lambda _: float(calls.append(1) or comm.rank)
            )
        return len(calls), outcome

    found = run(3, main)
    idle = Draws(2, 0).shuffled(3)[2]
    assert [calls for calls, _ in found] == [0 if r == idle else 2 for r in range(3)]
    outcome = found[idle][1]
    assert (outcome.partner, outcome.own_score, outcome.has_taken) == (
        None,
        None,
        False,
    )


def test_one_trainer_evaluates_nothing_and_keeps_its_model() -> None:
    for ranks in (1, 3):
        for states, outcomes in play(ranks, 1):
            assert is_equal(states[1], states[0])
            assert outcomes[0].sources == (0,)
            assert outcomes[0].judgements == (Judgement(),)


def test_a_trainers_score_is_the_mean_of_its_ranks() -> None:
    def main(comm: Any) -> Outcome:
        with Tournament(comm, 2) as tournament:
            return tournament.step(net_of(comm.rank), lambda _: 10.0**comm.rank)

    assert run(6, main)[5].judgements == (Judgement(37, 37), Judgement(37e3, 37e3))


def test_equal_scores_of_a_trainers_ranks_keep_their_bits() -> None:
    for value in (0.1, 0.7, 1e300, math.inf):

        def main(comm: Any, value: float = value) -> Outcome:
            with Tournament(comm, 2) as tournament:
                return tournament.step(net_of(comm.rank), lambda _: value)

        judgements = run(6, main)[0].judgements
        assert judgements == (Judgement(value, value),) * 2


def test_a_taken_model_is_mutated_alike_on_a_trainers_ranks() -> None:
    mutate = Perturb(("lr", "weight_decay"), (0.5, 2.0))

    def main(comm: Any) -> tuple[float, ...]:
        found = []
        tournament = Tournament(
            comm, 4, selection=Truncation(2), mutate=mutate, seed=comm.size
        )
        with tournament:
            net = net_of(comm.rank)
            optimizer = torch.optim.AdamW(
                net.parameters(), lr=1.0 + tournament.trainer, weight_decay=3.0
            )
            for _ in range(6):
                # The model's own trainer tells how good it is: 0 is the best.
                outcome = tournament.step(net, lambda _: tournament.trainer, optimizer)
                group = optimizer.param_groups[0]
                found += [group["lr"], group["weight_decay"]]
            assert outcome.sources == (0, 1, 1, 0)
        return tuple(found)

    ranks = run(8, main)
    assert ranks[0::2] == ranks[1::2]
    assert [{*each[0::2]} for each in ranks[:4]] == [{1.0}] * 2 + [{2.0}] * 2
    third, last = ranks[4], ranks[6]
    assert {*third[0::2]} == {1.0, 4.0}
    assert {*last[0::2]} == {0.5, 2.0}
    assert {*last[1::2]} == {1.5, 6.0}
    assert [a == 0.5 for a in last[0::2]] != [a == 1.5 for a in last[1::2]]


def test_the_same_seed_plays_the_same_tournament() -> None:
    one, again, other = (
        [outcome.sources for outcome in play(4, 4, 4, seed=seed)[0][1]]
        for seed in (5, 5, 6)
    )
    assert one == again
    pairs = [[Draws(seed, number).pairs(4) for number in range(4)] for seed in (5, 6)]
    assert pairs[0] != pairs[1]
    assert other != one


def test_a_loaded_tournament_goes_on_with_the_same_choices() -> None:
    whole = [
        outcome for _, outcomes in play(4, 4, 5, seed=9)[:1] for outcome in outcomes
    ]

    def main(comm: Any) -> list[Outcome]:
        with Tournament(comm, 4, seed=9) as first:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS["adam"](net)
            trained(net, optimizers, comm.rank, 1 + first.trainer)

            def evaluate(net: Any) -> float:
                return quality(net, comm.rank)

            found = [first.step(net, evaluate, optimizers) for _ in range(2)]
            state = first.state_dict()
        assert state == {"trainers": 4, "seed": 9, "round_number": 2}
        with Tournament(comm, 4) as second:
            second.load_state_dict(state)
            found += [second.step(net, evaluate, optimizers) for _ in range(3)]
            assert second.round_number == 5
        return found

    assert run(4, main)[0] == whole


def test_trainers_are_equal_groups_of_neighbours() -> None:
    def main(comm: Any) -> tuple[int, int, tuple[int, ...]]:
        with Tournament(comm, 2) as tournament:
            assert tournament.num_trainers == 2
            assert "2 trainers by Pairwise()" in repr(tournament)
            inner = tournament.trainer_comm
            return tournament.trainer, inner.rank, (*core_of(inner).world_ranks,)

    assert run(4, main) == [
        *((0, rank, (0, 1)) for rank in range(2)),
        *((1, rank, (2, 3)) for rank in range(2)),
    ]


def test_data_parallel_trainers_stay_equal_inside() -> None:
    """Ranks of a trainer that have one model have one after every round."""

    def main(comm: Any) -> list[Any]:
        with Tournament(comm, 2, selection=Consensus()) as tournament:
            net = net_of(tournament.trainer)
            optimizers = OPTIMIZERS["adam"](net)
            for step in range(3):
                trained(net, optimizers, 10 * step + tournament.trainer, 2)
                tournament.step(
                    net, lambda net: net.last.weight.sum().item(), optimizers
                )
            return snapshot(net, optimizers)

    ranks = run(8, main)
    assert all(is_equal(each, ranks[0]) for each in ranks)


@dataclass(frozen=True)
class Chosen:
    """A rule of a program's own, that names partners and sources outright."""

    partners_of: tuple[int | None, ...]
    sources_of: tuple[int, ...]

    def check(self, num_trainers: int) -> None:
        """Accept all."""

    def partners(self, draws: Draws, num_trainers: int) -> tuple[int | None, ...]:
        return self.partners_of

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        return self.sources_of


@pytest.mark.parametrize(
    ("partners", "sources"),
    [
        ((1, 2, 3, 0), (1, 2, 3, 0)),
        ((1, 2, 3, 0), (3, 1, 0, 3)),
        ((2, 2, 2, None), (2, 2, 2, 2)),
        ((None, None, None, None), (3, 0, 1, 2)),
        ((0, 1, 2, 3), (1, 1, 1, 1)),
        ((1, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_a_rule_of_ones_own_may_send_models_anywhere(
    partners: tuple[int | None, ...], sources: tuple[int, ...]
) -> None:
    found = play(8, 4, selection=Chosen(partners, sources))
    for rank, (states, outcomes) in enumerate(found):
        source = 2 * sources[rank // 2] + rank % 2
        assert is_equal(states[1], found[source][0][0])
        judged = [
            (each.own is None, each.other is None) for each in outcomes[0].judgements
        ]
        assert judged == [(p is None, p in (None, t)) for t, p in enumerate(partners)]


@pytest.mark.parametrize(
    ("partners", "sources", "text"),
    [
        ((0,), (0, 1), r"partners\(\) of Chosen"),
        ((0, 2), (0, 1), "partners"),
        ((0, 1), (0, 1, 2), r"returned \(0, 1, 2\); expected .* each of 2"),
        ((0, 1), (0, None), "sources"),
        ((0, 1), (-1, 0), "sources"),
    ],
)
def test_a_rule_that_names_no_trainers_is_told(
    partners: Any, sources: Any, text: str
) -> None:
    def main(comm: Any) -> None:
        with Tournament(comm, 2, selection=Chosen(partners, sources)) as tournament:
            net = net_of(comm.rank)
            before = snapshot(net)
            with pytest.raises(UsageError, match=text):
                tournament.step(net, lambda _: 0.0)
            assert is_equal(snapshot(net), before)

    run(2, main)


def test_pairs_are_drawn_evenly() -> None:
    """And are those of earlier versions: runs that are saved go on with them."""
    assert Draws(0, 0).shuffled(6) == [0, 1, 5, 3, 4, 2]
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(1500):
        pairs = Draws(4, number).pairs(5)
        members = [each for pair in pairs for each in pair]
        assert len({*members}) == len(members) == 4
        seen.update(tuple(sorted(pair)) for pair in pairs)
    assert len(seen) == 10
    assert all(230 <= times <= 370 for times in seen.values())
