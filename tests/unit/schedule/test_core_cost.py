# SPDX-License-Identifier: Apache-2.0
"""The model of ranks on one node, and how near its choices are to what was measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pytest

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.errors import ScheduleError
from commrt.planning.prediction import floor_us, predicted_us
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.core_cost import READER_SHARE, Load, core_cost, core_counts
from commrt.schedule.cost import CHUNK_NBYTES, MESSAGE_SHARE, counts
from commrt.schedule.ir import RankProgram
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import cheapest
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.samples import Group
from commrt.vocabulary.operations import COLLECTIVES, operation

_DATA = Path(__file__).parents[3] / "docs" / "data"
Cell = tuple[Group, str, int]
LONG = 64 * CHUNK_NBYTES


def test_what_a_core_sends_and_receives_adds_up() -> None:
    for size in (2, 4, 7):
        ring = core_counts(algorithms.schedule("allreduce", "ring", size))
        lap = (size - 1) / size
        assert ring.mean == pytest.approx((2 * lap, 0, 2 * lap, lap))
        assert ring.fill == pytest.approx(0)


def test_a_value_for_many_is_copied_once_where_memory_is_shared() -> None:
    found = core_counts(algorithms.schedule("bcast", "direct", 5))
    assert set(found.loads) == {Load(1, 3, 0, 0), Load(0, 0, 1, 0)}
    shared, each = (Load(1, 3, 0, 0).work(1, 0, shares) for shares in (True, False))
    assert (shared, each) == (1 + 3 * READER_SHARE, 4)


def test_a_chain_is_filled_once_per_fragment() -> None:
    schedule = algorithms.schedule("bcast", "chain", 5)
    found = core_counts(schedule)
    # Each rank receives and sends an eighth before the next one has it.
    assert found.fill == pytest.approx(3 / 8 * 2)
    assert found.rounds == pytest.approx(4 + 7 * MESSAGE_SHARE)
    assert core_cost(schedule, LONG, 0, 1, 0) == pytest.approx(
        2 * LONG + 3 / 8 * 2 * 8 * CHUNK_NBYTES
    )


def test_ranks_that_share_a_core_take_turns() -> None:
    long = partial(core_cost, algorithms.schedule("bcast", "chain", 4), LONG, 0, 1, 0)
    # A rank in the middle sends and receives the vector; all of them, six times N.
    assert long(crowd=2) - long() == pytest.approx((6 / 4 * 2 - 2) * LONG)
    gather = algorithms.schedule("gather", "direct", 4)
    # Its root does half of all the work, so another core is idle anyway.
    assert core_cost(gather, LONG, 0, 1, 0, crowd=2) == pytest.approx(
        core_cost(gather, LONG, 0, 1, 0)
    )
    barrier = algorithms.schedule("barrier", "dissemination", 4)
    assert core_cost(barrier, 0, 1, 0, 0) == 2
    assert core_cost(barrier, 0, 1, 0, 0, crowd=3) == 6


def test_ranks_that_receive_first_are_played_as_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))

    @algorithms.algorithm("allgather", "receive_first")
    def author(b: Builder) -> None:
        other = 1 - b.rank
        b.copy(b.out[b.rank], b.inp[0])
        b.recv(b.out[other], other)
        b.send(b.out[b.rank], other)

    schedule = algorithms.schedule("allgather", "receive_first", 2)
    assert core_counts(schedule).rounds == counts(schedule).rounds == 1

    @algorithms.algorithm("bcast", "unheard")
    def lost(b: Builder) -> None:
        b.blocks(1)
        b.copy(b.out[:], b.inp[:]) if b.rank == 0 else b.send(b.out[:], 0)

    with pytest.raises(ScheduleError, match="no partner"):
        core_counts(algorithms.schedule("bcast", "unheard", 2))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_the_floor_is_never_above_the_cost(coll: str, nodes: int) -> None:
    for size in (2, 3, 6, 9, 16):
        link = "oversubscribed" if nodes == 1 else "network"
        facts = CommFacts(size, nodes, size, 2, link)  # type: ignore[arg-type]
        found = [Candidate("shm", name) for name in algorithms.names(coll, size)]
        for nbytes in (0, 8, 100_000, 1 << 24):
            query = Query(coll, nbytes, root=size - 1)
            for one in [*found, Candidate("mpi", "native")]:
                bound = floor_us(facts, query, one)
                cost = predicted_us(facts, query, one)
                assert 0 < bound <= cost * (1 + 1e-9), (one, size, nbytes)


def test_what_cannot_be_cheapest_is_not_costed() -> None:
    costed = []

    def cost(one: str) -> float:
        costed.append(one)
        return {"a": 5.0, "b": 3.0, "c": 3.0, "d": 4.0}[one]

    floors = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.5}
    assert cheapest("abcd", cost, floors.__getitem__) == ("b", 3.0)
    assert costed == ["a", "b", "c"]
    assert cheapest("cb", cost)[0] == "c"
    never = float("inf")
    assert cheapest("ab", lambda one: never) == ("a", never)


@pytest.mark.parametrize("nbytes", [8, 1 << 24])
def test_a_choice_among_many_ranks_makes_few_of_their_programs(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long programs are what takes the time of the first call on many ranks."""
    made: Counter[str] = Counter()

    def build(author: Any, *args: Any) -> RankProgram:
        made[author.__module__.rpartition(".")[2]] += 1
        return build_program(author, *args)

    _registry._schedule.cache_clear()
    monkeypatch.setattr(_registry, "build_program", build)
    size, query = 64, Query("allreduce", nbytes)
    facts = CommFacts(size, 1, size, size, "near")
    found = [Candidate("shm", name) for name in algorithms.names("allreduce", size)]
    floor = partial(floor_us, facts, query)
    assert cheapest(found, partial(predicted_us, facts, query), floor)[1] > 0
    assert made["recursive_doubling"] + made["shifted_halving_doubling"] >= size
    # The root's, its neighbours', and the one half-way round.
    assert made["ring"] == made["bidirectional_ring"] == 4


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_model_alone_was_near_the_best_of_what_was_measured(number: int) -> None:
    """On recorded tunings of a machine with two cores, which 4 ranks share."""
    recording = load_recording(_DATA / f"tuning-{number}.json.gz")
    cells: dict[Cell, dict[Candidate, list[float]]] = {}
    for one in recording.samples:
        cell = recording.group_of(one), one.op, one.nbytes
        times = cells.setdefault(cell, defaultdict(list))
        times[one.candidate] += one.us
    ratios: dict[tuple[Group, str], list[float]] = defaultdict(list)
    for (group, op, nbytes), measured in cells.items():
        us = {one: median(times) for one, times in measured.items()}
        facts = CommFacts(group.ranks, 1, group.ppn, 2, group.link_class)  # type: ignore[arg-type]
        query = Query(op, nbytes, root=0 if operation(op).has_root else None)
        # What a call may have unasked, without what only a tuner tries.
        able = [
            one
            for one in recording.orders[op]
            if one in us
            and one.algorithm in algorithms.names(op)
            and not one.params.keys() - {"k", "shots"}
        ]
        pick, _ = cheapest(able, partial(predicted_us, facts, query))
        ratios[group, op].append(us[pick] / min(us.values()))
    assert {group.ranks for group, _ in ratios} == {2, 4}
    for (group, op), found in ratios.items():
        assert geometric_mean(found) < 1.1, (group, op)
    assert geometric_mean(chain.from_iterable(ratios.values())) < 1.04
