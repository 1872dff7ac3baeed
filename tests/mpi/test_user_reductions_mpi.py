# SPDX-License-Identifier: Apache-2.0
"""Reductions of the user's own between real ranks, on one node and across nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from affine import run_all

import commrt
from commrt.errors import ReductionError, UsageError

NODES = [(2, ""), (3, "2,1"), (4, "2,2")]


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def every_way(comm: Any, coll: str, op: Any) -> Iterator[dict[str, Any]]:
    for each in comm.candidates(coll, 4096, op=op):
        yield {"algorithm": each.name, "params": {**each.params, "chunk": 1024}}


def run_every_way() -> list[str]:
    return run_all(commrt.init(), (1, 200), every_way)


@pytest.mark.parametrize(("size", "where"), NODES)
def test_rank_order_is_kept_by_every_algorithm(
    mpirun: Any, size: int, where: str
) -> None:
    assert mpirun(size, run_every_way, env=nodes(where)) == [[]] * size


def ask_for_native() -> list[str]:
    comm = commrt.init()
    op = commrt.reduction(np.add, commutative=True)
    try:
        comm.allreduce(np.ones(3), op=op, algorithm="mpi/native")
    except UsageError as error:
        refusal = str(error)
    return [refusal, str(comm.explain("allreduce", 8, op=op))]


def test_the_librarys_own_collectives_are_refused_by_rule(mpirun: Any) -> None:
    for refusal, explained in mpirun(2, ask_for_native):
        assert "mpi/native, which must not run" in refusal
        assert "not    mpi/native: knows no reduction of yours" in explained


def fail_on_rank_1() -> list[str]:
    comm = commrt.init()

    def wrong(a: Any, b: Any) -> Any:
        if comm.rank == 1:
            raise ValueError("no such sum")
        return a + b

    try:
        comm.allreduce(np.ones(9), op=commrt.reduction(wrong, commutative=True))
    except ReductionError as error:
        return [type(error).__name__, repr(error.__cause__)]
    except commrt.errors.CommError as error:
        return [type(error).__name__, ""]
    return ["none", ""]


def test_an_exception_is_known_to_the_whole_node(mpirun: Any) -> None:
    found = mpirun(2, fail_on_rank_1)
    assert found[1] == ["ReductionError", "ValueError('no such sum')"]
    assert found[0][0] in ("RevokedError", "none")
