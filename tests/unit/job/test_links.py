# SPDX-License-Identifier: Apache-2.0
"""Link classes: every pair is measured once, the worst pair decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from commrt.job.links import agree_link_class, rounds_of, spins_for
from commrt.select.facts import CommFacts


@dataclass
class FakeWorld:
    """What agree_link_class asks of a world."""

    nodes: list[list[int]]
    cores: int
    links: dict[tuple[int, int], Any] = field(default_factory=dict)

    def node_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)


@pytest.mark.parametrize("number", range(1, 12))
def test_every_pair_meets_once_and_rounds_are_disjoint(number: int) -> None:
    members = list(range(10, 10 + number))
    rounds = list(rounds_of(members))
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == number * (number - 1) // 2
    assert all(a < b for a, b in met)
    for pairs in rounds:
        flat = [rank for pair in pairs for rank in pair]
        assert len(flat) == len(set(flat))


def test_the_worst_pair_decides() -> None:
    links = {(0, 1): "near", (0, 2): "far", (1, 2): "near"}
    world: Any = FakeWorld([[0, 1, 2]], 8, links)
    assert agree_link_class(world, [0, 1, 2], 3) == "far"
    assert agree_link_class(world, [2, 1], 2) == "near"
    assert agree_link_class(world, [2], 1) == "single"


def test_nodes_and_crowds_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = FakeWorld([[0, 1], [2, 3]], 1, {(0, 1): "near", (2, 3): "near"})
    assert agree_link_class(world, [0, 2], 1) == "network"
    assert agree_link_class(world, [0, 1], 2) == "oversubscribed"
    monkeypatch.setenv("COMMRT_LINK_CLASS", "far")
    assert agree_link_class(world, [0, 1], 2) == "far"
    assert agree_link_class(world, [0, 2], 1) == "network"


def test_crowded_ranks_yield_soon() -> None:
    crowded = CommFacts(4, 1, 4, 2, "oversubscribed")
    some_of_a_crowd = CommFacts(2, 1, 2, 2, "oversubscribed")
    roomy = CommFacts(4, 1, 4, 8, "near")
    assert (
        spins_for(crowded) == spins_for(some_of_a_crowd) < 4 < 2000 < spins_for(roomy)
    )
    assert spins_for(roomy, others_need_core=True) == spins_for(crowded)
