# SPDX-License-Identifier: Apache-2.0
"""Parameters and programs of schedules that the engine runs on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from commrt import _native, algorithms
from commrt.errors import ScheduleError, UsageError, shown, suggest
from commrt.planning.footprint import CHUNK_NBYTES, LANE_NBYTES, Own, footprint
from commrt.planning.spec import PlanSpec, Ranks
from commrt.schedule.engine_model import LINES, EngineModel
from commrt.schedule.lower import Lowered, lower
from commrt.schedule.nodes import Nodes
from commrt.select.facts import (
    Candidate,
    LinkClass,
    ParamValue,
    Query,
    without_compression,
)
from commrt.vocabulary.dtypes import ReduceOp, engine_factor

__all__ = [
    "CHUNK_NBYTES",
    "INLINE_NBYTES",
    "LANE_NBYTES",
    "SYMMETRIC_NBYTES",
    "StoreRule",
    "TransportParams",
    "allows",
    "check_params",
    "distinct",
    "lowered_program",
    "lowered_programs",
    "node_numbers",
    "only_by_name",
    "scaling",
    "split_params",
    "why_not",
]

INLINE_NBYTES = _native.inline_nbytes()
"""Bytes that fit into a message's line, and bytes that fit into all of its lines."""
_INLINE_COMBINED_NBYTES = 1072
"""A sum is copied once more on its way into lines and out of them: an allreduce of
1 KiB took 0.90 (far) to 1.00 (near) of its time through a slot, one of 2 KiB 1.08; a
bcast or an allgather of 1.5 to 2 KiB 0.80 to 0.94."""
SYMMETRIC_NBYTES = 32768
"""Full vector from which buffers in the symmetric heap are used in place. Below it, a
copy costs less than the steps that avoid it."""
_FRAGMENTS_PROVED = 3
"""As many as ``verify_lowered`` runs: later ones wait for the like of what these do."""
_STORES = {"plain": 0, "stream": 1, "stream_slots": 2, "stream_both": 3}
_LEARN_FROM_NBYTES = 4096
"""``store=auto`` learns for messages from this length on; shorter ones are plain."""
_CACHES_LEFT = 1.5
"""So many times the last cache, and what stays there of a result is worth less to its
reader than what streaming saves: half of the time or more from here on, where cores are
near; between a half and one cache a fifth, and the whole result would stay."""
_CACHES_LEFT_FAR = {True: 1.0, False: 3.0}
"""The same where cores are far, by whether values are combined, which reads an input
beside. Then a call and reading its result break even at 0.9 to 1.2 caches; where they
only move at 2 to 4, and without the reading no sooner."""
_CACHE_NBYTES = 32 << 20
"""The last cache, where the kernel does not tell."""
_MOST_SPINS = 1 << 20
"""A look takes tens of nanoseconds: some 50 ms, as often as a wait checks signals."""


