# SPDX-License-Identifier: Apache-2.0
"""What a log has of torch's layers: bytes as in the formulas, places in the program.

The formulas are the textbooks': bytes of the logical buffer per rank and step.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt.errors import TimeoutError_, UsageError
from commrt.torch import tracing
from commrt.trace.job import load

DEADLINE_S = 300.0
IN, HIDDEN, OUT, ROWS, E = 8, 32, 4, 6, 4
Found = dict[str, list[Any]]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def volumes(step: Callable[[], Any]) -> Found:
    """Return what the second of two steps asks for, by dimension and operation.

    In the first, torch's layers exchange what they need to begin.
    """
    step()
    with commrt.trace.record() as recording:
        step()
    return {
        f"{dimension} {op}": [volume.calls, volume.nbytes]
        for (dimension, op), volume in recording.volume().items()
    }


def data_parallel() -> Found:
    model = DistributedDataParallel(net())

    def step() -> None:
        model(torch.ones(ROWS, IN)).sum().backward()

    step()  # DDP orders its buckets anew after the first
    return volumes(step)


def sharded() -> Found:
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return volumes(lambda: model(torch.ones(ROWS, IN)).sum().backward())


def tensor_parallel() -> Found:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), mesh, plan)
    commrt.trace.label(mesh.get_group(), "tp")  # the default group, as torch sees it

    def step() -> None:
        model(torch.ones(ROWS, IN, requires_grad=True)).sum().backward()

    return volumes(step)


def pipeline() -> Found:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(group_desc="mesh_pp")
    stage = PipelineStage(
        nn.Linear(IN, IN), rank, size, torch.device("cpu"), group=group
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(8, IN)
    given = (x,) if rank == 0 else ()
    more = {"target": x} if rank == size - 1 else {}
    return volumes(lambda: schedule.step(*given, **more))


def mixture_of_experts() -> Found:
    """Tokens go to experts and come back, forwards and backwards."""
    group = dist.new_group(group_desc="mesh_ep")
    size = dist.get_world_size()
    tokens = torch.ones(2 * size, IN, requires_grad=True)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return dist.nn.all_to_all_single(torch.empty_like(x), x, group=group)

    return volumes(lambda: exchange(2 * exchange(tokens)).sum().backward())


def grid() -> Found:
    """Two dimensions, each with a group for its name."""
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    whole, part = torch.empty(10), torch.empty(5)

    def step() -> None:
        dist.all_reduce(torch.ones(3), group=mesh["dp"].get_group())
        dist.all_gather_into_tensor(whole, part, group=mesh["dp"].get_group())
        dist.all_reduce(torch.ones(2), group=mesh["tp"].get_group())

    return volumes(step)


SCHEMES = (data_parallel, sharded, tensor_parallel, pipeline, mixture_of_experts, grid)


def in_jobs(steps: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each gives, with a default group of its own."""
    found = []
    for step in steps:
        with job(name=step.__name__):
            found.append(step())
    return found


def all_schemes() -> list[Any]:
    import torch.distributed.nn  # noqa: F401  dist.nn

    return in_jobs(SCHEMES)


def methods_and_choices() -> list[Any]:
    return in_jobs((each_method, asked_for))


def asked_for() -> list[str]:
    """Return what ran calls that ask for something, and others, as the log says."""
    x = torch.ones(1000)
    ring = commrt.torch.Options(algorithm={"all_reduce": "ring"})
    group = dist.new_group(pg_options=ring)
    with commrt.trace.record() as recording:
        for _ in range(2):
            dist.all_reduce(x)
            with commrt.torch.using("ring"):
                dist.all_reduce(x)
                dist.all_reduce(x, async_op=True).wait()
            dist.all_reduce(x, group=group)
    return [one.algorithm for one in recording.log().operations]


