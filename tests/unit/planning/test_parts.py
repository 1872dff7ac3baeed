# SPDX-License-Identifier: Apache-2.0
"""Which schedules carry blocks of different lengths, and what lengths blocks get."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.errors import UsageError
from commrt.planning.footprint import CHUNK_NBYTES, LANE_NBYTES, footprint
from commrt.planning.vectors import CountedFootprint
from commrt.schedule.ir import Op
from commrt.schedule.parts import block_length, parts_of
from commrt.vocabulary.operations import OPERATIONS, operation

VECTOR = [spec.name for spec in OPERATIONS if spec.vector_of is not None]
EVERY = [(coll, name) for coll in VECTOR for name in algorithms.names(coll)]


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))


def test_the_plain_operations_schedules_are_offered() -> None:
    for coll in VECTOR:
        plain = operation(coll).vector_of
        assert plain is not None
        lacks = set(algorithms.names(plain)) - set(algorithms.names(coll))
        # These store one rank's blocks for another, which cannot know them.
        stores = {"bine", "dissemination"} if plain == "alltoall" else set()
        assert lacks - {"two_level"} == stores


@pytest.mark.parametrize(("coll", "name"), EVERY)
@pytest.mark.parametrize("size", [*range(1, 34)])
def test_sender_and_receiver_agree_on_every_length(
    coll: str, name: str, size: int
) -> None:
    if not algorithms.get(coll, name).supports(size):
        return
    for root in {0, size // 2, size - 1} if operation(coll).has_root else {0}:
        schedule = algorithms.schedule(coll, name, size, root)
        parts = parts_of(schedule)
        assert parts is not None
        assert parts.stays_in_pairs(schedule)
        assert size > 17 or parts.one_pair_at_a_time(schedule)
        # No two holders have equally much, and no length is a sum of others.
        holders = size * size if parts.coll == "alltoall" else size
        lengths = {h: 3**h if holders <= 33 else 7 * h * h + h for h in range(holders)}
        bounds = [
            parts.bounds(program.rank, program.spaces, lengths)
            for program in schedule.programs()
        ]
        _messages_agree(schedule, bounds)


def _messages_agree(schedule: Any, bounds: Any) -> None:
    def widths(rank: int, where: Any) -> list[int]:
        edges = bounds[rank][where.space]
        return [edges[i + 1] - edges[i] for i in range(where.lo, where.hi)]

    sent: dict[tuple[int, int], list[list[int]]] = {}
    taken: dict[tuple[int, int], int] = {}
    for program in schedule.programs():
        for step in program.steps:
            if step.op is Op.SEND:
                key = program.rank, step.peer
                sent.setdefault(key, []).append(widths(program.rank, step.src))
    for program in schedule.programs():
        for step in program.steps:
            if step.src is not None and step.dst is not None:
                assert widths(program.rank, step.src) == widths(program.rank, step.dst)
            if step.op in (Op.RECV, Op.RRED):
                key = step.peer, program.rank
                message = sent[key][taken.get(key, 0)]
                taken[key] = taken.get(key, 0) + 1
                assert message == widths(program.rank, step.dst)


@pytest.mark.usefixtures("_own_registry")
def test_a_block_with_two_holders_is_no_vector_schedule() -> None:
    @algorithms.algorithm("allgather", "by_one_slot")
    def author(b: Any) -> None:
        b.copy(b.out[b.rank], b.inp[0])
        slot = b.tmp(1)
        for peer in range(b.size):
            if peer != b.rank:
                b.send(b.inp[0], peer)
        for peer in range(b.size):
            if peer != b.rank:
                b.recv(slot[0], peer)
                b.copy(b.out[peer], slot[0])

    assert "by_one_slot" in algorithms.names("allgather")
    # On two ranks the slot holds one rank's block only; on three it holds two.
    assert "by_one_slot" not in algorithms.names("allgatherv")


@pytest.mark.usefixtures("_own_registry")
def test_algorithms_are_registered_for_the_plain_operation() -> None:
    with pytest.raises(
        UsageError, match=r"allgatherv runs the algorithms of allgather"
    ):
        algorithms.algorithm("allgatherv", "mine")


@given(length=st.integers(0, 10**12), share=st.integers(1, 9))
def test_blocks_of_a_holder_add_up(length: int, share: int) -> None:
    assert sum(block_length(length, i, share) for i in range(share)) == length


@given(
    counts=st.lists(st.integers(0, 10**7), min_size=2, max_size=9),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    chunk=st.sampled_from([64, 4096, CHUNK_NBYTES]),
    data=st.data(),
)
def test_fragments_fit_into_a_lane_and_depend_on_the_counts_alone(
    counts: list[int], itemsize: int, chunk: int, data: Any
) -> None:
    size = len(counts)
    name = data.draw(st.sampled_from(algorithms.names("gatherv", size)))
    bound = footprint("gatherv", name, size, 0, ())
    counted = CountedFootprint(
        bound.publishes,
        bound.slices,
        bound.messages,
        bound.exchanges,
        tuple(sorted(counts, reverse=True)),
    )
    total = sum(counts)
    number = counted.fragments(total, itemsize, chunk, LANE_NBYTES)
    longest = counted.largest_nbytes(total, itemsize, number)
    assert number >= 1
    assert (longest + 64) * bound.publishes <= LANE_NBYTES or longest <= 64
    shuffled = data.draw(st.permutations(counts))
    again = CountedFootprint(
        bound.publishes,
        bound.slices,
        bound.messages,
        bound.exchanges,
        tuple(sorted(shuffled, reverse=True)),
    )
    assert again.fragments(total, itemsize, chunk, LANE_NBYTES) == number
