# SPDX-License-Identifier: Apache-2.0
"""A round of a tournament sends the bytes of its formula, and computes meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from recorded import logs_of
from science_cases import sent_between_barriers
from tournament_cases import OPTIMIZERS, net_of, tensors_in, trained

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.tournament import (
    Consensus,
    Evolution,
    Pairwise,
    Selection,
    Tournament,
    Truncation,
    tournament,
)
from commrt.layers.tournament.transfer import Transfer
from commrt.local import run

RULES: dict[str, Selection] = {
    "pairwise": Pairwise(),
    "consensus": Consensus(),
    "truncation": Truncation(),
    "evolution": Evolution(),
}
LEAST_STRUCTURE, MOST_STRUCTURE = 100, 4000
"""Bytes of an optimizer's numbers, pickled."""


def nbytes_in(net: Any, optimizers: Any) -> int:
    states = [net.state_dict(), *(each.state_dict() for each in optimizers)]
    return sum(each.nbytes for each in tensors_in(states))


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("kind", ["none", "momentum", "adam", "two"])
@pytest.mark.parametrize(
    ("ranks", "trainers"), [(1, 1), (2, 2), (4, 2), (3, 3), (8, 4)]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_sends_the_bytes_of_its_formula(
    rule: str, ranks: int, trainers: int, kind: str
) -> None:
    def main(comm: Any) -> Any:
        with Tournament(comm, trainers, selection=RULES[rule], seed=1) as played:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS[kind](net)
            trained(net, optimizers, comm.rank, 1)
            nbytes = nbytes_in(net, optimizers)
            comm.barrier()
            outcome = played.step(net, lambda _: comm.rank, optimizers)
            comm.barrier()
        return nbytes, outcome

    with commrt.trace.record() as recording:
        found = run(ranks, main)
    for (nbytes, outcome), log in zip(found, recording.logs(), strict=True):
        sent = sent_between_barriers(log)
        meetings = (48 + 16 + 32 + 16 + 8) * ranks if ranks > 1 else 0
        assert sent.pop("allgather", 0) == meetings
        copies = outcome.partner is not None
        if rule in ("truncation", "evolution"):
            others = enumerate(outcome.sources)
            copies = sum(at != s == outcome.trainer for at, s in others)
        structure = sent.pop("send", 0) - copies * nbytes
        if kind == "none" or not copies:
            assert structure == 0
        else:
            low, high = LEAST_STRUCTURE, MOST_STRUCTURE
            assert copies * low < structure < copies * high
        assert sent == Counter()


def test_a_state_goes_in_two_messages() -> None:
    """One of tensors, and one of an optimizer's numbers."""

    def main(comm: Any) -> None:
        with Tournament(comm, 2) as played:
            net = net_of(comm.rank)
            optimizers = OPTIMIZERS["adam"](net)
            trained(net, optimizers, comm.rank, 1)
            comm.barrier()
            played.step(net, lambda _: 0.0, optimizers)

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        assert [each.op for each in log.operations].count("send") == 2


def test_nothing_is_sent_for_wrong_arguments() -> None:
    """But that they are wrong."""

    def main(comm: Any) -> None:
        for wrong in (0, 3, 5, 8, -2, 2.0, True, None, "4"):
            with pytest.raises(
                UsageError, match=r"divide .* 4; expected one of 1, 2, 4"
            ):
                Tournament(comm, wrong)

    with commrt.trace.record() as recording:
        run(4, main)
    for log in logs_of(recording):
        assert [(each.op, each.nbytes) for each in log.operations] == [
            ("allgather", 16 * 4)
        ] * 9


def test_a_state_travels_while_its_trainer_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Noted(Transfer):
        def __init__(self, comm: Any, *args: Any) -> None:
            super().__init__(comm, *args)
            self.is_first_rank = comm.rank == 0

        def note(self, event: str) -> None:
            if self.is_first_rank:
                events.append(event)

        def start(self) -> None:
            self.note("start")
            super().start()

        def wait(self) -> Any:
            self.note("wait")
            return super().wait()

    monkeypatch.setattr(tournament, "Transfer", Noted)

    def main(comm: Any) -> None:
        def evaluate(_: Any) -> float:
            if comm.rank == 0:
                events.append("judge")
            return 0.0

        with Tournament(comm, 2) as played:
            played.step(net_of(comm.rank), evaluate)

    run(2, main)
    assert events == ["start", "judge", "wait", "judge", "start", "wait"]
