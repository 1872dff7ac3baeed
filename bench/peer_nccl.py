# SPDX-License-Identifier: Apache-2.0
"""NCCL itself as a peer: ``python -m commrt.bench.peer_nccl JOB``.

Its C functions by ctypes, on a blocking communicator as programs make one by default:
what a call costs here is what NCCL's own enqueue costs from Python, with arguments
converted before. Ranks meet, and times are collected, over commrt.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from commrt import nccl
from commrt.bench import worker
from commrt.bench.device_memory import DeviceMemory, Timing
from commrt.bench.timing_loop import Call, Parts
from commrt.bench.worker import CommrtPeer
from commrt.comm import core_of
from commrt.errors import BackendError, UsageError
from commrt.nccl.abilities import NCCL_REDUCTIONS, NCCL_TYPES, nccl_count
from commrt.nccl.features import version_text
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation

__all__ = ["NcclPeer", "connect"]

_FUNCTIONS = {
    "allreduce": "ncclAllReduce",
    "reduce": "ncclReduce",
    "bcast": "ncclBroadcast",
    "allgather": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "alltoall": "ncclAlltoAll",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
}
_SUM = NCCL_REDUCTIONS[ReduceOp.SUM]


class _Enqueued:
    """A call that is in the stream, and needs no wait there."""

    def wait(self) -> None:
        """Do nothing: what is given to the stream next comes after it."""


_ENQUEUED = _Enqueued()


class NcclPeer(CommrtPeer):
    """Calls of NCCL's C functions in place of commrt's."""

    def __init__(self, peer: CommrtPeer) -> None:
        """Make an NCCL communicator of the ranks of ``peer``; collective."""
        super().__init__(peer.comm, peer.memory)
        self._memory = cast(DeviceMemory, peer.memory)
        taken = nccl.library()
        kind = self._memory.device.kind
        if kind not in taken.serves:
            raise UsageError(
                f"{taken} does not work on devices of kind {kind!r}; expected one of "
                f"{', '.join(sorted(taken.serves))}"
            )
        self.library = f"NCCL {version_text(taken.version)}"
        self.nccl = nccl.NcclComm.create(
            core_of(self.comm).world.bootstrap,
            config=nccl.NcclConfig(blocking=True),
            taken=taken,
            timeout_s=self.comm.timeout_s,
            name="bench",
            device=self._memory.device,
        )
        self._functions = ctypes.CDLL(taken.path)

    def bind(self, coll: str, x: Any, out: Any, root: int) -> Call:
        """Return a call that puts ``coll`` into the stream."""
        name = _FUNCTIONS.get(coll)
        function = getattr(self._functions, name, None) if name else None
        if function is None:
            raise UsageError(
                f"{self.library} has no function for {coll}; leave it out, or the peer"
            )
        target, spec = x if out is None else out, operation(coll)
        count = target.size if spec.out_count == "div_size" else x.size
        if spec.by_pair:
            count //= self.size
        dtype = dtype_by_name(x.dtype.name)
        if dtype.name not in NCCL_TYPES:
            raise UsageError(
                f"{self.library} has no type {dtype.name}; expected one of "
                f"{', '.join(sorted(NCCL_TYPES))}"
            )
        call = partial(
            function,
            ctypes.c_void_p(x.address),
            ctypes.c_void_p(target.address),
            ctypes.c_size_t(nccl_count(dtype, count)),
            ctypes.c_int(NCCL_TYPES[dtype.name]),
            *([ctypes.c_int(_SUM)] if spec.reduces else []),
            *([ctypes.c_int(root)] if spec.has_root else []),
            ctypes.c_void_p(self.nccl.pointer),
            ctypes.c_void_p(self._memory.stream.handle),
        )
        return partial(_check, call, str(name))

    def bind_nonblocking(self, coll: str, x: Any, out: Any, root: int) -> Call:
        """Return a call that puts ``coll`` into the stream, and returns what waits."""
        call = self.bind(coll, x, out, root)

        def submit() -> _Enqueued:
            call()
            return _ENQUEUED

        return submit

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that puts ``coll`` into the stream for all parts."""
        calls = [self.bind(coll, x, out, root) for x, out in parts]

        def all_parts() -> None:
            for call in calls:
                call()

        return all_parts

    def close(self) -> None:
        """End the NCCL communicator, with those of the other ranks."""
        self.memory.drain()
        self.nccl.close()


def _check(call: Callable[[], int], name: str) -> None:
    code = call()
    if code:
        raise BackendError(
            f"{name} returned error code {code}; NCCL_DEBUG=WARN tells more"
        )


def connect(device: str, timing: Timing) -> tuple[NcclPeer, Mapping[str, Any]]:
    """Start commrt and NCCL; return the peer and what to record about it."""
    peer, about = worker.connect(device, timing)
    made = NcclPeer(peer)
    return made, {**about, "library": made.library}


if __name__ == "__main__":
    worker.serve(sys.argv[1], connect)
