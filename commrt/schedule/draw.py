# SPDX-License-Identifier: Apache-2.0
"""A schedule as a picture (SVG): who sends which blocks to whom, and when.

One lane per rank; one column per message of the critical path, from left to right. The
text has no scripts, no fonts of its own and no links, so that it shows everywhere.
"""

from __future__ import annotations

import colorsys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from html import escape

from commrt.schedule.ir import Op, RankProgram, Schedule
from commrt.schedule.trace import Contents, LocalStep, Message, Trace, trace
from commrt.vocabulary.operations import operation

__all__ = ["draw"]

_LANE, _TOP = 56, 92
_LEFT, _RIGHT = 74, 176
_COLUMN, _PER_RECEIVE = 78, 12
_GUTTER, _PER_MARK = 16, 24
_NEAR = 17
"""Distance of a message's label from its sender's lane, above or below."""
_CHARACTER = 6.3
_NAMED_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#b07aa1",
    "#b6992d",
    "#3a9a94",
    "#d37295",
)
_STYLE = """\
text { font: 11px sans-serif; fill: #222 }
.title { font-size: 15px; font-weight: bold }
.small { font-size: 10px; fill: #666 }
.label { font-size: 10.5px; text-anchor: middle; font-weight: bold }
.lane { stroke: #bbb }
.column { fill: #f4f4f6 }
.message { fill: none; stroke-width: 1.8 }
"""


def draw(schedule: Schedule) -> str:
    """Return the picture, or raise ScheduleError if messages do not match or end."""
    return _Picture(schedule, trace(schedule)).text()


