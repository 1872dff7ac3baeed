# SPDX-License-Identifier: Apache-2.0
"""Boxes: cutting, programs that fit each other on all ranks, the geometry of halos."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from halo_cases import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.grids.geometry import Grid
from commrt.grids.halo import HaloShape, directions, halo_moves
from commrt.schedule.boxes import (
    Box,
    BoxProgram,
    Move,
    StepKind,
    compile_moves,
    cut,
)

SHAPES = st.lists(st.integers(1, 7), max_size=5)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 4, 16]), st.integers(1, 3000))
def test_parts_tile_a_box_in_order(shape: list[int], itemsize: int, limit: int) -> None:
    index = np.arange(math.prod(shape)).reshape(shape)
    seen = [
        index[tuple(map(slice, start, stop))].ravel()
        for start, stop in cut(shape, itemsize, limit)
    ]
    assert all(len(part) for part in seen)
    assert np.concatenate(seen).tolist() == list(range(index.size))


def test_short_rows_are_cut_as_the_lines_that_they_touch() -> None:
    face = cut((256, 256, 1), 4, 1 << 18)
    assert len(face) == 16
    assert len(cut((1, 256, 256), 4, 1 << 18)) == 1
    assert cut((10,), 8, 32) == [((a,), (a + b,)) for a, b in ((0, 3), (3, 3), (6, 4))]


def programs(seed: object, limit: int) -> tuple[list[BoxProgram], list[int]]:
    """Return the programs of all ranks of a drawn exchange."""
    rng = random.Random(str(seed))
    size = rng.choice((1, 2, 3, 4, 6, 8, 12))
    case = draw(rng, size)
    grid = Grid(case.dims, case.periodic)
    shape = HaloShape(case.widths, case.axes, case.corners, case.direct)
    sizes = [np.dtype(name).itemsize for name in case.dtypes]
    found = []
    for rank in range(size):
        extents = tuple(case.extents(grid.coords_of(rank)))
        moves = halo_moves(
            grid, rank, shape, [extents] * len(sizes), reverse=case.op is not None
        )
        found.append(
            compile_moves(
                moves,
                sizes,
                rank=rank,
                size=size,
                reduces=case.op is not None,
                limit=limit,
            )
        )
    return found, sizes


def length(program: BoxProgram, step: int, sizes: list[int]) -> list[int]:
    low, high = program.steps[step, 1:3]
    boxes = program.boxes[low:high]
    return [box.count * sizes[box.array] for box in boxes]


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**9), st.sampled_from([100, 700, 1 << 18]))
def test_messages_meet_their_like(seed: int, limit: int) -> None:
    found, sizes = programs(seed, limit)
    sent, received = {}, {}
    for rank, program in enumerate(found):
        for step, (kind, _, _, peer, k, _) in enumerate(program.steps.tolist()):
            if kind == StepKind.SEND:
                sent[rank, peer, k] = length(program, step, sizes)
            elif kind in (StepKind.RECEIVE, StepKind.RECEIVE_REDUCE):
                received[peer, rank, k] = length(program, step, sizes)
    assert sent == received


def stated(counts: list[int], *, sends: bool, itemsize: int = 8) -> BoxProgram:
    """Return the program of one rank for what goes to, or comes from, another one."""
    ends = np.cumsum([0, *counts]).tolist()
    moves = []
    for number, (low, high) in enumerate(pairwise(ends)):
        box = Box(0, (low,), (high,))
        moves.append(Move(0, number, 1, box if sends else None, None if sends else box))
    return compile_moves(
        moves[::-1], [itemsize], rank=0, size=2, stated=True, limit=160
    )


def lengths(program: BoxProgram) -> list[int]:
    return [sum(length(program, step, [8])) for step in range(len(program.steps))]


COUNTS = st.lists(st.sampled_from([0, 1, 3, 19, 20, 21, 40, 41, 60]), max_size=3)


@given(COUNTS)
def test_stated_lengths_are_sent_as_they_are_received(counts: list[int]) -> None:
    sent, received = stated(counts, sends=True), stated(counts, sends=False)
    assert lengths(sent) == lengths(received)
    assert sum(lengths(sent)) == 8 * sum(counts)
    assert sent.steps[:, 4].tolist() == list(range(len(sent.steps)))
    assert len(sent.steps) >= len(counts)


@given(COUNTS, st.data())
def test_sides_that_state_other_lengths_meet_one_that_differs(
    counts: list[int], data: st.DataObject
) -> None:
    """The first that differs ends the operation: none may be left over before."""
    size = len(counts)
    other = data.draw(
        st.lists(st.sampled_from([0, 1, 20, 40, 41]), min_size=size, max_size=size)
    )
    ours, theirs = (lengths(stated(each, sends=True)) for each in (counts, other))
    shared = min(len(ours), len(theirs))
    assert (ours[:shared] == theirs[:shared]) == (counts == other)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**9))
def test_only_earlier_steps_are_waited_for_and_no_receive_waits_for_a_send(
    seed: int,
) -> None:
    found, _ = programs(seed, 300)
    for program in found:
        for step, (low, high) in enumerate(
            zip(program.dep_ptr, program.dep_ptr[1:], strict=False)
        ):
            for dep in program.deps[low:high]:
                assert dep < step
                assert program.steps[dep, 0] != StepKind.SEND


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**9))
def test_nothing_writes_what_an_earlier_step_reads(seed: int) -> None:
    """So that no step need wait for a send."""
    found, _ = programs(seed, 300)
    for program in found:
        read: list[Box] = []
        for kind, low, high, _, _, source in program.steps.tolist():
            own = program.boxes[low:high]
            if kind != StepKind.SEND:
                assert not any(meet(box, other) for box in own for other in read)
            if kind == StepKind.SEND:
                read += own
            elif source >= 0:
                read += program.boxes[source : source + high - low]


def meet(one: Box, other: Box) -> bool:
    return one.array == other.array and all(
        a < d and c < b
        for a, b, c, d in zip(one.start, one.stop, other.start, other.stop, strict=True)
    )


@pytest.mark.parametrize("part", range(6))
@settings(deadline=None, max_examples=2)
@given(number=st.integers(0, 10**9))
def test_programs_end_with_one_slot_per_key_and_few_steps_at_once(
    part: int, number: int
) -> None:
    """The engine's rules, with the least that programs ask for."""
    seed = 6 * number + part
    ranks = [Window(rank, each) for rank, each in enumerate(programs(seed, 200)[0])]
    unread: dict[tuple[int, int, int], bool] = {}
    for _ in range(10_000):
        moved = [rank.run_some(unread) for rank in ranks]
        if all(rank.is_over for rank in ranks):
            return
        assert any(moved), "all ranks wait"
    pytest.fail("does not end")


