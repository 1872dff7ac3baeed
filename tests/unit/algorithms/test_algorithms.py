# SPDX-License-Identifier: Apache-2.0
"""Every algorithm is right for every number of ranks, and found by name."""

from __future__ import annotations

import random
from math import ceil, log2

import pytest
from schedule_cases import EVERY, schedules

from commrt import algorithms
from commrt.errors import UsageError
from commrt.schedule.builder import Builder
from commrt.schedule.core_cost import core_counts
from commrt.schedule.cost import (
    CHUNK_NBYTES,
    JAM,
    MESSAGE_SHARE,
    TAPER,
    cost,
    counts,
    floor,
)
from commrt.schedule.ir import Op
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered
from commrt.vocabulary.operations import SCHEDULED, operation


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_right_on_1_to_33_ranks(coll: str, name: str, seed: int, full: bool) -> None:
    """A third of the sizes from 10 on, other ones in each run; all in a full run."""
    few, many = range(1, 10), range(10, 34)
    rng = random.Random(f"{coll} {name} {seed}")
    for size in (*few, *(many if full else rng.sample(many, 8))):
        for schedule in schedules(coll, name, size):
            verify(schedule)


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_right_as_the_engine_runs_it(coll: str, name: str) -> None:
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 12, 17):
        for schedule in schedules(coll, name, size):
            verify_lowered(schedule)


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_right_when_ranks_span_nodes(coll: str, name: str) -> None:
    for size in (2, 3, 5, 8):
        for schedule in schedules(coll, name, size):
            verify_lowered(schedule, can_fuse=lambda rank, peer: rank // 2 == peer // 2)


@pytest.mark.full
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_right_on_many_ranks(coll: str, name: str, size: int) -> None:
    choices = algorithms.param_choices(coll, name, size)
    params = {key: values[0] for key, values in choices.items()}
    root = size // 2 + 1 if operation(coll).has_root else 0
    schedule = algorithms.schedule(coll, name, size, root, params)
    verify(schedule)
    verify_lowered(schedule)


@pytest.mark.full
@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_right_as_the_engine_runs_it_on_1_to_33_ranks(coll: str, name: str) -> None:
    for size in range(1, 34):
        for schedule in schedules(coll, name, size, every=True):
            verify_lowered(schedule)


@pytest.mark.parametrize("coll", SCHEDULED)
def test_each_operation_has_one_for_latency_and_one_for_bandwidth(coll: str) -> None:
    known = [algorithms.get(coll, name) for name in algorithms.names(coll)]
    assert any(one.latency for one in known)
    assert any(one.bandwidth for one in known)


@pytest.mark.parametrize(
    ("coll", "name", "steps", "moved"),
    [
        ("allreduce", "ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
        ("allreduce", "bidirectional_ring", lambda p: p, lambda p: 2 * (p - 1) / p),
        ("allreduce", "recursive_doubling", log2, log2),
        ("allreduce", "halving_doubling", lambda p: 2 * log2(p), lambda p: 2 - 2 / p),
        ("bcast", "binomial", log2, log2),
        ("reduce", "binomial", log2, log2),
        ("bcast", "chain", lambda p: p - 1, lambda p: 1),
        ("reduce", "chain", lambda p: p - 1, lambda p: 1),
        ("allgather", "bidirectional_ring", lambda p: p / 2, lambda p: 1 - 1 / p),
        ("allgather", "neighbor_exchange", lambda p: p / 2, lambda p: 1 - 1 / p),
        ("allgather", "dissemination", log2, lambda p: 1 - 1 / p),
        ("allgather", "recursive_doubling", log2, lambda p: 1 - 1 / p),
        ("reduce_scatter", "halving_doubling", log2, lambda p: 1 - 1 / p),
        ("reduce_scatter", "bidirectional_ring", lambda p: p / 2, lambda p: 1 - 1 / p),
        ("reduce_scatter", "pairwise", lambda p: p - 1, lambda p: 1 - 1 / p),
        ("alltoall", "pairwise", lambda p: p - 1, lambda p: 1 - 1 / p),
        ("alltoall", "dissemination", log2, lambda p: log2(p) / 2),
        ("allreduce", "swing", lambda p: 2 * log2(p), lambda p: 2 - 2 / p),
        ("scatter", "binomial", log2, lambda p: 1 - 1 / p),
        ("gather", "binomial", log2, lambda p: 1 - 1 / p),
        ("allreduce", "bine", lambda p: 2 * log2(p), lambda p: 2 - 2 / p),
        ("bcast", "bine", log2, log2),
        ("reduce", "bine", log2, log2),
        ("allgather", "bine", log2, lambda p: 1 - 1 / p),
        ("reduce_scatter", "bine", log2, lambda p: 1 - 1 / p),
        ("alltoall", "bine", log2, lambda p: log2(p) / 2),
        ("scatter", "bine", log2, lambda p: 1 - 1 / p),
        ("gather", "bine", log2, lambda p: 1 - 1 / p),
    ],
)
def test_costs_are_those_of_the_textbook(
    coll: str, name: str, steps: object, moved: object
) -> None:
    for size in (2, 4, 8, 16):
        found = counts(algorithms.schedule(coll, name, size))
        assert found.steps == steps(size)  # type: ignore[operator]
        assert found.moved == pytest.approx(moved(size))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "size", "depth"),
    [("chain", 3, 2), ("chain", 8, 7), ("binary_tree", 8, 3), ("binary_tree", 15, 3)],
)
def test_an_allreduce_on_a_tree_turns_each_part_round_at_the_root(
    name: str, size: int, depth: int
) -> None:
    colls = ("allreduce", "reduce", "bcast")
    some = [algorithms.schedule(coll, name, size) for coll in colls]
    assert [counts(one).steps for one in some] == [2 * depth, depth, depth]
    # The last part goes up while the first ones come down.
    for model in (counts, core_counts):
        both, up, down = (model(one).rounds for one in some)
        assert both < up + down - 1


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 33])
def test_folding_costs_two_messages_and_dissemination_none(size: int) -> None:
    doubling = counts(algorithms.schedule("allreduce", "recursive_doubling", size))
    assert int(log2(size)) < doubling.steps <= int(log2(size)) + 2
    barrier = counts(algorithms.schedule("barrier", "dissemination", size))
    assert barrier.steps == ceil(log2(size))


