# SPDX-License-Identifier: Apache-2.0
"""Cases of ``cases`` on the memory of a GPU, by ranks that are processes or threads."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

from cases import COUNTS, SPREADS, Case, difference, expected, inputs, legal_pairs

from commrt.comm import Communicator
from commrt.devices import DeviceArray
from commrt.errors import BackendError
from commrt.launch.detect import detect
from commrt.vocabulary.operations import OPERATIONS, operation

__all__ = ["MOVED", "OWN_HOST", "draw", "say_own_host", "wrong_results"]

MOVED = [spec.name for spec in OPERATIONS if spec.x_count != "none"]
"""The operations that have data."""
OWN_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
"""NCCL below 2.30 takes ranks on one GPU only if each says that it is another host."""


def say_own_host() -> None:
    """Let this rank say so, in a job whose environment has ``OWN_HOST``."""
    if "NCCL_NET" in os.environ:
        os.environ["NCCL_HOSTID"] = f"host{detect().rank}"


def draw(size: int, seed: int, number: int) -> list[Case]:
    """Return so many cases of each operation that moves data, without an algorithm."""
    rng = random.Random(f"gpu/{size}/{seed}")
    cases = []
    for coll in MOVED:
        pairs = legal_pairs(coll)
        spreads = SPREADS if operation(coll).count_arguments else SPREADS[:1]
        for _ in range(number):
            dtype, op = rng.choice(pairs)
            cases.append(
                Case(
                    coll,
                    size,
                    dtype=dtype,
                    op=op,
                    root=rng.randrange(size),
                    count=rng.choice(COUNTS),
                    in_place=rng.random() < 0.5,
                    spread=rng.choice(spreads),
                )
            )
    return cases


def wrong_results(
    comm: Communicator,
    gpu: Any,
    cases: list[Case],
    stream: Any,
    algorithm: str | None = None,
) -> dict[str, Any]:
    """Make calls, half of them nonblocking; return what was wrong.

    ``refused`` counts the cases that the algorithm's backend does not take.
    """
    wrong: list[str] = []
    refused = 0
    for number, case in enumerate(cases):
        drawn = replace(case, algorithm=algorithm)
        xs = inputs(drawn)
        want = expected(drawn, xs)[comm.rank]
        x = DeviceArray(gpu, xs[comm.rank].size, xs[comm.rank].dtype)
        x.put(xs[comm.rank])
        arguments = drawn.arguments(comm.rank)
        if want is not None and not (drawn.in_place and operation(drawn.coll).in_place):
            arguments["out"] = DeviceArray(gpu, want.size, x.dtype)
        call = getattr(comm, drawn.coll)
        try:
            if number % 2:
                out = call(x, nonblocking=True, **arguments).wait()
            else:
                out = call(x, **arguments)
        except BackendError:
            refused += 1
            continue
        stream.synchronize()
        if want is None:
            continue
        found = difference(drawn, xs, out.get(), want)
        if found is not None:
            wrong.append(f"rank {comm.rank}: {found} ({drawn})")
    return {"wrong": wrong, "refused": refused, "made": len(cases) - refused}
