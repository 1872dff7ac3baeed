# SPDX-License-Identifier: Apache-2.0
"""Bine trees and butterflies: near partners, few bytes between groups of ranks."""

from __future__ import annotations

import pytest

from commrt import algorithms
from commrt.algorithms.bine import TOP, Node, distance, tree
from commrt.schedule.cost import OnNode, cost, counts
from commrt.schedule.ir import Op, ParamValue, Schedule
from commrt.select.model import cheapest
from commrt.vocabulary.operations import operation

SIZES = [*range(1, 40), 64, 100, 127, 128]


def crossing(schedule: Schedule, group: int) -> float:
    """Bytes between groups of so many neighbouring ranks, as parts of the vector."""
    found = 0.0
    for program in schedule.programs():
        for step in program.steps:
            if step.op is Op.SEND and step.peer // group != program.rank // group:
                assert step.src is not None
                space = program.spaces[step.src.space]
                num, den = space.scale
                found += (step.src.hi - step.src.lo) * num / den / space.nblk
    return found


def over_roots(coll: str, name: str, size: int, group: int, **params: str) -> float:
    roots = range(size) if operation(coll).has_root else range(1)
    return sum(
        crossing(algorithms.schedule(coll, name, size, root, params), group)
        for root in roots
    )


# -- the tree --------------------------------------------------------------------------


def test_partners_are_a_third_nearer_than_in_a_binomial_tree() -> None:
    assert [distance(step) for step in range(6)] == [1, 1, 3, 5, 11, 21]


@pytest.mark.parametrize(
    ("size", "root", "parents"),
    [
        (1, 0, [TOP]),
        (2, 0, [TOP, 0]),
        (4, 2, [1, 2, TOP, 2]),
        # Ranks -2 to 5, counted from the root: 3 below 0, -1 below 0, 4 below 3.
        (8, 2, [1, 2, TOP, 2, 5, 2, 5, 6]),
    ],
)
def test_small_trees_are_those_of_the_paper(
    size: int, root: int, parents: list[int]
) -> None:
    found = tree(size)
    assert found.root == root
    assert [node.parent for node in found.nodes] == parents


def below(nodes: tuple[Node, ...], place: int) -> list[int]:
    found = [place]
    for child in nodes[place].children:
        found += below(nodes, child)
    return sorted(found)


@pytest.mark.parametrize("size", SIZES)
def test_subtrees_are_neighbours_and_the_tree_is_no_higher_than_a_binomial_one(
    size: int,
) -> None:
    found = tree(size)
    assert len(found.nodes) == size
    for place, node in enumerate(found.nodes):
        assert below(found.nodes, place) == list(range(node.first, node.stop))
        assert all(found.nodes[child].parent == place for child in node.children)
        lengths = [len(below(found.nodes, child)) for child in node.children]
        assert lengths[1:] == sorted(lengths[1:], reverse=True)
    steps = counts(algorithms.schedule("bcast", "bine", size)).steps
    assert steps <= (size - 1).bit_length()


# -- what goes between groups of ranks -------------------------------------------------


