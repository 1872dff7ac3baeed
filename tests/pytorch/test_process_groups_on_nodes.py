# SPDX-License-Identifier: Apache-2.0
"""Process groups on several nodes without MPI: pretended nodes, which gloo connects.

What is right on one node must be right there: these are the tests of the other files,
and what is only there. ``test_continuous.py`` has the scenarios there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import differences, job
from test_process_group_collectives import run_everything
from test_process_group_life import PROGRAM, stores
from test_process_group_training import (
    run_data_parallel,
    run_others,
    run_sharded,
)

from commrt.comm import core_of
from commrt.errors import MismatchError, TimeoutError_

DEADLINE_S = 300.0
"""Four ranks and their threads on two busy cores take their time."""
LAYOUTS = {"2,1": 3, "2": 4, "1": 2}
"""COMMRT_NODES, and how many ranks."""


def on_nodes(nodes: str, **more: str) -> dict[str, Any]:
    """Return the arguments of a launch on so many ranks of each node."""
    return {"env": {"COMMRT_NODES": nodes, **more}, "deadline_s": DEADLINE_S}


# -- numbers -------------------------------------------------------------------------


def lengths() -> list[Any]:
    """Everything that is reduced or moved, from nothing to more than one fragment."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for count in (0, 1, 7, 1000, 66_001, 300_001):
        x = torch.arange(count, dtype=torch.float64) % 97 + rank
        dist.all_reduce(x)
        gathered = [torch.zeros(count, dtype=torch.float64) for _ in range(size)]
        dist.all_gather(gathered, x + rank)
        share = torch.zeros(count)
        parts = torch.arange(count * size, dtype=torch.float32) % 31 + rank
        dist.reduce_scatter(share, [*parts.chunk(size)] if count else [share] * size)
        swapped = torch.zeros(count * size)
        dist.all_to_all_single(swapped, parts)
        root = torch.full((count,), float(rank))
        dist.broadcast(root, size - 1)
        total = torch.full((count,), float(rank + 1))
        dist.reduce(total, 0)
        there = torch.zeros(count)
        own = [torch.full((count,), float(r)) for r in range(size)]
        dist.scatter(there, own if rank == size - 1 else None, src=size - 1)
        dist.barrier()
        kept = total if rank == 0 else there
        found += [x, gathered, share, swapped, root, there, kept]
    return found


