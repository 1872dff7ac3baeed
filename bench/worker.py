# SPDX-License-Identifier: Apache-2.0
"""commrt as a peer of the timing loop: ``python -m commrt.bench.worker JOB``.

Only the public API is used: what is timed is what a user calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench import (
    device_overlap,
    overlap,
    point_to_point,
    submit_cost,
    timing_loop,
)
from commrt.bench.bench_operations import MULTI, THERE_AND_BACK, bench_operation
from commrt.bench.device_memory import DeviceMemory, Timing, memory_for
from commrt.bench.timing_loop import Array, Call, HostMemory, Measure, Memory, Parts
from commrt.vocabulary.operations import OpSpec

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["CommrtPeer", "connect", "equal_counts", "measure_of", "run", "serve"]


class CommrtPeer:
    """The collectives of a commrt communicator."""

    def __init__(self, comm: Communicator, memory: Memory | None = None) -> None:
        self.comm = comm
        self.memory: Memory = HostMemory() if memory is None else memory
        self.rank: int = comm.rank
        self.size: int = comm.size

    def barrier(self) -> object:
        """Return once every rank has called."""
        return self.comm.barrier()

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return every rank's values on rank 0, None elsewhere."""
        mine = np.asarray(values, np.float64)
        everyone = np.empty((self.size, mine.size), np.float64)
        self.comm.allgather(mine, out=everyone)
        rows: list[list[float]] = everyone.tolist()
        return rows if self.rank == 0 else None

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        shared = np.array([value], np.float64)
        self.comm.bcast(shared, root=0)
        return float(shared[0])

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return an array in symmetric memory; collective."""
        array: Array = self.comm.empty(count, dtype)
        return array

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a blocking call of ``coll``; without ``out`` it works in place."""
        return self._bound(coll, x, out, root, {})

    def bind_nonblocking(
        self, coll: str, x: Array, out: Array | None, root: int
    ) -> Call:
        """Return a call that submits ``coll`` and returns the request."""
        return self._bound(coll, x, out, root, {"nonblocking": True})

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that submits ``coll`` for all parts, then waits for all."""
        from commrt.request import wait_all

        submits: list[Any] = [
            self.bind_nonblocking(coll, x, out, root) for x, out in parts
        ]
        return lambda: wait_all([submit() for submit in submits])

    def _bound(
        self, coll: str, x: Array, out: Array | None, root: int, extra: dict[str, Any]
    ) -> Call:
        spec = bench_operation(coll)
        if spec is THERE_AND_BACK:
            assert out is not None
            return self._there_and_back(x, out, extra)
        method = getattr(self.comm, coll)
        if spec is MULTI:
            assert out is not None
            blocks = [self.memory.split(array, self.size) for array in (x, out)]
            lists = [list(zip(each, range(self.size), strict=True)) for each in blocks]
            return partial(method, sends=lists[0], recvs=lists[1], **extra)
        if spec.x_count == "none":
            if isinstance(self.memory, DeviceMemory):
                extra = {**extra, "stream": self.memory.stream}
            return partial(method, **extra)
        if spec.has_root:
            extra = {**extra, "root": root}
        extra = {**extra, **equal_counts(spec, x.size, self.size)}
        if out is not None and (spec.output_on != "root" or self.rank == root):
            extra = {**extra, "out": out}
        return partial(method, x, **extra)

    def _there_and_back(self, x: Array, out: Array, extra: dict[str, Any]) -> Call:
        """Return a call that sends a message to the last rank and gets it back."""
        comm, last = self.comm, self.size - 1

        def root() -> None:
            comm.send(x, dest=last, **extra)
            comm.recv(out, source=last)

        def other() -> None:
            comm.recv(out, source=0)
            comm.send(out, dest=0, **extra)

        return {0: root, last: other}.get(self.rank, lambda: None)


def equal_counts(spec: OpSpec, num_x: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the counts of a vector operation all of whose blocks have one length."""
    block = num_x if spec.out_count == "times_size" else num_x // size
    return dict.fromkeys(spec.count_arguments, (block,) * size)


def connect(
    device: str = "cpu", timing: Timing = "events"
) -> tuple[CommrtPeer, dict[str, Any]]:
    """Start commrt; return the peer and what to record about it.

    ``device`` says where the peer's arrays lie: ``cpu``, ``cuda`` or ``thread``.
    """
    import commrt

    # Through Any: the benchmarks sit above every layer and load before the API does.
    runtime: Any = commrt
    comm = runtime.init()
    versions = {"numpy": np.__version__}
    library = f"commrt {getattr(commrt, '__version__', 'unknown')}"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        versions["mpi4py"] = sys.modules["mpi4py"].__version__
        name = timing_loop.library_name(mpi.Get_library_version())
        library = f"{library} over {name}"
    return CommrtPeer(comm, memory_for(comm, device, timing)), {
        "library": library,
        "versions": versions,
        "engine_link_class": str(comm.facts.link_class),
        "table_digest": comm.table_digest or "none",
    }


def measure_of(mode: str) -> Measure | None:
    """Return what measures one size; None: the plain blocking loop."""
    modes: dict[str, Measure | None] = {
        "blocking": None,
        "nonblocking": overlap.measure_overlap,
        "device_overlap": device_overlap.measure_overlap,
        "latency": point_to_point.measure_latency,
        "bw": point_to_point.measure_bandwidth,
        "bibw": point_to_point.measure_bandwidth,
        "submit": submit_cost.measure_submit,
        "root_call": submit_cost.measure_root_call,
    }
    return modes[mode]


def run(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; return the result on rank 0."""
    peer, about = connect(job["device"], job["timing"])
    rows = timing_loop.run_job(peer, job, measure_of(job["mode"]))
    if peer.rank != 0:
        return None
    for row in rows:
        # Nobody made shared flags for us; the engine's own measurement remains.
        if row["link_class"] == "unknown":
            row["link_class"] = about["engine_link_class"]
    return {"peer": "commrt", "ranks": peer.size, **about, "rows": rows}


def serve(path: str, connects: Callable[[str, Timing], Any]) -> None:
    """Do the job of a launch with the peer that ``connects`` returns."""
    job = timing_loop.load_job(path)
    ready = partial(connects, job["device"], job["timing"])
    timing_loop.work(path, ready, measure_of(job["mode"]))


if __name__ == "__main__":
    serve(sys.argv[1], connect)
