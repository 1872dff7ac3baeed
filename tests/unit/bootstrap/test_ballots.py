# SPDX-License-Identifier: Apache-2.0
"""Votes on who goes on, with messages that arrive in any order and ranks that die."""

from __future__ import annotations

import random
from collections import deque

import pytest

from commrt.bootstrap.ballots import Ballot, Vote, Voter
from commrt.bootstrap.survivors import Decision


class Ranks:
    """Ranks of one process that vote; messages of a pair arrive in order.

    A rank that dies takes with it any of its messages that are on their way. The others
    see its death at any time after it, each at another one.
    """

    def __init__(self, members: list[int], drawn: random.Random) -> None:
        self.drawn = drawn
        self.living = set(members)
        self.seen: dict[int, set[int]] = {rank: set() for rank in members}
        self.on_the_way: dict[tuple[int, int], deque[tuple[Vote, bytes]]] = {}
        self.ballots = {rank: Ballot() for rank in members}
        self.decided: dict[int, Decision] = {}
        self.voters = {rank: self._voter(members, rank) for rank in members}

    def _voter(self, members: list[int], rank: int) -> Voter:
        def post(vote: Vote, body: bytes, to: int) -> None:
            self.on_the_way.setdefault((rank, to), deque()).append((vote, body))

        def gone(which: int) -> str:
            return "it was shot" if which in self.seen[rank] else ""

        return Voter(self.ballots[rank], members, rank, post, gone)

    def kill(self, rank: int) -> None:
        """End a rank; some of its last messages are lost."""
        self.living.discard(rank)
        for (source, _), queue in self.on_the_way.items():
            if source == rank:
                for _ in range(self.drawn.randint(0, len(queue))):
                    queue.pop()

    def do_anything(self) -> None:
        """Deliver a message, let a death be seen, or let a rank make a step."""
        queues = [at for at, queue in self.on_the_way.items() if queue]
        unseen = [
            (rank, dead)
            for rank in self.living
            for dead in {*self.ballots} - self.living - self.seen[rank]
        ]
        waiting = [rank for rank in self.living if rank not in self.decided]
        choice = self.drawn.choice(["deliver"] * len(queues) + ["see"] + ["step"] * 3)
        if choice == "deliver":
            source, to = self.drawn.choice(queues)
            self.ballots[to].take(*self.on_the_way[source, to].popleft())
        elif choice == "see" and unseen:
            rank, dead = self.drawn.choice(unseen)
            self.seen[rank].add(dead)
        elif choice == "step" and waiting:
            rank = self.drawn.choice(waiting)
            if self.voters[rank].step():
                decision = self.voters[rank].decision
                assert decision is not None
                self.decided[rank] = decision


@pytest.mark.parametrize("number", range(300))
def test_all_that_live_decide_alike(number: int, seed: int) -> None:
    drawn = random.Random(f"{seed}/{number}")
    size = drawn.randint(1, 7)
    members = drawn.sample(range(20), size)
    ranks = Ranks(members, drawn)
    dies = drawn.sample(members, drawn.randint(0, size - 1))
    late = [rank for rank in members if drawn.random() < 0.5]
    for rank in members:
        if rank not in late:
            ranks.voters[rank].come(bytes([rank]))
    steps = 0
    while not ranks.living <= ranks.decided.keys():
        steps += 1
        assert steps < 100_000
        if late and drawn.random() < 0.2:
            rank = late.pop()
            if rank in ranks.living:
                ranks.voters[rank].come(bytes([rank]))
        if dies and drawn.random() < 0.05:
            ranks.kill(dies.pop())
        ranks.do_anything()
    found = {ranks.decided[rank].text() for rank in ranks.living}
    assert len(found) == 1
    decision = Decision.of(found.pop().encode())
    assert ranks.living <= decision.said.keys()
    assert decision.said == {rank: bytes([rank]) for rank in decision.said}
    assert [*decision.said] == [rank for rank in members if rank in decision.said]
    assert {*decision.said, *decision.gone} == {*members}
    assert not ranks.living & decision.gone.keys()


def test_a_rank_that_calls_again_goes_on_with_what_came() -> None:
    """Rank 2 is late; rank 1 has given up before, and has another blob by then."""
    ranks = Ranks([0, 1, 2], random.Random(0))
    ranks.voters[0].come(b"0")
    ranks.voters[1].come(b"old")
    _deliver_all(ranks)
    assert not ranks.voters[1].step()
    assert ranks.voters[1].missing() == [2]
    again = ranks._voter([0, 1, 2], 1)
    again.come(b"new")
    ranks.voters[2].come(b"2")
    _deliver_all(ranks)
    assert ranks.voters[0].step()
    assert not again.step()
    assert again.missing() == [0]  # its proposal
    _deliver_all(ranks)
    assert again.step()
    _deliver_all(ranks)
    assert ranks.voters[2].step()
    assert again.decision is not None
    assert again.decision.said == {0: b"0", 1: b"new", 2: b"2"}
    assert ranks.voters[2].decision == ranks.voters[0].decision == again.decision


def test_a_rank_that_was_left_out_by_mistake_hears_of_it() -> None:
    ranks = Ranks([0, 1], random.Random(0))
    ranks.seen[1].add(0)
    ranks.voters[1].come(b"1")
    assert ranks.voters[1].step()
    _deliver_all(ranks)
    ranks.voters[0].come(b"0")
    assert ranks.voters[0].step()
    assert ranks.voters[0].decision is not None
    assert ranks.voters[0].decision.gone == {0: "it was shot"}


def _deliver_all(ranks: Ranks) -> None:
    for (_, to), queue in ranks.on_the_way.items():
        while queue:
            ranks.ballots[to].take(*queue.popleft())