def many_at_once() -> list[Any]:
    """Operations and messages in flight together, of all lengths, in any order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([*range(size)][::-1])
    sums = [torch.full((1 + 997 * i,), rank + float(i)) for i in range(30)]
    groups = [None, group]
    works = [
        dist.all_reduce(x, group=groups[i % 2], async_op=True)
        for i, x in enumerate(sums)
    ]
    right, left = (rank + 1) % size, (rank - 1) % size
    sizes = [3, 70_000, 0, 2_500_000, 1, 100_000]
    outs = [torch.zeros(n) for n in sizes]
    receives = [dist.irecv(out, left, tag=i) for i, out in enumerate(outs)]
    sends = [
        dist.isend(torch.full((n,), float(rank + i)), right, tag=i)
        for i, n in reversed([*enumerate(sizes)])
    ]
    for work in [*reversed(works), *receives, *sends]:
        work.wait()
    return [*sums, *outs]


def run_numbers() -> list[str]:
    return differences([lengths, many_at_once])


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.full(sample=1)
def test_numbers_are_gloos(torchrun: Any, nodes: str) -> None:
    size = LAYOUTS[nodes]
    assert torchrun(size, run_numbers, **on_nodes(nodes)) == [[]] * size


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.full
def test_every_type_and_reduction(torchrun: Any, nodes: str) -> None:
    got = torchrun(LAYOUTS[nodes], run_everything, **on_nodes(nodes))
    for reductions, moved in got:
        assert reductions == []
        assert moved == []


@pytest.mark.parametrize("scenarios", [run_data_parallel, run_sharded, run_others])
@pytest.mark.parametrize("progress", ["off", "on"])
@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.full
def test_training(
    torchrun: Any, scenarios: Callable[[], list[str]], progress: str, nodes: str
) -> None:
    where = on_nodes(nodes, COMMRT_PROGRESS=progress)
    ranks = LAYOUTS[nodes]
    assert torchrun(ranks, scenarios, **where) == [[]] * ranks


@pytest.mark.full
def test_any_store(torchrun: Any, tmp_path: Path) -> None:
    got = torchrun(2, stores, folder=str(tmp_path), **on_nodes("1"))
    assert got == [[2.0] * 4 + [1.0, 1.0, 2.0]] * 2


# -- what is only there --------------------------------------------------------------


def run_where() -> list[Any]:
    """Say who runs what, and where memory comes from."""
    with job() as rank:
        group: Any = dist.group.WORLD
        comm = group.communicator
        pair = dist.new_group([0, 1])
        whole = comm.explain("allreduce", 1 << 24).choice.candidate
        able = comm.candidates("allreduce", 1 << 24)
        found = [comm.nodes, whole.backend, any(c.has_two_levels for c in able)]
        found.append(comm.mpi is None)
        if rank < 2:
            inside = pair.communicator
            found.append(inside.explain("allreduce", 8).choice.candidate.backend)
            x = torch.ones(3)
            dist.all_reduce(x, group=pair)
            found.append(x.tolist())
        view = group._get_backend(torch.device("cpu"))
        cpu = torch.device("cpu")
        found.append(view.supports_tensor_alloc(cpu))
        memory = view.allocate_tensor(5, dtype=torch.float32, device=cpu)
        found.append([*memory.shape])
        return found


@pytest.mark.full
def test_who_runs_what(torchrun: Any) -> None:
    first, second, third = torchrun(3, run_where, **on_nodes("2,1"))
    whole = [[[0, 1], [2]], "tcp", True, True]
    inside = ["shm", [2.0] * 3]
    assert first == second == [*whole, *inside, False, [5]]
    assert third == [*whole, False, [5]]


def run_late() -> list[str]:
    """Rank 2, on another node, comes late to a call, which ends all the same."""
    said = []
    with job(timeout=timedelta(seconds=300)) as rank:
        comm = dist.group.WORLD.communicator  # type: ignore[union-attr]
        x = torch.ones(4)
        store = dist.distributed_c10d._get_default_store()
        if rank < 2:
            work = dist.all_reduce(x, async_op=True)
            with pytest.raises(TimeoutError_) as raised:
                work.wait(timedelta(seconds=0.3))
            said.append(str(raised.value))
            store.add("waited", 1)
            store.wait([f"go{rank}"])
            work.wait()
        else:
            while store.add("waited", 0) < 2:
                core_of(comm).world.engine.step()
            store.set("go0", "")
            store.set("go1", "")
            dist.all_reduce(x)
        said.append(str(x.tolist()))
    return said


def test_a_rank_that_is_late_is_named(torchrun: Any) -> None:
    first, second, third = torchrun(3, run_late, **on_nodes("2,1"))
    assert "rank 2 on another node has not started it" in first[0]
    # Behind the first line each rank's table tells ages, which differ.
    said = second[0].splitlines()[0].replace("rank 1:", "rank 0:")
    assert first[0].splitlines()[0] == said
    assert first[1] == second[1] == "[3.0, 3.0, 3.0, 3.0]"
    assert third == ["[3.0, 3.0, 3.0, 3.0]"]


DIES = """
import os, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("commrt", timeout=timedelta(seconds=3))
dist.barrier()
if dist.get_rank() == 2:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(dist.get_rank(), type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.full
def test_a_rank_that_dies_is_named(torchrun: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIES)
    done = torchrun.program(3, [str(program)], **on_nodes("2,1"))
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2, done.stdout
    assert all("PeerFailedError" in line for line in lines), lines
    assert all("rank 2 has died: process" in line for line in lines), lines


def run_mismatch() -> list[str]:
    """Check mode compares across nodes; every rank hears the same."""
    said = []
    with job() as rank:
        for call in (
            lambda: dist.all_reduce(torch.ones(3 + rank)),
            lambda: dist.broadcast(
                torch.ones(2, dtype=[torch.float32, torch.int32][rank == 2]), 0
            ),
            lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(1)),
        ):
            with pytest.raises(MismatchError) as raised:
                call()
            said.append(str(raised.value))
        x = torch.ones(2)
        dist.all_reduce(x)
        said.append(str(x.tolist()))
    return said