@lru_cache(maxsize=1)
def last_level_cache_nbytes() -> int:
    """Return the size of the largest cache that the first CPU has."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            largest = max(largest, int(path.read_text().strip().removesuffix("K")))
    return largest << 10 or _CACHE_NBYTES


@dataclass(frozen=True)
class TransportParams:
    """Parameters of shared-memory messages; the tuner picks them by size and link."""

    chunk: int | str = "auto"
    """Wanted bytes per message of a fragment; ``auto``: 131072 where data flows one
    way, so that its receiver begins early, and 262144 where ranks exchange as many
    messages as they get; where connections of commrt's own join nodes 65536; where
    gloo does 262144, of vectors beyond 1 MiB 4 MiB, and of those that an allreduce adds
    up 1 MiB beyond 2 MiB."""
    store: str = "auto"
    """Writes that are non-temporal: none (``plain``), results (``stream``), shared
    slots (``stream_slots``), both (``stream_both``). ``auto`` starts with plain slots
    if cores are near, and with streamed slots elsewhere. It starts with streamed
    results if the node's buffers are larger than the cache. Then it goes on with the
    writes that prove faster, rank by rank (native/engine/store_choice.hpp)."""
    depth: int = 2
    """Fragments tried at once."""
    reuse: int | str = "auto"
    """Fragments whose payload may be unread at once; few keep slots in the cores' own
    caches. ``auto``: 2, or as many as lie in the window, where slots that have left
    those caches prove faster (job/slot_window.py): unless ranks only exchange."""
    inline: int | str = "auto"
    """Most bytes of a message to one peer that ride in lines of their own; a longer
    one, or one to several peers beyond a line's 48 bytes, lies in a slot, to which its
    line points. ``auto``: 1072 where values are combined, else 2096."""
    spins: int | str = "auto"
    """Looks of a waiting rank before it lets another rank have its core; ``auto``: 2
    where ranks outnumber cores, else 20000. The least of several operations in flight
    counts."""

    def __post_init__(self) -> None:
        known = ("auto", *_STORES)
        if self.store not in known:
            raise UsageError(
                f"unknown store={shown(self.store)}{suggest(self.store, known)}"
            )
        for name in ("chunk", "depth", "reuse"):
            value = getattr(self, name)
            if value == "auto" and name != "depth":
                continue
            if not isinstance(value, int) or not 1 <= value <= 1 << 30:
                raise UsageError(
                    f"parameter {name}={shown(value)} must be an integer in "
                    f"1..{1 << 30}{', or auto' if name != 'depth' else ''}"
                )
        self._check_inline()
        self._check_spins()

    def _check_inline(self) -> None:
        wanted = self.inline
        least, most = INLINE_NBYTES
        if wanted == "auto":
            return
        if type(wanted) is not int or not least <= wanted <= most:
            raise UsageError(
                f"parameter inline={shown(wanted)} must be an integer in "
                f"{least}..{most}, or auto"
            )

    def _check_spins(self) -> None:
        looks = self.spins
        if looks == "auto":
            return
        if type(looks) is not int or not 0 <= looks <= _MOST_SPINS:
            raise UsageError(
                f"parameter spins={shown(looks)} must be an integer in "
                f"0..{_MOST_SPINS}, or auto"
            )

    def most_inline(self, reduces: bool) -> int:
        """Return the most bytes of a message that ride in lines."""
        if isinstance(self.inline, int):
            return self.inline
        return _INLINE_COMBINED_NBYTES if reduces else INLINE_NBYTES[1]

    def store_rule(self, link_class: LinkClass, combines: bool) -> StoreRule:
        """Return how the stores of a plan follow from its lengths."""
        if self.store != "auto":
            fixed = _STORES[self.store], 0
            return StoreRule(0, 0, fixed, fixed, fixed)
        near = link_class in ("near", "single")
        far = link_class == "far"
        caches = _CACHES_LEFT_FAR[combines] if far else _CACHES_LEFT
        return StoreRule(
            _LEARN_FROM_NBYTES,
            ceil(caches * last_level_cache_nbytes()),
            (_STORES["plain"], 0),
            (_STORES["plain" if near else "stream_slots"], _STORES["stream_slots"]),
            (_STORES["stream" if near else "stream_both"], _STORES["stream_both"]),
        )

    def stores(
        self,
        message_nbytes: int,
        node_nbytes: int,
        link_class: LinkClass,
        combines: bool,
    ) -> tuple[int, int]:
        """Return the codes of the store kind and of what the engine learns about."""
        rule = self.store_rule(link_class, combines)
        return rule.of(message_nbytes, node_nbytes)


@dataclass(frozen=True)
class StoreRule:
    """Codes of the stores of a plan, and of what the engine learns, by its lengths."""

    learns_from: int
    """First length of the longest message, in bytes, that is not ``short``."""
    beyond_cache: int
    """First length of what the buffers of all ranks of this node take together that is
    ``beyond``: below it, results stay in their cache."""
    short: tuple[int, int]
    cached: tuple[int, int]
    beyond: tuple[int, int]

    def of(self, message_nbytes: int, node_nbytes: int) -> tuple[int, int]:
        """Return the codes for such lengths."""
        if message_nbytes < self.learns_from:
            return self.short
        return self.cached if node_nbytes < self.beyond_cache else self.beyond

    def plain(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Return it as the engine takes it."""
        kinds = [self.short, self.cached, self.beyond]
        return self.learns_from, self.beyond_cache, kinds


_TRANSPORT_NAMES = tuple(TransportParams.__dataclass_fields__)


def split_params(
    params: Mapping[str, ParamValue],
) -> tuple[dict[str, ParamValue], TransportParams]:
    """Split a candidate's parameters into the algorithm's and the transport's."""
    transport = {k: v for k, v in params.items() if k in _TRANSPORT_NAMES}
    own = {k: v for k, v in params.items() if k not in transport}
    return own, TransportParams(**transport)  # type: ignore[arg-type]


def check_params(
    coll: str, algorithm: str, size: int, params: Mapping[str, ParamValue]
) -> None:
    """Raise UsageError for a parameter that neither algorithm nor transport has.

    The library's own collectives have none and cross no transport of ours; but where
    the choice is automatic a call does not know whether one of them runs.
    """
    known = {*_TRANSPORT_NAMES}
    if algorithms.exists(coll, algorithm):
        known.update(algorithms.param_choices(coll, algorithm, size))
    for name in params:
        if name not in known:
            raise UsageError(
                f"{coll} {algorithm}: unknown parameter "
                f"{shown(name)}{suggest(name, known)}"
            )
    split_params(params)


