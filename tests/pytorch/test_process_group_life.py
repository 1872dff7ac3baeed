# SPDX-License-Identifier: Apache-2.0
"""Groups, limits and ends of process groups.

Messages, groups of some ranks, works and futures are in ``message_scenarios.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job

from commrt.errors import CommError, RevokedError, TimeoutError_
from commrt.torch.backend import can_be_made

DEADLINE_S = 300.0


# -- groups --------------------------------------------------------------------------


def many_groups() -> float:
    """Make groups of one, of which programs have hundreds, and some of two."""
    with job(name="many") as rank:
        for _ in range(250):
            for member in range(2):
                group = dist.new_group([member])
                if member == rank:
                    dist.all_reduce(torch.ones(1), group=group)
        total = torch.zeros(1)
        for _ in range(20):
            x = torch.ones(1)
            dist.all_reduce(x, group=dist.new_group([0, 1]))
            total += x
        return float(total)


def stores(folder: str) -> list[float]:
    """Start again and again, from each kind of store, and by torchrun's variables."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []

    def one(**arguments: Any) -> None:
        dist.init_process_group("commrt", **arguments)
        x = torch.ones(2)
        dist.all_reduce(x)
        found.append(float(x[0]))
        dist.destroy_process_group()

    one()
    where = {"rank": rank, "world_size": size}
    for turn in range(2):
        one(init_method=f"file://{folder}/store{turn}", **where)
    one(store=dist.FileStore(f"{folder}/given", size), **where)
    one(store=dist.HashStore(), rank=0, world_size=1)
    # Where Python makes no backends, all devices are commrt's then.
    both = f"file://{folder}/both"
    dist.init_process_group("cpu:gloo,cuda:commrt", init_method=both, **where)
    kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    is_gloos = "ProcessGroupGloo" if can_be_made() else "BackendView"
    found.append(float(kind == is_gloos))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", **where)
    mixed = dist.new_group(backend="commrt")
    x = torch.ones(2)
    dist.all_reduce(x, group=mixed)
    found.append(float(x[0]))
    dist.destroy_process_group()
    return found


def test_any_store_and_again_after_the_end(torchrun: Any, tmp_path: Path) -> None:
    got = torchrun(2, stores, deadline_s=DEADLINE_S, folder=str(tmp_path))
    assert got == [[2.0] * 4 + [1.0, 1.0, 2.0]] * 2


# -- limits and ends -----------------------------------------------------------------


def late() -> list[str]:
    """Rank 1 comes too late for a call with a limit, and the call ends all the same."""
    said = []
    with job(name="late", timeout=timedelta(seconds=300)) as rank:
        group = dist.group.WORLD
        options = torch.distributed.distributed_c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        x = torch.ones(4)
        if rank == 0:
            work = group.allreduce([x], options)
            with pytest.raises(RuntimeError) as raised:
                work.wait(timedelta(seconds=0.2))
            assert isinstance(raised.value, TimeoutError_)
            assert isinstance(raised.value, dist.DistBackendError)
            said.append(str(raised.value))
            dist.distributed_c10d._get_default_store().set("go", "1")
            work.wait(timedelta(seconds=300))
        else:
            dist.distributed_c10d._get_default_store().get("go")
            group.allreduce([x], options).wait()
        assert x.tolist() == [2.0] * 4
        group.set_timeout(timedelta(seconds=700))
        assert group.communicator.timeout_s == 700
    return said


def aborted() -> str:
    """A group is aborted by one rank while the other one waits."""
    with job(name="aborted") as rank:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            dist.distributed_c10d._abort_process_group(group)
            return ""
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        assert isinstance(raised.value, RevokedError)
        with pytest.raises(RevokedError) as again:
            dist.recv(torch.ones(1), group=group)
        assert isinstance(again.value, dist.DistBackendError)
        return str(raised.value)