class Window:
    """The steps of one rank's program that may run now."""

    def __init__(self, rank: int, program: BoxProgram) -> None:
        self.rank, self.program = rank, program
        # Lists once, not a row of the array at each look: windows are looked at often.
        self.steps = program.steps.tolist()
        self.deps = program.deps.tolist()
        self.sends = [i for i, row in enumerate(self.steps) if row[0] == StepKind.SEND]
        self.place = {step: place for place, step in enumerate(self.sends)}
        self.done = [False] * len(self.steps)
        self.head = 0

    @property
    def is_over(self) -> bool:
        return self.head == len(self.done)

    def run_some(self, unread: dict[tuple[int, int, int], bool]) -> bool:
        """Run what can run; return whether anything did."""
        moved = False
        for step in range(
            self.head, min(len(self.done), self.head + self.program.ahead)
        ):
            if not self.done[step] and self.can_run(step, unread):
                self.done[step] = moved = True
        while not self.is_over and self.done[self.head]:
            self.head += 1
        return moved

    def can_run(self, step: int, unread: dict[tuple[int, int, int], bool]) -> bool:
        """Return whether a step can run; if it can, note what it wrote or read."""
        program = self.program
        deps = self.deps[program.dep_ptr[step] : program.dep_ptr[step + 1]]
        if not all(self.done[dep] for dep in deps):
            return False
        kind, _, _, peer, k, _ = self.steps[step]
        if kind == StepKind.SEND:
            before = self.place[step] - program.fewest_slots
            if before >= 0:
                _, _, _, other, number, _ = self.steps[self.sends[before]]
                if unread.get((self.rank, other, number), True):
                    return False
            unread[self.rank, peer, k] = True
        elif kind in (StepKind.RECEIVE, StepKind.RECEIVE_REDUCE):
            if not unread.get((peer, self.rank, k), False):
                return False
            unread[peer, self.rank, k] = False
        return True


def test_directions_are_faces_or_all_around() -> None:
    faces = HaloShape(((1, 1),) * 3, (0, 1, 2), False, True)
    around = HaloShape(((1, 1),) * 3, (0, 1, 2), True, True)
    assert len(directions(faces)) == 6
    assert len(directions(around)) == 26
    assert len(set(directions(around))) == 26


def test_messages_to_one_peer_go_together() -> None:
    grid = Grid((2, 1), (True, False))
    shape = HaloShape(((1, 1), (0, 0)), (0, 1), True, False)
    moves = halo_moves(grid, 0, shape, [(6, 4), (6, 4)])
    program = compile_moves(moves, [8, 4], rank=0, size=2)
    assert program.steps[:, 0].tolist() == [StepKind.SEND, StepKind.RECEIVE]
    assert program.peers == ((1, 1, 1),)
    assert program.longest_nbytes == 2 * 4 * (8 + 4)


def test_opposite_faces_of_short_rows_go_together() -> None:
    shape = HaloShape(((1, 1),) * 3, (0, 1, 2), True, False)
    arrays = [(66, 258, 34), (66, 258, 34)]
    for dims, boxes in (((1, 1, 2), 2), ((2, 1, 1), 1)):
        moves = halo_moves(Grid(dims, (True,) * 3), 0, shape, arrays)
        program = compile_moves(moves, [4, 4], rank=0, size=2, limit=1 << 15)
        for kind, low, high, *_ in program.steps.tolist():
            if kind != StepKind.COPY:
                own = program.boxes[low:high]
                assert len(own) == boxes
                assert len({(box.array, box.shape, box.start[:2]) for box in own}) == 1