def test_cost_prefers_few_steps_for_short_and_few_bytes_for_long_vectors() -> None:
    doubling = algorithms.schedule("allreduce", "recursive_doubling", 16)
    ring = algorithms.schedule("allreduce", "ring", 16)
    model = (1.0, 1e-4, 1e-5)
    assert cost(doubling, 8, *model) < cost(ring, 8, *model)
    assert cost(ring, 1 << 24, *model) < cost(doubling, 1 << 24, *model)
    assert cost(ring, 0, 1.0, 1.0, 1.0) == counts(ring).steps


def test_on_a_long_way_many_messages_at_once_take_little_more_than_one() -> None:
    direct = algorithms.schedule("allreduce", "direct", 16, 0, {"shots": 1})
    doubling = algorithms.schedule("allreduce", "recursive_doubling", 16)
    near, far = 20.0, 2000.0
    assert cost(direct, 8, near, 0, 0) == near * (1 + 14 * MESSAGE_SHARE)
    assert cost(direct, 8, far, 0, 0) == pytest.approx(far + 14 * 10)
    assert cost(doubling, 8, near, 0, 0) < cost(direct, 8, near, 0, 0)
    assert cost(direct, 8, far, 0, 0) < cost(doubling, 8, far, 0, 0)
    for alpha in (near, far):
        assert floor(direct, [0, 1], 8, alpha, 0, 0) <= cost(direct, 8, alpha, 0, 0)


def test_cost_of_a_tree_counts_the_way_down_once_per_fragment() -> None:
    chain = algorithms.schedule("bcast", "chain", 5)
    found = counts(chain)
    # An eighth of the vector goes over four links, the rest comes right behind it.
    assert (found.moved, found.rounds) == (1, 4 + 7 * MESSAGE_SHARE)
    assert found.fill == pytest.approx(3 / 8)
    short, long = CHUNK_NBYTES, 64 * CHUNK_NBYTES
    # Four nodes send it on to the next one, half of the way round.
    assert found.far == pytest.approx(4 / 5 / 2)
    far = TAPER * found.far
    assert cost(chain, short, 0, 1, 0) == pytest.approx(short * (11 / 8 + far))
    assert cost(chain, long, 0, 1, 0) == pytest.approx(
        long * (1 + far) + 3 * CHUNK_NBYTES
    )


def test_streams_that_a_rank_waits_for_before_it_sends_on_cost_more() -> None:
    def found(coll: str, name: str, **params: int) -> int:
        return counts(algorithms.schedule(coll, name, 4, params=params)).gathered

    assert found("allreduce", "direct", shots=2) == 3
    assert found("allreduce", "direct", shots=1) == 1  # nobody sends on
    assert found("allreduce", "ring") == found("allreduce", "halving_doubling") == 1
    for coll in ("alltoall", "allgather", "reduce_scatter"):
        assert found(coll, "direct") == 1

    direct = algorithms.schedule("allreduce", "direct", 4, params={"shots": 2})
    ring = algorithms.schedule("allreduce", "ring", 4)
    # One fragment: streams end together. Many: each waits for the slowest stream.
    assert cost(direct, CHUNK_NBYTES, 0, 1, 0) == cost(ring, CHUNK_NBYTES, 0, 1, 0)
    long = 64 * CHUNK_NBYTES
    jam = JAM * 2 * 1.5 * (long - 4 * CHUNK_NBYTES)
    assert cost(direct, long, 0, 1, 0) == pytest.approx(cost(ring, long, 0, 1, 0) + jam)


def test_cost_takes_the_usual_fragments() -> None:
    from commrt.planning import host_plans

    assert host_plans.CHUNK_NBYTES == CHUNK_NBYTES


