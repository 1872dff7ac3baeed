# SPDX-License-Identifier: Apache-2.0
"""Performance guidelines on a table's own evidence: what cannot be the best choice.

Each finding is a hint, not an error: the table was loaded, so it is well-formed. A
guideline says that an operation must not be slower than others that do its work:
whoever breaks it has a better algorithm at hand (mock-ups after Traff, Hunold and
Carpen-Amarie).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commrt.select.network import Network
from commrt.select.rules import Cell, Point
from commrt.select.table import Table

__all__ = ["Finding", "lint"]

_SLACK = 1.1
"""Ratio below which a violation is noise."""

_SUMS = (
    ("allreduce", ("reduce", "bcast")),
    ("allreduce", ("reduce_scatter", "allgather")),
    ("allgather", ("gather", "bcast")),
    ("reduce_scatter", ("reduce", "scatter")),
    ("reduce_scatter", ("allreduce",)),
    ("reduce", ("allreduce",)),
    ("bcast", ("scatter", "allgather")),
    ("gather", ("allgather",)),
    ("allgather", ("alltoall",)),
    ("scatter", ("bcast",)),
)
"""Left must not be slower than the sum on the right, for the same whole vector."""

_PER_RANK = ("allgather", "gather", "scatter", "alltoall")
"""Operations whose rule bytes are one block of the whole vector."""


@dataclass(frozen=True)
class Finding:
    """One thing that a table should be looked at for."""

    kind: str
    """guideline, not-monotone, extrapolated, simulated, no-evidence."""
    text: str
    """The finding, with its numbers."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def lint(table: Table) -> list[Finding]:
    """Return the choices that the table's evidence speaks against; empty if none."""
    series = _series(table)
    findings = [*_not_monotone(series), *_guidelines(series)]
    findings += _extrapolated(table)
    return findings


Where = tuple[
    int | None, int | None, int | None, str | None, str | None, Network | None
]
Series = Mapping[tuple[str, Where], list[Point]]


def _where(cell: Cell) -> Where:
    place = cell.ranks, cell.nodes, cell.ppn, cell.link_class, cell.device
    return (*place, cell.network)


def _series(table: Table) -> Series:
    series: dict[tuple[str, Where], list[Point]] = {}
    for rule in table.rules:
        if rule.evidence is not None:
            points = series.setdefault((rule.op, _where(rule.cell)), [])
            points += rule.evidence.points
    for points in series.values():
        points.sort(key=lambda point: point.nbytes)
    return series


def _not_monotone(series: Series) -> Iterator[Finding]:
    for (op, where), points in series.items():
        for small, large in itertools.pairwise(points):
            if large.us * _SLACK < small.us and large.ci[1] < small.ci[0]:
                yield Finding(
                    "not-monotone",
                    f"{op} {_place(where)}: {small.nbytes} B takes {small.us} us, "
                    f"{large.nbytes} B only {large.us} us: padding would be faster",
                )


def _guidelines(series: Series) -> Iterator[Finding]:
    for (op, where), points in series.items():
        for target, parts in _SUMS:
            if target == op:
                for point in points:
                    yield from _guideline(series, op, where, point, parts)


def _guideline(
    series: Series, op: str, where: Where, point: Point, parts: tuple[str, ...]
) -> Iterator[Finding]:
    ranks = where[0]
    if ranks is None:
        return
    whole = point.nbytes * (ranks if op in _PER_RANK else 1)
    times = [_time(series, part, where, whole, ranks) for part in parts]
    known = [time for time in times if time is not None]
    if len(known) == len(parts) and point.us > _SLACK * sum(known):
        yield Finding(
            "guideline",
            f"{op} {_place(where)} at {point.nbytes} B takes {point.us} us, but "
            f"{' + '.join(parts)} {sum(known):.4g} us",
        )


def _time(
    series: Series, op: str, where: Where, whole: int, ranks: int
) -> float | None:
    """Return the time of ``op`` for a whole vector, between its measured sizes."""
    points = series.get((op, where), [])
    nbytes = whole / ranks if op in _PER_RANK else whole
    below = [point for point in points if point.nbytes <= nbytes]
    above = [point for point in points if point.nbytes >= nbytes]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    if low.nbytes == high.nbytes:
        return low.us
    share = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
    return low.us + share * (high.us - low.us)


def _extrapolated(table: Table) -> Iterator[Finding]:
    for index, rule in enumerate(table.rules):
        if rule.evidence is None:
            yield Finding("no-evidence", f"rule {index} ({rule.op}) states none")
        elif rule.evidence.verdict == "simulated":
            yield Finding(
                "simulated", f"rule {index} ({rule.op}) was simulated, not measured"
            )
        elif rule.evidence.verdict == "extrapolated":
            match = rule.match
            yield Finding(
                "extrapolated",
                f"rule {index} ({rule.op}, [{match.lo}, {match.hi}) B) holds no "
                f"measured size",
            )


def _place(where: Where) -> str:
    ranks, nodes, _, link_class, _, network = where
    between = "" if network is None else f", {network}"
    return f"({ranks} ranks, {nodes} nodes, {link_class}{between})"
