# SPDX-License-Identifier: Apache-2.0
"""Goals for calls on a GPU, compared with the figures of a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GOALS", "Goal", "Outcome", "goals_table", "json_lines", "judged"]

Found = Mapping[str, "Outcome"]
LONG_NBYTES = 256 << 20
OVERLAP_NBYTES = 16 << 20


@dataclass(frozen=True)
class Outcome:
    """The outcome of one part of the report."""

    said: str = ""
    """All that it printed."""
    why_not: str = ""
    """Reason why there is nothing to judge by; empty if there is something."""


@dataclass(frozen=True)
class Goal:
    """A figure that is wanted, and how it follows from what parts say."""

    wanted: str
    """Description of the goal in words."""
    parts: tuple[str, ...]
    """Parts whose figures the goal needs; of several the last one that has any."""
    measure: Callable[[Found], tuple[float, str]]
    """Return the figure, and how it is written; LookupError where there is none."""
    reaches: Callable[[float], bool]


def json_lines(said: str) -> Iterator[dict[str, Any]]:
    """Yield a benchmark's JSON among other lines."""
    for line in said.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:  # cut short
                continue


def _submitted(found: Found, engine: str) -> float:
    for each in json_lines(found["submit"].said):
        if each.get("engine") == engine:
            return float(each["rows"][0]["median_us"])
    for line in found["submit"].said.splitlines():
        if line.startswith(f"# not measured by {engine}: "):
            raise LookupError(line.removeprefix("# "))
    raise LookupError(f"no figure by {engine}")


def _over_nccl(found: Found) -> tuple[float, str]:
    own, raw = _submitted(found, "nccl"), _submitted(found, "NCCL itself")
    return own - raw, f"{own:.2f} us, NCCL itself {raw:.2f} us: {own - raw:+.2f} us"


def _staged_submit(found: Found) -> tuple[float, str]:
    cost = _submitted(found, "staged")
    return cost, f"{cost:.2f} us"


def _one(found: Found, part: str) -> dict[str, Any]:
    for each in json_lines(found[part].said):
        if all(row["valid"] for row in each["rows"]):
            return each
        raise LookupError(f"{part}: a result was wrong")
    raise LookupError(f"{part}: no figures")


def _of_copy(found: Found) -> tuple[float, str]:
    each = _one(found, "parts")
    return each["of_slower_copy"], (
        f"{each['of_slower_copy']:.2f} ({each['nbytes']} B: copies "
        f"{each['long']['to_host_us']:.0f} and {each['long']['to_device_us']:.0f} us, "
        f"call {each['long']['call_us']:.0f} us)"
    )


def _of_parts(found: Found) -> tuple[float, str]:
    each = _one(found, "parts")
    ratio, call = each["of_parts"], each["short"]["call_us"]
    return ratio, f"{ratio:.2f} (call {call:.1f} us)"


def _of_card(found: Found) -> tuple[float, str]:
    """Two ranks read and write twice as much as a copy of one rank's bytes does."""
    best, why = None, ""
    for part in ("peers", "peers under MPS"):
        try:
            row = _one(found, part)["rows"][-1]
        except LookupError as error:
            why = why or found[part].why_not or str(error)
            continue
        if best is None or row["median_us"] < best[0]:
            best = row["median_us"], part, row["nbytes"]
    if best is None:
        raise LookupError(why)
    took_us, part, nbytes = best
    copies = _one(found, "parts")
    copy_us = copies["long"]["on_device_us"] * nbytes / copies["nbytes"]
    ratio = 2 * copy_us / took_us
    return ratio, (
        f"{ratio:.2f} ({nbytes} B: {took_us:.0f} us by {part}, a copy on the card "
        f"{copy_us:.0f} us)"
    )


def _overlap(found: Found) -> tuple[float, str]:
    """A rank alone copies only; two ranks add on the host, and hide more."""
    best, why = None, ""
    for part in ("overlap", "overlap of two ranks under MPS"):
        try:
            row = _one(found, part)["rows"][-1]
        except LookupError as error:
            why = why or found[part].why_not or str(error)
            continue
        if best is None or row["overlap_percent"] > best[0]:
            best = row["overlap_percent"], part, row["nbytes"]
    if best is None:
        raise LookupError(why)
    percent, part, nbytes = best
    return percent, f"{percent:.0f} % ({nbytes} B: {part})"


def _leaks(found: Found) -> tuple[float, str]:
    for each in json_lines(found["leaks"].said):
        row = each["rows"][0]
        text = "nothing is left" if row["valid"] else "something is left"
        return float(row["valid"]), f"{row['number']} calls: {text}"
    raise LookupError("leaks: no figures")


GOALS: Sequence[Goal] = (
    Goal(
        "a nonblocking call by NCCL: at most 3 us over NCCL's own enqueue",
        ("submit",),
        _over_nccl,
        lambda us: us <= 3,
    ),
    Goal(
        "a nonblocking staged call: at most 10 us",
        ("submit",),
        _staged_submit,
        lambda us: us <= 10,
    ),
    Goal(
        "staged, one rank, 256 MiB: at least 0.85 of the slower copy direction",
        ("parts",),
        _of_copy,
        lambda ratio: ratio >= 0.85,
    ),
    Goal(
        "staged, one rank, 8 B: at most 1.5 times the sum of its parts",
        ("parts",),
        _of_parts,
        lambda ratio: ratio <= 1.5,
    ),
    Goal(
        "two ranks on one GPU, 256 MiB: at least 0.6 of what copies on it allow",
        ("parts",),
        _of_card,
        lambda ratio: ratio >= 0.6,
    ),
    Goal(
        "overlap of a staged allreduce of 16 MiB with kernels: at least 90 %",
        (),
        _overlap,
        lambda percent: percent >= 90,
    ),
    Goal(
        "a million calls leave nothing behind",
        ("leaks",),
        _leaks,
        lambda valid: bool(valid),
    ),
)


def judged(goal: Goal, found: Found, no_use: str) -> tuple[str, str]:
    """Return what was measured, and the verdict; ``no_use``: why it means nothing."""
    for part in goal.parts:
        if found[part].why_not:
            return "", f"not run: {found[part].why_not}"
    try:
        value, text = goal.measure(found)
    except (LookupError, TypeError) as error:
        return "", f"not run: {error.args[0] if error.args else error}"
    if no_use:
        return text, f"not run: {no_use}"
    return text, "reached" if goal.reaches(value) else "missed"


def goals_table(found: Found, no_use: str = "") -> str:
    """Return all goals and verdicts as a table of markdown."""
    lines = ["| wanted | measured | verdict |", "|---|---|---|"]
    for goal in GOALS:
        measured, verdict = (
            text.replace("|", "/").replace("\n", " ")
            for text in judged(goal, found, no_use)
        )
        lines.append(f"| {goal.wanted} | {measured} | {verdict} |")
    lines.append(
        "| ten million calls on a simulated device leave nothing behind | | not run: "
        "needs no GPU, docs/internals/testing.md has the command |"
    )
    return "\n".join(lines)