@pytest.mark.parametrize("coll", ["bcast", "reduce"])
def test_cost_chooses_a_tree_of_many_ranks_by_length(coll: str) -> None:
    names = ("binomial", "halving_doubling", "chain")
    some = {name: algorithms.schedule(coll, name, 16) for name in names}

    def cheapest(nbytes: int) -> str:
        return min(names, key=lambda name: cost(some[name], nbytes, 1.0, 1e-4, 1e-5))

    assert [cheapest(1 << shift) for shift in (3, 17, 25)] == list(names)


def test_cost_counts_who_waits_for_one_receiver() -> None:
    # Everyone sends to the root at once, which takes one after the other.
    gather = counts(algorithms.schedule("gather", "direct", 5))
    assert (gather.steps, gather.rounds) == (1, 1 + 3 * MESSAGE_SHARE)
    assert gather.moved == pytest.approx(4 / 5)
    assert gather.fill == pytest.approx(0)


@pytest.mark.parametrize(
    ("coll", "name", "sizes"),
    [
        ("allgather", "neighbor_exchange", (2, 4, 6, 8)),
        ("bcast", "chain", (1, 2, 3, 4, 5, 6, 7, 8)),
        ("allreduce", "chain", (3, 4, 5, 6, 7, 8)),
        ("allreduce", "binary_tree", (5, 6, 7, 8)),
        ("reduce", "binary_tree", (5, 6, 7, 8)),
        ("bcast", "double_tree", (5, 6, 7, 8)),
        ("allreduce", "double_tree", (5, 6, 7, 8)),
    ],
)
def test_where_an_algorithm_makes_no_sense_it_does_not_exist(
    coll: str, name: str, sizes: tuple[int, ...]
) -> None:
    one = algorithms.get(coll, name)
    assert tuple(size for size in range(1, 9) if one.supports(size)) == sizes


def test_shifted_ranks_of_a_switch_use_different_links_at_a_time() -> None:
    k, switches = 4, 16
    schedule = algorithms.schedule(
        "allreduce", "shifted_halving_doubling", k * switches, params={"k": k}
    )
    distances = []
    for rank in range(k):
        steps = schedule.program(rank).steps
        peers = [step.peer for step in steps if step.op is Op.SEND]
        away = [peer // k for peer in peers if peer // k]
        distances.append(away[:4])
    assert all(len(set(at_once)) == k for at_once in zip(*distances, strict=True))


def test_schedules_are_kept() -> None:
    first = algorithms.schedule("allreduce", "ring", 4)
    assert algorithms.schedule("allreduce", "ring", 4) is first
    assert algorithms.schedule("allreduce", "ring", 4, root=3) is first


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algorithms.get("allreduce", "rng"), "did you mean 'ring'"),
        (lambda: algorithms.get("allreduc", "ring"), "did you mean 'allreduce'"),
        (lambda: algorithms.schedule("bcast", "binomial", 4, 4), "root=4"),
        (lambda: algorithms.schedule("bcast", "binomial", 0), "size=0"),
        (
            lambda: algorithms.schedule("allreduce", "direct", 2, params={"shot": 1}),
            "did you mean 'shots'",
        ),
        (
            lambda: algorithms.schedule("allreduce", "direct", 2, params={"shots": 3}),
            "not one of 1, 2",
        ),
        (lambda: algorithms.algorithm("allreduce", "ring"), "already has"),
        (lambda: algorithms.algorithm("allreduce", "native"), "none of"),
        (lambda: algorithms.algorithm("allreduce", "My-Ring"), "lower-case"),
        (lambda: algorithms.algorithm("sum", "x"), "unknown operation"),
    ],
)
def test_wrong_names_and_values_are_refused(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]


def test_others_can_add_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    from commrt.algorithms import _registry

    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))

    @algorithms.algorithm("bcast", "even_only", supports=lambda size: size % 2 == 0)
    def author(b: Builder) -> None:
        """Say what it does."""

    assert "even_only" in algorithms.names("bcast")
    assert algorithms.get("bcast", "even_only").doc == "Say what it does."
    with pytest.raises(UsageError, match="does not support 3 ranks"):
        algorithms.schedule("bcast", "even_only", 3)


def test_an_authors_mistake_leaves_the_others_choice_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from commrt.algorithms import _registry
    from commrt.planning.prediction import predicted_us
    from commrt.select.facts import Candidate, CommFacts, Query

    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))

    @algorithms.algorithm("bcast", "hasty")
    def author(b: Builder) -> None:
        raise ZeroDivisionError("ranks - 2")

    facts = CommFacts(size=2, nodes=1, ppn=2, cores=2, link_class="near")
    query = Query("bcast", 64, "float32")
    with pytest.warns(RuntimeWarning, match="'hasty' is left out for 2 ranks: ZeroDiv"):
        assert predicted_us(facts, query, Candidate("shm", "hasty")) == float("inf")
    assert predicted_us(facts, query, Candidate("shm", "direct")) < 100
