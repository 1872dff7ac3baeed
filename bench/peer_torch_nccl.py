# SPDX-License-Identifier: Apache-2.0
"""torch.distributed with NCCL: ``python -m commrt.bench.peer_torch_nccl JOB``.

The arrays are the same as for every peer, seen by torch where they lie; its current
stream is the one in which times are taken. Ranks meet over commrt.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from commrt.bench import worker
from commrt.bench.device_memory import DeviceMemory, Timing
from commrt.bench.timing_loop import Call, Parts
from commrt.bench.worker import CommrtPeer
from commrt.errors import UsageError

__all__ = ["TorchNcclPeer", "connect", "free_port"]

_HOST = "127.0.0.1"


class TorchNcclPeer(CommrtPeer):
    """Collectives of torch's default process group."""

    def __init__(self, peer: CommrtPeer, torch: Any, dist: Any) -> None:
        """Make the process group of the ranks of ``peer``; collective."""
        super().__init__(peer.comm, peer.memory)
        memory = cast(DeviceMemory, peer.memory)
        ordinal = int(getattr(memory.device, "ordinal", 0))
        self._torch, self._dist = torch, dist
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.ExternalStream(memory.stream.handle, self._device)
        torch.cuda.set_stream(stream)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://{_HOST}:{free_port(peer)}",
            rank=peer.rank,
            world_size=peer.size,
        )

    def bind(self, coll: str, x: Any, out: Any, root: int) -> Call:
        """Return a call of ``coll``; allreduce and reduce are in place only."""
        dist = self._dist
        source = self._torch.as_tensor(x, device=self._device)
        if coll in ("allreduce", "reduce", "bcast"):
            calls: dict[str, Call] = {
                "allreduce": partial(dist.all_reduce, source),
                "reduce": partial(dist.reduce, source, root),
                "bcast": partial(dist.broadcast, source, root),
            }
            return calls[coll]
        names = {
            "allgather": "all_gather_into_tensor",
            "reduce_scatter": "reduce_scatter_tensor",
            "alltoall": "all_to_all_single",
        }
        if coll not in names:
            raise UsageError(
                f"torch.distributed with NCCL is not compared in {coll}; expected one "
                f"of {', '.join(names)}"
            )
        target = self._torch.as_tensor(out, device=self._device)
        return partial(getattr(dist, names[coll]), target, source)

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that starts ``coll`` for all parts, then waits for all."""
        bound: list[Any] = [self.bind(coll, *part, root) for part in parts]

        def all_parts() -> None:
            for work in [each(async_op=True) for each in bound]:
                work.wait()

        return all_parts

    def close(self) -> None:
        """End the process group, with those of the other ranks."""
        self.memory.drain()
        self._dist.destroy_process_group()


def free_port(peer: CommrtPeer) -> int:
    """Return a port that was free on rank 0, the same on all ranks."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(peer.agree(float(probe.getsockname()[1])))


def connect(device: str, timing: Timing) -> tuple[TorchNcclPeer, Mapping[str, Any]]:
    """Start commrt and torch; return the peer and what to record about it."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    peer, about = worker.connect(device, timing)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    library = f"torch {torch.__version__}, NCCL {version}"
    return TorchNcclPeer(peer, torch, dist), {**about, "library": library}


if __name__ == "__main__":
    worker.serve(sys.argv[1], connect)
