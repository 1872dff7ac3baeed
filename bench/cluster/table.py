# SPDX-License-Identifier: Apache-2.0
"""Tables of a comparison between hosts: pure functions of recorded launches.

A ratio is commrt's time over another one's, of launches that followed each other; below
1 commrt was faster. A cell's ratio is the median over such pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from commrt.bench.aggregate import geometric_mean
from commrt.bench.cluster.placements import bound_us, parse_placement

__all__ = ["OURS", "OWN", "cells", "report"]

OURS = "commrt"
OWN = "own:"
"""Begins the name of a schedule of commrt that was asked for."""
_SLOWER = 1.1
_LARGE_NBYTES = 4 << 20
_IDLE = 0.2

Cell = tuple[str, str, int]
"""A placement, an operation and a size."""


def cells(data: Mapping[str, Any]) -> dict[Cell, dict[str, list[float]]]:
    """Return the medians of launches, by cell and library, in order of launches."""
    found: dict[Cell, dict[str, list[float]]] = {}
    for cell, peer, row in _rows(data):
        if row.get("valid", True):
            found.setdefault(cell, {}).setdefault(peer, []).append(row["median_us"])
    return found


def report(data: Mapping[str, Any]) -> str:
    """Return the comparison as markdown."""
    found = cells(data)
    lines = [f"`{' '.join(data['command'])}`", "", f"Rate of each link: {data['rate']}"]
    libraries = {one["peer"]: one["library"] for one in data["launches"]}
    lines += [f"- {peer}: {name}" for peer, name in libraries.items()]
    lines += ["", *_summary(found), "", *_bounds(data, found), "", *_times(data, found)]
    for cell, peer, row in _rows(data):
        if not row.get("valid", True):
            lines.append(f"Wrong result: {peer}, {' '.join(map(str, cell))}")
    for failure in data["failures"]:
        reason = failure["error"].splitlines()[:2][-1]
        lines.append(
            f"Failed: {failure['placement']}, {failure['coll']}, {failure['peer']}: "
            f"{reason}"
        )
    return "\n".join(lines) + "\n"


def _rows(
    data: Mapping[str, Any],
) -> Iterable[tuple[Cell, str, dict[str, Any]]]:
    for one in data["launches"]:
        for row in one["rows"]:
            cell = (str(one["placement"]), str(one["coll"]), int(row["nbytes"]))
            yield cell, str(one["peer"]), row


def _ratio(times: Mapping[str, list[float]], other: str) -> float | None:
    pairs = zip(times.get(OURS, ()), times.get(other, ()), strict=False)
    ratios = [mine / theirs for mine, theirs in pairs]
    return statistics.median(ratios) if ratios else None


def _best(times: Mapping[str, list[float]], own: bool) -> str | None:
    """Return the fastest of commrt's own schedules, or of the other libraries."""
    named = [name for name in times if name != OURS and name.startswith(OWN) == own]
    return min(named, key=lambda name: statistics.median(times[name]), default=None)


def _summary(found: Mapping[Cell, Mapping[str, list[float]]]) -> list[str]:
    """Return ratios over all cells of a placement, for each library."""
    lines = [
        f"| placement | commrt over | geometric mean | worst | cells above {_SLOWER} |",
        "|---|---|---:|---:|---:|",
    ]
    for placement in dict.fromkeys(cell[0] for cell in found):
        here = [times for cell, times in found.items() if cell[0] == placement]
        names = dict.fromkeys(name for times in here for name in times)
        peers = [name for name in names if name != OURS and not name.startswith(OWN)]
        for peer in peers:
            ratios = [_ratio(times, peer) for times in here]
            lines += _line(placement, peer, ratios)
        for what, own in (("the best of them", False), ("its own best schedule", True)):
            ratios = []
            for times in here:
                best = _best(times, own)
                ratios.append(None if best is None else _ratio(times, best))
            lines += _line(placement, what, ratios)
    return lines


def _line(placement: str, what: str, ratios: list[float | None]) -> list[str]:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return []
    above = sum(ratio > _SLOWER for ratio in known)
    return [
        f"| {placement} | {what} | {geometric_mean(known):.2f} | {max(known):.2f} | "
        f"{above} of {len(known)} |"
    ]


def _bounds(
    data: Mapping[str, Any], found: Mapping[Cell, Mapping[str, list[float]]]
) -> list[str]:
    """Return times over what the links need, for large messages at a set rate."""
    if data["bits_per_s"] is None:
        return []
    lines = ["| placement | operation | bytes | library | over the bound |"]
    lines.append("|---|---|---:|---|---:|")
    for (placement, coll, nbytes), times in found.items():
        least = bound_us(coll, nbytes, parse_placement(placement), data["bits_per_s"])
        if least is None or nbytes < _LARGE_NBYTES:
            continue
        for name, spent in times.items():
            over = statistics.median(spent) / least
            lines.append(f"| {placement} | {coll} | {nbytes} | {name} | {over:.2f} |")
    return lines if len(lines) > 2 else []


def _times(
    data: Mapping[str, Any], found: Mapping[Cell, Mapping[str, list[float]]]
) -> list[str]:
    idle: dict[Cell, list[float]] = {}
    for cell, _, row in _rows(data):
        if row.get("cores_idle") is not None:
            idle.setdefault(cell, []).append(row["cores_idle"])
    lines = ["| placement | operation | bytes | µs, by library | cores idle |"]
    lines.append("|---|---|---:|---|---:|")
    for cell, times in found.items():
        spent = ", ".join(
            f"{name} {statistics.median(each):.1f}" for name, each in times.items()
        )
        seen = statistics.median(idle[cell]) if cell in idle else 0.0
        note = "" if seen >= _IDLE else " (cores were busy)"
        lines.append(f"| {' | '.join(map(str, cell))} | {spent} | {seen:.0%}{note} |")
    return lines