@pytest.mark.whole  # it is made before the nodes have been measured
def test_mismatches_in_check_mode(torchrun: Any) -> None:
    where = on_nodes("2,1", COMMRT_DEBUG="check")
    first, second, third = torchrun(3, run_mismatch, **where)
    assert first == second == third
    elements, dtypes, operations, total = first
    file = Path(__file__).name
    assert "rank 0: all_reduce(tensor=float32[3]" in elements
    assert "rank 2: all_reduce(tensor=float32[5]" in elements
    assert "rank 2: broadcast(tensor=int32[2]" in dtypes
    assert "ranks 1, 2: barrier()" in operations
    for text in (elements, dtypes, operations):
        assert f" at {file}:" in text
    assert total == "[3.0, 3.0]"


@pytest.mark.parametrize(
    ("end", "last"),
    [("", ""), ("[work.wait() for work in works]", "dist.destroy_process_group()")],
)
@pytest.mark.full
def test_programs_end_cleanly(
    torchrun: Any, tmp_path: Path, end: str, last: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end, last=last))
    done = torchrun.program(2, [str(program)], **on_nodes("1"))
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
    assert "terminate called" not in done.stderr


BREAKS = """
import os, signal, socket, sys, torch, torch.distributed as dist
from datetime import timedelta
how = sys.argv[1]
dist.init_process_group("commrt", timeout=timedelta(seconds=4))
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
dist.barrier()
if rank == 2:
    store.set("pid", str(os.getpid()))
    if how == "cut":
        for name in os.listdir("/proc/self/fd"):
            try:
                one = socket.socket(fileno=os.dup(int(name)))
                port = one.getpeername()[1]
            except (OSError, IndexError):
                continue
            is_store = port == int(os.environ["MASTER_PORT"])
            if one.type == socket.SOCK_STREAM and not is_store:
                one.shutdown(socket.SHUT_RDWR)
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
x = torch.ones(3)
store.wait(["pid"])
try:
    dist.all_reduce(x, group=dist.group.WORLD)
except RuntimeError as error:
    print(rank, type(error).__name__, error, flush=True)
if how == "stopped":  # it would outlive the launcher
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < 2:
        pass
    if rank == 0:
        os.kill(int(store.get("pid")), signal.SIGKILL)
os._exit(0)
"""
"""Rank 2, alone on its node, ends, loses its connections, or stands still."""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("killed", "rank 2 has died: process"),
        ("cut", "has ended, or has closed its connection"),
        ("stopped", "rank 2 on another node has not answered when asked"),
    ],
)
@pytest.mark.full
def test_what_breaks_is_named(
    torchrun: Any, tmp_path: Path, how: str, expected: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BREAKS)
    done = torchrun.program(3, [str(program), how], **on_nodes("2,1"))
    lines = {line[0]: line for line in done.stdout.splitlines() if line[:1].isdigit()}
    # Where a rank is killed torchrun ends the others, who may have said nothing yet.
    if how != "killed":
        assert {"0", "1"} <= lines.keys(), done.stdout
    named = [line for rank, line in lines.items() if rank != "2"]
    assert any(expected in line for line in named) or how == "killed", lines
    assert all("rank 2" in line or "gave up" in line for line in named), lines
    if how == "cut":
        assert "or has closed its connection" in lines["2"]
