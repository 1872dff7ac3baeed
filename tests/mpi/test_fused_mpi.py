# SPDX-License-Identifier: Apache-2.0
"""fused() between real ranks, on one node and across, and by the library itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import commrt


def run_drawn(
    seed: int, limit: float | None, types: list[str], ops: list[str]
) -> list[bool]:
    comm = commrt.init()
    rng = random.Random(f"{seed} {comm.size}")
    own = random.Random(f"{seed} {comm.rank}") if limit is not None else rng
    right = []
    for nbytes in (500, 30_000, 1 << 20):
        started: list[tuple[Any, Any, Any]] = []
        with comm.fused(nbytes=nbytes, time_limit_s=limit):
            for turn in range(60):
                dtype = rng.choice(types)
                op = rng.choice(ops)
                count = rng.choice([0, 1, 5, 100, 1023, 20_000])
                x = (np.arange(count) % 5 + comm.rank).astype(dtype)
                out = np.empty_like(x) if rng.random() < 0.5 else x
                request = comm.allreduce(x, out=out, op=op, nonblocking=True)
                rows = [np.arange(count) % 5 + rank for rank in range(comm.size)]
                total = np.max(rows, axis=0) if op == "max" else np.sum(rows, axis=0)
                if op == "avg":
                    whole = dtype == "int32"
                    total = total // comm.size if whole else total / comm.size
                started.append((request, out, total))
                if own.random() < 0.1:
                    own.choice(started)[0].wait()
                if rng.random() < 0.05:
                    comm.barrier()
                if turn % 20 == 7:
                    comm.bcast(np.zeros(3), root=turn % comm.size)
        for request, out, total in own.sample(started, len(started)):
            assert request.wait() is out
            close = 1e-3 if out.dtype == np.float16 else 1e-6
            right.append(bool(np.allclose(out, total, rtol=close, atol=0)))
    return right


@pytest.mark.parametrize("limit", [None, 0.002])
@pytest.mark.parametrize(
    ("size", "where", "algorithm"),
    [
        (2, "", ""),
        (4, "", ""),
        (2, "1,1", ""),
        (3, "2,1", ""),
        (4, "2,2", ""),
        (2, "", "mpi/native"),
        (3, "1,2", "mpi/native"),
    ],
)
def test_drawn_calls_give_what_numpy_gives(
    mpirun: Any, size: int, where: str, algorithm: str, limit: float | None, seed: int
) -> None:
    env = {"COMMRT_TIMEOUT_S": "300"}
    if where:
        env["COMMRT_NODES"] = where
    if algorithm:
        env["COMMRT_ALGORITHM"] = f"allreduce:{algorithm}"
    # The library knows no average, and its maximum of floats is another one.
    types = ["float32", "float64", "int32", *([] if algorithm else ["float16"])]
    ops = ["sum"] if algorithm else ["sum", "max", "avg"]
    kinds = {"types": types, "ops": ops}
    done = mpirun(size, run_drawn, seed=seed, limit=limit, **kinds, env=env)
    assert done == [[True] * 180] * size


def run_different(limit: float | None) -> str:
    comm = commrt.init()
    lengths = [100, 100 + (comm.rank == 1), 100]
    try:
        with comm.fused(time_limit_s=limit):
            requests = [comm.allreduce(np.ones(n), nonblocking=True) for n in lengths]
        commrt.wait_all(requests, timeout_s=300)
    except commrt.errors.CommError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("limit", [None, 1.0])
def test_calls_that_differ_end_with_errors(mpirun: Any, limit: float | None) -> None:
    env = {"COMMRT_TIMEOUT_S": "300"}
    kinds = mpirun(2, run_different, limit=limit, env=env)
    assert "MismatchError" in kinds or "RequestErrors" in kinds
    assert "nothing" not in kinds
