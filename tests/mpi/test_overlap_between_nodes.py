# SPDX-License-Identifier: Apache-2.0
"""Operations between nodes go on while the program computes, on one core.

Ranks compute until a result lies in memory. Where nothing drove it, none would come.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt
from commrt import _native
from commrt.comm import core_of
from commrt.errors import TimeoutError_

COUNT = 1 << 18
"""Elements of 8 bytes: many messages, one behind the other."""
LIMIT_S = 240.0
ROUNDS = 40
ON_ONE_CORE = {"COMMRT_CARRIER": "tcp"}


def joined_on_one_core() -> Any:
    """Return the communicator of ranks that have no core for a progress thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    comm = commrt.init()
    assert not core_of(comm).world.engine.has_thread
    return comm


def compute_until(is_there: Callable[[], Any]) -> bool:
    """Call nothing of commrt until something is there; False after a limit."""
    limit = time.monotonic() + LIMIT_S
    while not is_there():
        if time.monotonic() > limit:
            return False
    return True


def _sum(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    x = np.full(COUNT, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    return [comm.allreduce(x, nonblocking=True)], x, np.full(COUNT, total)


def _broadcast(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    right = np.arange(COUNT, dtype=np.float64)
    x = right.copy() if comm.rank == 0 else np.zeros(COUNT)
    return [comm.bcast(x, root=0, nonblocking=True)], x, right


def _blocks(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    count = COUNT // comm.size
    x = np.full(count * comm.size, comm.rank + 1.0)
    out = np.zeros(count * comm.size)
    right = np.repeat(np.arange(comm.size) + 1.0, count)
    return [comm.alltoall(x, out=out, nonblocking=True)], out, right


def _messages(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.zeros(COUNT)
    requests = [
        comm.recv(out, source=before, nonblocking=True),
        comm.send(np.full(COUNT, comm.rank + 1.0), dest=after, nonblocking=True),
    ]
    return requests, out, np.full(COUNT, before + 1.0)


def _many_sums(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    rows = np.full((5, COUNT // 8), comm.rank + 1.0)
    requests = [comm.allreduce(row, nonblocking=True) for row in rows]
    return requests, rows, np.full_like(rows, comm.size * (comm.size + 1) / 2)


Begin = Callable[[Any], tuple[list[Any], np.ndarray, np.ndarray]]
CALLS: dict[str, Begin] = {
    "allreduce": _sum,
    "bcast": _broadcast,
    "alltoall": _blocks,
    "messages": _messages,
    "many": _many_sums,
}


def computes_until_it_is_there(name: str, waits_for_another: bool) -> list[Any]:
    """Start a call, and compute until its result lies in memory, without any call."""
    comm = joined_on_one_core()
    requests, found, right = CALLS[name](comm)
    if waits_for_another:
        comm.dup().allreduce(np.ones(1))
    came = compute_until(lambda: np.array_equal(found, right))
    commrt.wait_all(requests)
    comm.barrier()
    return ["there" if came else "nothing came"]


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("waits_for_another", [False, True])
@pytest.mark.parametrize("nodes", ["1,1", "1,1,1", "2,1"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_computes_gets_what_it_asked_for(
    mpirun: MpiRun, name: str, nodes: str, waits_for_another: bool
) -> None:
    size = sum(map(int, nodes.split(",")))
    found = mpirun(
        size,
        computes_until_it_is_there,
        env={"COMMRT_NODES": nodes, **ON_ONE_CORE},
        name=name,
        waits_for_another=waits_for_another,
    )
    assert found == [["there"]] * size


def _is_all(x: np.ndarray, value: float) -> bool:
    return bool((x == value).all())


def looks_then_computes(how: str) -> list[int]:
    """Look for an operation in some way, and compute until another one is there."""
    comm = joined_on_one_core()
    other = comm.dup()
    before = _native.num_late_looks()
    for _ in range(ROUNDS):
        x, y = np.full(1 << 15, 1.0), np.full(8, 1.0)
        long = comm.allreduce(x, nonblocking=True)
        if how == "wait_any":
            commrt.wait_any([other.allreduce(y, nonblocking=True), long])
        elif how == "wait":
            other.allreduce(y, nonblocking=True).wait()
        elif how == "test":
            long.test()
        elif how == "blocking":
            other.allreduce(y)
        assert compute_until(partial(_is_all, x, comm.size))
        long.wait()
        other.barrier()
    return [_native.num_late_looks() - before]


@pytest.mark.parametrize("how", ["nothing", "wait_any", "wait", "test", "blocking"])
def test_who_leaves_something_in_flight_hands_over(mpirun: MpiRun, how: str) -> None:
    """The thread seldom finds something by its clock: it was told before."""
    env = {"COMMRT_NODES": "1,1", **ON_ONE_CORE}
    for late in mpirun(2, looks_then_computes, env=env, how=how):
        assert late[0] <= ROUNDS // 4


def computes_while_the_other_one_waits(folder: str) -> list[str]:
    """Rank 0 computes until rank 1 has waited in vain; both get the sum then."""
    comm = joined_on_one_core()
    x, total = np.full(COUNT, comm.rank + 1.0), 3.0
    request = comm.allreduce(x, nonblocking=True)
    has_waited = Path(folder, "has waited")
    said = "in vain"
    if comm.rank == 0:
        assert compute_until(has_waited.exists)
        said = "there" if (x == total).all() else "nothing came"
    else:
        with pytest.raises(TimeoutError_):
            request.wait(timeout_s=1.0)
        has_waited.touch()
    request.wait()
    assert (x == total).all()
    return [said]


def test_nothing_goes_on_by_itself_where_that_was_asked_for(
    mpirun: MpiRun, tmp_path: Path
) -> None:
    env = {"COMMRT_NODES": "1,1", "COMMRT_PROGRESS": "off", **ON_ONE_CORE}
    found = mpirun(2, computes_while_the_other_one_waits, env=env, folder=str(tmp_path))
    assert found == [["nothing came"], ["in vain"]]


def ends_with_sums_in_flight() -> list[str]:
    """End without a wait for what has been started."""
    comm = joined_on_one_core()
    warnings.simplefilter("ignore", ResourceWarning)
    kept = [comm.allreduce(np.ones(COUNT), nonblocking=True) for _ in range(3)]
    return [f"{len(kept)} started"]


def test_a_rank_may_end_while_operations_go_on(mpirun: MpiRun) -> None:
    env = {"COMMRT_NODES": "1,1,1", **ON_ONE_CORE}
    assert mpirun(3, ends_with_sums_in_flight, env=env) == [["3 started"]] * 3
