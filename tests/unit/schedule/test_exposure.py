# SPDX-License-Identifier: Apache-2.0
"""What peers may read and write in place is right in every order of events.

Lowered programs are run by a simulator that picks a random instruction that may run and
a random way that is allowed for each message: a copy, the sender's buffer read when the
message is taken, or the receiver's buffer written when it is sent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from cases import Case, expected, inputs, ways

from commrt import algorithms
from commrt.schedule.exposure import Reach, Sharing, reaches
from commrt.schedule.ir import Slice
from commrt.schedule.lower import LOCAL, Lowered, lower
from commrt.vocabulary.operations import SCHEDULED, operation

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 3, 4, 5, 6, 8)
ORDERS = 6


def everybody(_rank: int, _peer: int) -> bool:
    return True


def analysed(
    coll: str, name: str, size: int, params: algorithms.Params, root: int = 0
) -> tuple[list[Lowered], list[Reach]]:
    schedule = algorithms.schedule(coll, name, size, root, params)
    programs = [lower(schedule, rank) for rank in range(size)]
    return programs, reaches(programs, everybody)


@dataclass
class Buffers:
    """One rank's memory, with its send and receive buffer as ``sharing`` says."""

    program: Lowered
    sharing: Sharing
    spaces: list[Array] = field(default_factory=list)

    @classmethod
    def of(cls, program: Lowered, sharing: Sharing, x: Array, full: int) -> Buffers:
        made = cls(program, sharing)
        kinds = {space.kind: i for i, space in enumerate(program.spaces)}
        lengths = [
            space.bounds(full)[-1] if space.nblk else 0 for space in program.spaces
        ]
        made.spaces = [np.full(length, -999, np.int64) for length in lengths]
        if sharing is not Sharing.APART and {"in", "out"} <= kinds.keys():
            short, long = sorted((kinds["in"], kinds["out"]), key=lambda i: lengths[i])
            at = program.rank * lengths[short] if sharing is Sharing.OWN_BLOCK else 0
            made.spaces[short] = made.spaces[long][at : at + lengths[short]]
        if "in" in kinds and lengths[kinds["in"]]:
            made.spaces[kinds["in"]][:] = x
        return made

    def at(self, part: Slice, full: int) -> Array:
        bounds = self.program.spaces[part.space].bounds(full)
        return self.spaces[part.space][bounds[part.lo] : bounds[part.hi]]


class Simulation:
    """Runs all programs to their end, in an order drawn from ``seed``."""

    def __init__(
        self,
        programs: list[Lowered],
        found: list[Reach],
        sharing: list[Sharing],
        xs: list[Array],
        full: int,
        seed: str,
    ) -> None:
        self.programs, self.found, self.full = programs, found, full
        self.random = random.Random(seed)
        self.ranks = [
            Buffers.of(program, sharing[i], xs[i], full)
            for i, program in enumerate(programs)
        ]
        self.messages: dict[tuple[int, int, int], Array | None] = {}
        self.routes = {"slot": 0, "exposed": 0, "delivered": 0}

    def run(self) -> None:
        left = {(r, i) for r, p in enumerate(self.programs) for i in range(len(p))}
        while left:
            ready = sorted(node for node in left if self._may_run(node, left))
            assert ready, "nothing can run"
            node = self.random.choice(ready)
            self._execute(*node)
            left.discard(node)

    def _may_run(self, node: tuple[int, int], left: set[tuple[int, int]]) -> bool:
        rank, index = node
        program = self.programs[rank]
        if any((rank, dep) in left for dep in program.deps_of(index)):
            return False
        return all(
            kind == LOCAL or (peer, rank, k) in self.messages
            for kind, peer, k, _ in program.inputs_of(index)
        )

    def _execute(self, rank: int, index: int) -> None:
        program, mine = self.programs[rank], self.ranks[rank]
        outs = [e for e in program.outputs_of(index) if e[0] == LOCAL]
        operands = []
        for kind, *where in program.inputs_of(index):
            if kind == LOCAL:
                operands.append(mine.at(Slice(*where), self.full))
                continue
            arrived = self.messages[where[0], rank, where[1]]
            landed = arrived is None
            operands.append(
                mine.at(Slice(*outs[0][1:]), self.full) if landed else arrived
            )
        value = np.sum(operands, axis=0)
        for _, *where in outs:
            mine.at(Slice(*where), self.full)[:] = value
        first = int(program.output_ptr[index])
        for row, (kind, peer, k, _) in enumerate(program.outputs_of(index), first):
            if kind != LOCAL:
                self.messages[rank, peer, k] = self._send(rank, index, row, peer, value)

    def _send(
        self, rank: int, index: int, row: int, peer: int, value: Array
    ) -> Array | None:
        found, theirs = self.found[rank], self.ranks[peer]
        mine = self.ranks[rank]
        ways = ["slot"]
        if found.exposable[index] & mine.sharing:
            ways.append("result")
        if found.operand_exposable[index] & mine.sharing:
            ways.append("operand")
        if found.deliverable[row] & theirs.sharing:
            ways.append("delivered")
        way = self.random.choice(ways)
        entries = {
            "result": [e for e in self.programs[rank].outputs_of(index) if not e[0]],
            "operand": self.programs[rank].inputs_of(index),
        }
        if way in entries:
            self.routes["exposed"] += 1
            return mine.at(Slice(*entries[way][0][1:]), self.full)
        self.routes[way] += 1
        if way == "slot":
            return value.copy()
        landing = found.landings[row]
        assert landing is not None
        assert landing[0] == peer
        theirs.at(landing[1], self.full)[:] = value
        return None


