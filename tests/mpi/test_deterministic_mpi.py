# SPDX-License-Identifier: Apache-2.0
"""deterministic=True between real ranks, on one node and across nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rounding import from_the_left, same_numbers, telling

import commrt
from commrt.errors import MismatchError, UsageError

NODES = [(2, ""), (3, "2,1"), (4, "2,2"), (4, "")]


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def every_way() -> list[str]:
    comm = commrt.init(deterministic=True)
    wrong = []
    for name in ("float32", "bfloat16"):
        for op, factor in (("sum", 1.0), ("avg", 1 / comm.size)):
            xs = [telling(name, rank, 5000) for rank in range(comm.size)]
            want = from_the_left(xs, op, factor)
            for each in comm.candidates("allreduce", 20_000, dtype=name, op=op):
                for chunk in (2048, 131072):
                    params = {**each.params, "chunk": chunk}
                    got = comm.allreduce(
                        xs[comm.rank].copy(), op=op, algorithm=each.name, params=params
                    )
                    if not same_numbers(got, want):
                        wrong.append(f"rank {comm.rank}: {each} {name} {op} {chunk}")
    return wrong


@pytest.mark.parametrize(("size", "where"), NODES)
def test_every_way_gives_the_bits_of_the_sum_from_the_left(
    mpirun: Any, size: int, where: str
) -> None:
    assert mpirun(size, every_way, env=nodes(where)) == [[]] * size


def asked_by_variable() -> list[Any]:
    comm = commrt.init()
    found = [comm.deterministic, comm.dup().deterministic]
    try:
        commrt.init(deterministic=False)
    except UsageError as error:
        found.append(str(error))
    try:
        comm.allreduce(np.ones(3), algorithm="mpi/native")
    except UsageError as error:
        found.append(str(error))
    return found


def test_the_variable_asks_for_it_and_the_library_is_refused(mpirun: Any) -> None:
    for found in mpirun(2, asked_by_variable, env={"COMMRT_DETERMINISTIC": "1"}):
        assert found[:2] == [True, True]
        assert "comm.dup(deterministic=False)" in found[2]
        assert "mpi/native, which must not run" in found[3]


def disagree() -> str:
    from commrt.launch.detect import detect

    try:
        commrt.init(deterministic=detect().rank == 1)
    except MismatchError as error:
        first = str(error)
    assert commrt.init(deterministic=True).allreduce(np.ones(1))[0] == 2
    return first


def test_ranks_that_disagree_at_init_are_told_so(mpirun: Any) -> None:
    texts = mpirun(2, disagree)
    assert texts[0] == texts[1]
    assert "rank 1 of the job: deterministic=True" in texts[0]


def sparse_and_halo() -> list[list[str]]:
    """Return this rank's results, of what is the same everywhere and of its own."""
    comm = commrt.init(deterministic=True)
    x = telling("float32", comm.rank, 3000)
    at = np.flatnonzero(np.arange(9000) % (comm.rank + 2) == 0)[:3000].astype(np.int32)
    entries = at, x[: len(at)], 9000
    started = [comm.sparse_allreduce(entries, nonblocking=True) for _ in range(5)]
    found = [request.wait() for request in started]
    sums = [np.asarray(getattr(each, "values", each)) for each in found]
    for algorithm in ("split", "split_dense"):
        total = comm.sparse_allreduce(entries, result="dense", algorithm=algorithm)
        sums.append(total[total != 0])
    cart = comm.cart((2, comm.size // 2), periodic=True)
    cells = []
    for direct in (None, True):
        field = telling("float32", comm.rank, 64).reshape(8, 8)
        cart.halo_reduce(field, 2, direct=direct)
        cells.append(field[2:-2, 2:-2].tobytes().hex())
    return [[each.tobytes().hex() for each in sums], cells]


def test_sparse_sums_and_halos_are_the_same_wherever_the_ranks_are(mpirun: Any) -> None:
    one_node, two_nodes = (
        mpirun(4, sparse_and_halo, env=nodes(text)) for text in ("", "2,2")
    )
    assert one_node == two_nodes
    for sums, cells in one_node:
        assert sums[:5] == one_node[0][0][:5]
        assert len({*sums[:5]}) == len({*sums[5:]}) == 1
        assert len({*cells}) == 1
