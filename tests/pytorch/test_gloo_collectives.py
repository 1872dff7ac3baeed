# SPDX-License-Identifier: Apache-2.0
"""gloo's own collectives (``gloo/native``) on pretended nodes, as a candidate.

Numbers are compared with gloo's groups; what else is promised of a call, with what
docs/faults.md says of every other one.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job, unequal

from commrt.comm import core_of
from commrt.errors import MismatchError, RevokedError, TimeoutError_, UsageError
from commrt.torch import Options, using

DEADLINE_S = 300.0
LAYOUTS = {"1": 2, "2,1": 3, "2": 4}
"""COMMRT_NODES, and how many ranks."""
NATIVE = Options(algorithm="gloo/native")
TYPES = {
    torch.float32: "SUM AVG PRODUCT",
    torch.float64: "SUM AVG PRODUCT",
    torch.complex64: "SUM AVG",
    torch.int32: "SUM PRODUCT MIN MAX BAND BOR BXOR",
    torch.int64: "SUM PRODUCT MIN MAX BAND BOR BXOR",
}


def on_nodes(nodes: str, **more: str) -> dict[str, Any]:
    """Return the arguments of a launch on so many ranks of each node."""
    return {"env": {"COMMRT_NODES": nodes, **more}, "deadline_s": DEADLINE_S}


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a rank's own small whole numbers, whose sums and products are exact."""
    made = (torch.arange(count) * (seed + 1) + dist.get_rank() * 5 + seed) % 7 + 1
    return made.to(dtype)


def every_operation() -> list[Any]:
    """Run what gloo has, in and out of place, of lengths with and without a rest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for dtype, names in TYPES.items():
        for name in names.split():
            op, is_avg = getattr(dist.ReduceOp, name), name == "AVG"
            if is_avg and GLOO:  # it has none: the mean of a sum
                op = dist.ReduceOp.SUM
            x = numbers(1003, dtype)
            dist.all_reduce(x, op=op)
            share = torch.zeros(12, dtype=dtype)
            z = numbers(7, dtype, 2)
            if not dtype.is_complex:  # gloo has but the first of complex numbers
                dist.reduce_scatter_tensor(share, numbers(12 * size, dtype, 1), op=op)
                dist.reduce(z, size - 1, op=op)
            scale = size if is_avg and GLOO else 1
            found += [x / scale, share / scale]
            if rank == size - 1 and not dtype.is_complex:
                found.append(z / scale)
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.bool):
        x = numbers(5, dtype)
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        wide = torch.zeros(5 * size, dtype=dtype)
        dist.all_gather_into_tensor(wide, x)
        swapped = torch.zeros(3 * size, dtype=dtype)
        dist.all_to_all_single(swapped, numbers(3 * size, dtype, 3))
        sends = [(rank + to) % 3 for to in range(size)]
        receives = [(source + rank) % 3 for source in range(size)]
        ragged = torch.zeros(sum(receives), dtype=dtype)
        dist.all_to_all_single(
            *(ragged, numbers(sum(sends), dtype, 4), receives, sends)
        )
        root = numbers(9, dtype)
        dist.broadcast(root, size - 1)
        there = torch.zeros(4, dtype=dtype)
        own = [numbers(4, dtype, 10 + r) for r in range(size)]
        dist.scatter(there, own if rank == 0 else None, src=0)
        kept = [torch.zeros_like(x) for _ in range(size)] if rank == 1 else None
        dist.gather(x, kept, dst=1)
        found += [parts, wide, swapped, ragged, root, there, kept or 0]
    dist.barrier()
    return found


GLOO = False
"""Whether ``every_operation`` runs on gloo's group, which has no AVG."""


def run_numbers() -> list[str]:
    global GLOO
    results = []
    for backend, options in (("gloo", {}), ("commrt", {"pg_options": NATIVE})):
        GLOO = backend == "gloo"
        with job(backend, "numbers", **options):
            results.append(every_operation())
    return unequal(*results, 1e-6)


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.full(sample=1)
def test_numbers_are_gloos(torchrun: Any, nodes: str) -> None:
    size = LAYOUTS[nodes]
    assert torchrun(size, run_numbers, **on_nodes(nodes)) == [[]] * size


def run_who_runs_it() -> list[str]:
    """Return what explains, names and measurements say."""
    found = []
    with job() as rank:
        comm: Any = dist.group.WORLD.communicator  # type: ignore[union-attr]
        measured = core_of(comm).world.between_nodes
        assert min(measured.alpha_us, measured.beta_us, measured.native_us) > 0
        found.append(repr(measured))
        for coll in ("allreduce", "alltoall"):
            found.append(str(comm.explain(coll, 64 << 20).choice.candidate))
        for coll, dtype, op, why in (
            ("allreduce", "float32", "max", "is another one"),
            ("allreduce", "bfloat16", "sum", "rounded at every step"),
            ("allreduce", "int16", "sum", "adds no int16"),
            ("scan", "float32", "sum", "gloo has no scan"),
            ("allgatherv", "float32", "sum", "gloo has no allgatherv"),
        ):
            said = str(comm.explain(coll, 1 << 20, dtype=dtype, op=op)).splitlines()
            assert any("gloo/native" in line and why in line for line in said), said
        with pytest.raises(UsageError, match=r"gloo/native.*is another one"):
            comm.allreduce(torch.ones(3), op="max", algorithm="gloo/native")
        x = torch.full((1000,), rank + 1.0)
        dist.all_reduce(x)
        found.append(str(x[0].item()))
    return found


