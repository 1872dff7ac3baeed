# SPDX-License-Identifier: Apache-2.0
"""Ratios of times, made of launches: pairs in one link class, medians, geometric means.

This module has pure functions of recorded data. A launch is one start of one peer. Its
row of one size belongs to a class if the links were in that class before and after the
row. Rows during which the class changed are counted and left out. Launches alternate,
so the k-th launch of commrt and the k-th of a peer *within a class* were near each
other in time: they form a pair. A ratio below 1 means that commrt was faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt.bench.timing_loop import median_interval

__all__ = [
    "CLASSES",
    "Cell",
    "Comparison",
    "aggregate",
    "geometric_mean",
    "markdown",
]

CLASSES = ("near", "far", "oversubscribed", "single", "network", "unknown")
_OURS = "commrt"


@dataclass(frozen=True)
class Cell:
    """One peer at one size, in one class."""

    median_us: float
    """Median over launches of each launch's median."""
    low_us: float
    """Lowest launch, or lower end of the 95 % interval from 6 launches on."""
    high_us: float
    """Highest launch, or upper end of that interval."""
    num_launches: int
    """Launches behind the figure."""
    ratio: float | None
    """Median over pairs of commrt's time by this peer's; None: no pair, or commrt."""
    num_pairs: int
    """Pairs behind the ratio."""


@dataclass
class Comparison:
    """All peers at all sizes, for one operation, number of ranks and class."""

    coll: str
    ranks: int
    link_class: str
    cells: dict[tuple[int, str], Cell] = field(default_factory=dict)
    """Cells by bytes and peer."""
    num_mixed: int = 0
    """Rows left out, in all classes, because the links changed during them."""
    num_wrong: int = 0
    """Rows whose result was wrong, which were not timed."""

    def sizes(self) -> list[int]:
        """Return the sizes that have any figure."""
        return sorted({nbytes for nbytes, _ in self.cells})

    def peers(self) -> list[str]:
        """Return commrt first, then the others as they were first seen."""
        names = list(dict.fromkeys(peer for _, peer in self.cells))
        return sorted(names, key=lambda name: name != _OURS)

    def mean_ratio(self, peer: str) -> float | None:
        """Return the geometric mean over sizes of the ratios to ``peer``."""
        ratios = [
            cell.ratio
            for (_, name), cell in self.cells.items()
            if name == peer and cell.ratio is not None
        ]
        return geometric_mean(ratios) if ratios else None


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def aggregate(launches: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Return one comparison per operation, number of ranks and class, with figures.

    Where no row of an operation gave a figure, one of class ``mixed`` says so. A launch
    has ``peer``, ``coll``, ``ranks`` and ``rows``; launches are in the order in which
    they ran.
    """
    times: dict[tuple[str, int, str], dict[tuple[int, str], list[float]]] = {}
    mixed: dict[tuple[str, int], int] = {}
    wrong: dict[tuple[str, int], int] = {}
    for one in launches:
        job = (str(one["coll"]), int(one["ranks"]))
        for row in one["rows"]:
            if not row.get("valid", True):
                wrong[job] = wrong.get(job, 0) + 1
            elif row["link_class"] == "mixed":
                mixed[job] = mixed.get(job, 0) + 1
            else:
                group = times.setdefault((*job, row["link_class"]), {})
                key = (int(row["nbytes"]), str(one["peer"]))
                group.setdefault(key, []).append(float(row["median_us"]))
    result = []
    for coll, ranks, link_class in sorted(times, key=_order):
        group = times[coll, ranks, link_class]
        cells = {key: _cell(group, *key) for key in group}
        left_out = mixed.get((coll, ranks), 0), wrong.get((coll, ranks), 0)
        result.append(Comparison(coll, ranks, link_class, cells, *left_out))
    having = {(one.coll, one.ranks) for one in result}
    for job in sorted({*mixed, *wrong} - having):
        left_out = mixed.get(job, 0), wrong.get(job, 0)
        result.append(Comparison(*job, "mixed", {}, *left_out))
    return result


def _order(key: tuple[str, int, str]) -> tuple[str, int, int]:
    return key[0], key[1], CLASSES.index(key[2])


def _cell(group: Mapping[tuple[int, str], list[float]], nbytes: int, peer: str) -> Cell:
    theirs = group[nbytes, peer]
    median, low, high = median_interval(theirs)
    ours = group.get((nbytes, _OURS), []) if peer != _OURS else []
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    ratio = median_interval(ratios)[0] if ratios else None
    return Cell(median, low, high, len(theirs), ratio, len(ratios))


def markdown(comparison: Comparison) -> str:
    """Return a table: times in µs, and commrt's time by each peer's."""
    if not comparison.cells:
        return _without_figures(comparison)
    peers = comparison.peers()
    others = [peer for peer in peers if peer != _OURS]
    ratios = [f"commrt / {peer}" for peer in others]
    heads = ["bytes", *(f"{peer}, µs" for peer in peers), *ratios]
    what = f"{comparison.coll}, {comparison.ranks} ranks, {comparison.link_class} links"
    lines = [
        f"### {what}",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---:|' * len(heads)}",
    ]
    for nbytes in comparison.sizes():
        cells = [comparison.cells.get((nbytes, peer)) for peer in peers]
        text = [_bytes(nbytes), *(_time(cell) for cell in cells)]
        text += [_ratio(comparison.cells.get((nbytes, peer))) for peer in others]
        lines.append(f"| {' | '.join(text)} |")
    means = [comparison.mean_ratio(peer) for peer in others]
    shown = ["-" if mean is None else f"**{_short(mean)}**" for mean in means]
    blanks = [""] * len(peers)
    lines.append(f"| {' | '.join(['geometric mean', *blanks, *shown])} |")
    lines += ["", _footnote(comparison)]
    return "\n".join(lines) + "\n"


def _without_figures(comparison: Comparison) -> str:
    """Return what stands where there is nothing to show, and what to do."""
    text = f"### {comparison.coll}, {comparison.ranks} ranks\n\nNo figures."
    if comparison.num_mixed:
        text += (
            f" The links changed state during all {comparison.num_mixed} rows, as they "
            f"do beside other work: run it again, with more launches."
        )
    if comparison.num_wrong:
        text += f" {comparison.num_wrong} rows had a wrong result, and were not timed."
    return text + "\n"


def _bytes(nbytes: int) -> str:
    for unit, name in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return str(nbytes)


def _time(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    digits = 2 if cell.median_us < 100 else 0
    low, high = f"{cell.low_us:.{digits}f}", f"{cell.high_us:.{digits}f}"
    return f"{cell.median_us:.{digits}f} ({low} to {high})"


def _ratio(cell: Cell | None) -> str:
    if cell is None or cell.ratio is None:
        return "-"
    return _short(cell.ratio)


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.095 else f"{ratio:.2g}"


def _footnote(comparison: Comparison) -> str:
    launches = [cell.num_launches for cell in comparison.cells.values()]
    pairs = [cell.num_pairs for cell in comparison.cells.values() if cell.num_pairs]
    text = (
        f"Median over {_span(launches)} launches (lowest and highest launch; from 6 "
        f"launches the 95 % interval of the median)"
    )
    text += f"; ratios: median over {_span(pairs)} pairs." if pairs else "; no pairs."
    if comparison.num_mixed:
        text += (
            f" Left out: {comparison.num_mixed} rows during which the links changed "
            f"state."
        )
    if comparison.num_wrong:
        text += f" Not timed: {comparison.num_wrong} rows with a wrong result."
    return text


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
