# SPDX-License-Identifier: Apache-2.0
"""A job's communication as a picture: volume, time, and how long the messages are.

SVG without any library, light and dark as the viewer's page is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from commrt.files.visible import visible, visible_lines
from commrt.trace.job import Job
from commrt.trace.log import size_bin
from commrt.trace.summary import Row, readable_nbytes, readable_s, rows_by

__all__ = ["picture"]

_WIDTH, _LABEL, _VALUE = 760, 230, 110
_ROW, _GAP, _HEAD = 20, 34, 26
_MOST_BARS = 16
_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#1c1917}.t{font-weight:600;font-size:14px}
.v{fill:#57534e}.a{fill:#2563eb}.b{fill:#ea8a3a}.c{fill:#059669}
@media(prefers-color-scheme:dark){text{fill:#e7e5e4}.v{fill:#a8a29e}
.a{fill:#60a5fa}.b{fill:#fb923c}.c{fill:#34d399}}"""


@dataclass(frozen=True)
class _Bar:
    label: str
    parts: Sequence[tuple[str, float]]
    """Colour's class and length of each part."""
    value: str


def picture(job: Job) -> str:
    """Return the picture."""
    rows = rows_by(job, ("dimension", "op"))
    bins = sorted(rows_by(job, ("bin", "op")), key=lambda row: (_low(row), row.key[1]))
    panels = [
        (
            "Volume per rank, by dimension and operation",
            _bars(rows, lambda row: [("a", row.nbytes)], _volume),
        ),
        (
            "Time per rank: waiting (orange) and transfer (blue)",
            _bars(
                rows,
                lambda row: [("b", row.waiting_s), ("a", row.transfer_s)],
                lambda row: readable_s(row.seconds),
            ),
        ),
        (
            "Calls per rank, by the bytes of a call",
            _bars(bins, lambda row: [("c", row.calls)], lambda row: f"{row.calls:.4g}"),
        ),
        (
            "Volume per rank, by the bytes of a call",
            _bars(bins, lambda row: [("a", row.nbytes)], _volume),
        ),
    ]
    parts, at = [], 10
    for title, bars in panels:
        parts.append(f'<text class="t" x="10" y="{at + 16}">{escape(title)}</text>')
        at += _HEAD
        longest = max((sum(part for _, part in bar.parts) for bar in bars), default=0)
        for bar in bars:
            parts.append(_drawn(bar, at, longest))
            at += _ROW
        at += _GAP
    said = visible(f"Communication of job {job.logs[0].job}, {job.size} ranks")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {at}" '
        f'width="{_WIDTH}" height="{at}" role="img" aria-label="{escape(said)}">'
        f"<style>{_STYLE}</style>{visible_lines(''.join(parts))}</svg>\n"
    )


def _low(row: Row) -> int:
    """Return the place of a row's bin among all bins."""
    order = [size_bin(0), *(size_bin(1 << power) for power in range(0, 62, 2))]
    return order.index(row.key[0])


def _volume(row: Row) -> str:
    return readable_nbytes(row.nbytes)


def _bars(
    rows: Sequence[Row],
    parts: Callable[[Row], list[tuple[str, float]]],
    value: Callable[[Row], str],
) -> list[_Bar]:
    bars = [_Bar(" ".join(row.key), parts(row), value(row)) for row in rows]
    shown = [bar for bar in bars if any(length > 0 for _, length in bar.parts)]
    if len(shown) <= _MOST_BARS:
        return shown
    left = len(shown) - _MOST_BARS
    return [*shown[:_MOST_BARS], _Bar(f"and {left} more", [], "")]


def _drawn(bar: _Bar, at: int, longest: float) -> str:
    room = _WIDTH - _LABEL - _VALUE - 20
    x = float(_LABEL)
    drawn = [
        f'<text x="{_LABEL - 8}" y="{at + 14}" text-anchor="end">'
        f"{escape(bar.label)}</text>"
    ]
    for colour, length in bar.parts:
        width = room * length / longest if longest else 0.0
        drawn.append(
            f'<rect class="{colour}" x="{x:.1f}" y="{at + 3}" width="{width:.1f}" '
            f'height="{_ROW - 6}"/>'
        )
        x += width
    drawn.append(f'<text class="v" x="{x + 6:.1f}" y="{at + 14}">{bar.value}</text>')
    return "".join(drawn)
