# SPDX-License-Identifier: Apache-2.0
"""Parts of SVG that pictures of simulated runs are made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["document", "heat", "label", "legend", "line", "rect"]

_STOPS = ((232, 238, 244), (112, 173, 209), (244, 188, 75), (200, 48, 42))
"""Colours from no load to a full one."""


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a whole file; its title is read out, and shown by browsers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">'
        f"<title>{escape(title)}</title>"
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def heat(part: float) -> str:
    """Return the colour of a load from 0 to 1."""
    place = min(max(part, 0.0), 1.0) * (len(_STOPS) - 1)
    index = min(int(place), len(_STOPS) - 2)
    share = place - index
    mixed = (
        round(a + share * (b - a))
        for a, b in zip(_STOPS[index], _STOPS[index + 1], strict=True)
    )
    return "#" + "".join(f"{one:02x}" for one in mixed)


def rect(x: float, y: float, w: float, h: float, fill: str, hint: str = "") -> str:
    """Return a bar; ``hint`` shows where the mouse rests."""
    shape = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0.3):.2f}" height="{h:.2f}" '
        f'fill="{fill}"'
    )
    return f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>"


def line(
    ends: tuple[float, float, float, float], colour: str, width: float, hint: str = ""
) -> str:
    """Return a line between two points."""
    x1, y1, x2, y2 = ends
    shape = (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"'
    )
    return f"{shape}><title>{escape(hint)}</title></line>" if hint else f"{shape}/>"


def label(
    x: float, y: float, text: str, anchor: str = "start", size: float = 11
) -> str:
    """Return a text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" '
        f'fill="#222">{escape(text)}</text>'
    )


def legend(x: float, y: float, width: float) -> str:
    """Return the scale of colours, from 0 to 100 %."""
    bars = [
        rect(x + width * i / 40, y, width / 40 + 0.5, 8, heat((i + 0.5) / 40))
        for i in range(40)
    ]
    ends = label(x, y + 20, "0 %", size=9) + label(x + width, y + 20, "100 %", "end", 9)
    return "".join(bars) + ends
