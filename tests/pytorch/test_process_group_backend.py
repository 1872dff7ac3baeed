# SPDX-License-Identifier: Apache-2.0
"""The backend of a device: where each device has its own, and for torch's C++.

torch 2.13 lets no class of Python derive from Backend. A stand-in takes its place there
for the methods alone, by the names that torch's later ``PyBackend.hpp`` asks for; what
torch does with a backend is tried where it takes one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch.nn.parallel import DistributedDataParallel

import commrt.trace
from commrt.errors import MismatchError, TimeoutError_, UsageError
from commrt.torch.backend import can_be_made

DEADLINE_S = 300.0
EACH_ITS_OWN = "cpu:commrt,cuda:gloo"
needs_backends = pytest.mark.skipif(
    not can_be_made(),
    reason=f"torch {torch.__version__} lets Python derive from no Backend",
)

ASKED = (
    *("broadcast", "allreduce", "allreduce_sparse", "allreduce_coalesced", "reduce"),
    *("allgather", "all_gather_single", "allgather_coalesced", "gather", "scatter"),
    *("all_gather_single_coalesced", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "send"),
    *("recv", "recv_anysource", "barrier", "monitored_barrier", "start_coalescing"),
    *("end_coalescing", "shrink", "getBackendName", "supports_coalescing"),
    *("supports_tensor_alloc", "set_timeout", "abort", "shutdown"),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group"),
)
PROGRAM = """
import json, sys
import torch
import torch._C._distributed_c10d as of_torch

class StandIn:
    "What a later torch lets Python derive from."
    def __init__(self, rank, size):
        self.at = rank, size

try:
    of_torch.Backend(0, 1)
except TypeError:
    of_torch.Backend = StandIn

from commrt.torch.backend import CommrtBackend, backend_of
from commrt.torch.joined_group import JoinedGroup
from commrt.torch.jobs import Member

assert "commrt.torch.process_group" not in sys.modules
store = torch.distributed.HashStore()
b = backend_of(JoinedGroup(Member(store, 0, 1, [], "alone", 60.0)))
x, y = torch.arange(3.0), torch.zeros(3)
for work in (
    b.broadcast([x], 0), b.allreduce([x]), b.allreduce_coalesced([x]), b.reduce([x]),
    b.allgather([[y]], [x]), b.all_gather_single(y, x),
    b.allgather_coalesced([[y]], [x]), b.all_gather_single_coalesced([y], [x]),
    b.gather([[y]], [x]), b.gather_single(y, x), b.scatter([y], [[x]]),
    b.reduce_scatter([y], [[x]]), b.reduce_scatter_single(y, x),
    b.reduce_scatter_single_coalesced([y], [x]), b.all_to_all_single(y, x, [], []),
    b.alltoall([y], [x]), b.barrier(), b.allreduce_sparse([x.to_sparse()]),
):
    if work is not None:
        work.wait()
for work in (
    b.recv_anysource([y], 3), b.send([x], 0, 3),
    b.recv([x], 0, 4), b.send([y], 0, 4),
):
    work.wait()
b.start_coalescing()
assert b.allreduce([x]) is None
b.end_coalescing().wait()
b.monitored_barrier()
missing = [name for name in json.loads(sys.argv[1]) if not hasattr(CommrtBackend, name)]
print(json.dumps([x.tolist(), y.tolist(), missing]))
b.shutdown()
"""


def test_a_backend_has_what_torch_asks_for(tmp_path: Path) -> None:
    from commrt.launch.mpiexec import child_environment

    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(file), json.dumps(ASKED)],
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment(sys.executable),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []]


# -- a backend for each device ---------------------------------------------------


def results() -> list[Any]:
    """Return what calls give: of every kind, waited for and not, from C++ too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(2.0 * size) + rank
    given = list((x + 10).chunk(size))
    parts = [torch.zeros(2) for _ in range(size)]
    whole, own = torch.zeros(2 * size), torch.zeros(2)
    found: list[Any] = []

    def keep(*tensors: torch.Tensor) -> None:
        found.extend(each.tolist() for each in tensors)

    def summed(op: Any, **more: Any) -> torch.Tensor:
        y = x.clone()
        work = dist.all_reduce(y, op, **more)
        if work is not None:
            work.wait()
        return y

    keep(summed(dist.ReduceOp.SUM), summed(dist.ReduceOp.AVG))
    keep(summed(dist.ReduceOp.MAX, async_op=True))
    for call in (
        lambda: dist.all_gather(parts, given[0]),
        lambda: dist.all_gather_into_tensor(whole, given[1]),
        lambda: dist.reduce_scatter(own, given),
        lambda: dist.reduce_scatter_tensor(own, x),
        lambda: dist.all_to_all(parts, given),
        lambda: dist.all_to_all_single(whole, x),
        lambda: dist.gather(own, parts if rank == 0 else None),
        lambda: dist.scatter(own, given if rank == 0 else None),
        lambda: dist.broadcast(x, size - 1),
        lambda: dist.reduce(x, 0),
        lambda: dist.barrier(),
    ):
        call()
        keep(*parts, whole, own, x)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    keep(sparse.to_dense())
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, whole, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    keep(whole)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(x)
        dist.all_reduce(own)
    works.wait()
    keep(x, own)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"of": rank})
    return [*found, objects]


