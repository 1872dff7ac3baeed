# SPDX-License-Identifier: Apache-2.0
"""One rank of ``commrt.bench.wrong_calls``: run by path, with any of the systems.

``python wrong_calls_worker.py SYSTEM FAULT FOLDER`` writes how the rank ended there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZE, N, AT, CALLS, LIMIT_S = 3, 12, 5, 400, 15
Sum = Callable[[Any, str], Any]
Bcast = Callable[[Any, int], Any]


def _mpi4py() -> tuple[int, int, Sum, Bcast]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ops = {"sum": MPI.SUM, "max": MPI.MAX}
    return (
        world.rank,
        world.size,
        lambda x, op: world.Allreduce(MPI.IN_PLACE, x, op=ops[op]),
        lambda x, root: world.Bcast(x, root=root),
    )


def _gloo() -> tuple[int, int, Sum, Bcast]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    return (
        dist.get_rank(),
        dist.get_world_size(),
        lambda x, op: dist.all_reduce(torch.from_numpy(x), op=ops[op]),
        lambda x, root: dist.broadcast(torch.from_numpy(x), src=root),
    )


def _commrt(**how: Any) -> tuple[int, int, Sum, Bcast]:
    import commrt

    comm = commrt.init()
    comm.timeout_s = LIMIT_S
    return (
        comm.rank,
        comm.size,
        lambda x, op: comm.allreduce(x, out=x, op=op, **how),
        lambda x, root: comm.bcast(x, root=root, **how),
    )


SYSTEMS: dict[str, Callable[[], tuple[int, int, Sum, Bcast]]] = {
    "mpi4py": _mpi4py,
    "gloo": _gloo,
    "commrt": _commrt,
    "native": lambda: _commrt(backend="mpi", algorithm="native"),
}


def run(system: str, fault: str, folder: Path) -> None:
    """Make the calls, and write how they ended."""
    rank, size, add, bcast = SYSTEMS[system]()
    found: dict[str, Any] = {"end": "done", "wrong": 0}
    for turn in range(CALLS):
        wrong = turn == AT and rank == size - 1
        swapped = turn in (AT, AT + 1) and rank == size - 1
        x = np.full(N, rank + 1, np.int32)
        expected = size * (size + 1) // 2
        try:
            if fault == "reduction":
                add(x, "max" if wrong else "sum")
            elif fault == "root":
                x[:] = 7 if rank == 0 else rank
                expected = 7
                bcast(x, 1 if wrong else 0)
            elif fault == "type":
                # 1.0 where the others have 1.
                y = x.astype(np.float32) if wrong else x
                add(y, "sum")
                x = y.astype(np.int64) if wrong else x
            elif fault == "length":
                x = x[: N - 1] if wrong else x
                add(x, "sum")
            elif fault == "order":
                is_sum = bool(turn % 2) != swapped
                add(x, "sum" if is_sum else "max")
                expected = expected if is_sum else size
            elif not wrong:  # one rank leaves a call out
                x[:] = turn
                add(x, "sum")
                expected = turn * size
            else:
                continue
        except Exception as error:  # noqa: BLE001 - whatever a system raises
            kind = type(error).__name__
            late = "imeout" in kind or "imed out" in str(error)
            found |= {"end": "timeout" if late else "error", "turn": turn}
            found |= {"kind": kind, "text": str(error)}
            break
        found["wrong"] += int((x != expected).any())
    Path(folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    given = Path(sys.argv[3])
    run(sys.argv[1], sys.argv[2], given)
    # A launcher ends ranks that still wait once one has gone.
    until = time.monotonic() + 2 * LIMIT_S
    while time.monotonic() < until and len(list(given.glob("*.json"))) < SIZE:
        time.sleep(0.05)
    os._exit(0)  # nobody waits for what cannot end
