# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune report``: a table and its measurements as one page for people.

One HTML file that needs nothing else: no network, no script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from commrt.select.facts import LINK_CLASSES, Candidate
from commrt.select.rules import Evidence
from commrt.select.table import Table
from commrt.tuning.report_cells import Judged, ReportCell, cells_of
from commrt.tuning.report_figures import figures, looks_of, picks
from commrt.tuning.report_style import STYLE
from commrt.tuning.samples import Recording
from commrt.tuning.statistics import geometric_mean
from commrt.tuning.summary import describe_failure, human_nbytes, too_busy
from commrt.tuning.svg_chart import Look, human_ratio, strip, swatch
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["report"]

_TIMES = "\N{MULTIPLICATION SIGN}"


def report(table: Table, recording: Recording | None, source: str) -> str:
    """Return the page.

    Args:
        table: the choices.
        recording: the measurements; None: only what the table's evidence holds.
        source: where both come from, for people.
    """
    cells = cells_of(table, recording)
    looks = looks_of(cells)
    body = "".join(
        [
            f"<h1>What commrt picks on {escape(table.machine.cpu.model)}</h1>",
            f'<p class="soft">{escape(source)}</p>',
            _facts(table, recording, cells),
            _glance(cells, looks),
            *(_groups(cells, looks, table.tie_margin, recording is not None)),
            _missing(table, recording, cells),
            _reading(table.tie_margin),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>commrt on {escape(table.machine.cpu.model)}</title>"
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _facts(
    table: Table, recording: Recording | None, cells: Sequence[ReportCell]
) -> str:
    machine = table.machine
    rows = {
        "processor": f"{machine.cpu.model}, {machine.cpu.sockets} "
        f"{_plural(machine.cpu.sockets, 'socket')}, {machine.cpu.cores} cores",
        "GPUs": ", ".join(f"{one.count} {_TIMES} {one.model}" for one in machine.gpus),
        "network": ", ".join(
            f"{one.count} {_TIMES} {one.model}" for one in machine.nics
        ),
        "kernel": machine.kernel,
        "host": machine.host,
        "fingerprint": machine.fingerprint,
    }
    software = table.software or (recording.software if recording else {})
    return (
        '<div class="facts">'
        f'<div class="card"><h3>Machine</h3>{_list(rows)}</div>'
        f'<div class="card"><h3>Software and method</h3>'
        f"{_list({**software, **table.method})}</div>"
        f'<div class="card"><h3>How good the choices are</h3>'
        f"{_quality(table, recording, cells)}</div></div>"
    )


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _list(rows: Mapping[str, object]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{_value(value)}</dd>"
        for name, value in rows.items()
        if value not in ("", None)
    )
    return f"<dl>{items}</dl>"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key} {each}" for key, each in value.items()))
    return escape(str(value))


def _quality(
    table: Table, recording: Recording | None, cells: Sequence[ReportCell]
) -> str:
    judged = [one for cell in cells for one in cell.judged]
    lines = []
    if judged:
        mean = geometric_mean(one.ratio for one in judged)
        worst, op = max(
            ((one, cell.op) for cell in cells for one in cell.judged),
            key=lambda pair: pair[0].ratio,
        )
        lines = [
            f'<p><span class="big">{_regret(mean)}</span> regret: what <em>auto</em> '
            "picks takes this much longer than the best candidate of its launches, "
            f"over {len(judged)} sizes of launches that did not shape the table "
            "(geometric mean).</p>",
            f"<p>Worst: {op} of {human_nbytes(worst.nbytes)} bytes, where "
            f"{escape(str(worst.choice))} took {human_ratio(worst.ratio)} the time of "
            f"{escape(str(worst.best))}.</p>",
        ]
        if unjudged := sum(cell.unjudged for cell in cells):
            lines.append(f"<p>At {unjudged} more, the choice was not measured.</p>")
    elif held_out := _held_out(table):
        lines = [f"<p>By the table's own word: {held_out}.</p>"]
    else:
        lines = ["<p>Not known: no held-out launch is recorded.</p>"]
    if recording is None:
        lines.append(
            '<p class="soft">From the table alone: of each range the times of its '
            "choice, of the MPI library's own collective, and of the next best at one "
            "size. The times of all candidates need the recording: "
            "<code>commrt-tune run --raw FILE</code>, then <code>commrt-tune report "
            "--raw FILE</code>.</p>"
        )
    else:
        held = sum(one.held_out for one in recording.launches.values())
        shaping = len(recording.launches) - held
        repetitions = sum(len(one.us) for one in recording.samples)
        lines.append(
            f'<p class="soft">Recorded: {shaping} {_launches(shaping)} to decide from, '
            f"{held} to judge; {repetitions} repetitions of "
            f"{len(recording.samples)} measurements.</p>"
        )
    return "".join(lines)


def _launches(count: int) -> str:
    return "launch" if count == 1 else "launches"


def _regret(mean: float) -> str:
    return f"{100 * (mean - 1):.1f}\N{NO-BREAK SPACE}%"


def _held_out(table: Table) -> str:
    held = table.method.get("held_out")
    if not isinstance(held, Mapping) or not held.get("cells"):
        return ""
    try:
        return (
            f"{_regret(float(held['regret']))} regret over {int(held['cells'])} "
            f"held-out sizes, at worst {human_ratio(float(held['worst']))}"
        )
    except (KeyError, TypeError, ValueError):  # recorded, not checked
        return ""


def _glance(cells: Sequence[ReportCell], looks: Mapping[Candidate, Look]) -> str:
    titles = list(dict.fromkeys(cell.title for cell in cells))
    ops = [op for op in COLLECTIVES if any(cell.op == op for cell in cells)]
    by = {(cell.op, cell.title): (cell, n) for n, cell in enumerate(cells)}
    sizes = [size for cell in cells for size in cell.sizes]
    low, high = min(sizes, default=1), max(sizes, default=2)
    rows = []
    for op in ops:
        row = [f"<tr><th>{op}</th>"]
        for title in titles:
            found = by.get((op, title))
            if found is None:
                row.append('<td class="soft">not measured</td>')
                continue
            cell, number = found
            inside = strip(picks(cell, looks), low, max(high, 2 * low))
            text = inside if cell.rules else "the model decides"
            row.append(f'<td><a href="#cell{number}">{text}</a></td>')
        rows.append("".join([*row, "</tr>"]))
    shown = {rule.use for cell in cells for rule in cell.rules}
    heads = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return (
        "<h2>At a glance</h2><p>What <em>auto</em> picks, from "
        f"{human_nbytes(low)} at the left to {human_nbytes(high)} bytes at the right "
        "(logarithmic). A picture leads to its measurements.</p>"
        f"{_legend({one: look for one, look in looks.items() if one in shown})}"
        f'<div class="scroll"><table class="glance"><tr><th></th>{heads}</tr>'
        f"{''.join(rows)}</table></div>"
    )


def _legend(looks: Mapping[Candidate, Look]) -> str:
    items = "".join(
        f"<li>{swatch(look)}{escape(str(one))}</li>" for one, look in looks.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _groups(
    cells: Sequence[ReportCell],
    looks: Mapping[Candidate, Look],
    margin: float,
    recorded: bool,
) -> Iterator[str]:
    title = ""
    for number, cell in enumerate(cells):
        if cell.title != title:
            title = cell.title
            yield f"<h2>{escape(title)}</h2>"
        mine = {one: look for one, look in looks.items() if one in cell.times}
        note = f'<p class="soft">{escape(cell.note)}</p>' if cell.note else ""
        yield (
            f'<section class="cell" id="cell{number}"><h3>{cell.op}</h3>{note}'
            f"{_legend(mine)}{figures(cell, looks, margin)}{_rules(cell)}"
            f"{_judged(cell.judged) if recorded else ''}</section>"
        )


def _rules(cell: ReportCell) -> str:
    if not cell.rules:
        return "<p>No rule: the model decides.</p>"
    rows = []
    for rule in cell.rules:
        lo, hi = rule.match.lo, rule.match.hi
        span = f"{human_nbytes(lo) if lo else 0} to {human_nbytes(hi)}"
        evidence = rule.evidence
        verdict = "no evidence" if evidence is None else _VERDICTS[evidence.verdict]
        quality = "" if evidence is None else _trust(evidence)
        second = ""
        if evidence is not None and evidence.runner_up is not None:
            one = evidence.runner_up
            second = f"{one.candidate}, {one.us:g} µs at {human_nbytes(one.nbytes)}"
        why = "" if evidence is None else evidence.crossover or ""
        rows.append(
            f'<tr><td class="n">{span}</td><td><code>{escape(str(rule.use))}</code>'
            f"</td><td>{verdict}{_as_good(cell, lo, hi, rule.use)}</td>"
            f"<td>{quality}</td>"
            f"<td>{escape(second)}</td><td>{escape(why)}</td></tr>"
        )
    return (
        '<div class="scroll"><table><tr><th>bytes</th><th>picked</th><th>verdict</th>'
        "<th>evidence</th><th>next best</th><th>where the range begins</th></tr>"
        f"{''.join(rows)}</table></div>"
    )


_VERDICTS = {
    "win": "win",
    "tie": "tie",
    "unsure": "another was faster, not for sure",
    "only": "nothing to compare with",
    "extrapolated": "no measured size inside",
    "simulated": "simulated, not measured",
}


def _trust(evidence: Evidence) -> str:
    """Return how far a range's measurements can be trusted, and why not farther."""
    if evidence.quality is None:
        return ""
    counted = sum(point.n for point in evidence.points)
    disturbed = sum(point.disturbed for point in evidence.points)
    if not disturbed:
        return evidence.quality
    share = disturbed / (counted + disturbed)
    return f"{evidence.quality}: {share:.0%} of the repetitions were disturbed"


def _as_good(cell: ReportCell, lo: int, hi: int | None, use: Candidate) -> str:
    """Return who else is as good inside a range, and at how many of its sizes."""
    inside = [n for n in cell.tied if lo <= n and (hi is None or n < hi)]
    counts: dict[Candidate, int] = {}
    for nbytes in inside:
        for one in sorted(cell.tied[nbytes] - {use}, key=str):
            counts[one] = counts.get(one, 0) + 1
    if not counts:
        return ""
    words = ", ".join(f"{one} at {n} of {len(inside)}" for one, n in counts.items())
    return f"; as good: {escape(words)} sizes"


def _judged(judged: Sequence[Judged]) -> str:
    if not judged:
        return '<p class="soft">No held-out launch judged this.</p>'
    mean = geometric_mean(one.ratio for one in judged)
    worst = max(judged, key=lambda one: one.ratio)
    text = f"Held-out launches: {_regret(mean)} regret over {len(judged)} sizes"
    if worst.ratio > 1:
        text += (
            f"; worst {human_ratio(worst.ratio)} at {human_nbytes(worst.nbytes)}, "
            f"where {worst.choice} is picked and {worst.best} was best"
        )
    return f"<p>{escape(text)}.</p>"


def _missing(
    table: Table, recording: Recording | None, cells: Sequence[ReportCell]
) -> str:
    """Return what was not measured: nobody should take silence for an answer."""
    seen = {cell.op for cell in cells}
    links = {cell.link_class for cell in cells}
    ops = [op for op in COLLECTIVES if op not in seen]
    lines = []
    if ops:
        lines.append(f"Operations, which the model decides: {', '.join(ops)}.")
    other = [one for one in LINK_CLASSES if one not in links and one != "single"]
    lines.append(
        f"Link classes seen: {', '.join(sorted(links)) or 'none'}; "
        f"not seen: {', '.join(other) or 'none'}."
    )
    ranks = sorted({cell.ranks for cell in cells if cell.ranks})
    lines.append(
        f"Ranks measured: {', '.join(map(str, ranks)) or 'any'}. Other counts use the "
        "nearest smaller one."
    )
    empty = sum(
        1
        for rule in table.rules
        if rule.evidence is None or rule.evidence.verdict == "extrapolated"
    )
    if empty:
        lines.append(f"Ranges without a measured size inside: {empty}.")
    for cell in cells:
        gaps = _gaps(cell) if recording is not None and cell.tied else ""
        if gaps:
            lines.append(f"{cell.op}, {cell.title}: {gaps}.")
    if recording is not None:
        lines += too_busy(recording)
        for text in dict.fromkeys(map(describe_failure, recording.failures)):
            lines.append(f"Left out, as it failed: {text}.")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>What was not measured</h2><ul>{items}</ul>"


def _gaps(cell: ReportCell) -> str:
    """Return which candidates lack sizes, usually as clear losers."""
    sizes = len(cell.sizes)
    short = [
        f"{one} at {sizes - len(seen)} of {sizes}"
        for one, seen in cell.times.items()
        if len(seen) < sizes
    ]
    return f"not timed: {', '.join(short)} sizes" if short else ""


def _reading(margin: float) -> str:
    return (
        "<h2>How to read this</h2>"
        "<p>Bytes are those of a rule: the whole buffer for allreduce, reduce, bcast, "
        "reduce_scatter, scan and exscan; one rank's block for allgather, gather and "
        "scatter; one pair's block for alltoall. Bandwidth is these bytes over the "
        "time, without a factor for the operation. A time is the median over launches "
        "of the median over repetitions of the slowest rank, with all launches scaled "
        "to one level; bars are its interval. Bold lines are picked somewhere; dotted "
        "vertical lines are where the choice changes. In the third chart what takes 4 "
        "times the best "
        "or more lies at the upper edge.</p>"
        f"<p>As good means: within {margin:.0%} of the best, or {2 * margin:.0%} "
        "where a rank test over launches does not tell the two apart. Of equals the "
        "simpler one is picked, and a further range has to save something: so a choice "
        "may be slower than the best by a little. What would run without a table stays "
        "where nothing was faster for sure. The verdict of a range is that of "
        "its middle size. Repetitions during which another program ran on a rank's "
        "core are disturbed, and do not count.</p>"
    )