class _Picture:
    def __init__(self, schedule: Schedule, found: Trace) -> None:
        self._schedule = schedule
        self._trace = found
        self._everyone = (1 << schedule.size) - 1
        self._sums = operation(schedule.coll).reduces
        self._marks: dict[tuple[int, int], list[LocalStep]] = defaultdict(list)
        for step in found.local_steps:
            self._marks[step.column, step.rank].append(step)
        self._sent_by: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self._received_by: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for one in found.messages:
            self._sent_by[one.column, one.src].append(one)
            self._received_by[one.column, one.dst].append(one)
        self._place_columns()

    def _place_columns(self) -> None:
        """Give every column the room that its busiest rank needs."""
        self._start: list[float] = []
        self._end: list[float] = []
        self._between: list[float] = []
        self._gutter: list[float] = []
        x = float(_LEFT)
        ranks = range(self._schedule.size)
        for column in range(self._trace.num_columns + 1):
            kinds = max(len(self._kinds(column, rank)) for rank in ranks)
            self._gutter.append(x)
            x += _GUTTER + _PER_MARK * kinds
            self._start.append(x)
            if column < self._trace.num_columns:
                sends = max(len(self._sent_by[column, rank]) for rank in ranks)
                receives = max(len(self._received_by[column, rank]) for rank in ranks)
                widest = max(
                    _label_width(self._label_of(one.contents))
                    for rank in ranks
                    for one in self._sent_by[column, rank]
                )
                self._between.append(widest + 5)
                x += _COLUMN + self._between[-1] * (sends - 1)
                x += _PER_RECEIVE * (receives - 1)
                self._end.append(x)
        self._lanes_end = x

    def _kinds(self, column: int, rank: int) -> dict[bool, list[LocalStep]]:
        """Return the local reductions and the copies at one point, where there are."""
        kinds: dict[bool, list[LocalStep]] = {}
        for step in self._marks.get((column, rank), ()):
            kinds.setdefault(step.reduces, []).append(step)
        return kinds

    def _y(self, rank: int) -> float:
        return _TOP + _LANE * (rank + 0.5)

    # -- text --------------------------------------------------------------------

    def text(self) -> str:
        """Return the SVG."""
        title = _title(self._schedule)
        body = "\n".join(
            [
                *self._header(title),
                *self._grid(),
                *self._arrows(),
                *self._local_marks(),
                *self._legend(),
            ]
        )
        width = max(self._lanes_end + _RIGHT, 20 + 8.2 * len(title), 760)
        height = _TOP + _LANE * self._schedule.size + 66
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
            f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">\n'
            f"<style>\n{_STYLE}</style>\n"
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )

    def _header(self, title: str) -> Iterator[str]:
        found = self._trace
        sent = max(self._traffic(Op.SEND))
        received = max(self._traffic(Op.RECV, Op.RRED))
        counts = (
            f"{_plural(found.num_columns, 'message')} on the critical path, "
            f"{len(found.messages)} in all; the busiest rank sends {_part(sent)} and "
            f"receives {_part(received)} of N, the whole vector"
        )
        yield _words(16, 24, title, "title")
        yield _words(16, 43, counts)

    def _traffic(self, *ops: Op) -> list[Fraction]:
        return [_traffic(program, ops) for program in self._schedule.programs()]

    def _grid(self) -> Iterator[str]:
        bottom = _TOP + _LANE * self._schedule.size
        for column, (start, end) in enumerate(
            zip(self._start, self._end, strict=False)
        ):
            yield (
                f'<rect class="column" x="{start:.0f}" y="{_TOP - 16}" '
                f'width="{end - start:.0f}" height="{bottom - _TOP + 16}"/>'
            )
            middle = (start + end) / 2
            yield _words(middle, _TOP - 22, str(column + 1), "small", "middle")
        yield _words(16, _TOP - 22, "message", "small")
        sent, received = self._traffic(Op.SEND), self._traffic(Op.RECV, Op.RRED)
        for rank in range(self._schedule.size):
            y = self._y(rank)
            yield (
                f'<line class="lane" x1="{_LEFT - 6}" x2="{self._lanes_end:.0f}" '
                f'y1="{y:.0f}" y2="{y:.0f}"/>'
            )
            rooted = operation(self._schedule.coll).has_root
            name = "root" if rooted and rank == self._schedule.root else "rank"
            yield _words(16, y + 4, f"{name} {rank}")
            traffic = f"sends {_part(sent[rank])}, receives {_part(received[rank])}"
            yield _words(self._lanes_end + 8, y + 4, traffic, "small")

    def _arrows(self) -> Iterator[str]:
        labels = []
        for one in self._trace.messages:
            sends = self._sent_by[one.column, one.src]
            receives = self._received_by[one.column, one.dst]
            after = len(receives) - 1 - receives.index(one)
            between = self._between[one.column]
            x1 = self._start[one.column] + between * sends.index(one)
            x2 = self._end[one.column] - 8 - _PER_RECEIVE * after
            y1, y2 = self._y(one.src), self._y(one.dst)
            y = y1 + (_NEAR if y2 > y1 else -_NEAR)
            x = x1 + (x2 - x1) * _NEAR / abs(y2 - y1)
            if len(sends) > 1:
                # Straight lines could cross before their labels, and these overlap.
                x1 += max(0.0, between / 2 - 12)
                x = x1 + 6
            colour = self._stroke(one.contents)
            tip = f"rank {one.src} {one.ends[0]} to rank {one.dst} {one.ends[1]}"
            tip += f": {self._describe(one.contents)}"
            verb = "is added" if one.reduces else "is stored"
            yield f"<g><title>{escape(tip)}; {verb}</title>"
            yield (
                f'<path class="message" stroke="{colour}" '
                f'd="M{x1:.1f} {y1:.1f}L{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}"/>'
            )
            yield f'<circle cx="{x1:.1f}" cy="{y1:.1f}" r="2.2" fill="{colour}"/>'
            if one.reduces:
                yield from _plus(x2, y2, colour)
            else:
                yield _arrow_head(x, y, x2, y2, colour)
            yield "</g>"
            labels.append((x, y, one.contents))
        for x, y, contents in labels:
            yield from self._label(x, y, contents)

    def _local_marks(self) -> Iterator[str]:
        for (column, rank), _ in sorted(self._marks.items()):
            kinds = self._kinds(column, rank)
            for place, (reduces, steps) in enumerate(sorted(kinds.items())):
                x, y = self._gutter[column] + 14 + _PER_MARK * place, self._y(rank)
                contents = [one for step in steps for one in step.contents]
                colour = self._stroke(contents)
                lines = [
                    f"{step.ends[1]} {'+=' if reduces else '='} {step.ends[0]}: "
                    f"{self._describe(step.contents)}"
                    for step in steps
                ]
                yield f"<g><title>{escape(chr(10).join(lines))}</title>"
                if reduces:
                    yield from _plus(x, y, colour)
                else:
                    yield _square(x, y, colour)
                if len(steps) > 1:
                    yield _words(x, y + 18, f"{len(steps)}x", "small", "middle")
                yield "</g>"

    def _legend(self) -> Iterator[str]:
        x, y = 16.0, _TOP + _LANE * self._schedule.size + 22
        grey = "#444"
        for kind, words in self._kinds_of_marks():
            if kind == "sent":
                yield _line(x, y)
                yield _arrow_head(x, y, x + 28, y, grey)
            elif kind == "added":
                yield _line(x, y)
                yield from _plus(x + 26, y, grey)
            elif kind == "copied":
                yield _square(x + 27, y, grey)
            else:
                yield from _plus(x + 26, y, grey)
            yield _words(x + 38, y + 4, words)
            x += 54 + _CHARACTER * len(words)
        yield _words(16, y + 24, self._what_labels_say())

    def _kinds_of_marks(self) -> Iterator[tuple[str, str]]:
        """Yield what the picture shows, and what to call it."""
        messages = {one.reduces for one in self._trace.messages}
        local = {one.reduces for one in self._trace.local_steps}
        if False in messages:
            yield "sent", "sent and stored"
        if True in messages:
            yield "added", "sent and added"
        if False in local:
            yield "copied", "local copies"
        if True in local:
            yield "reduced", "local reductions"

    def _what_labels_say(self) -> str:
        if not self._trace.num_parts:
            return "A message says that its sender has come this far."
        if self._by_ranks:
            return (
                "Labels: whose contributions the message holds, white until the sum is "
                "complete. Dots: more than the label has room for."
            )
        blocks = "Labels: blocks of the vector that the message carries"
        if self._sums:
            blocks += ", white while they are partial sums"
        return f"{blocks}. A colour is a block; grey lines carry several."

    # -- contents ----------------------------------------------------------------

    @property
    def _by_ranks(self) -> bool:
        """True if labels tell sums apart: where all messages are of the same block."""
        return self._sums and self._trace.num_parts == 1

    def _label_of(self, contents: Contents) -> str:
        held = [one for one in contents if one is not None]
        if not held:
            return "?"
        parts = sorted({part for part, _ in held})
        return _numbers(_ranks(held[0][1]) if self._by_ranks else parts)

    def _label(self, x: float, y: float, contents: Contents) -> Iterator[str]:
        held = [one for one in contents if one is not None]
        text = self._label_of(contents)
        width = _label_width(text)
        partial = any(self._is_partial(bits) for _, bits in held)
        colours = [self._colour(part) for part in sorted({part for part, _ in held})]
        colours = colours[:24] or ["#888"]
        left, top = x - width / 2, y - 7.5
        for number, colour in enumerate(colours):
            share = width / len(colours)
            yield (
                f'<rect x="{left + share * number:.1f}" y="{top:.1f}" '
                f'width="{share:.1f}" height="15" fill="{colour}"/>'
            )
        # The frame keeps its colours; what is not finished is white inside.
        inside = "white" if partial else "rgba(255,255,255,0.62)"
        yield (
            f'<rect x="{left + 1.6:.1f}" y="{top + 1.6:.1f}" '
            f'width="{width - 3.2:.1f}" height="11.8" fill="{inside}"/>'
        )
        yield _words(x, y + 3.8, text, "label")

    def _is_partial(self, bits: int) -> bool:
        return self._sums and bits != self._everyone

    def _stroke(self, contents: Iterable[tuple[int, int] | None]) -> str:
        parts = {one[0] for one in contents if one is not None}
        return self._colour(parts.pop()) if len(parts) == 1 else "#777"

    def _colour(self, part: int) -> str:
        if self._trace.num_parts <= len(_NAMED_COLOURS):
            return _NAMED_COLOURS[part % len(_NAMED_COLOURS)]
        hue = part / self._trace.num_parts
        rgb = colorsys.hls_to_rgb(hue, (0.45, 0.6)[part % 2], 0.6)
        return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)

    def _describe(self, contents: Contents) -> str:
        """Return ``blocks 0-3 from ranks 0, 1`` for a tip."""
        groups: dict[int | None, list[int]] = defaultdict(list)
        for one in contents:
            groups[one and one[1]].append(one[0] if one else -1)
        words = []
        for bits, parts in groups.items():
            if bits is None:
                words.append(f"{_plural(len(parts), 'block')} that hold nothing yet")
                continue
            ranks = "everyone" if bits == self._everyone else _numbers(_ranks(bits), 99)
            words.append(f"block {_numbers(parts, 99)} of {ranks}")
        return ", ".join(words)


