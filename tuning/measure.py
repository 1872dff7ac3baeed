# SPDX-License-Identifier: Apache-2.0
"""The tuner's only use of the runtime: a communicator whose calls name a candidate.

Everything else in this package works on recorded data and needs no ranks.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from commrt import nccl
from commrt.backends import Attached
from commrt.bench.device_memory import DeviceMemory, local_rank, open_memory
from commrt.bench.timing_loop import (
    PROBE_STEP,
    Array,
    Call,
    FlagBarrier,
    HostMemory,
    Memory,
    SharedFlags,
    Trial,
    link_class_of,
    probe_link,
)
from commrt.bench.worker import CommrtPeer, equal_counts
from commrt.comm import core_of
from commrt.job.arena import machine_identity
from commrt.nccl.features import version_text
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.policy import Policy
from commrt.select.schema import Catalog
from commrt.tuning.interference import (
    WAKE_UP_US,
    CoreTime,
    Reference,
    WaitingTime,
    others_share,
)
from commrt.tuning.job import Turn
from commrt.vocabulary.operations import operation

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Session", "catalog"]

_PATIENT_SPINS = 200_000
"""Polls, some 6 ms, for which a rank waits before it gives its core away: longer than
the turn of a program that has taken another rank's core. A rank that gave way sooner
would itself be away when the other one comes back, and so on at every repetition."""


class _CandidatePeer(CommrtPeer):
    """A communicator whose bound calls are run by the candidate that is set."""

    candidate: Candidate | None = None

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a persistent call: a named candidate at the cost of a default one."""
        if self.candidate is None:
            return _unbound
        spec = operation(coll)
        given: dict[str, Any] = {
            "algorithm": self.candidate.name,
            "params": dict(self.candidate.params),
        }
        if spec.has_root:
            given["root"] = root
        given.update(equal_counts(spec, x.size, self.size))
        if spec.x_count == "none" and isinstance(self.memory, DeviceMemory):
            given["stream"] = self.memory.stream
        if out is not None and (spec.output_on != "root" or self.rank == root):
            given["out"] = out
        plan = getattr(self.comm.plan, coll)
        call: Call = plan(**given) if spec.x_count == "none" else plan(x, **given)
        return call


def _unbound() -> None:
    raise AssertionError("buffers were made, and no candidate is bound to them")


