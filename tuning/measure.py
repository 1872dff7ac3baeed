# SPDX-License-Identifier: Apache-2.0
"""The tuner's only use of the runtime: a communicator whose calls name a candidate.

Everything else in this package works on recorded data and needs no ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from commrt.backends.prediction import predicted_us
from commrt.bench.timing_loop import Array, Call, FlagBarrier, SharedFlags, Trial
from commrt.bench.worker import CommrtPeer
from commrt.operations import operation
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.schema import Known

__all__ = ["Session", "known_names"]


class _CandidatePeer(CommrtPeer):
    """A communicator that runs every bound call by one candidate."""

    def __init__(self, comm: Any, candidate: Candidate) -> None:
        super().__init__(comm)
        self._arguments = {
            "algorithm": candidate.name,
            "params": dict(candidate.params),
        }

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a persistent call: a named candidate at the cost of a default one."""
        spec = operation(coll)
        given: dict[str, Any] = dict(self._arguments)
        if spec.has_root:
            given["root"] = root
        if out is not None and (spec.output_on == "all" or self.rank == root):
            given["out"] = out
        plan = getattr(self.comm.plan, coll)
        call: Call = plan(**given) if spec.x_count == "none" else plan(x, **given)
        return call


class Session:
    """The ranks this process belongs to.

    Args:
        flags: file of shared flags for the barrier before each repetition; None where
            the ranks were started by someone else and may span machines.
    """

    def __init__(self, flags: str | None) -> None:
        import commrt

        # Through Any: the tuner is written against the public methods only.
        runtime: Any = commrt
        self._comm = runtime.init()
        self._plain = CommrtPeer(self._comm)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.facts: CommFacts = self._comm.facts
        self.barrier: Callable[[], object] = self._comm.barrier
        if flags is not None and self.size > 1:
            shared = SharedFlags(flags, self.size)
            crowded = self.facts.link_class == "oversubscribed"
            self.barrier = FlagBarrier(shared, self.rank, crowded)

    def candidates(self, op: str, nbytes: int, dtype: str) -> Sequence[Candidate]:
        """Return what can run it here, simplest first; equal on all ranks."""
        found = self._comm.candidates(op, nbytes, dtype=dtype, distinct=True)
        return cast("Sequence[Candidate]", found)

    def model_us(self, op: str, nbytes: int, dtype: str, candidate: Candidate) -> float:
        """Return what the model expects."""
        redop = "sum" if operation(op).reduces else None
        query = Query(op, nbytes, dtype, op=redop)
        return predicted_us(self.facts, query, candidate)

    def trial(self, op: str, nbytes: int, dtype: str, candidate: Candidate) -> Trial:
        """Return buffers and a bound call, ready to be checked and timed."""
        spec = operation(op)
        job = {"spec": spec.__dict__, "dtype": dtype, "root": 0, "in_place": False}
        return Trial(_CandidatePeer(self._comm, candidate), job, nbytes)

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
        return versions


def known_names() -> Known:
    """Return every backend and algorithm name that a table may use."""
    from commrt import world

    return world.known_names()
