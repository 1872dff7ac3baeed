# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts: they meet in its store, and need no MPI.

A launch takes seconds, most of them for importing torch, so each checks much.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import run_cases, sample

import commrt
from commrt.comm import core_of
from commrt.errors import TimeoutError_
from commrt.launch.detect import detect

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
DEADLINE_S = 300.0


def test_the_readme_prints_once(torchrun: Any, tmp_path: Path) -> None:
    program = tmp_path / "average.py"
    program.write_text(BLOCK.findall((ROOT / "README.md").read_text())[0])
    done = torchrun.program(4, [str(program)], deadline_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    assert done.stdout == "average over 4 ranks: 1.5\n"


def blobs() -> list[list[int]]:
    """Meet in the store, before and beside the world."""
    from commrt.bootstrap import connect

    peers = connect(detect())
    got = [
        peers.exchange(range(peers.size), "same key", bytes([peers.rank, turn]), 20)
        for turn in range(3)
    ]
    peers.close()
    return [list(blob) for row in got for blob in row]


def messages(comm: Any) -> list[float]:
    """Pass short and long messages round."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ends = []
    for number in (1, 100_000):
        x, out = np.full(number, float(comm.rank)), np.zeros(number)
        request = comm.recv(out, source=left, nonblocking=True)
        comm.send(x, dest=right)
        request.wait()
        comm.sendrecv(out.copy(), dest=right, out=out, source=left)
        ends.append(float(out[-1]))
    return ends


def groups(comm: Any) -> list[list[int]]:
    found = []
    even = comm.rank & ~1
    for group in (
        comm.split(comm.rank % 2, key=-comm.rank),
        comm.dup(),
        comm.create_group([even + 1, even]),
    ):
        with group:
            found.append(group.allgather(np.array([comm.rank])).reshape(-1).tolist())
    return found


def tensors(comm: Any) -> list[Any]:
    import torch

    x = torch.full((70_000,), 1.0 + comm.rank, dtype=torch.bfloat16)
    mean = comm.allreduce(x, op="avg", nonblocking=True).wait()
    assert mean is x
    parts = comm.alltoall(torch.arange(comm.size) * 10 + comm.rank)
    return [float(mean[-1]), parts.tolist()]


def everything(seed: int) -> list[Any]:
    met = blobs()
    comm = commrt.init()
    assert commrt.init() is comm
    assert comm.mpi is None
    wrong = []
    for coll in ("allreduce", "alltoall", "bcast", "reduce_scatter"):
        wrong += run_cases(comm, sample(coll, comm.size, seed, 20))
    found = [wrong, messages(comm), groups(comm), tensors(comm)]
    return [met, comm.size, "mpi4py" in sys.modules, *found]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_meet_and_communicate_without_mpi(
    torchrun: Any, size: int, seed: int
) -> None:
    met = [[rank, turn] for turn in range(3) for rank in range(size)]
    got = torchrun(size, everything, deadline_s=DEADLINE_S, seed=seed)
    for rank, (blobs_, size_, mpi, wrong, ends, ranks, (mean, parts)) in enumerate(got):
        assert (blobs_, size_, mpi, wrong) == (met, size, False, [])
        assert ends == [(rank - 2) % size] * 2
        halves = [r for r in reversed(range(size)) if r % 2 == rank % 2]
        assert ranks == [halves, list(range(size)), [rank | 1, rank & ~1]]
        assert mean == (size + 1) / 2
        assert parts == [rank * 10 + r for r in range(size)]


def late() -> list[Any]:
    """Rank 1 arrives after the others have given up waiting, once."""
    comm = commrt.init()
    x = np.ones(1000)
    text = ""
    if comm.rank == 1:
        core_of(comm).world.meet(range(comm.size), "test")
        comm.allreduce(x)
    else:
        with pytest.raises(TimeoutError_) as raised:
            comm.allreduce(x, timeout_s=0.3)
        text = str(raised.value)
        core_of(comm).world.meet(range(comm.size), "test")
        assert raised.value.request.wait() is x  # type: ignore[attr-defined]
    return [text, float(x[-1])]


def test_a_rank_that_does_not_arrive_is_named(torchrun: Any) -> None:
    got = torchrun(3, late, deadline_s=DEADLINE_S)
    assert [total for _, total in got] == [3.0] * 3
    for rank in (0, 2):
        assert got[rank][0].startswith(f"allreduce #0 on world, rank {rank}: not")
        assert "within 0.3 s: rank 1 on this node has not started it" in got[rank][0]


def never_calls_init() -> str:
    if detect().rank == 1:
        return ""
    with pytest.raises(TimeoutError_) as raised:
        commrt.init()
    return str(raised.value)


def test_a_rank_that_never_calls_init_is_named(torchrun: Any) -> None:
    env = {"COMMRT_TIMEOUT_S": "0.5"}
    text, _ = torchrun(2, never_calls_init, env=env, deadline_s=DEADLINE_S)
    assert "rank 0: rank 1 did not arrive" in text


def raises() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        raise RuntimeError("boom on purpose")
    comm.allreduce(np.ones(10), timeout_s=500)


def test_an_uncaught_exception_ends_the_job(torchrun: Any) -> None:
    done = torchrun.failing(2, raises, deadline_s=DEADLINE_S)
    assert not done.timed_out
    assert done.returncode != 0
    assert "RuntimeError: boom on purpose" in done.stderr
    assert "commrt: rank 1 ended with RuntimeError; aborting the job" in done.stderr
