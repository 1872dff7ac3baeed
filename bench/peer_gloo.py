# SPDX-License-Identifier: Apache-2.0
"""torch.distributed with gloo as a peer: run by path, without commrt or MPI.

``python peer_gloo.py JOB RANKS`` starts the ranks itself; they meet at a port of
127.0.0.1, with torchrun's variables. Arrays are numpy's, seen through
``torch.from_numpy``, so that inputs are made and rewritten alike for every peer.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commrt.bench import timing_loop
    from commrt.bench.timing_loop import Array, Call, Parts
else:
    import timing_loop  # beside this file

    # This folder must not shadow anything that the library imports.
    del sys.path[0]


class GlooPeer:
    """Blocking collectives of the default process group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.barrier = dist.barrier

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return every rank's values on rank 0, None elsewhere."""
        rows: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._dist.gather_object(values, rows, dst=0)
        return rows

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        tensor = self._torch.tensor([value], dtype=self._torch.float64)
        self._dist.broadcast(tensor, src=0)
        return float(tensor.item())

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a call of ``coll``.

        gloo reduces in place only: out of place, the input is copied first, as a user
        would have to.
        """
        return self._bound(coll, x, out, root)

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that submits ``coll`` for all parts, then waits for all."""
        submits: list[Any] = [
            self._bound(coll, *part, root, async_op=True) for part in parts
        ]

        def call() -> None:
            for work in [submit() for submit in submits]:
                work.wait()

        return call

    def _bound(
        self, coll: str, x: Array, out: Array | None, root: int, **how: bool
    ) -> Call:
        dist, at_root = self._dist, self.rank == root
        source = self._torch.from_numpy(x)
        target = None if out is None else self._torch.from_numpy(out)
        if coll in ("allreduce", "reduce"):
            reduce = dist.all_reduce if coll == "allreduce" else dist.reduce
            extra = () if coll == "allreduce" else (root,)
            if target is None:
                return partial(reduce, source, *extra, **how)

            def copied() -> Any:
                target.copy_(source)
                return reduce(target, *extra, **how)

            return copied
        if coll == "send_recv":
            return self._there_and_back(source, target)
        parts = None
        if at_root and coll in ("gather", "scatter", "gatherv", "scatterv"):
            whole = target if coll.startswith("gather") else source
            parts = list(whole.chunk(self.size)) if whole is not None else None
        blocks = [] if target is None else list(target.chunk(self.size))
        counts = [x.size // self.size] * self.size
        calls: dict[str, Call] = {
            "bcast": partial(dist.broadcast, source, root, **how),
            "allgather": partial(dist.all_gather_into_tensor, target, source, **how),
            "reduce_scatter": partial(
                dist.reduce_scatter_tensor, target, source, **how
            ),
            "alltoall": partial(dist.all_to_all_single, target, source, **how),
            "gather": partial(dist.gather, source, parts, root, **how),
            "scatter": partial(dist.scatter, target, parts, root, **how),
            "barrier": partial(dist.barrier, **how),
            # A vector operation takes a list of tensors, or the lengths of its parts.
            "allgatherv": partial(dist.all_gather, blocks, source, **how),
            "alltoallv": partial(
                dist.all_to_all_single, target, source, counts, counts, **how
            ),
            "gatherv": partial(dist.gather, source, parts, root, **how),
            "scatterv": partial(dist.scatter, target, parts, root, **how),
        }
        return calls[coll]

    def _there_and_back(self, x: Any, out: Any) -> Call:
        """Return a call that sends a message to the last rank and gets it back."""
        dist, last = self._dist, self.size - 1

        def root() -> None:
            dist.send(x, last)
            dist.recv(out, last)

        def other() -> None:
            dist.recv(out, 0)
            dist.send(out, 0)

        return {0: root, last: other}.get(self.rank, lambda: None)


def connect() -> tuple[GlooPeer, dict[str, Any]]:
    """Meet the other ranks; return the peer and what to record about the library."""
    import numpy
    import torch
    import torch.distributed as dist

    # As torchrun does: intra-op threads would only fight over the ranks' CPUs.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    about = {
        "library": f"gloo of torch {torch.__version__}",
        "versions": {"torch": torch.__version__, "numpy": numpy.__version__},
    }
    return GlooPeer(), about


def rank_main(job_path: str) -> None:
    """Be one rank; who it is stands in the environment, as torchrun leaves it."""
    timing_loop.work(job_path, connect)
    import torch.distributed as dist

    dist.destroy_process_group()


def main(job_path: str, size: int) -> int:
    """Start the ranks as fresh processes; return 0 if all of them succeeded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, job_path],
            env={
                **os.environ,
                **shared,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(size)
    ]
    return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
