# SPDX-License-Identifier: Apache-2.0
"""Two-level algorithms: right on any nodes, and cheap where they are chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import assert_equal, expected, inputs
from stated_offers import StatedOffers

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.algorithms._nested import cut
from commrt.algorithms._nested import run as nested
from commrt.backends.catalog import check_candidate
from commrt.commands.verify import default_nodes
from commrt.errors import ScheduleError, UsageError
from commrt.planning.host_plans import allows, footprint, only_by_name
from commrt.planning.prediction import floor_us, predicted_us
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.cost import OnNode, counts
from commrt.schedule.interpret import run, run_lowered
from commrt.schedule.ir import Op, Schedule, Slice
from commrt.schedule.lower import lower
from commrt.schedule.nodes import Nodes, check_nodes, members, parse_nodes
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.policy import Policy
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.vocabulary.operations import COLLECTIVES, operation

COLLS = [
    coll
    for coll in COLLECTIVES
    if "two_level" in algorithms.names(coll, 4, (0, 0, 1, 1))
]


def test_the_operations_that_have_one() -> None:
    assert [
        *("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall"),
        *("gather", "scatter"),
    ] == COLLS


def layouts(size: int, rng: random.Random) -> list[Nodes]:
    """Some nodes for so many ranks: equal, unequal, in turn, and drawn ones."""
    num = rng.randint(2, size - 1)
    drawn = check_nodes((rng.randrange(num) for _ in range(size)), size)
    return [*default_nodes(size), drawn]


FEW_RANKS = 12


def schedules(coll: str, size: int, rng: random.Random) -> Iterator[Schedule]:
    """The default and others that are drawn; of many ranks on two of the nodes."""
    some = layouts(size, rng)
    for nodes in some if size <= FEW_RANKS else rng.sample(some, 2):
        if "two_level" not in algorithms.names(coll, size, nodes):
            continue
        choices = algorithms.param_choices(coll, "two_level", size, nodes)
        drawn = {key: rng.choice(values) for key, values in choices.items()}
        for params in ({}, drawn) if size <= FEW_RANKS else (drawn,):
            root = rng.randrange(size) if operation(coll).has_root else 0
            yield algorithms.schedule(coll, "two_level", size, root, params, nodes)


def prove(schedule: Schedule) -> None:
    nodes = schedule.nodes
    assert nodes is not None
    verify(schedule)
    verify_lowered(schedule, can_fuse=lambda rank, peer: nodes[rank] == nodes[peer])


@pytest.mark.parametrize("coll", COLLS)
def test_right_on_3_to_33_ranks(coll: str, seed: int) -> None:
    """A third of the sizes, other ones in each run; every combination in a full run."""
    rng = random.Random(f"{coll} {seed}")
    proved = 0
    for size in rng.sample(range(3, 34), 11):
        for schedule in schedules(coll, size, rng):
            verify(schedule)
            proved += 1
    assert proved >= 22, "two or more of each size"


@pytest.mark.parametrize("coll", COLLS)
def test_right_as_the_engine_runs_it(coll: str, seed: int) -> None:
    rng = random.Random(f"{coll} {seed} lowered")
    for size in (3, 4, 5, 6, 7, 8, 12, 17):
        for schedule in schedules(coll, size, rng):
            prove(schedule)


@pytest.mark.full
@pytest.mark.parametrize("size", [*range(3, 10), 12, 16, 24])
@pytest.mark.parametrize("coll", COLLS)
def test_every_combination_is_right(coll: str, size: int, seed: int) -> None:
    for nodes in layouts(size, random.Random(seed)):
        if "two_level" not in algorithms.names(coll, size, nodes):
            continue
        choices = algorithms.param_choices(coll, "two_level", size, nodes)
        for values in itertools.product(*choices.values()):
            params = dict(zip(choices, values, strict=True))
            roots = {0, size - 1} if operation(coll).has_root else {0}
            for root in roots:
                prove(algorithms.schedule(coll, "two_level", size, root, params, nodes))


@pytest.mark.full
@pytest.mark.parametrize("counts", [(16,) * 4, (40, 24), (8,) * 16, (1, 31, 32, 64)])
@pytest.mark.parametrize("coll", COLLS)
def test_right_on_many_ranks(coll: str, counts: tuple[int, ...]) -> None:
    nodes = parse_nodes(counts)
    choices = algorithms.param_choices(coll, "two_level", len(nodes), nodes)
    for leaders in (1, 4, "all") if "leaders" in choices else (None,):
        params = {} if leaders is None else {"leaders": leaders}
        prove(algorithms.schedule(coll, "two_level", len(nodes), 5, params, nodes))


@pytest.mark.parametrize("coll", COLLS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_both_forms_agree_with_numpy(coll: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 9), label="size")
    numbers = data.draw(
        st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(
            lambda found: 1 < len(set(found)) < size
        ),
        label="nodes",
    )
    nodes = check_nodes(numbers, size)
    choices = algorithms.param_choices(coll, "two_level", size, nodes)
    params = {
        key: data.draw(st.sampled_from(v), label=key) for key, v in choices.items()
    }
    count = data.draw(st.sampled_from([0, 1, 2, 3, 7, 33]), label="count")
    has_root = operation(coll).has_root
    root = data.draw(st.integers(0, size - 1), label="root") if has_root else 0
    in_place = data.draw(st.booleans(), label="in place")
    fragments = data.draw(st.integers(1, 4), label="fragments")
    schedule = algorithms.schedule(coll, "two_level", size, root, params, nodes)
    xs = inputs(coll, size, count)
    wanted = expected(coll, root, xs)
    assert_equal(run(schedule, xs, in_place=in_place), wanted)

    def near(rank: int, peer: int) -> bool:
        return nodes[rank] == nodes[peer]

    lowered = [lower(schedule, rank, partial(near, rank)) for rank in range(size)]
    found = run_lowered(
        schedule, lowered, xs, in_place=in_place, fragments=fragments, align=3
    )
    assert_equal(found, wanted)


def test_an_allreduce_gives_all_ranks_the_same_bits() -> None:
    rng = np.random.default_rng(11)
    for nodes in (parse_nodes((2, 2)), parse_nodes((3, 1, 4)), (0, 1, 0, 1, 0)):
        xs = [rng.standard_normal(40).astype(np.float32) for _ in nodes]
        for params in algorithms.offered_params(
            "allreduce", "two_level", len(nodes), nodes
        ):
            schedule = algorithms.schedule(
                "allreduce", "two_level", len(nodes), 0, params, nodes
            )
            lowered = [lower(schedule, rank) for rank in range(len(nodes))]
            outs = run_lowered(schedule, lowered, xs)
            assert len({out.tobytes() for out in outs if out is not None}) == 1


# -- what goes between nodes ----------------------------------------------------------


def between(schedule: Schedule) -> tuple[int, float]:
    """Messages that leave the busiest node, and their bytes as parts of the vector."""
    nodes = schedule.nodes
    assert nodes is not None
    messages, parts = [0] * len(nodes), [0.0] * len(nodes)
    for program in schedule.programs():
        for step in program.steps:
            if step.op is Op.SEND and nodes[step.peer] != nodes[program.rank]:
                assert step.src is not None
                space = program.spaces[step.src.space]
                num, den = space.scale
                part = (step.src.hi - step.src.lo) * num / den / space.nblk
                messages[nodes[program.rank]] += 1
                parts[nodes[program.rank]] += part
    return max(messages), max(parts)


@pytest.mark.parametrize(
    ("coll", "among", "messages", "part"),
    [
        ("allreduce", "recursive_doubling", 1, 1.0),
        ("allreduce", "ring", 2, 1.0),
        ("bcast", "binomial", 1, 1.0),
        ("reduce", "binomial", 1, 1.0),
        ("allgather", "ring", 1, 0.5),
        ("reduce_scatter", "pairwise", 1, 0.5),
        ("alltoall", "pairwise", 1, 4 / 2),
    ],
)
def test_between_nodes_go_as_few_messages_as_there_are_leaders(
    coll: str, among: str, messages: int, part: float
) -> None:
    nodes = parse_nodes((4, 4))
    for leaders, stripes in ((1, 1), (2, 2), ("all", 4)):
        params = {"among": among, "leaders": leaders}
        schedule = algorithms.schedule(coll, "two_level", 8, 0, params, nodes)
        found = between(schedule)
        assert found == (messages * stripes, pytest.approx(part)), leaders


@pytest.mark.parametrize("coll", ["gather", "scatter"])
def test_a_node_sends_or_receives_all_of_its_blocks_at_once(coll: str) -> None:
    for root in range(8):
        nodes = parse_nodes((3, 4, 1))
        schedule = algorithms.schedule(coll, "two_level", 8, root, nodes=nodes)
        home = nodes[root]
        messages = {
            (nodes[program.rank], nodes[step.peer], step.src.hi - step.src.lo)
            for program in schedule.programs()
            for step in program.steps
            if step.op is Op.SEND and step.src is not None
            if nodes[step.peer] != nodes[program.rank]
        }
        others = [(node, own) for node, own in enumerate((3, 4, 1)) if node != home]
        assert messages == {
            (node, home, own) if coll == "gather" else (home, node, own)
            for node, own in others
        }


@pytest.mark.parametrize("coll", ["gather", "scatter"])
def test_the_root_needs_no_copies_where_ranks_of_a_node_are_neighbours(
    coll: str,
) -> None:
    in_order, in_turn = (
        algorithms.schedule(coll, "two_level", 6, 2, nodes=nodes)
        for nodes in (parse_nodes((2, 2, 2)), (0, 1, 2, 0, 1, 2))
    )
    copies = [
        sum(step.op is Op.COPY for step in one.program(2).steps)
        for one in (in_order, in_turn)
    ]
    assert copies[0] <= 2 < copies[1]


def test_every_rank_of_a_node_leads_a_stripe() -> None:
    nodes = parse_nodes((3, 3, 2))
    schedule = algorithms.schedule("allreduce", "two_level", 8, nodes=nodes)
    leading = {
        program.rank
        for program in schedule.programs()
        if any(
            step.op is Op.SEND and nodes[step.peer] != nodes[program.rank]
            for step in program.steps
        )
    }
    assert leading == set(range(8))


def test_the_root_leads_on_its_node() -> None:
    nodes = parse_nodes((4, 4))
    for coll in ("bcast", "reduce"):
        for root in range(8):
            schedule = algorithms.schedule(
                coll, "two_level", 8, root, {"leaders": 1}, nodes
            )
            # One message between nodes, one on a node.
            assert counts(schedule).steps == 2


# -- where it exists ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "exists"),
    [
        ((0, 0, 0, 0), False),
        ((0, 1, 2, 3), False),
        ((0, 0, 1, 1), True),
        ((0, 1, 0, 2), True),
        (None, False),
    ],
)
def test_it_exists_where_some_ranks_share_one_of_several_nodes(
    nodes: Nodes | None, exists: bool
) -> None:
    assert ("two_level" in algorithms.names("allreduce", 4, nodes)) == exists
    if not exists:
        with pytest.raises(UsageError, match="not on several nodes, two or more on"):
            algorithms.schedule("allreduce", "two_level", 4, nodes=nodes)


def test_one_partition_is_one_schedule_however_nodes_are_numbered() -> None:
    first = algorithms.schedule("bcast", "two_level", 4, nodes=(0, 0, 1, 1))
    assert algorithms.schedule("bcast", "two_level", 4, nodes=(7, 7, 3, 3)) is first
    other = algorithms.schedule("bcast", "two_level", 4, nodes=(0, 1, 0, 1))
    assert other.digest() != first.digest()
    # What needs no nodes has none in its key.
    ring = algorithms.schedule("bcast", "ring", 4)
    assert algorithms.schedule("bcast", "ring", 4, nodes=(0, 0, 1, 1)) is ring
    copy = Schedule.from_json(first.to_json())
    assert (copy.nodes, copy.digest()) == ((0, 0, 1, 1), first.digest())


def test_nodes_tell_footprints_apart() -> None:
    own = ("allgather", "two_level", 6, 0, (("among", "ring"), ("leaders", 1)))
    found = {
        footprint(*own, parse_nodes(counts)) for counts in ((3, 3), (1, 5), (4, 2))
    }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"leaders": 3}, "leaders=3 is not one of all, 1"),
        ({"inside": "rings"}, "inside='rings' is not one of direct"),
        ({"among": "two_level"}, "among='two_level' is not one of recursive_doubling"),
        ({"amon": "ring"}, "did you mean 'among'"),
    ],
)
def test_wrong_names_inside_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        algorithms.schedule("allreduce", "two_level", 4, 0, params, (0, 0, 1, 1))


def test_unequal_nodes_leave_out_what_needs_equal_blocks() -> None:
    for ranks, there in (((2, 2), True), ((1, 3), False)):
        found = algorithms.param_choices(
            "allgather", "two_level", 4, parse_nodes(ranks)
        )
        assert ("dissemination" in found["among"]) == there
        assert "recursive_doubling" in found["among"]


def test_a_rule_may_name_any_inner_algorithms() -> None:
    nodes = (0, 0, 1, 1)
    query = Query("allreduce", 64, op="sum")
    rare = Candidate("mpi", "two_level", {"inside": "ring", "among": "direct"})
    check_candidate("allreduce", rare, 4)
    assert allows(nodes, query, rare)
    assert not allows((0, 0, 0, 0), query, rare)
    wrong = Candidate("mpi", "two_level", {"inside": "rng"})
    assert not allows(nodes, query, wrong)
    with pytest.raises(UsageError, match="inside='rng' is not one of"):
        check_candidate("allreduce", wrong)


def test_a_table_may_ask_for_what_nobody_has_unasked_and_a_call_overrules_it() -> None:
    def match(lo: int, hi: int | None) -> Match:
        return Match(lo, hi, ranks=8, nodes=2, device="host")

    rules = [
        Rule("allreduce", match(0, 64), Candidate("mpi", "swing", {"torus": "2x4"})),
        Rule(
            "allreduce",
            match(64, None),
            Candidate("mpi", "two_level", {"inside": "ring", "leaders": 2}),
        ),
    ]
    table = Table(Machine(Cpu("c", 1, 1)), tuple(rules))
    nodes = parse_nodes((4, 4))
    found = [
        Candidate("mpi", name, params)
        for name in ("direct", "swing", "two_level")
        for params in list(algorithms.offered_params("allreduce", name, 8, nodes))
        or [{}]
    ]
    predicted = partial(predicted_us, facts_of(nodes))
    unasked = {
        "only_on_request": lambda query, one: only_by_name(nodes, query.coll, one)
    }
    offers = StatedOffers(found, predicted, **unasked, allows=partial(allows, nodes))
    policy = Policy(facts_of(nodes), table, offers)
    for nbytes, rule in ((8, rules[0]), (64, rules[1])):
        query = Query("allreduce", nbytes, op="sum")
        assert policy.choose(query).candidate == rule.use
        forced = policy.choose(query, algorithm="direct")
        assert forced.candidate.algorithm == "direct"
    bare = Policy(facts_of(nodes), None, StatedOffers(found, predicted, **unasked))
    assert bare.choose(Query("allreduce", 8, op="sum")).candidate.algorithm != "swing"


def test_others_algorithms_may_be_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))

    @algorithms.algorithm("bcast", "my_flat", params={"parts": (3, 1)})
    def author(b: Builder) -> None:
        b.blocks(b.params["parts"])
        if b.rank == b.root:
            b.copy(b.out[:], b.inp[:])
        for part, peer in itertools.product(range(b.nblk), range(1, b.size)):
            if b.rank == b.root:
                b.send(b.out[part], b.root + peer)
        for part in range(b.nblk if b.rank != b.root else 0):
            b.recv(b.out[part], b.root)

    nodes = parse_nodes((2, 3))
    for params in ({"inside": "my_flat"}, {"among": "my_flat"}):
        prove(algorithms.schedule("bcast", "two_level", 5, 3, params, nodes))


# -- how it is made -------------------------------------------------------------------


def test_blocks_suit_all_inner_algorithms() -> None:
    assert cut([("allreduce", "ring", 4), ("bcast", "ring", 6)]) == 12
    # Beyond, blocks may be a fourth of the shortest longer than others.
    assert cut([("bcast", "ring", size) for size in (5, 7, 11)]) == 64


def test_an_inner_algorithm_that_needs_equal_blocks_says_so() -> None:
    def author(b: Builder) -> None:
        known = b.tmp(4)
        pieces = [Slice(known.space, 0, 1), Slice(known.space, 1, 4)]
        inp = [pieces[b.rank]]
        nested(b, "allgather", "dissemination", [0, 1], inp=inp, out=pieces)

    with pytest.raises(ScheduleError, match=r"3 blocks into 1|1 blocks into 3"):
        build_program(author, "allreduce", 1, 2)


# -- the model ------------------------------------------------------------------------


def facts_of(nodes: Nodes, cores: int = 64) -> CommFacts:
    ranks = members(nodes)
    return CommFacts(
        len(nodes), len(ranks), max(map(len, ranks)), cores, "network", nodes
    )


@pytest.mark.parametrize("coll", COLLS)
def test_the_floor_is_never_above_the_cost(coll: str) -> None:
    for counts_ in ((2, 2), (1, 3, 2)):
        nodes = parse_nodes(counts_)
        for cores in (1, 64):
            facts = facts_of(nodes, cores)
            for name in algorithms.names(coll, len(nodes), nodes):
                one = Candidate("mpi", name)
                for nbytes in (0, 8, 100_000, 1 << 24):
                    query = Query(coll, nbytes, root=len(nodes) - 1)
                    bound = floor_us(facts, query, one)
                    cost = predicted_us(facts, query, one)
                    assert 0 < bound <= cost * (1 + 1e-9), (one, counts_, nbytes)


def test_ranks_of_a_node_share_its_port() -> None:
    nodes = parse_nodes((4, 4))
    near = OnNode(nodes, 0.125, 0.0)
    flat = algorithms.schedule("allgather", "direct", 8)
    leaders = algorithms.schedule("allgather", "two_level", 8, nodes=nodes)
    # Each of 4 ranks sends its block to 4 others; or once.
    assert counts(flat, near).moved == pytest.approx(2.0)
    assert counts(leaders, near).moved == pytest.approx(0.5)
    assert counts(flat).moved == pytest.approx(7 / 8)


def test_a_message_on_a_node_is_a_part_of_a_round() -> None:
    nodes = parse_nodes((2, 2))
    near = OnNode(nodes, 0.125, 0.1)
    doubling = algorithms.schedule("allreduce", "recursive_doubling", 4)
    assert counts(doubling, near).rounds == pytest.approx(1.125)
    assert counts(doubling).rounds == 2


@pytest.mark.parametrize("coll", COLLS)
def test_the_model_picks_two_levels_on_full_nodes_and_flat_ones_on_small(
    coll: str,
) -> None:
    def cheapest(nodes: Nodes, nbytes: int, cores: int) -> str:
        facts, query = facts_of(nodes, cores), Query(coll, nbytes, root=0)
        return min(
            (
                Candidate("mpi", name, params)
                for name in algorithms.names(coll, len(nodes), nodes)
                for params in algorithms.offered_params(coll, name, len(nodes), nodes)
            ),
            key=lambda one: (
                predicted_us(facts, query, one),
                one.algorithm == "two_level",
            ),
        ).algorithm

    full = parse_nodes((8, 8, 8, 8))
    assert "two_level" in {cheapest(full, 1 << shift, 8) for shift in (10, 16, 20)}
    # Ranks that share a core pay for every further round.
    assert cheapest(parse_nodes((2, 2)), 8, 1) != "two_level"


@pytest.mark.parametrize(
    "coll", ["allreduce", "bcast", "reduce", "reduce_scatter", "gather", "scatter"]
)
def test_a_few_nodes_exchange_short_vectors_directly(coll: str) -> None:
    """Three messages at once are over before two that wait for each other."""
    nodes = parse_nodes((4, 4, 4, 4))
    root = 5 if operation(coll).has_root else None
    query, facts = Query(coll, 8, root=root), facts_of(nodes)
    took = {
        params["among"]: predicted_us(
            facts, query, Candidate("mpi", "two_level", params)
        )
        for params in algorithms.offered_params(coll, "two_level", 16, nodes)
        if params.get("leaders", 1) == 1
    }
    direct = took.pop("direct")
    assert took
    assert direct < 0.9 * min(took.values())