def step() -> list[Any]:
    """Return the gradients of one step under DDP."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    net(torch.ones(2, 4))  # has warmed up before DDP wraps it
    net.zero_grad()
    wrapped = DistributedDataParallel(net)
    wrapped(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    return [each.grad.tolist() for each in net.parameters() if each.grad is not None]


def each_its_own() -> list[Any]:
    with job("commrt", "all"):
        want = [results(), step()]
    with job(EACH_ITS_OWN, "own"):
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        other = group._get_backend(torch.device("cuda"))
        kinds = [type(each).__name__ for each in (group, backend, other)]
        with commrt.trace.record() as recording:
            got = [results(), step()]
        calls = {one.op for one in recording.log().operations}
        what = str(commrt.torch.explain(torch.ones(4)))
        with pytest.raises(UsageError):
            dist.all_gather([torch.empty(2)], torch.ones(2))
        dist.set_timeout(timedelta(seconds=700))
        limit = backend.communicator.timeout_s
        part = dist.new_group([0])  # has a backend for each device, too
    return [kinds, got == want, sorted(calls), "allreduce" in what, limit, str(part)]


@needs_backends
def test_each_device_has_the_backend_that_the_program_gives_it(torchrun: Any) -> None:
    for kinds, is_same, calls, explains, limit, _ in torchrun(
        2, each_its_own, deadline_s=DEADLINE_S
    ):
        assert kinds == ["ProcessGroup", "CommrtBackend", "ProcessGroupGloo"]
        assert is_same
        assert explains
        assert limit == 700
        known = ("allreduce", "allgather", "alltoall", "gather", "send", "recv")
        assert {*known, "bcast", "reduce", "scatter", "barrier"} <= {*calls}


# -- what torch's C++ asks of a group that is all commrt's -----------------------


def from_cpp() -> list[Any]:
    with job() as rank:
        group: Any = dist.group.WORLD
        size, ops, boxed = dist.get_world_size(), torch.ops.c10d, group.boxed()
        x, whole = torch.full((2,), rank + 1.0), torch.zeros(2 * size)
        ops._allgather_base_(whole, x, boxed, False, -1)
        found = [whole.tolist()]
        dist.gather_single(x, whole.zero_() if rank == 0 else None)
        found.append(whole.tolist())
        dist.monitored_barrier(timeout=timedelta(seconds=300))
        dist.distributed_c10d.set_timeout(timedelta(seconds=900))
        found.append(group.communicator.timeout_s)
        backend = group._get_backend(torch.device("cpu"))
        assert backend is group._get_backend(torch.device("cpu"))
        cpp = torch._C._distributed_c10d.Backend
        # What C++ would ask for next, torch cannot pass to Python.
        found.append(cpp.supports_tensor_alloc(backend, torch.device("cpu")))
        found.append(backend.supports_tensor_alloc(torch.device("cpu")))
        return found


@needs_backends
def test_calls_from_cpp_reach_the_group(torchrun: Any) -> None:
    first, second = torchrun(2, from_cpp, deadline_s=DEADLINE_S)
    both = [1.0, 1.0, 2.0, 2.0]
    assert first == [both, both, 900.0, False, True]
    assert second == [both, both, 900.0, False, True]


def checked() -> list[Any]:
    """In torch's own check mode, commrt's group compares, or torch's wrapper does."""
    said = []
    for backend in ("commrt", EACH_ITS_OWN):
        with job(backend, backend.replace(":", "-")) as rank:
            x = torch.ones(2 + rank)
            with pytest.raises(RuntimeError) as raised:
                dist.all_reduce(x)
            said.append([isinstance(raised.value, MismatchError), str(raised.value)])
    return said