def allows(nodes: Nodes, query: Query, candidate: Candidate) -> bool:
    """Return whether a schedule may have these parameters on such ranks."""
    coll, name = query.coll, candidate.algorithm
    if not algorithms.exists(coll, name, len(nodes), nodes):
        return False
    choices = algorithms.param_choices(coll, name, len(nodes), nodes)
    own, _ = split_params(without_compression(candidate).params)
    return all(value in choices.get(key, ()) for key, value in own.items())


def only_by_name(nodes: Nodes, coll: str, candidate: Candidate) -> str | None:
    """Return why nobody has this candidate unasked; None: it needs no asking."""
    size, name = len(nodes), candidate.algorithm
    if not algorithms.exists(coll, name, size, nodes):
        return None
    offered = algorithms.get(coll, name).offered
    if offered is None:
        return None
    choices = algorithms.param_choices(coll, name, size, nodes)
    own, _ = split_params(candidate.params)
    if offered(size, {key: own.get(key, one[0]) for key, one in choices.items()}):
        return None
    return "is for who names it"


def why_not(
    comm: Ranks, coll: str, algorithm: str, root: int, params: Mapping[str, ParamValue]
) -> str | None:
    """Return why a schedule would wait for itself on these ranks, None if it does not.

    Every rank says the same. Where a fragment has no more messages from one rank to
    another than there are lines for them, nothing can go wrong; with more of them, the
    model of the engine decides.
    """
    own = tuple(sorted(params.items()))
    if algorithms.get(coll, algorithm).built_in:
        return None
    nodes = node_numbers(comm)
    if footprint(coll, algorithm, comm.size, root, own, nodes).messages <= LINES:
        return None
    return _deadlock(coll, algorithm, root, own, nodes)


@lru_cache(maxsize=256)
def _deadlock(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes
) -> str | None:
    def share_memory(rank: int, peer: int) -> bool:
        return nodes[rank] == nodes[peer]

    lowered = lowered_programs(coll, algorithm, root, params, nodes)
    try:
        for _ in EngineModel(lowered, _FRAGMENTS_PROVED, has_lines=share_memory):
            pass
    except ScheduleError as error:
        return str(error)
    return None


_LARGEST_COMPARED = 8


@lru_cache(maxsize=1024)
def _signature(
    coll: str, algorithm: str, size: int, params: Own, nodes: Nodes
) -> bytes:
    schedule = algorithms.schedule(coll, algorithm, size, 0, dict(params), nodes)
    digest = hashlib.sha256()
    for rank in range(size):
        one = lower(schedule, rank)
        tables = (one.inputs, one.outputs, one.input_ptr, one.output_ptr)
        digest.update(repr([(s.kind, s.nblk, s.scale) for s in one.spaces]).encode())
        for table in tables:
            digest.update(table.tobytes() + b";")
    return digest.digest()


def distinct(
    coll: str, candidates: Sequence[Candidate], nodes: Nodes
) -> list[Candidate]:
    """Return the candidates without those that run what an earlier one runs.

    Without those, too, that run only where somebody names them. On two ranks many
    algorithms are one and the same exchange. Compared are lowered programs, for a few
    ranks; more ranks tell algorithms apart.
    """
    found: dict[Any, Candidate] = {}
    size = len(nodes)
    for candidate in candidates:
        if only_by_name(nodes, coll, candidate) is not None:
            continue
        key: Any = candidate
        known = algorithms.exists(coll, candidate.algorithm)
        if known and size <= _LARGEST_COMPARED:
            own, transport = split_params(candidate.params)
            program = _signature(
                coll, candidate.algorithm, size, tuple(sorted(own.items())), nodes
            )
            key = (candidate.backend, transport, program)
        found.setdefault(key, candidate)
    return list(found.values())


def node_numbers(comm: Ranks) -> Nodes:
    """Return the number of the node that each rank lies on."""
    return comm.facts.layout


@lru_cache(maxsize=1024)
def lowered_program(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes, rank: int
) -> Lowered:
    """Return a rank's program: kept, as calls may have new counts every time."""
    schedule = algorithms.schedule(
        coll, algorithm, len(nodes), root, dict(params), nodes
    )
    return lower(schedule, rank, lambda peer: nodes[peer] == nodes[rank])


def lowered_programs(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes
) -> list[Lowered]:
    """Return the programs of all ranks."""
    ranks = range(len(nodes))
    return [
        lowered_program(coll, algorithm, root, params, nodes, rank) for rank in ranks
    ]


def scaling(spec: PlanSpec, size: int) -> tuple[float, int, int]:
    """Return the factors for floats and integers before sending, and the divisor.

    avg scales floats before sending and divides integers at the end.
    """
    if spec.factor is not None:
        return *engine_factor(spec.factor, spec.dtype), 1
    if not spec.op.reduces or spec.reduction is not ReduceOp.AVG:
        return 1.0, 1, 1
    if spec.dtype.kind in ("float", "complex"):
        return 1.0 / size, 1, 1
    return 1.0, 1, size
