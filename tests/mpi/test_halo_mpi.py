# SPDX-License-Identifier: Apache-2.0
"""Halo exchange between real ranks, on one node and across nodes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from halo_cases import check, draw
from layout_cases import move_drawn

import commrt
from commrt.launch.mpiexec import child_environment


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_drawn(seed: int) -> bool:
    comm = commrt.init()
    rng = random.Random(f"mpi {comm.size} {seed}")
    return sum(check(comm, draw(rng, comm.size)) for _ in range(12)) > 0


@pytest.mark.parametrize(
    ("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1"), (4, ""), (4, "2,2")]
)
def test_drawn_exchanges_agree_with_numpy(
    mpirun: Any, size: int, where: str, seed: int
) -> None:
    assert mpirun(size, run_drawn, seed=seed, env=nodes(where)) == [True] * size


def run_redistributions(seed: int) -> bool:
    comm = commrt.init()
    rng = random.Random(f"mpi layouts {comm.size} {seed}")
    return sum(move_drawn(comm, rng) for _ in range(15)) > 0


@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1"), (4, "2,2")])
def test_drawn_redistributions_agree_with_numpy(
    mpirun: Any, size: int, where: str, seed: int
) -> None:
    done = mpirun(size, run_redistributions, seed=seed, env=nodes(where))
    assert done == [True] * size


def run_long() -> list[bool]:
    comm = commrt.init()
    right = []
    for dims in ((2, 1, 1), (1, 1, 2)):
        with comm.cart(dims, periodic=True) as cart:
            field = np.zeros((66, 130, 258), np.float32)
            inner = field[1:-1, 1:-1, 1:-1]
            inner[...] = np.arange(inner.size).reshape(inner.shape) % 1000
            inner += 1000 * comm.rank
            exchange = cart.plan.halo_exchange(field, 1)
            for _ in range(3):
                exchange()
            both = cart.allgather(np.ascontiguousarray(inner))
            axis = dims.index(2)
            whole = np.pad(np.concatenate(list(both), axis), 1, mode="wrap")
            first = inner.shape[axis] * comm.rank
            index = [slice(None)] * 3
            index[axis] = slice(first, first + field.shape[axis])
            right.append(bool(np.array_equal(field, whole[tuple(index)])))
    return right


@pytest.mark.parametrize("where", ["", "1,1"])
def test_long_faces_in_many_messages(mpirun: Any, where: str) -> None:
    assert mpirun(2, run_long, env=nodes(where)) == [[True, True]] * 2


def test_the_benchmark_compares_with_mpi4py() -> None:
    argv = [
        sys.executable,
        "-m",
        "commrt.bench",
        "halo",
        "--format",
        "json",
        "--no-pin",
    ]
    argv += ["--shape", "6x5", "--width", "2", "-i", "10", "--timeout-s", "60"]
    done = subprocess.run(
        argv,
        env=child_environment(sys.executable),
        cwd=os.sep,  # here, sources would hide what is installed
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (launch,) = json.loads(done.stdout)["launches"]
    assert launch["valid"]
    assert launch["grid"] == [2, 1]
    assert {name: len(us) for name, us in launch["samples_us"].items()} == {
        "commrt": 10,
        "mpi4py": 10,
        "copy": 10,
    }