@needs_backends
def test_calls_are_compared_once(
    torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for ours, wrapped in torchrun(2, checked, deadline_s=DEADLINE_S):
        assert ours[0]
        assert "test_process_group_backend.py" in ours[1]
        assert not wrapped[0]
        assert "Detected mismatch between collectives on ranks" in wrapped[1]


def looked_at() -> list[Any]:
    """What torch's hooks find, where torch is asked to look for NaN."""
    with job(name="nan"):
        group: Any = dist.group.WORLD
        dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="NaN found in input tensor"):
            dist.all_reduce(torch.tensor([float("nan")]))
        return [type(group).__name__, float(dist.get_world_size())]


def refused() -> str:
    with job(name="hooks"):
        group: Any = dist.group.WORLD
        with pytest.raises(UsageError) as raised:
            group.register_pre_hook(1, print)
        return str(raised.value)


@needs_backends
def test_hooks_see_calls_or_are_refused(
    torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in torchrun(2, refused, deadline_s=DEADLINE_S):
        assert "runs no hooks" in said
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    assert torchrun(2, looked_at, deadline_s=DEADLINE_S) == [["ProcessGroup", 2.0]] * 2


# -- groups made of a group ------------------------------------------------------


def shrunk(flags: int) -> list[Any]:
    """All ranks but the second go on without it."""
    found: list[Any] = []
    with job(name=f"shrink{flags}") as rank:
        part = dist.new_group([0, 1, 2])
        x = torch.ones(1)
        dist.all_reduce(x, group=part)
        if rank == 1:
            return found
        for group in (part, None):
            left = dist.shrink_group([1], group, flags)
            y = torch.tensor([rank + 1.0])
            dist.all_reduce(y, group=left)
            found.append([left.rank(), left.size(), y.item()])
        after = dist.new_group([1, 0])
        dist.all_reduce(x, group=after)
        dist.barrier()
        found.append(x.item())
    return found


@needs_backends
@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.filterwarnings("ignore:Shrinking default group")
def test_a_group_goes_on_with_fewer_ranks(torchrun: Any, flags: int) -> None:
    got = torchrun(3, shrunk, deadline_s=DEADLINE_S, flags=flags)
    assert got[1] == []
    for rank, said in enumerate((got[0], got[2])):
        assert said == [[rank, 2, 4.0], [rank, 2, 4.0], 6.0]


def split() -> list[Any]:
    """torch asks for an accelerator; here the CPU is one, and bound to the group."""
    with job(name="split") as rank, pytest.MonkeyPatch.context() as patch:
        group: Any = dist.group.WORLD
        group.bound_device_id = torch.device("cpu", 0)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(
            torch.accelerator, "current_accelerator", lambda: torch.device("cpu")
        )
        part: Any = dist.split_group(split_ranks=[[2, 0], [1]])
        x = torch.tensor([rank + 1.0])
        dist.broadcast(x, group=part, src=1 if rank == 1 else 2)
        return [dist.get_rank(part), dist.get_process_group_ranks(part), x.item()]


@needs_backends
def test_torchs_split_group_given_a_device(torchrun: Any) -> None:
    got = torchrun(3, split, deadline_s=DEADLINE_S)
    assert got == [[1, [2, 0], 3.0], [0, [1], 2.0], [0, [2, 0], 3.0]]


def missing_at_barrier() -> str:
    """Rank 1 does not come to the barrier of a backend that torch's group holds."""
    with job(EACH_ITS_OWN, "missing") as rank:
        if rank == 1:
            dist.distributed_c10d._get_default_store().get("seen")
            return ""
        with pytest.raises(RuntimeError) as raised:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        dist.distributed_c10d._get_default_store().set("seen", "1")
        assert isinstance(raised.value, TimeoutError_)
        return str(raised.value)


@needs_backends
def test_a_monitored_barrier_of_torch_names_who_is_missing(torchrun: Any) -> None:
    first, _ = torchrun(2, missing_at_barrier, deadline_s=DEADLINE_S)
    assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in first
