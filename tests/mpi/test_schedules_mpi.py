# SPDX-License-Identifier: Apache-2.0
"""Every algorithm between real ranks, on one node and across nodes of unequal size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, run_cases, ways

import commrt
from commrt.vocabulary.operations import COLLECTIVES

COUNTS = (0, 1, 1003)
FRAGMENTS = {"chunk": 512}
"""So little that 1003 elements are several fragments."""


def every_way() -> list[Any]:
    """Run every algorithm with every parameter; return what was wrong, and how many."""
    comm = commrt.init()
    cases = [
        Case(coll, comm.size, name, {**own, **FRAGMENTS}, dtype, root=root, count=count)
        for coll in COLLECTIVES
        for name, own in ways(coll, comm.size, comm.facts.layout)
        if name is not None
        for count in COUNTS
        for dtype, root in (("float32", 0), ("float64", comm.size - 1))
        # Of many inner algorithms each is tried once.
        if name != "two_level" or (count, dtype) == (1003, "float64")
    ]
    shifted = [case for case in cases if case.algorithm == "shifted_halving_doubling"]
    widths = sorted({case.params.get("k", 0) for case in shifted})
    two_level = sum(case.algorithm == "two_level" for case in cases)
    return [run_cases(comm, cases), comm.facts.nodes, widths, two_level > 50]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(
    ("size", "where", "widths"),
    [
        (3, "1,2", [0, 3]),
        (5, "2,3", [0, 5]),
        # Groups of 2 and 3 that fit no node: 6 = 3 groups of 2 = 2 groups of 3.
        (6, "1,2,3", [0, 1, 3, 6]),
        (6, "", [0, 1, 3, 6]),
        (7, "3,4", [0, 7]),
    ],
)
def test_every_algorithm_agrees_with_numpy(
    mpirun: Any, size: int, where: str, widths: list[int]
) -> None:
    env = {"COMMRT_NODES": where, "COMMRT_TIMEOUT_S": "300"} if where else {}
    got = mpirun(size, every_way, env=env, deadline_s=300)
    assert got == [[[], where.count(",") + 1, widths, "," in where]] * size


def knows_its_nodes() -> list[Any]:
    """Return cores and nodes, and those of a group in an order of its own."""
    comm: Any = commrt.init()
    found = [comm.facts.cores, list(comm.facts.layout)]
    if comm.rank == 2:
        return found
    group = comm.create_group([3, 0, 1])
    total = group.allreduce(np.full(7, group.rank + 1.0), algorithm="two_level")
    return [*found, list(group.facts.layout), total.tolist()]


def test_every_rank_knows_who_shares_a_node(mpirun: Any) -> None:
    (cores, nodes), *_ = (each[:2] for each in mpirun(4, knows_one_node))
    assert nodes == [0, 0, 0, 0]
    got = mpirun(4, knows_its_nodes, env={"COMMRT_NODES": "2,2"})
    # Pretended nodes share the cores of the machine.
    one = [max(1, cores // 2), [0, 0, 1, 1]]
    assert got[2] == one
    assert [got[rank] for rank in (0, 1, 3)] == [[*one, [0, 1, 1], [6.0] * 7]] * 3
    apart = mpirun(4, knows_one_node, env={"COMMRT_NODES": "1,1,1,1"})
    part = cores // 4 if cores >= 4 else cores / 4
    assert apart == [[part, [0, 1, 2, 3]]] * 4


def knows_one_node() -> list[Any]:
    """Return cores and nodes."""
    comm = commrt.init()
    return [comm.facts.cores, list(comm.facts.layout)]


def rides_in_lines_or_not() -> list[int]:
    """Return the lengths, in bytes, of which an allreduce or a bcast was wrong."""
    comm: Any = commrt.init()
    wrong = []
    for inline in (48, 100, 2096):
        for nbytes in (8, 48, 56, 96, 104, 112, 304, 2096, 2104):
            x = np.arange(nbytes // 8) + comm.rank
            want = comm.size * x + sum(range(comm.size)) - comm.size * comm.rank
            for name in ("ring", "direct"):
                way = f"shm/{name}{{inline={inline}}}"
                request = comm.allreduce(x.copy(), algorithm=way, nonblocking=True)
                found = comm.allreduce(x.copy(), algorithm=way)
                sent = comm.bcast(x.copy(), root=1, algorithm=way)
                right = [want, want, np.arange(nbytes // 8) + 1]
                pairs = zip((request.wait(), found, sent), right, strict=True)
                if not all(np.array_equal(one, other) for one, other in pairs):
                    wrong.append(nbytes)
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_payloads_in_lines_of_their_own_arrive_whole(mpirun: Any, size: int) -> None:
    assert mpirun(size, rides_in_lines_or_not) == [[]] * size