class Session:
    """The ranks this process belongs to.

    Args:
        flags: file of shared flags for the barrier before each repetition; None where
            the ranks were started by someone else and may span machines.
        turn: file that says whose turn it is; None where nobody wants to know.
        device: where arrays lie: cpu, cuda or thread.
        comm: the ranks; None: all that were started.
        memory: of this rank's device; None: made for ``device``.
    """

    def __init__(
        self,
        flags: str | None,
        turn: str | None = None,
        device: str = "cpu",
        *,
        comm: Communicator | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        import commrt

        self._comm: Communicator = commrt.init() if comm is None else comm
        self.memory: Memory = HostMemory()
        self._kind = "host" if device == "cpu" else "cuda"
        if device != "cpu":
            place = local_rank(self._comm.rank, self._comm.facts.layout)
            self.memory = memory or open_memory(device, "events", place)
            # The first call on a device is where ranks agree on who has NCCL.
            self._comm.allreduce(self.memory.empty(1, np.dtype("float32")))
            self.memory.drain()
        self._plain = CommrtPeer(self._comm)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        if self._comm.facts.nodes > 1:
            core_of(self._comm).find_network()
        self.facts: CommFacts = self._comm.facts
        self.barrier: Callable[[], object] = self._comm.barrier
        self._flags: SharedFlags | None = None
        self._probes = 0
        if flags is not None and self.size > 1:
            shared = SharedFlags(flags, self.size)
            crowded = self.facts.ppn > self.facts.cores
            self.barrier = FlagBarrier(shared, self.rank, crowded, _PATIENT_SPINS)
            # In a crowd, and between nodes (also pretended ones), it never changes.
            changes = self.facts.link_class in ("near", "far")
            self._flags = shared if changes else None
        self._turn = Turn(turn) if turn is not None and self.rank == 0 else None
        spans_nodes = self.facts.nodes > 1
        self._machines: list[int] | None = None
        self.crowded: bool = self.facts.ppn > self.facts.cores
        """True if ranks outnumber the cores of their machine."""
        if spans_nodes:
            self._machines = self._numbers_of_machines()
            self.crowded |= core_of(self._comm).world.shares_cores
        # Threads of a pretended device share the ranks' cores, too.
        alone = device == "cpu" and not self.crowded
        # Between nodes a rank sleeps until a message comes; its core wakes late.
        wake_up_us = WAKE_UP_US if spans_nodes else 0.0
        self._waiting = WaitingTime(wake_up_us) if alone else None
        self._reference = Reference() if alone else None
        self._core_time = CoreTime(of_interrupts=not spans_nodes)

    def link_class(self) -> str:
        """Return the class of the links now; collective, equal on all ranks.

        ``unknown`` where the ranks were hardly on two cores at once.
        """
        if self._flags is not None:
            self.barrier()
            worst_ns = probe_link(self._flags, self.rank, self._probes)
            self._probes += PROBE_STEP
            return link_class_of(self.agree(worst_ns), self.size, self.size)
        return self.facts.link_class

    def lost_us(self) -> float:
        """Return for how long so far something else ran on this rank's core.

        Always 0 where ranks outnumber cores, as they wait for each other there.
        """
        return 0.0 if self._waiting is None else self._waiting.us()

    def watch_cores(self) -> None:
        """Begin to see what runs beside the ranks."""
        self._core_time.start()

    def others_share(self) -> float:
        """Return the share of the cores' time, since ``watch_cores``, that the ranks
        did not get; collective, equal on all ranks."""
        rows = self._plain.gather(self._core_time.row())
        if not rows:
            return self.agree(0.0)
        shares = self.crowded
        found = others_share(rows, share_cores=shares, machines=self._machines)
        return self.agree(found)

    def _numbers_of_machines(self) -> list[int]:
        """Return a number for each rank's machine: nodes may be containers of one."""
        mine = np.array([zlib.crc32(machine_identity().encode())], np.int64)
        return [int(one) for one in self._comm.allgather(mine).ravel()]

    def reference_us(self) -> float:
        """Return what a fixed piece of work takes now on the slowest rank; collective.

        0 where ranks outnumber cores.
        """
        mine = 0.0 if self._reference is None else self._reference.us()
        slowest = self.worst([mine])
        return self.agree(slowest[0] if slowest else 0.0)

    def turn_of(self, index: int) -> None:
        """Note whose turn it is; each note is a sign of life."""
        if self._turn is not None:
            self._turn.set(index)

    def candidates(self, op: str, nbytes: int, dtype: str) -> Sequence[Candidate]:
        """Return the candidates that can run here, simplest first; equal on all
        ranks."""
        found = self._comm.candidates(
            op, nbytes, dtype=dtype, distinct=True, device=self._kind
        )
        return cast("Sequence[Candidate]", found)

    def model_us(self, op: str, nbytes: int, dtype: str, candidate: Candidate) -> float:
        """Return the model's prediction."""
        redop = "sum" if operation(op).reduces else None
        query = Query(op, nbytes, dtype, self._kind, op=redop)
        asked: Attached = core_of(self._comm).attached[candidate.backend]
        return asked.predicted_us(query, candidate)

    def unasked(self, op: str, nbytes: int, dtype: str) -> Candidate:
        """Return what a call would run without a table; equal on all ranks."""
        redop = "sum" if operation(op).reduces else None
        root = 0 if operation(op).has_root else None
        query = Query(op, nbytes, dtype, self._kind, op=redop, root=root)
        return (
            Policy(self.facts, None, core_of(self._comm).policy.offers)
            .choose(query)
            .candidate
        )

    def buffers(self, op: str, nbytes: int, dtype: str) -> Trial:
        """Return the buffers that all candidates share."""
        spec = operation(op)
        kind = {"root": 0, "in_place": False, "symmetric": False}
        job = {"spec": spec.__dict__, "dtype": dtype, **kind}
        return Trial(_CandidatePeer(self._comm, self.memory), job, nbytes)

    def bind(self, trial: Trial, candidate: Candidate) -> Call:
        """Return the operation on these buffers, run by ``candidate``."""
        peer = cast("_CandidatePeer", trial.peer)
        peer.candidate = candidate
        return peer.bind(trial.coll, trial.x, trial.out, trial.root)

    def worst(self, values: list[float]) -> list[float]:
        """Return, on rank 0, each value's maximum over ranks; elsewhere nothing."""
        rows = self._plain.gather(values)
        return [max(column) for column in zip(*rows, strict=True)] if rows else []

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        return self._plain.agree(value)

    def software(self) -> dict[str, object]:
        """Return the versions that are recorded in the table."""
        import commrt

        versions: dict[str, object] = {
            "commrt": getattr(commrt, "__version__", "unknown"),
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        library = getattr(self._comm, "mpi_library", None)
        if isinstance(library, str) and library:
            versions["mpi"] = library.splitlines()[0].strip(" \0")
        if isinstance(self.memory, DeviceMemory):
            device = self.memory.device
            none = f"none: a device of {device.kind}"
            versions["cuda"] = getattr(device, "name", none)
            taken = nccl.taken()
            if taken is not None:
                versions["nccl"] = version_text(taken.version)
        return versions


def catalog() -> Catalog:
    """Return every backend and algorithm name that a table may use."""
    from commrt.backends import catalog

    return catalog.catalog()