@pytest.mark.parametrize("coll", ["bcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize(("size", "group"), [(16, 4), (32, 5), (40, 8), (64, 6)])
def test_trees_send_less_between_groups_than_binomial_ones(
    coll: str, size: int, group: int
) -> None:
    bine = over_roots(coll, "bine", size, group)
    assert bine < 0.97 * over_roots(coll, "binomial", size, group)


@pytest.mark.parametrize("coll", ["reduce_scatter", "allgather"])
@pytest.mark.parametrize(("size", "group"), [(16, 4), (32, 4), (64, 6), (32, 5)])
def test_butterflies_send_less_between_groups_than_those_that_start_far_away(
    coll: str, size: int, group: int
) -> None:
    other = {"reduce_scatter": "halving_doubling", "allgather": "dissemination"}[coll]
    bine = over_roots(coll, "bine", size, group)
    assert bine < 0.75 * over_roots(coll, other, size, group)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_an_allreduce_sends_less_between_uneven_groups(size: int) -> None:
    bine = over_roots("allreduce", "bine", size, 6)
    assert bine < 0.95 * over_roots("allreduce", "halving_doubling", size, 6)


# -- what the forms are for ------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8, 13, 16])
@pytest.mark.parametrize("form", ["halving", "whole"])
def test_an_allreduce_sends_the_messages_of_swing_on_a_ring(
    size: int, form: str
) -> None:
    bine, swing = (
        algorithms.schedule("allreduce", name, size, 0, {"form": form})
        for name in ("bine", "swing")
    )
    for one, other in zip(bine.programs(), swing.programs(), strict=True):
        assert list(one.steps) == list(other.steps)


@pytest.mark.parametrize(
    ("coll", "form"), [("bcast", "scatter"), ("reduce", "halving")]
)
def test_long_vectors_take_the_butterfly_and_short_ones_the_tree(
    coll: str, form: str
) -> None:
    for size in (8, 16, 32):
        short, long = (
            counts(algorithms.schedule(coll, "bine", size, 0, {"form": one}))
            for one in ("tree", form)
        )
        assert short.steps < long.steps
        assert long.moved < 2 < short.moved


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_all_others_than_the_root_receive_a_long_broadcast_once(size: int) -> None:
    for root in range(size):
        found = algorithms.schedule("bcast", "bine", size, root, {"form": "scatter"})
        for program in found.programs():
            got = [step.dst for step in program.steps if step.op is Op.RECV]
            blocks = sum(one.hi - one.lo for one in got if one is not None)
            assert blocks == (0 if program.rank == root else size)


# -- the default -----------------------------------------------------------------------


def chosen(coll: str, size: int, nbytes: int) -> str:
    """The cheapest schedule between so many nodes with a rank each, simplest first."""

    def price(found: tuple[str, dict[str, ParamValue]]) -> float:
        name, params = found
        root = size // 3 if operation(coll).has_root else 0
        return cost(
            algorithms.schedule(coll, name, size, root, params), nbytes, 6, 1e-3, 1e-5
        )

    found = [
        (name, params)
        for name in algorithms.simplest_first(coll, algorithms.names(coll, size))
        for params in algorithms.offered_params(coll, name, size)
    ]
    return cheapest(found, price)[0][0]


@pytest.mark.parametrize("coll", ["bcast", "reduce", "gather", "scatter"])
def test_many_nodes_take_near_partners_where_all_else_is_alike(coll: str) -> None:
    assert chosen(coll, 64, 1024) == "bine"
    # On one switch nothing is far: the simplest one of equals stays.
    assert chosen(coll, 4, 1024) == "direct"


@pytest.mark.parametrize("size", [8, 64])
def test_many_nodes_halve_with_the_nearest_rank_first(size: int) -> None:
    assert chosen("reduce_scatter", size, 1 << 20) == "bine"
    assert chosen("allgather", size, 1 << 20) == "bine"


def test_far_bytes_are_counted_by_their_way_round_the_nodes() -> None:
    # A ring's bytes go one node on; of 16 nodes the farthest is 8 away.
    ring = counts(algorithms.schedule("allgather", "ring", 16))
    assert ring.far == pytest.approx(15 / 16 / 8)
    direct = counts(algorithms.schedule("allgather", "direct", 16))
    ways = [min(way, 16 - way) for way in range(16)]
    assert direct.far == pytest.approx(sum(ways) / 16 / 8)
    # Nodes of 4 ranks: the same ring crosses from node to node once in four messages.
    nodes = tuple(rank // 4 for rank in range(64))
    among = counts(algorithms.schedule("allgather", "ring", 64), OnNode(nodes, 0.1, 0))
    assert among.far == pytest.approx(63 / 64 / 8)
    assert counts(algorithms.schedule("allgather", "ring", 4)).far == 0
