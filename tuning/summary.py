# SPDX-License-Identifier: Apache-2.0
"""The end of a run in a few lines: what was picked where, and how good it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from commrt.operations import COLLECTIVES
from commrt.tuning.decide import ENOUGH_LAUNCHES, Decision
from commrt.tuning.regret import Regret
from commrt.tuning.samples import Group, Recording

__all__ = ["describe_group", "human_nbytes", "summarise"]

_IN_FORCE = (
    "From now on commrt chooses from it here. To look into it:",
    "  commrt-tune show                      all choices with their evidence",
    "  commrt-tune explain allreduce 4096    one call",
    "  python -m commrt.bench compare        against mpi4py, side by side",
)
_NAMED = (
    "Programs choose from it where COMMRT_TABLE names it. To look into it:",
    "  commrt-tune show --table FILE",
)


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
    recording: Recording,
    decisions: Sequence[Decision],
    regret: Regret,
    path: str,
    *,
    in_force: bool,
) -> str:
    """Return the text that ``commrt-tune run`` ends with.

    Args:
        recording: what was measured.
        decisions: what the table says.
        regret: how good that was.
        path: where the table is.
        in_force: whether programs find it there by themselves.
    """
    lines = ["Picked, by bytes of the call:"]
    for group in dict.fromkeys(decision.group for decision in decisions):
        launches = len({one.launch for one in recording.of(group, held_out=False)})
        lines += ["", f"{describe_group(group)} ({launches} launches)"]
        for decision in decisions:
            lines += _ranges(decision) if decision.group == group else []
    lines += ["", *_hardly_seen(recording, decisions), *_unmeasured(decisions)]
    lines += [*_failures(recording), *_quality(regret)]
    lines += ["", f"Written to {path}", *(_IN_FORCE if in_force else _NAMED)]
    return "\n".join(lines)


def _ranges(decision: Decision) -> Iterator[str]:
    """Yield a line per range, the first with the operation's name."""
    name = decision.op
    for chosen in decision.ranges:
        end = "above" if chosen.hi is None else f"below {human_nbytes(chosen.hi)}"
        yield f"  {name:<15}{end:<13}{chosen.candidate}"
        name = ""


def _hardly_seen(recording: Recording, decisions: Iterable[Decision]) -> Iterator[str]:
    """Yield a line per group whose choices another one stands in for."""
    decided = {decision.group for decision in decisions}
    for group in recording.groups():
        if group not in decided:
            other = {"near": "far", "far": "near"}[group.link_class]
            yield (
                f"{describe_group(group)} were seen in fewer than {ENOUGH_LAUNCHES} "
                f"launches: what was picked for {other} links stands in there"
            )


def _unmeasured(decisions: Iterable[Decision]) -> list[str]:
    measured = {decision.op for decision in decisions}
    missing = [coll for coll in COLLECTIVES if coll not in measured]
    if not missing:
        return []
    return [f"Not measured, so the model goes on choosing: {', '.join(missing)}"]


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
        return ["Not checked: no further launch saw the same link class."]
    lines = [
        f"Checked by a further launch, {regret.cells} times at sizes in between "
        f"(geometric means):",
        f"  what auto picks takes {regret.regret:.2f} of the best candidate's time "
        f"(at worst {regret.worst:.3g})",
    ]
    if regret.versus_native is not None:
        lines.append(
            f"  and {regret.versus_native:.2f} of the time of the MPI library's own "
            f"collective (mpi/native)"
        )
    if regret.unmeasured:
        lines.append(
            f"  at {regret.unmeasured} further sizes what auto picks was not measured"
        )
    return lines
