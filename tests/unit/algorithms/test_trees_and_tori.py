# SPDX-License-Identifier: Apache-2.0
"""What the double tree, Swing and Bruck with a radix are made for."""

from __future__ import annotations

from collections import Counter

import pytest

from commrt import algorithms
from commrt.algorithms.double_tree import top, tree
from commrt.algorithms.swing import Swing
from commrt.planning.host_plans import distinct, only_by_name
from commrt.schedule.cost import counts
from commrt.schedule.ir import Op, Schedule
from commrt.select.facts import Candidate


def on_links(schedule: Schedule, lengths: tuple[int, ...]) -> float:
    """Bytes over the busiest link of a torus, on shortest ways, by dimensions."""
    load: Counter[tuple[int, int, int]] = Counter()
    for program in schedule.programs():
        for step in program.steps:
            if step.op is not Op.SEND:
                continue
            assert step.src is not None
            space = program.spaces[step.src.space]
            num, den = space.scale
            part = (step.src.hi - step.src.lo) * num / den / space.nblk
            here, stride = program.rank, 1
            for dimension, length in reversed(list(enumerate(lengths))):
                away = (step.peer // stride - here // stride) % length
                sign, hops = (1, away) if 2 * away <= length else (-1, length - away)
                for _ in range(hops):
                    load[dimension, here, sign] += part  # type: ignore[assignment]
                    place = here // stride % length
                    here += ((place + sign) % length - place) * stride
                stride *= length
    return max(load.values())


# -- the double tree -------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 40), 64, 100, 127])
def test_each_tree_spans_all_ranks(size: int) -> None:
    for number in range(2):
        for rank in range(size):
            own = tree(number, rank, size)
            assert len(own.children) <= 2
            assert all(tree(number, one, size).parent == rank for one in own.children)
            hops = 0
            while (parent := tree(number, rank, size).parent) >= 0:
                rank, hops = parent, hops + 1
            assert rank == top(number, size)
            assert hops <= (size - 1).bit_length()


@pytest.mark.parametrize("size", range(2, 40))
def test_who_has_children_in_one_tree_is_a_leaf_in_the_other(size: int) -> None:
    inner = [
        {rank for rank in range(size) if tree(number, rank, size).children}
        for number in range(2)
    ]
    # Of an odd number of ranks one is in the middle of both.
    assert len(inner[0] & inner[1]) <= size % 2


@pytest.mark.parametrize("size", [8, 16, 33])
def test_a_double_tree_moves_the_vector_once_where_a_tree_moves_it_twice(
    size: int,
) -> None:
    for coll, least in (("bcast", 1), ("reduce", 1), ("allreduce", 2)):
        double = counts(algorithms.schedule(coll, "double_tree", size))
        single = counts(algorithms.schedule(coll, "binary_tree", size))
        assert (double.moved, single.moved) == (least, least + 1)
        assert double.steps <= single.steps + 2


# -- Swing ---------------------------------------------------------------------------


def test_partners_swing_from_side_to_side() -> None:
    pattern = Swing((16,), 0)
    assert [pattern.peer(0, step) for step in range(4)] == [1, 15, 3, 11]
    assert [pattern.peer(5, step) for step in range(4)] == [4, 6, 2, 10]
    mirrored = Swing((16,), 1)
    assert [mirrored.peer(0, step) for step in range(4)] == [15, 1, 13, 5]


def test_on_a_torus_the_dimensions_take_turns() -> None:
    pattern = Swing((4, 4), 0)
    assert [pattern.peer(0, step) for step in range(4)] == [4, 1, 12, 3]
    assert [Swing((4, 4), 1).peer(0, step) for step in range(4)] == [1, 4, 3, 12]


@pytest.mark.parametrize("shape", [(16,), (4, 4), (2, 8), (2, 2, 4), (64,), (4, 4, 4)])
def test_partners_are_mutual_and_every_rank_is_reached(shape: tuple[int, ...]) -> None:
    for port in range(2 * len(shape)):
        pattern = Swing(shape, port)
        places = set()
        for rank in range(pattern.size):
            for step in range(pattern.steps):
                peer = pattern.peer(rank, step)
                assert pattern.peer(peer, step) == rank != peer
                high = pattern.keeps_high(rank, step)
                assert pattern.keeps_high(peer, step) != high
            steps = range(pattern.steps)
            places.add(tuple(pattern.keeps_high(rank, step) for step in steps))
        assert len(places) == pattern.size


@pytest.mark.parametrize("size", [16, 32, 64])
def test_swing_loads_the_links_of_a_ring_less(size: int) -> None:
    loads = {
        name: on_links(algorithms.schedule("allreduce", name, size), (size,))
        for name in ("swing", "halving_doubling")
    }
    assert loads["swing"] < 0.85 * loads["halving_doubling"]


def test_ports_use_all_links_of_a_torus() -> None:
    def load(**params: int | str) -> float:
        some = {"torus": "4x4", **params}
        return on_links(algorithms.schedule("allreduce", "swing", 16, 0, some), (4, 4))

    assert load(ports="all") < 0.5 * load()


def test_swing_is_only_for_who_names_it() -> None:
    nodes = (0,) * 8
    swing = Candidate("shm", "swing")
    ring = Candidate("shm", "ring")
    assert only_by_name(nodes, "allreduce", swing) is not None
    assert only_by_name(nodes, "allreduce", ring) is None
    assert distinct("allreduce", [swing, ring], nodes) == [ring]


# -- Bruck with a radix --------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 8, 9, 16, 27])
def test_a_radix_trades_messages_for_bytes(size: int) -> None:
    found = [
        counts(algorithms.schedule("alltoall", "dissemination", size, 0, {"radix": k}))
        for k in range(2, size + 1)
    ]
    direct = counts(algorithms.schedule("alltoall", "direct", size))
    assert found[-1].moved == pytest.approx(direct.moved)
    assert (found[-1].steps, found[-1].rounds) == (1, direct.rounds)
    assert all(one.moved <= found[0].moved for one in found)


def test_digits_of_a_step_move_at_once() -> None:
    for size, radix in ((9, 3), (16, 4), (27, 3)):
        schedule = algorithms.schedule(
            "alltoall", "dissemination", size, 0, {"radix": radix}
        )
        digits = _digits(size, radix)
        assert counts(schedule).steps == digits
        sends = [step for step in schedule.program(0).steps if step.op is Op.SEND]
        assert len(sends) == digits * (radix - 1)


def _digits(size: int, radix: int) -> int:
    digits = 0
    while radix**digits < size:
        digits += 1
    return digits


@pytest.mark.parametrize(
    ("size", "radices"),
    [(4, [2]), (8, [2, 3]), (16, [2, 4, 8]), (33, [2, 4, 6, 8])],
)
def test_few_radices_are_tried(size: int, radices: list[int]) -> None:
    offered = algorithms.offered_params("alltoall", "dissemination", size)
    assert [params["radix"] for params in offered] == radices
