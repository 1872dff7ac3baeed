# SPDX-License-Identifier: Apache-2.0
"""The end of a run in a few lines: what was picked where, and how good it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commrt.operations import COLLECTIVES
from commrt.tuning.decide import Decision
from commrt.tuning.regret import Regret
from commrt.tuning.samples import Group, Recording

__all__ = ["describe_group", "human_nbytes", "summarise"]


def human_nbytes(nbytes: int | None) -> str:
    """Return a byte count for people: 8, 3.2K, 32M; the end of everything is inf."""
    if nbytes is None:
        return "inf"
    exponent = max(0, min(3, (nbytes.bit_length() - 1) // 10))
    value = nbytes / 1024**exponent
    digits = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return digits + ("", "K", "M", "G")[exponent]


def describe_group(group: Group) -> str:
    """Return ranks, nodes and link class for people."""
    nodes = "" if group.nodes == 1 else f" on {group.nodes} nodes"
    return f"{group.ranks} ranks{nodes}, {group.link_class} links"


def summarise(
    recording: Recording, decisions: Sequence[Decision], regret: Regret, path: str
) -> str:
    """Return the text that ``commrt-tune run`` ends with."""
    lines = [f"Table: {path}", ""]
    for group in dict.fromkeys(decision.group for decision in decisions):
        launches = sum(one.group == group for one in recording.launches.values())
        lines.append(f"{describe_group(group)} ({launches} launches)")
        lines += [
            f"  {decision.op:<15}{_ranges(decision)}"
            for decision in decisions
            if decision.group == group
        ]
    lines += ["", *_unmeasured(decisions), *_failures(recording), *_quality(regret)]
    return "\n".join(lines)


def _ranges(decision: Decision) -> str:
    parts = []
    for chosen in decision.ranges:
        until = "" if chosen.hi is None else f" below {human_nbytes(chosen.hi)}"
        parts.append(f"{chosen.candidate}{until}")
    return ", then ".join(parts)


def _unmeasured(decisions: Iterable[Decision]) -> list[str]:
    measured = {decision.op for decision in decisions}
    missing = [coll for coll in COLLECTIVES if coll not in measured]
    if not missing:
        return []
    return [f"Not measured, stays with the model: {', '.join(missing)}"]


def _failures(recording: Recording) -> list[str]:
    worst = {
        (failure.op, failure.candidate, failure.ranks): failure
        for failure in recording.failures
    }
    return [
        f"Left out: {one.candidate} for {one.op} with {one.ranks} ranks: {one.reason} "
        f"at {human_nbytes(one.nbytes)}"
        for one in worst.values()
    ]


def _quality(regret: Regret) -> list[str]:
    if not regret.cells:
        return ["auto was not checked: no held-out launch saw the same link class"]
    lines = [
        f"auto on held-out launches: {100 * (regret.regret - 1):.1f} % above the best "
        f"candidate (geometric mean of {regret.cells} cells off the grid, worst "
        f"{regret.worst:.2f}x)"
    ]
    if regret.versus_native is not None:
        lines.append(
            f"auto against the library's own collective: {regret.versus_native:.2f} of "
            f"its time (geometric mean)"
        )
    if regret.unmeasured:
        lines.append(f"{regret.unmeasured} held-out cells had no measured choice")
    return lines
