# SPDX-License-Identifier: Apache-2.0
"""Log-log charts over message size as inline SVG, drawn without any library.

Colours are classes (``c0``, ``c1``, ...), which the page defines once for light and
once for dark; shapes and dashes tell lines apart where colours do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from commrt.tuning.summary import human_nbytes

__all__ = ["Line", "Look", "Span", "chart", "human_ratio", "marker", "strip", "swatch"]

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP = 66, 14, 30
_AXIS, _STRIP, _ROW = 22, 16, 11
_LETTER = 5.7
"""Width of a letter at the size of the strip's labels, generously."""
_LABEL_GAP = 40
"""Least distance of two labels under the strip."""
_FLAT = 8.0
"""An axis that spans less gets labels within the decade."""


@dataclass(frozen=True)
class Look:
    """Colour and shape of a candidate, the same everywhere on the page."""

    colour: int
    """Number of the colour's class."""
    variant: int
    """0, 1, ...: of those with one colour; chooses shape and dashes."""


@dataclass(frozen=True)
class Line:
    """One candidate's values."""

    name: str
    """Candidate."""
    look: Look
    """Its colour and shape."""
    points: Sequence[tuple[int, float, tuple[float, float] | None]]
    """Bytes, value, interval."""


@dataclass(frozen=True)
class Span:
    """A range that one candidate has."""

    lo: int
    """First byte count."""
    hi: int | None
    """First beyond; None: no end."""
    name: str
    """Candidate."""
    look: Look
    """Its colour and shape."""