def wrong_calls() -> list[str]:
    """What is wrong with a call is said, and the group goes on."""
    said = []
    x, premultiplied = torch.ones(2), dist._make_nccl_premul_sum(0.5)
    with job(name="wrong") as rank:
        calls = [
            lambda: dist.all_gather_single(torch.zeros(3), torch.zeros(2)),
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e8m0fnu)),
            lambda: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND),
            lambda: dist.all_to_all_single(
                torch.zeros(3), torch.zeros(3), [1, 1], [2, 1]
            ),
            lambda: dist.group.WORLD.allreduce([torch.zeros(1), torch.zeros(1)]),
            lambda: dist.all_gather([torch.zeros(1)], torch.zeros(1)),
            lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
            lambda: dist.all_to_all([torch.eye(2).to_sparse()] * 2, [x] * 2),
            lambda: dist.all_reduce(torch.eye(2).to_sparse(), premultiplied),
            lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
            lambda: dist.new_group(pg_options=object()),
        ]
        for call in calls:
            with pytest.raises(CommError) as raised:
                call()
            assert isinstance(raised.value, dist.DistBackendError)
            said.append(str(raised.value))
        x = torch.full((2,), rank + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 2
    return said


def jobs() -> list[Any]:
    """Run them in one launch."""
    return [many_groups(), wrong_calls(), late(), aborted()]


def test_many_groups_late_ranks_aborts_and_wrong_calls(torchrun: Any) -> None:
    first, second = torchrun(2, jobs, deadline_s=DEADLINE_S)
    parts = ("out has 3 elements", "float8_e8m0fnu", "op='band'", "add up to its 3")
    parts += ("expected one", "expected one for each", "takes dense ones")
    parts += ("x.to_dense()", "only sum and avg", "sparse_csr", "commrt.torch.Options")
    for total, wrong, *_ in (first, second):
        assert total == 40.0
        for text, part in zip(wrong, parts, strict=True):
            assert part in text
    assert "rank 1 on this node has not started it" in first[2][0]
    assert second[2] == []
    assert "rank 0 gave up" in second[3]


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("commrt")
x = torch.ones(100_000)
works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
group = dist.new_group([0, 1])
dist.all_reduce(x, group=group)
{end}
import sys
sys.stdout.write("rank %d ends\\n" % dist.get_rank())
{last}
"""


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("[work.wait() for work in works]", ""),  # no destroy_process_group
        ("", ""),  # nor waited for
        ("", "dist.destroy_process_group()"),
    ],
)
def test_programs_end_cleanly(
    torchrun: Any, tmp_path: Path, end: str, last: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end, last=last))
    done = torchrun.program(2, [str(program)])
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
    assert "terminate called" not in done.stderr


DIES = """
import os, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("commrt", timeout=timedelta(seconds=300))
dist.barrier()
if dist.get_rank() == 1:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(type(error).__name__, error)
os._exit(0)
"""


def test_a_rank_that_dies_is_named(torchrun: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIES)
    done = torchrun.program(2, [str(program)])
    assert "PeerFailedError" in done.stdout
    assert "rank 1 has died: process " in done.stdout


def test_mpiexec_tells_rank_size_and_rendezvous(mpirun: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('commrt')\n"
        "x = torch.ones(2)\n"
        "dist.all_reduce(x)\n"
        "print(dist.get_rank(), dist.get_world_size(), x.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    done = mpirun.program(2, [str(program)])
    assert done.ok, done.describe_failure()
    lines = [line for line in done.stdout.splitlines() if line]
    assert sorted(lines) == ["0 2 [2.0, 2.0]", "1 2 [2.0, 2.0]"]


# -- registration --------------------------------------------------------------------


def test_importing_torch_is_enough() -> None:
    code = (
        "import torch.distributed as dist, sys;"
        "assert dist.is_backend_available('commrt');"
        "heavy = {'commrt.comm', 'commrt._native'} & {*sys.modules};"
        "assert not heavy, f'registering is to be light: {heavy}'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_torchcomms_is_said_to_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from commrt.torch import registration

    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    # torch 2.14 asks torchcomms for its own backends alone.
    c10d = dist.distributed_c10d
    monkeypatch.delattr(c10d, "_torchcomms_handles_backend", raising=False)
    with pytest.warns(RuntimeWarning, match="unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"):
        registration._warn_of_torchcomms()
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0")
    registration._warn_of_torchcomms()


def test_an_untried_version_of_torch_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from commrt.torch import registration

    registration.check_version.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(RuntimeWarning, match=r"and this is 2\.99\.0"):
        registration.check_version()
    registration.check_version()


def test_what_is_wrong_at_registration_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from commrt.torch import registration

    monkeypatch.delattr(dist.Backend, "COMMRT")
    monkeypatch.setattr(dist.Backend, "register_backend", None)
    with pytest.warns(RuntimeWarning, match="cannot register itself"):
        registration.register()
