# SPDX-License-Identifier: Apache-2.0
"""Collectives of an MPI library whose ranks call different things."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.bench.price import measure
from commrt.comm import core_of
from commrt.errors import CommError, MismatchError

EVERY, AT = 16, 37
NATIVE = {"backend": "mpi", "algorithm": "native"}


def differ(kind: str, nonblocking: bool, turns: int) -> list[Any]:
    """Make one call otherwise on the last rank; return where this rank stopped."""
    comm = commrt.init()
    assert core_of(comm).compare_every == EVERY
    x = np.ones(2, np.int32)
    how: dict[str, Any] = {**NATIVE, "nonblocking": nonblocking}
    for turn in range(turns):
        wrong = turn == AT and comm.rank == comm.size - 1
        swaps = turn in (AT, AT + 1) and comm.rank == comm.size - 1
        try:
            if kind == "reduction":
                done = comm.allreduce(x.copy(), op="max" if wrong else "sum", **how)
            elif kind == "type":
                y = x.view(np.float32) if wrong else x
                done = comm.allreduce(y.copy(), **how)
            elif kind == "root":
                done = comm.bcast(x.copy(), root=1 if wrong else 0, **how)
            else:
                op = "max" if bool(turn % 2) != swaps else "sum"
                done = comm.allreduce(x.copy(), op=op, **how)
            if nonblocking:
                done.wait()
        except MismatchError as error:
            return [turn, str(error)]
    return [turns, ""]


@pytest.mark.parametrize("nonblocking", [False, True])
@pytest.mark.parametrize("kind", ["reduction", "type", "root", "order"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_raise_the_same(
    mpirun: Any, kind: str, size: int, nonblocking: bool
) -> None:
    found = mpirun(
        size,
        differ,
        env={"COMMRT_COMPARE_EVERY": str(EVERY)},
        kind=kind,
        nonblocking=nonblocking,
        turns=3000,
    )
    texts = {text for _, text in found}
    assert len(texts) == 1, found
    (text,) = texts
    # The slowest rank has made at most so many calls behind it; others may be ahead.
    assert AT <= min(turn for turn, _ in found) <= AT + EVERY, found
    if "A library ran them" in text:
        assert f"as operation #{AT}." in text
    else:  # a rank that waited has seen the other's call
        assert "made another call" in text


def test_ranks_of_other_nodes_raise_it_too(mpirun: Any) -> None:
    found = mpirun(
        4,
        differ,
        env={"COMMRT_COMPARE_EVERY": str(EVERY), "COMMRT_NODES": "1,2,1"},
        kind="reduction",
        nonblocking=False,
        turns=3000,
    )
    # Two nodes may find it at the same time.
    assert 1 <= len({text for _, text in found}) <= 3, found
    assert all(turn <= AT + 4 * 8 * EVERY for turn, _ in found), found
    assert all(f"up to operation #{8 * EVERY - 1}" in text for _, text in found)


def root_runs_ahead(folder: str) -> list[Any]:
    """Have the root call once more after a rank has found that its calls differ."""
    comm = commrt.init()
    comm.timeout_s = 250
    comm.bcast(np.ones(2), root=0, **NATIVE)
    told = Path(folder, "told")
    try:
        # Of two bcasts with different roots no rank need wait, as MPICH has them.
        if comm.rank == comm.size - 1:
            comm.barrier(**NATIVE)
        else:
            comm.bcast(np.ones(2), root=0, **NATIVE)
        while not told.exists():
            pass
        comm.bcast(np.ones(2), root=0, **NATIVE)
    except MismatchError as error:
        told.touch()
        return [str(error)]
    return []


def test_a_root_that_runs_ahead_raises_in_its_next_call(
    mpirun: Any, tmp_path: Path
) -> None:
    env = {"COMMRT_COMPARE_EVERY": "100000"}
    found = mpirun(3, root_runs_ahead, env=env, folder=str(tmp_path))
    assert [len(one) for one in found] == [1] * 3, found
    assert len({text for (text,) in found}) == 1, found
    assert "#1 on world" in found[0][0]


def waits_for_other_roots() -> list[Any]:
    """Call a bcast with the next rank as the root, so that every rank waits."""
    comm = commrt.init()
    comm.timeout_s = 250
    for turn in range(AT + 1):
        root = (comm.rank + 1) % comm.size if turn == AT else 0
        try:
            comm.bcast(np.ones(2), root=root, **NATIVE)
        except MismatchError as error:
            return [turn, str(error)]
    return [AT + 1, ""]


@pytest.mark.parametrize(("size", "nodes"), [(2, "1,1"), (3, "2,1"), (4, "1,2,1")])
def test_ranks_of_other_nodes_that_all_wait_find_it(
    mpirun: Any, size: int, nodes: str
) -> None:
    found = mpirun(size, waits_for_other_roots, env={"COMMRT_NODES": nodes})
    for turn, text in found:
        assert turn == AT
        assert f"bcast #{AT} on world" in text
        assert text.count("root=") == 2


def right(seed: int) -> list[str]:
    """Make drawn calls, of the library and by schedules; some are refused."""
    comm = commrt.init()
    draw = random.Random(seed)
    wrong = []
    requests: list[Any] = []
    for turn in range(1500):
        name = draw.choice(["bcast", "allreduce", "allgather", "alltoall", "barrier"])
        count, root = draw.choice([1, 3, 700]), draw.randrange(comm.size)
        how: dict[str, Any] = dict(NATIVE) if draw.random() < 0.8 else {}
        nonblocking = draw.random() < 0.3
        refused = draw.random() < 0.02
        if nonblocking:
            how["nonblocking"] = True
        if name == "bcast":
            how["root"] = root
        x = [] if name == "barrier" else [np.full(count * comm.size, turn)]
        try:
            if refused:  # by all ranks alike
                comm.allreduce(np.ones(3), out=np.empty(1))
                continue
        except CommError:
            continue
        try:
            done = getattr(comm, name)(*x, **how)
            if nonblocking:
                requests.append(done)
            if len(requests) > 3:
                requests.pop(0).wait()
        except CommError as error:
            wrong.append(f"{turn} {name}: {error!r}")
            break
    for request in requests:
        request.wait()
    return wrong


@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, ""), (5, "2,1,2")])
def test_right_calls_are_never_taken_for_wrong_ones(
    mpirun: Any, size: int, where: str, seed: int
) -> None:
    env = {"COMMRT_COMPARE_EVERY": "3", "COMMRT_NODES": where}
    assert mpirun(size, right, env=env, seed=seed) == [[]] * size


def unasked() -> list[Any]:
    """Let one rank ask for another reduction, with nothing compared."""
    comm = commrt.init()
    assert core_of(comm).compare_every == 0
    for turn in range(300):
        op = "max" if turn == 5 and comm.rank else "sum"
        comm.allreduce(np.ones(2, np.int32), op=op, **NATIVE)
    return [core_of(comm).failure]


def test_nothing_is_compared_where_that_is_switched_off(mpirun: Any) -> None:
    env = {"COMMRT_COMPARE_EVERY": "0"}
    assert mpirun(2, unasked, env=env) == [[""], [""]]


def in_check_mode() -> int:
    """Return after how many calls ranks compare in check mode."""
    return core_of(commrt.init()).compare_every


def test_check_mode_compares_each_call_instead(mpirun: Any) -> None:
    assert mpirun(2, in_check_mode, env={"COMMRT_DEBUG": "check"}) == [0, 0]


def priced() -> list[Any]:
    """Return facts of prices that were measured, and what is as before after it."""
    comm = commrt.init()
    row = measure(comm, "comparison", "bcast", "float32", 8, turns=4)
    others = [
        measure(comm, what, "bcast", "float32", 8, turns=4)["ratio"] > 0
        for what in ("recorder", "liveness")
    ]
    core = core_of(comm)
    left = core.compare_every, core.keeps_records, core.who_died()
    return [row["detail"], row["first_us"] > 0, *others, *left]


def test_the_prices_of_what_watches_calls_are_measured(mpirun: Any) -> None:
    want = ["every 128 calls", True, True, True, 128, True, ""]
    assert mpirun(2, priced) == [want] * 2