def test_the_model_chooses_it_for_long_vectors(torchrun: Any) -> None:
    """Where gloo carries messages, too, which costs schedules copies."""
    carried = on_nodes("1", COMMRT_CARRIER="gloo")
    first, second = torchrun(2, run_who_runs_it, **carried)
    assert first == second
    assert first[1:] == ["gloo/native", "gloo/native", "3.0"]


def run_unequal() -> list[str]:
    """Return what calls say that gloo would end the process for, and what goes on."""
    said = []
    with job() as rank:
        # Again and again: who finds out first must not take the answer from the others.
        for length, other in ((1000, 1001), (1 << 20, 1 << 19)) * 8:
            group = dist.new_group(pg_options=NATIVE)
            comm: Any = group.communicator  # type: ignore[union-attr]
            for each in {length, other}:  # so that both are plans of every rank
                dist.all_reduce(torch.ones(each), group=group)
            x = torch.ones(length if rank == 0 else other)
            work = dist.all_reduce(x, group=group, async_op=True)
            assert work is not None
            with pytest.raises(MismatchError, match="different arguments"):
                work.wait()
            with pytest.raises((MismatchError, RevokedError)):
                comm.allreduce(torch.ones(length))
        group = dist.new_group(pg_options=NATIVE)
        x = torch.ones(64)
        all_reduce, broadcast = dist.all_reduce, partial(dist.broadcast, src=0)
        call: Any = broadcast if rank else all_reduce
        with pytest.raises(MismatchError):
            call(x, group=group)
        x = torch.ones(1 << 20)
        dist.all_reduce(x)
        said.append(str(x[0].item()))
    return said


def test_unequal_calls_are_an_error_before_gloo_has_them(torchrun: Any) -> None:
    assert torchrun(3, run_unequal, **on_nodes("2,1")) == [["3.0"]] * 3


def run_interleaved() -> list[float]:
    """Groups meet in another order on each rank, with messages and schedules between.

    The calls of each are in one order.
    """
    with job(pg_options=NATIVE) as rank:
        size = dist.get_world_size()
        everyone = [*range(size)]
        groups = [
            dist.new_group(everyone, pg_options=NATIVE),
            dist.new_group(everyone[::-1], pg_options=NATIVE),
            dist.new_group(everyone),
        ]
        lengths = [300_000, 5, 70_000]
        sums = {
            (which, i): torch.full((lengths[i],), float(rank + which + i))
            for which in range(3)
            for i in range(3)
        }
        order = [(w, i) for w in range(3) for i in range(3)]
        if rank % 2:
            order = [(w, i) for w in (2, 1, 0) for i in range(3)]
        out = torch.zeros(100_000)
        receive = dist.irecv(out, (rank - 1) % size)
        works = [
            dist.all_reduce(sums[key], group=groups[key[0]], async_op=True)
            for key in order
        ]
        send = dist.isend(torch.full((100_000,), float(rank)), (rank + 1) % size)
        polled = works.pop()
        while not polled.is_completed():
            pass
        for work in [*reversed(works), receive, send]:
            work.wait()
        return [sums[key][-1].item() for key in sorted(sums)] + [out[7].item()]


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.full(sample=1)
def test_groups_in_another_order_on_each_rank(torchrun: Any, nodes: str) -> None:
    size = LAYOUTS[nodes]
    got = torchrun(size, run_interleaved, **on_nodes(nodes))
    sums = [
        sum(range(size)) + size * (which + i) for which in range(3) for i in range(3)
    ]
    for rank, found in enumerate(got):
        assert found == [*map(float, sums), float((rank - 1) % size)]


def run_again() -> list[int]:
    """Groups that are freed leave theirs to the next ones of the same ranks."""
    made = []
    with job(pg_options=NATIVE):
        comm = dist.group.WORLD.communicator  # type: ignore[union-attr]
        lender = core_of(comm).world.gloo_groups
        for _ in range(4):
            group = dist.new_group([0, 1], pg_options=NATIVE)
            x = torch.ones(50_000)
            dist.all_reduce(x, group=group)
            assert x[-1].item() == 2
            dist.destroy_process_group(group)
            made.append(len(lender._groups))
    return made


def test_freed_groups_are_used_again(torchrun: Any) -> None:
    assert torchrun(2, run_again, **on_nodes("1")) == [[2, 2, 2, 2]] * 2


def run_late() -> list[str]:
    """Rank 2 comes late to a call, which ends all the same."""
    said = []
    with job(timeout=timedelta(seconds=300), pg_options=NATIVE) as rank:
        comm = dist.group.WORLD.communicator  # type: ignore[union-attr]
        x = torch.ones(70_000)
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
        with using("tcp/direct"):
            dist.all_reduce(x)
        said.append(str(x[-1].item()))
    return said