def formulas(rank: int, size: int) -> list[Found]:
    """Return what ``SCHEMES`` ask for in a step, by the textbooks' formulas."""
    psi = sum(p.nbytes for p in net().parameters())
    block = 2 * IN * E  # of a micro-batch: two rows of eight
    tokens = 2 * size * IN * E
    boundaries = 1 if rank in (0, size - 1) else 2
    # A dimension of all ranks is the default group.
    dimension = "world" if size == 2 else "dp"
    return [
        {"world allreduce": [1, psi]},
        # Both layers forwards, both again backwards; gradients of both.
        {"world allgather": [4, 2 * psi], "world reduce_scatter": [2, psi]},
        # Outputs forwards, gradients of inputs backwards.
        {"tp allreduce": [2, ROWS * (OUT + IN) * E]},
        # Activations to the stage behind, their gradients to the one before.
        {"pp send": [4 * boundaries, 4 * boundaries * block]},
        {"ep alltoall": [4, 4 * tokens]},
        {
            f"{dimension} allreduce": [1, 12],
            f"{dimension} allgather": [1, 40],
            "tp allreduce": [1, 8],
        },
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_formulas(torchrun: Any, size: int) -> None:
    got = torchrun(size, all_schemes, deadline_s=DEADLINE_S)
    assert got == [formulas(rank, size) for rank in range(size)]


def test_bytes_of_each_method_and_what_ran_it(torchrun: Any) -> None:
    ranks = torchrun(2, methods_and_choices, deadline_s=DEADLINE_S)
    for rank, (methods, (plain, *asked)) in enumerate(ranks):
        check_methods(rank, *methods)
        assert plain != "ring"
        assert asked == ["ring", "ring", "ring", plain, "ring", "ring", "ring"]


# -- each method -----------------------------------------------------------------


def each_method() -> list[Any]:
    """Return (operation, bytes, end seen) of calls in all of torch's forms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank
    x = torch.ones(3)
    wide = torch.ones(3 * size)
    bits = torch.eye(4).to_sparse()
    with commrt.trace.record() as recording:
        dist.all_reduce(x)
        dist.all_reduce(bits)
        dist.reduce(x, 1)
        dist.broadcast(x, 1)
        dist.all_gather([torch.empty(3) for _ in range(size)], x)
        dist.all_gather([torch.empty(1 + r) for r in range(size)], x[: rank + 1])
        dist.all_gather_into_tensor(wide, x)
        dist.reduce_scatter(torch.empty(3), [x.clone() for _ in range(size)])
        dist.reduce_scatter_tensor(torch.empty(3), wide)
        dist.all_to_all_single(torch.empty_like(wide), wide)
        dist.all_to_all_single(
            torch.empty(2 * (rank + 1)), torch.ones(3), [rank + 1] * 2, [1, 2]
        )
        dist.all_to_all([torch.empty(3) for _ in range(size)], list(wide.split(3)))
        parts = [torch.empty(3) for _ in range(size)]
        dist.gather(x, parts if rank == 1 else None, dst=1)
        dist.scatter(x, parts if rank == 1 else None, src=1)
        dist.barrier()
        with dist._coalescing_manager(async_ops=True) as works:
            dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(6))
        works.wait()
        with dist._coalescing_manager(async_ops=True) as works:
            dist.broadcast(torch.ones(1), 0)
            dist.broadcast(torch.ones(2), 0)
        works.wait()
        dist.group.WORLD.allreduce_coalesced([x, torch.ones(4)]).wait()
        work = dist.all_reduce(torch.ones(7), async_op=True)
        unseen = recording.log().operations[-1].end_ns
        work.get_future().wait()
        sent = dist.isend(x, other, tag=3)
        dist.recv(torch.empty(3), other, tag=3)
        sent.wait()
        dist.send(x, other) if rank == 0 else dist.recv(torch.empty(3))
        dist.group.WORLD.communicator.allreduce(x)
        with pytest.raises(UsageError):
            dist.all_gather([torch.empty(1)], x)
    log = recording.log()
    rows = [[one.op, one.nbytes] for one in log.operations]
    ended = all(one.end_ns is not None and not one.failed for one in log.operations)
    places = sorted({one.site.file for one in log.operations})
    algorithms = [one.algorithm for one in log.operations if one.op == "allreduce"]
    return [rows, ended, unseen, places == [__file__], all(algorithms)]


def check_methods(rank: int, rows: list[Any], *rest: Any) -> None:
    expected = [
        *(["allreduce", 12], ["sparse_allreduce", 4 * (16 + 4)], ["reduce", 12]),
        *(["bcast", 12], ["allgather", 24], ["allgather", 12], ["allgather", 24]),
        *(["reduce_scatter", 24], ["reduce_scatter", 24]),
        *(["alltoall", 24], ["alltoall", 12], ["alltoall", 24]),
        *(["gather", 24], ["scatter", 24], ["barrier", 0]),
        *(["allreduce", 44], ["bcast", 4], ["bcast", 8]),
        *(["allreduce", 28], ["allreduce", 28]),
        *(["send", 12], ["recv", 12]),
    ]
    last = ["recv" if rank else "send", 12]
    assert rows == [*expected, last, ["allreduce", 12]]
    assert rest == (True, None, True, True)


def test_every_method_of_a_group_is_recorded() -> None:
    from commrt.torch.group_methods import Collectives
    from commrt.torch.messages import Messages
    from commrt.torch.process_group import CommrtProcessGroup

    def methods(kind: type) -> Iterator[str]:
        return (name for name, each in vars(kind).items() if inspect.isfunction(each))

    # torch calls the methods that its own class has, and two around coalesced calls.
    called = {*vars(dist.ProcessGroup), "start_coalescing", "end_coalescing"}
    named = called & {*methods(Collectives), *methods(Messages)}
    known = {*tracing._CALLS, "_start_coalescing", "_end_coalescing"}
    assert named - {"start_coalescing", "end_coalescing"} <= known
    assert [name for name in known if not hasattr(CommrtProcessGroup, name)] == []


# -- torch's own analyser --------------------------------------------------------


def flights(folder: str) -> str:
    """Make files of a healthy job and of one whose rank 1 leaves a call out."""
    with job():
        return flown(folder)


def flown(folder: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    x = torch.ones(3 * size)
    with commrt.trace.record(f"{folder}/healthy"):
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(3 * size * size), x)
        uneven = [torch.empty(1 + r * r) for r in range(size)]
        dist.all_gather(uneven, torch.ones(1 + rank * rank))
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.barrier()
        if rank:
            dist.send(x, 0)
        else:
            for source in range(1, size):
                dist.recv(x, source)
    if rank < 2:
        with commrt.trace.record(f"{folder}/pair"):
            dist.broadcast(x, 0, group=pair)
            dist.all_reduce(x, group=pair)
    dist.barrier()
    said = ""
    store = dist.group.WORLD.get_group_store()
    with commrt.trace.record(f"{folder}/missed"):
        dist.all_reduce(x)
        if rank != 1:
            work = dist.all_reduce(x, async_op=True)
            try:
                work.wait(timeout=timedelta(seconds=0.2))
            except TimeoutError_ as error:
                said = str(error)
    if rank == 1:
        store.wait([f"late {other}" for other in {*range(size)} - {1}])
        dist.all_reduce(x)
    else:
        store.set(f"late {rank}", "")
        work.wait()
    return said


def analysed(folder: Path) -> Any:
    """Return what torch's analyser makes of the files in a folder."""
    (flight,) = folder.glob("flight-*")
    try:
        arguments = JobConfig().parse_args([str(flight)])
        details, version = read_dir(arguments)
        return build_db(details, arguments, version)
    finally:
        gc.enable()  # reading turns it off


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_torchs_analyser_finds_who_is_missing(
    torchrun: Any, tmp_path: Path, size: int
) -> None:
    said = torchrun(size, flights, folder=str(tmp_path), deadline_s=DEADLINE_S)
    assert said[1] == ""
    assert all(
        "not complete within 0.2 s" in said[rank] for rank in {*range(size)} - {1}
    )
    healthy = analysed(tmp_path / "healthy")
    # A message is named by the end whose file happens to be read first.
    ends = {"gloo:send 1->0": "a message", "gloo:recv 0<-1": "a message"}
    names = [one.collective_name for one in healthy.collectives]
    names = [ends.get(name, name) for name in names]
    assert sorted(names) == sorted(
        [
            *("gloo:all_reduce", "gloo:all_gather", "gloo:all_gather_v"),
            *("gloo:reduce_scatter", "gloo:all_to_all", "gloo:barrier"),
            *["a message"] * (size - 1),
        ]
    )
    assert all(one.pass_check for one in healthy.collectives)
    assert len(analysed(tmp_path / "pair").collectives) == 2
    found = analysed(tmp_path / "missed").collectives
    assert [one.pass_check for one in found if one.missing_ranks is None] == [True]
    (wrong,) = (one for one in found if one.missing_ranks is not None)
    assert wrong.missing_ranks == {1}
    assert wrong.collective_name == "gloo:all_reduce"
    assert wrong.collective_state == "started"
    assert wrong.collective_frames[0]["filename"] == __file__
    ranks = load([tmp_path / "missed"])
    errors = [log.error.partition(":")[0] for log in ranks.logs]
    assert errors == ["" if rank == 1 else "TimeoutError_" for rank in range(size)]


# -- the environment's way -------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        "destroyed",
        pytest.param("left", marks=pytest.mark.full),
        pytest.param("raised", marks=pytest.mark.full),
    ],
)
def test_a_folder_for_the_whole_run(torchrun: Any, tmp_path: Path, mode: str) -> None:
    program, logs = tmp_path / "train.py", tmp_path / "new" / "logs"
    program.write_text(PROGRAM)
    done = torchrun.program(
        2, [str(program), mode], env={"COMMRT_TRACE": str(logs)}, deadline_s=DEADLINE_S
    )
    assert (done.returncode == 0) == (mode != "raised"), done.stderr
    found = load([logs])
    assert [log.rank for log in found.logs] == [0, 1]
    for log in found.logs:
        rows = [(one.op, one.site.line) for one in log.operations]
        assert rows == [("allreduce", 5), ("barrier", 6)]
        assert log.is_complete
        assert log.error == ("ValueError: enough" if mode == "raised" else "")
    assert all(event.waiting_ns is not None for event in found.events)


PROGRAM = """\
import sys
import torch
import torch.distributed as dist
dist.init_process_group("commrt")
dist.all_reduce(torch.ones(4))
dist.barrier()
if sys.argv[1] == "raised":
    raise ValueError("enough")
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""
