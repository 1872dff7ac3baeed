# SPDX-License-Identifier: Apache-2.0
"""cupyx.distributed as a peer: ``python -m commrt.bench.peer_cupyx JOB``.

The arrays are the same as for every peer, seen by cupy where they lie, and its calls
get the stream in which times are taken. Ranks meet over commrt.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from commrt.bench import worker
from commrt.bench.device_memory import DeviceMemory, Timing
from commrt.bench.peer_torch_nccl import free_port
from commrt.bench.timing_loop import Call, Parts
from commrt.bench.worker import CommrtPeer
from commrt.errors import UsageError

__all__ = ["CupyxPeer", "connect"]


class CupyxPeer(CommrtPeer):
    """Collectives of cupyx's NCCL communicator."""

    def __init__(self, peer: CommrtPeer, cupy: Any, distributed: Any) -> None:
        """Make the communicator of the ranks of ``peer``; collective."""
        super().__init__(peer.comm, peer.memory)
        memory = cast(DeviceMemory, peer.memory)
        ordinal = int(getattr(memory.device, "ordinal", 0))
        self._cupy = cupy
        cupy.cuda.Device(ordinal).use()
        self._stream = cupy.cuda.ExternalStream(memory.stream.handle, ordinal)
        # Ranks meet over a process of rank 0's, which cupyx starts as only a fork can.
        multiprocessing.set_start_method("fork", force=True)
        try:
            self._cupyx = distributed.NCCLBackend(
                peer.size, peer.rank, "127.0.0.1", free_port(peer)
            )
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()  # nobody else ends it, and this one would wait for it
            raise
        peer.barrier()
        self._cupyx.stop()

    def bind(self, coll: str, x: Any, out: Any, root: int) -> Call:
        """Return a call of ``coll``; without ``out`` it works in place."""
        comm, size, cupy = self._cupyx, self.size, self._cupy
        source = cupy.asarray(x)
        target = source if out is None else cupy.asarray(out)
        stream = {"stream": self._stream}
        if coll == "bcast":
            return partial(comm.broadcast, source, root, **stream)
        if coll == "allreduce":
            return partial(comm.all_reduce, source, target, **stream)
        if coll == "reduce":
            return partial(comm.reduce, source, target, root, **stream)
        if coll == "allgather":
            return partial(comm.all_gather, source, target, source.size, **stream)
        if coll == "reduce_scatter":
            return partial(comm.reduce_scatter, source, target, target.size, **stream)
        # A row for each rank.
        if coll == "alltoall":
            rows = source.reshape(size, -1), target.reshape(size, -1)
            return partial(comm.all_to_all, *rows, **stream)
        if coll == "gather":
            return partial(
                comm.gather, source, target.reshape(size, -1), root, **stream
            )
        if coll == "scatter":
            return partial(
                comm.scatter, source.reshape(size, -1), target, root, **stream
            )
        raise UsageError(
            f"cupyx.distributed is not compared in {coll}; leave it out, or the peer"
        )

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that puts ``coll`` into the stream for all parts."""
        calls = [self.bind(coll, x, out, root) for x, out in parts]

        def all_parts() -> None:
            for call in calls:
                call()

        return all_parts


def connect(device: str, timing: Timing) -> tuple[CupyxPeer, Mapping[str, Any]]:
    """Start commrt and cupy; return the peer and what to record about it."""
    cupy: Any = importlib.import_module("cupy")
    distributed: Any = importlib.import_module("cupyx.distributed")
    peer, about = worker.connect(device, timing)
    library = f"cupyx.distributed {cupy.__version__}"
    return CupyxPeer(peer, cupy, distributed), {**about, "library": library}


if __name__ == "__main__":
    worker.serve(sys.argv[1], connect)