def test_a_rank_that_is_late_is_named(torchrun: Any) -> None:
    first, second, third = torchrun(3, run_late, **on_nodes("2,1"))
    assert "rank 2 on another node has not started it" in first[0]
    # Behind the first line each rank's table tells ages, which differ.
    said = second[0].splitlines()[0].replace("rank 1:", "rank 0:")
    assert first[0].splitlines()[0] == said
    assert first[1] == second[1] == third[0] == "9.0"


PROGRAM = """
import os, signal, sys, threading, torch, torch.distributed as dist
from datetime import timedelta
from commrt.errors import ClosedError
from commrt.torch import Options

dist.init_process_group(
    "commrt", timeout=timedelta(seconds=4), pg_options=Options(algorithm="gloo/native")
)
rank, size = dist.get_rank(), dist.get_world_size()
comm = dist.group.WORLD.communicator
x = torch.ones(100_000)
dist.all_reduce(x)
"""
DIES = """
if rank == size - 1:
    os._exit(0)
try:
    dist.all_reduce(x)
except RuntimeError as error:
    print(rank, type(error).__name__, error, flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"{rank} has told", b"")
store.wait([f"{other} has told" for other in range(size - 1)])
os._exit(0)
"""


@pytest.mark.parametrize("nodes", ["1", "2,1"])
@pytest.mark.full(sample=1)
def test_a_rank_that_dies_is_named(torchrun: Any, tmp_path: Path, nodes: str) -> None:
    size = LAYOUTS[nodes]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + DIES)
    done = torchrun.program(size, [str(program)], **on_nodes(nodes))
    lines = done.stdout.splitlines()
    assert len(lines) == size - 1, done.stdout
    assert all("PeerFailedError" in line for line in lines), lines
    assert all(f"rank {size - 1} has died" in line for line in lines), lines


DIES_AS_THEY_COMPARE = """
store = dist.distributed_c10d._get_default_store()
y = torch.ones(1000)
if rank in (2, 3):
    store.wait(["0 has begun", "1 has begun"])
if rank == 3:
    store.wait(["2 has begun"])
work = dist.all_reduce(y, async_op=True)
store.set(f"{rank} has begun", b"")
if rank == 2:  # what it has sent may be all that rank 1 needs, and not what rank 0 does
    store.wait(["3 has begun"])
    os._exit(0)
try:
    work.wait()
except RuntimeError as error:
    print(rank, type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_a_rank_that_dies_as_they_compare_holds_nobody_up(
    torchrun: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + DIES_AS_THEY_COMPARE)
    done = torchrun.program(4, [str(program)], **on_nodes("3,1"))
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    assert not any("TimeoutError_" in line for line in lines), lines


LEAVES = """
if rank == 0:  # and nobody else
    work = dist.all_reduce(x, async_op=True)
sys.stdout.write(f"rank {rank} ends\\n")
"""
FORKS = """
work = dist.all_reduce(x, async_op=True)
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except ClosedError:
        os.write(1, b"refused\\n")
    sys.exit(0)
work.wait()
dist.all_reduce(x)
os.waitpid(child, 0)
sys.stdout.write(f"rank {rank} ends {x[0].item()}\\n")
dist.destroy_process_group()
"""
INTERRUPTED = """
if rank == 0:
    store = dist.distributed_c10d._get_default_store()
    def interrupt():
        while comm.stats().operations < 2:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.set()
    interrupted = threading.Event()
    threading.Thread(target=interrupt).start()
    try:
        dist.all_reduce(x)
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\\n")
    store.set("go", "")
else:
    dist.distributed_c10d._get_default_store().wait(["go"])
    dist.all_reduce(x)
dist.barrier()
sys.stdout.write(f"rank {rank} ends\\n")
dist.destroy_process_group()
"""


def run_program(torchrun: Any, tmp_path: Path, text: str) -> tuple[list[str], str]:
    """Return the lines that two ranks print, sorted, and their stderr."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + text)
    done = torchrun.program(2, [str(program)], **on_nodes("1"))
    assert done.ok, done.describe_failure()
    assert "terminate called" not in done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def test_ending_with_a_call_in_flight(torchrun: Any, tmp_path: Path) -> None:
    lines, said = run_program(torchrun, tmp_path, LEAVES)
    assert lines == ["rank 0 ends", "rank 1 ends"]
    assert "Traceback" not in said


def test_forked_processes_leave_it_alone(torchrun: Any, tmp_path: Path) -> None:
    lines, _ = run_program(torchrun, tmp_path, FORKS)
    assert lines == ["rank 0 ends 8.0", "rank 1 ends 8.0", "refused", "refused"]


def test_ctrl_c_while_gloo_runs_it(torchrun: Any, tmp_path: Path) -> None:
    lines, _ = run_program(torchrun, tmp_path, INTERRUPTED)
    assert lines == ["interrupted", "rank 0 ends", "rank 1 ends"]
