# SPDX-License-Identifier: Apache-2.0
"""Device memory through pinned host memory and whatever host backend serves here.

A candidate ``staged/ring`` runs the host's ``ring``. A call is cut into pieces, so that
one is copied to the host while another is combined there and a third is on its way
back; ``piece`` is their length in bytes (``staged_pieces``). With ``copies="kernel"``
kernels copy to pinned memory and back, and no copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from commrt.backends.base import Availability, Backend, Capabilities
from commrt.backends.gloo.collectives import NATIVE as BY_GLOO
from commrt.backends.staged.pieces import cut_blocks, cut_elements
from commrt.errors import UsageError
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, ParamValue, Query
from commrt.vocabulary.operations import operation, rule_nbytes

__all__ = [
    "COPIES",
    "KERNEL",
    "PIECE",
    "PIECE_NBYTES",
    "StagedBackend",
    "check_copies",
    "check_piece",
    "on_host",
]

PIECE, COPIES = "piece", "copies"
"""The parameters of staging itself; the others are those of the host's candidate."""
PIECE_NBYTES = 1 << 20
ENGINE, KERNEL = "engine", "kernel"
"""What copies. Each rank's own affair, as peers see only what the host sends."""
NAME = "staged"


def check_piece(value: Any) -> int:
    """Return the length of pieces in bytes; UsageError for what is none."""
    if type(value) is not int or not 1 <= value <= 1 << 40:
        raise UsageError(
            f"parameter {PIECE}={value!r} must be a number of bytes, an integer from 1"
        )
    return value


def check_copies(value: Any) -> bool:
    """Return whether kernels copy; UsageError for what is no such choice."""
    if value not in (ENGINE, KERNEL):
        raise UsageError(
            f"parameter {COPIES}={value!r} must be {ENGINE!r}, for the device's copy "
            f"engines, or {KERNEL!r}"
        )
    return bool(value == KERNEL)


def on_host(query: Query, candidate: Candidate) -> tuple[Query, Candidate]:
    """Return what the host runs for a staged candidate; others stay what they are.

    The name of its backend stays, which the host's algorithms do not depend on.
    """
    if candidate.backend != NAME:
        return query, candidate
    own = PIECE, COPIES
    params = {name: v for name, v in candidate.params.items() if name not in own}
    piece = candidate.params.get(PIECE, PIECE_NBYTES)
    nbytes = query.nbytes
    if _is_cut(query.coll) and isinstance(piece, int):
        nbytes = min(nbytes, piece)
    host = replace(query, device="host", nbytes=nbytes)
    return host, Candidate(NAME, candidate.algorithm, params)


def _is_cut(coll: str) -> bool:
    """Whether an operation's elements do not depend on each other."""
    spec = operation(coll)
    return spec.out_count == "same" and spec.rule_bytes == "whole"


class StagedBackend:
    """Arrays on devices, through pinned memory.

    Args:
        host_backends: returns the backends that run the part on the host.
    """

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        native=True,
        limits="stream-ordered, through pinned memory; runs what a host backend runs",
    )

    def __init__(self, host_backends: Callable[[], Sequence[Backend]]) -> None:
        self._host_backends = host_backends

    def availability(self) -> Availability:
        """There wherever arrays on devices are."""
        reason = "the host backends, for arrays on devices"
        return Availability(self.name, True, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return one for each of the host backends' candidates."""
        if query.device != "cuda":
            return ()
        host, _ = on_host(query, Candidate(NAME, "any"))
        found = [
            Candidate(NAME, each.algorithm, each.params)
            for backend in self._host_backends()
            for each in backend.candidates(comm, host)
            if each != BY_GLOO  # it takes the GIL to start, which progress never has
        ]
        return list(dict.fromkeys(found))

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the plan of this rank."""
        own = dict(spec.candidate.params)
        most = check_piece(own.pop(PIECE, PIECE_NBYTES))
        by_kernel = check_copies(own.pop(COPIES, ENGINE))
        backend, inner = self._host_part(comm, spec, own)
        host = replace(spec, candidate=inner)

        def plan(part: PlanSpec) -> Any:
            return backend.plan(comm, part)

        if _is_cut(spec.op.name):
            made = cut_elements(host, plan, comm.rank, most)
        else:
            asked = PIECE in spec.candidate.params
            made = cut_blocks(host, plan, comm.rank, comm.size, most, asked)
        made.by_kernel = by_kernel
        return made

    def _host_part(
        self, comm: Any, spec: PlanSpec, params: dict[str, ParamValue]
    ) -> tuple[Backend, Candidate]:
        """Return the host's backend and candidate that a staged one stands for."""
        name = spec.candidate.algorithm
        query = Query(
            coll=spec.op.name,
            nbytes=rule_nbytes(
                spec.op.name, spec.num_elements * spec.dtype.itemsize, comm.size
            ),
            dtype=spec.dtype.name,
            op=spec.reduction.name.lower() if spec.op.reduces else None,
            root=spec.root if spec.op.has_root else None,
        )
        for backend in self._host_backends():
            if any(each.algorithm == name for each in backend.candidates(comm, query)):
                return backend, Candidate(backend.name, name, params)
        raise UsageError(
            f"{spec.candidate}: no host backend here runs {spec.op.name} by {name!r}"
        )