@dataclass(frozen=True)
class _Scale:
    """Logarithmic scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        clamped = min(max(value, self.low), self.high)
        share = math.log(clamped / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def chart(
    title: str,
    lines: Sequence[Line],
    spans: Sequence[Span],
    human: Callable[[float], str],
    *,
    tied: Sequence[tuple[Look, Sequence[int]]] = (),
    ceiling: float | None = None,
    band: float | None = None,
) -> str:
    """Return one chart.

    Args:
        title: what the values are, with their unit.
        lines: at least one, each with at least one point.
        spans: what is picked, shown along the axis; empty: no rule.
        human: a value for people.
        tied: rows below the axis: the sizes at which one is as good as the best.
        ceiling: values above are drawn at the upper edge.
        band: shade the values from 1 up to here.
    """
    x = _x_scale(lines)
    bottom = _HEIGHT - 1
    y = _y_scale(lines, bottom - _AXIS, ceiling)
    labels = _labels(spans, x)
    under = (
        _STRIP + 6 + 12 * max((row for _, row, _ in labels), default=0) if spans else 0
    )
    height = _HEIGHT + 4 + under + _ROW * len(tied)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>'
    ]
    if band is not None:
        top, low = y(band), y(1.0)
        parts.append(
            f'<rect class="band" x="{_LEFT}" y="{top:.1f}" '
            f'width="{_WIDTH - _LEFT - _RIGHT}" height="{low - top:.1f}"/>'
        )
    parts += [_y_axis(y, human), _x_axis(x, y.start)]
    inner = [span for span in spans if x.low < span.lo < x.high]
    parts += [
        f'<line class="cross" x1="{x(one.lo):.1f}" x2="{x(one.lo):.1f}" '
        f'y1="{_TOP}" y2="{y.start:.1f}"/>'
        for one in inner
    ]
    picked = {span.name for span in spans}
    ordered = sorted(lines, key=lambda line: line.name in picked)
    sizes = sorted({nbytes for line in lines for nbytes, _, _ in line.points})
    follows = dict(pairwise(sizes))
    parts += [
        _line(line, x, y, human, follows, bold=line.name in picked) for line in ordered
    ]
    at = float(_HEIGHT + 4)
    if spans:
        parts.append(_strip(spans, labels, x, at))
        at += under
    if tied:
        middle = at + _ROW * len(tied) / 2 + 3.5
        parts.append(
            f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{middle:.1f}">'
            "as good</text>"
        )
    for look, equal_at in tied:
        parts.append(_ties(look, equal_at, x, at))
        at += _ROW
    return "".join([*parts, "</svg>"])


def strip(spans: Sequence[Span], low: float, high: float) -> str:
    """Return what is picked between two sizes as a small picture of its own."""
    x = _Scale(low, high, 0, 260)
    return (
        f'<svg class="mini" viewBox="0 0 260 {_STRIP}" role="img" '
        f'aria-label="{escape(_words(spans))}">{_boxes(spans, x, 0)}</svg>'
    )


def swatch(look: Look) -> str:
    """Return a piece of line with its marker, for legends."""
    return (
        f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">'
        f'<path class="l c{look.colour} d{look.variant % 3}" d="M1 6H29"/>'
        f"{marker(look, 15, 6)}</svg>"
    )


def marker(look: Look, x: float, y: float, extra: str = "") -> str:
    """Return the marker of a candidate; shapes repeat every 7th."""
    shape = (look.colour + 3 * look.variant) % len(_SHAPES)
    hollow = " hollow" if look.variant else ""
    return (
        f'<path class="m c{look.colour}{hollow}" '
        f'd="{_SHAPES[shape].format(x=f"{x:.1f}", y=f"{y:.1f}")}">{extra}</path>'
    )


_SHAPES = (
    "M{x} {y}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "M{x} {y}m-2.8 -2.8h5.6v5.6h-5.6z",
    "M{x} {y}m0 -3.6l3.4 6h-6.8z",
    "M{x} {y}m0 -3.8l3.8 3.8l-3.8 3.8l-3.8 -3.8z",
    "M{x} {y}m0 3.6l3.4 -6h-6.8z",
    "M{x} {y}m-1.1 -3.4h2.2v2.3h2.3v2.2h-2.3v2.3h-2.2v-2.3h-2.3v-2.2h2.3z",
    "M{x} {y}m-3.6 -1.4h7.2v2.8h-7.2z",
)


def _x_scale(lines: Sequence[Line]) -> _Scale:
    sizes = [nbytes for line in lines for nbytes, _, _ in line.points]
    return _Scale(min(sizes) / 1.4, max(sizes) * 1.4, _LEFT, _WIDTH - _RIGHT)


def _y_scale(lines: Sequence[Line], start: float, ceiling: float | None) -> _Scale:
    values = [value for line in lines for _, value, _ in line.points]
    low, high = min(values), max(values)
    if ceiling is not None:
        return _Scale(1 / 1.04, min(max(high, 1.5), ceiling) * 1.04, start, _TOP)
    if high / low < 2:
        low, high = low / 1.5, high * 1.5
    return _Scale(low / 1.25, high * 1.25, start, _TOP)


def _y_ticks(y: _Scale) -> list[float]:
    """Return round numbers: decades, or also what lies between on a short axis."""
    span = y.high / y.low
    within = (
        (1,) if span > 300 else (1, 3) if span > 30 else (1, 2, 5)
        if span > _FLAT else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8)
    )  # fmt: skip
    first, last = math.floor(math.log10(y.low)), math.ceil(math.log10(y.high))
    ticks = [part * 10.0**power for power in range(first, last + 1) for part in within]
    return [tick for tick in ticks if y.low <= tick <= y.high]


def _y_axis(y: _Scale, human: Callable[[float], str]) -> str:
    parts = []
    for tick in _y_ticks(y):
        at = y(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
            f'y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{at + 3.5:.1f}">'
            f"{human(tick)}</text>"
        )
    return "".join(parts)


def _x_axis(x: _Scale, y: float) -> str:
    first, last = math.ceil(math.log2(x.low)), math.floor(math.log2(x.high))
    step = max(1, math.ceil((last - first) / 8))
    parts = [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
    ]
    for power in range(first, last + 1, step):
        at = x(2.0**power)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{y}"/>'
            f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{y + 15}">'
            f"{human_nbytes(2**power) if power >= 0 else ''}</text>"
        )
    return "".join(parts)


def _line(
    line: Line,
    x: _Scale,
    y: _Scale,
    human: Callable[[float], str],
    follows: Mapping[int, int],
    *,
    bold: bool,
) -> str:
    """Return a line, broken where a size that others have was not measured."""
    colour, dash = f"c{line.look.colour}", f"d{line.look.variant % 3}"
    spots = [(x(nbytes), y(value)) for nbytes, value, _ in line.points]
    path, before = "", 0
    for (nbytes, _, _), (at, up) in zip(line.points, spots, strict=True):
        joined = follows.get(before) == nbytes
        path += f"{'L' if joined else 'M'}{at:.1f} {up:.1f}"
        before = nbytes
    thick = " bold" if bold else ""
    parts = [f'<path class="l {colour} {dash}{thick}" d="{path}"/>']
    for (nbytes, value, ci), (at, up) in zip(line.points, spots, strict=True):
        words = f"{line.name}: {human(value)} at {human_nbytes(nbytes)}"
        if ci is not None:
            words += f" ({human(ci[0])} to {human(ci[1])})"
            parts.append(
                f'<path class="ci {colour}" d="M{at:.1f} {y(ci[0]):.1f}V{y(ci[1]):.1f}'
                f'M{at - 3:.1f} {y(ci[0]):.1f}h6M{at - 3:.1f} {y(ci[1]):.1f}h6"/>'
            )
        parts.append(marker(line.look, at, up, f"<title>{escape(words)}</title>"))
    return "".join(parts)


def _labels(spans: Sequence[Span], x: _Scale) -> list[tuple[float, int, str]]:
    """Return where the choice changes: place, row from 1, bytes; none over another."""
    free: list[float] = []
    labels = []
    for span in spans:
        if not x.low < span.lo < x.high:
            continue
        at = min(x(span.lo), _WIDTH - _RIGHT - _LABEL_GAP / 2)
        row = next((row for row, end in enumerate(free) if end <= at), len(free))
        free[row : row + 1] = [at + _LABEL_GAP]
        labels.append((at, row + 1, human_nbytes(span.lo)))
    return labels


def _strip(
    spans: Sequence[Span],
    labels: Sequence[tuple[float, int, str]],
    x: _Scale,
    top: float,
) -> str:
    """Return what is picked along the axis, with the sizes where it changes."""
    parts = [
        f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{top + 12}">picked'
        "</text>",
        _boxes(spans, x, top),
    ]
    parts += [
        f'<text class="tick" text-anchor="middle" x="{at:.1f}" '
        f'y="{top + _STRIP + 12 * row}">{words}</text>'
        for at, row, words in labels
    ]
    return "".join(parts)


def _boxes(spans: Sequence[Span], x: _Scale, top: float) -> str:
    parts = []
    for span in spans:
        left = x(max(span.lo, x.low))
        right = x(x.high if span.hi is None else max(span.hi, x.low))
        if right - left < 0.5:
            continue
        label = span.name.split("/", 1)[-1]
        fits = len(label) * _LETTER + 10 <= right - left
        text = (
            f'<text class="pick" x="{left + 7:.1f}" y="{top + 11.5}">{escape(label)}'
            "</text>"
            if fits
            else ""
        )
        parts.append(
            f"<g><title>{escape(_words([span]))}</title>"
            f'<rect class="f c{span.look.colour}" x="{left:.1f}" y="{top}" '
            f'width="{right - left:.1f}" height="{_STRIP}"/>'
            f'<rect class="e c{span.look.colour}" x="{left:.1f}" y="{top}" '
            f'width="3" height="{_STRIP}"/>{text}</g>'
        )
    return "".join(parts)


def _words(spans: Sequence[Span]) -> str:
    return "; ".join(
        f"from {human_nbytes(span.lo) if span.lo else 0} "
        f"to {human_nbytes(span.hi)}: {span.name}"
        for span in spans
    )


def _ties(look: Look, sizes: Sequence[int], x: _Scale, top: float) -> str:
    """Return one row: a marker at each size where the candidate is tied."""
    middle = top + _ROW / 2
    marks = "".join(marker(look, x(size), middle) for size in sizes)
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
        f'y1="{middle}" y2="{middle}"/>{marks}'
    )


def human_ratio(value: float) -> str:
    """Return a ratio for people."""
    return f"{value:.3g}\N{MULTIPLICATION SIGN}"