def _title(schedule: Schedule) -> str:
    title = f"{schedule.coll} {schedule.algorithm} on {_plural(schedule.size, 'rank')}"
    if operation(schedule.coll).has_root:
        title += f", root {schedule.root}"
    for key, value in schedule.params.items():
        title += f", {key}={value}"
    return title


def _traffic(program: RankProgram, ops: Sequence[Op]) -> Fraction:
    """Return the parts of N in all messages of these kinds."""
    blocks: Counter[int] = Counter()
    for step in program.steps:
        where = step.src if step.op is Op.SEND else step.dst
        if step.op in ops and where is not None:
            blocks[where.space] += where.hi - where.lo
    return sum(
        (
            Fraction(*program.spaces[space].scale) * count / program.spaces[space].nblk
            for space, count in blocks.items()
        ),
        Fraction(0),
    )


def _part(part: Fraction) -> str:
    """Return ``7/4 N``."""
    if part.denominator == 1:
        return "0" if not part else "N" if part == 1 else f"{part} N"
    return f"{part.numerator}/{part.denominator} N"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def _numbers(numbers: Sequence[int], most: int = 9) -> str:
    """Return ``0-3,6``, shortened to about ``most`` characters."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(
        f"{a}" if a == b else f"{a}{',' if b == a + 1 else '-'}{b}" for a, b in spans
    )
    return text if len(text) <= most else f"{text[: most - 2].rstrip(',-')},…"


def _label_width(text: str) -> float:
    return max(16.0, _CHARACTER * len(text) + 8)


def _words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(text)}</text>'


def _line(x: float, y: float) -> str:
    return f'<path class="message" stroke="#444" d="M{x:.1f} {y:.1f}h26"/>'


def _plus(x: float, y: float, colour: str) -> Iterator[str]:
    yield (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="white" stroke="{colour}" '
        f'stroke-width="1.8"/>'
    )
    yield (
        f'<path stroke="{colour}" stroke-width="1.8" '
        f'd="M{x - 3.4:.1f} {y:.1f}h6.8m-3.4 -3.4v6.8"/>'
    )


def _square(x: float, y: float, colour: str) -> str:
    place = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
    return f'<rect {place} fill="{colour}"/>'


def _arrow_head(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """Return a triangle at the second point, away from the first."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back_x, back_y = x2 - 9 * ux, y2 - 9 * uy
    return (
        f'<path fill="{colour}" d="M{x2:.1f} {y2:.1f}'
        f"L{back_x - 4 * uy:.1f} {back_y + 4 * ux:.1f}"
        f'L{back_x + 4 * uy:.1f} {back_y - 4 * ux:.1f}Z"/>'
    )