def wrong_ranks(
    coll: str,
    name: str,
    size: int,
    params: algorithms.Params,
    seed: str,
    found: list[Reach] | None = None,
    sharing: Sharing | None = None,
) -> list[int]:
    rng = random.Random(seed)
    root = rng.randrange(size) if operation(coll).has_root else 0
    programs, right = analysed(coll, name, size, params, root)
    case = Case(coll, size, name, dtype="int64", root=root, count=rng.choice((5, 24)))
    xs = [x % 1000 for x in inputs(case)]
    full = case.x_elements(0) * (size if coll in ("allgather", "gather") else 1)
    choices = possible(coll)
    drawn = [sharing or rng.choice(choices) for _ in range(size)]
    simulation = Simulation(programs, found or right, drawn, xs, full, seed)
    simulation.run()
    wrong = []
    for rank, want in enumerate(expected(case, xs)):
        outs = [
            buffer
            for space, buffer in zip(
                programs[rank].spaces, simulation.ranks[rank].spaces, strict=True
            )
            if space.kind == "out"
        ]
        if want is not None and not np.array_equal(outs[0], want):
            wrong.append(rank)
    return wrong


def possible(coll: str) -> list[Sharing]:
    if coll in ("allgather", "reduce_scatter"):
        return [Sharing.APART, Sharing.OWN_BLOCK]
    return [Sharing.APART, *([Sharing.IN_PLACE] if operation(coll).in_place else [])]


MOVING = [coll for coll in SCHEDULED if coll != "barrier"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", MOVING)
def test_every_order_gives_the_result(coll: str, size: int, seed: int) -> None:
    for name, params in ways(coll, size):
        if name is None:
            continue
        for order in range(ORDERS):
            text = f"{coll}/{name}/{params}/{size}/{seed}/{order}"
            assert wrong_ranks(coll, name, size, params, text) == [], text


def test_allowing_everything_is_found_out() -> None:
    programs, right = analysed("alltoall", "direct", 2, {})
    everything = [
        replace(
            one,
            operand_exposable=np.where(program.output_ptr[1:] > 0, 7, 0).astype("u1"),
        )
        for one, program in zip(right, programs, strict=True)
    ]
    found = [
        wrong_ranks("alltoall", "direct", 2, {}, str(i), everything, Sharing.IN_PLACE)
        for i in range(20)
    ]
    assert any(found)


def bits(coll: str, name: str, size: int, **params: int) -> tuple[Sharing, Sharing]:
    """Return the cases in which some message is exposed, or delivered."""
    _, found = analysed(coll, name, size, params)
    exposed = delivered = 0
    for one in found:
        for part in (one.exposable, one.operand_exposable):
            exposed |= int(np.bitwise_or.reduce(part, initial=0))
        delivered |= int(np.bitwise_or.reduce(one.deliverable, initial=0))
    return Sharing(exposed), Sharing(delivered)


ANY = Sharing.APART | Sharing.IN_PLACE


def test_two_shots_need_no_slot() -> None:
    assert bits("allreduce", "direct", 4, shots=2) == (ANY, ANY)


def test_an_exchange_in_place_cannot_be_read_in_place() -> None:
    assert bits("alltoall", "direct", 3) == (Sharing.APART, Sharing.APART)


@pytest.mark.parametrize("coll", ["allgather", "reduce_scatter"])
def test_a_rank_s_own_block_may_lie_in_the_whole(coll: str) -> None:
    exposed, _ = bits(coll, "direct", 3)
    assert exposed == Sharing.APART | Sharing.OWN_BLOCK


def test_ranks_of_other_nodes_reach_nothing() -> None:
    schedule = algorithms.schedule("allreduce", "ring", 4, 0, {})
    programs = [lower(schedule, rank) for rank in range(4)]
    for one in reaches(programs, lambda a, b: a // 2 == b // 2):
        for row, landing in enumerate(one.landings):
            assert (landing is None) == (one.deliverable[row] == 0)
    nobody = reaches(programs, lambda a, b: False)
    assert not any(one.exposable.any() or one.deliverable.any() for one in nobody)
