# SPDX-License-Identifier: Apache-2.0
"""The charts of a report's cell, and who is drawn how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from commrt.select.facts import Candidate
from commrt.tuning.report_cells import ReportCell, Seen
from commrt.tuning.report_style import NATIVE_COLOUR, NUM_COLOURS
from commrt.tuning.svg_chart import Line, Look, Span, chart, human_ratio
from commrt.tuning.table_writer import NATIVES

__all__ = ["figures", "looks_of", "picks"]

_CEILING = 4.0
"""Ratios above are of no interest: they are drawn at the edge."""


def looks_of(cells: Sequence[ReportCell]) -> dict[Candidate, Look]:
    """Return the look of each candidate: its own colour, while they last.

    The candidates picked most get the first ones. Beyond the last one they come again,
    dashed and hollow.
    """
    ranges = Counter(rule.use for cell in cells for rule in cell.rules)
    seen = dict.fromkeys(one for cell in cells for one in cell.times)
    seen.update(dict.fromkeys(rule.use for cell in cells for rule in cell.rules))
    ordered = sorted(
        (one for one in seen if one.name not in NATIVES), key=lambda one: -ranges[one]
    )
    looks = {
        one: Look(at % NUM_COLOURS, at // NUM_COLOURS) for at, one in enumerate(ordered)
    }
    natives = [one for one in seen if one.name in NATIVES]
    return looks | {one: Look(NATIVE_COLOUR, at) for at, one in enumerate(natives)}


def picks(cell: ReportCell, looks: Mapping[Candidate, Look]) -> list[Span]:
    """Return the choices of a cell as spans."""
    return [
        Span(rule.match.lo, rule.match.hi, str(rule.use), looks[rule.use])
        for rule in cell.rules
    ]


def figures(cell: ReportCell, looks: Mapping[Candidate, Look], margin: float) -> str:
    """Return the charts; where only one size was measured, a table of times."""
    if not cell.times:
        return '<p class="soft">No times are recorded.</p>'
    lines = _lines(cell, looks)
    if len({nbytes for line in lines for nbytes, _, _ in line.points}) < 2:
        return _one_size(cell)
    spans = picks(cell, looks)
    tied = [
        (looks[one], [size for size, equals in cell.tied.items() if one in equals])
        for one in cell.times
    ]
    drawn = [row for row in tied if row[1]]
    ratios = _relative(cell, looks)
    charts = [
        chart("Time per call", lines, spans, human_us, tied=drawn),
        chart(
            "Bandwidth: bytes over time", _bandwidths(cell, looks), spans, human_mbps
        ),
    ]
    if ratios:
        charts.append(
            chart(
                f"Time over that of the best (shaded: {margin:.0%})",
                ratios,
                spans,
                human_ratio,
                ceiling=_CEILING,
                band=1 + margin,
            )
        )
    return f'<div class="charts">{"".join(charts)}</div>'


def _lines(cell: ReportCell, looks: Mapping[Candidate, Look]) -> list[Line]:
    """Return the times that have a logarithm: tables by hand may hold others."""
    lines = []
    for one, seen in cell.times.items():
        points = [
            (size, at.us, at.ci)
            for size, at in sorted(seen.items())
            if size > 0 and at.us > 0
        ]
        if points:
            lines.append(Line(str(one), looks[one], points))
    return lines


def _bandwidths(cell: ReportCell, looks: Mapping[Candidate, Look]) -> list[Line]:
    """Return megabytes per second: bytes per microsecond."""
    return [
        Line(
            line.name,
            line.look,
            [(n, n / us, _inverse(n, ci)) for n, us, ci in line.points],
        )
        for line in _lines(cell, looks)
    ]


def _inverse(n: int, ci: tuple[float, float] | None) -> tuple[float, float] | None:
    if ci is None or min(ci) <= 0:
        return None
    return n / ci[1], n / ci[0]


def _relative(cell: ReportCell, looks: Mapping[Candidate, Look]) -> list[Line]:
    """Return times over the best time of the same size, where two can be compared."""
    best: dict[int, float] = {}
    count: Counter[int] = Counter()
    for seen in cell.times.values():
        for size, at in seen.items():
            best[size] = min(at.us, best.get(size, at.us))
            count[size] += 1
    lines = []
    for line in _lines(cell, looks):
        points = [
            (
                n,
                us / best[n],
                None if ci is None else (ci[0] / best[n], ci[1] / best[n]),
            )
            for n, us, ci in line.points
            if count[n] > 1 and best[n] > 0
        ]
        if points:
            lines.append(Line(line.name, line.look, points))
    return lines


def _one_size(cell: ReportCell) -> str:
    rows = []
    for one, seen in cell.times.items():
        for at in seen.values():
            rows.append((at.us, one, at))
    rows.sort(key=lambda row: row[0])
    body = "".join(
        f"<tr><td><code>{escape(str(one))}</code></td>"
        f'<td class="n">{human_us(us)}</td><td class="n">{_interval(at)}</td></tr>'
        for us, one, at in rows
    )
    return (
        "<table><tr><th>candidate</th><th>time per call</th><th>interval</th></tr>"
        f"{body}</table>"
    )


def _interval(at: Seen) -> str:
    return "" if at.ci is None else f"{human_us(at.ci[0])} to {human_us(at.ci[1])}"


def human_us(us: float) -> str:
    """Return a time for people."""
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "µs"), (1e6, 1e-3, "ms")):
        if us < limit * 0.9995:
            return f"{_digits(us * factor)}\N{NO-BREAK SPACE}{unit}"
    return f"{_digits(us * 1e-6)}\N{NO-BREAK SPACE}s"


def human_mbps(rate: float) -> str:
    """Return megabytes per second for people."""
    for limit, factor, unit in ((1, 1e3, "kB/s"), (1e3, 1, "MB/s")):
        if rate < limit * 0.9995:
            return f"{_digits(rate * factor)}\N{NO-BREAK SPACE}{unit}"
    return f"{_digits(rate * 1e-3)}\N{NO-BREAK SPACE}GB/s"


def _digits(value: float) -> str:
    """Return three digits, never with an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
