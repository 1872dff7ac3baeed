# SPDX-License-Identifier: Apache-2.0
"""The end of a run in a few lines: what was picked where, and how good it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from commrt.select.facts import Candidate
from commrt.tuning.decide import ENOUGH_LAUNCHES, Decision, undecided
from commrt.tuning.regret import Regret
from commrt.tuning.samples import Failure, Group, Recording
from commrt.vocabulary.operations import COLLECTIVES

__all__ = [
    "describe_failure",
    "describe_group",
    "human_nbytes",
    "summarise",
    "too_busy",
]

_SHOWN = 3
"""Sizes named one by one."""

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
    arrays = "" if group.device == "host" else f", {group.device} arrays"
    between = "" if group.network is None else f" ({group.network})"
    return f"{group.ranks} ranks{nodes}, {group.link_class} links{between}{arrays}"


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
        plural = "" if launches == 1 else "es"
        lines += ["", f"{describe_group(group)} ({launches} launch{plural})"]
        for decision in decisions:
            lines += _ranges(decision) if decision.group == group else []
    lines += ["", *_hardly_seen(recording, decisions), *_not_reached(recording)]
    lines += too_busy(recording)
    lines += [*_undecided(recording, decisions), *_failures(recording)]
    lines += [*recording.notes, *_quality(recording, regret)]
    lines += ["", f"Written to {path}", *(_IN_FORCE if in_force else _NAMED)]
    return "\n".join(lines)


def _ranges(decision: Decision) -> Iterator[str]:
    """Yield a line per range, the first with the operation's name."""
    name = decision.op
    for chosen in decision.ranges:
        end = "above" if chosen.hi is None else f"below {human_nbytes(chosen.hi)}"
        yield f"  {name:<16}{end:<13}{chosen.candidate}"
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


def _not_reached(recording: Recording) -> Iterator[str]:
    """Yield a line per rank count and reason, with the sizes that have no times."""
    said = False
    for why, words in (
        ("budget", "Not reached within the budget"),
        ("links", "Not measured, as the links kept changing"),
        ("busy", "Not measured, as other programs ran on the ranks' cores"),
    ):
        missing = recording.missing(why)
        for ranks in sorted({ranks for ranks, _, _ in missing}):
            ops: dict[str, list[int]] = {}
            for _, op, nbytes in (cell for cell in missing if cell[0] == ranks):
                ops.setdefault(op, []).append(nbytes)
            sizes = "; ".join(f"{op} {_some(each)}" for op, each in ops.items())
            yield f"{words}, {ranks} ranks: {sizes}"
            said = True
    if said:
        yield (
            "  There the measured sizes beside them decide; an operation without any "
            "stays with the model, or with what fewer ranks picked."
        )


def too_busy(recording: Recording) -> list[str]:
    """Return a line per operation that was too busy to decide."""
    lines = []
    late = {(ranks, op) for ranks, op, _ in recording.missing("budget")}
    for group, op, measured, planned in undecided(recording):
        why = "Too short a budget" if (group.ranks, op) in late else "Too busy"
        lines.append(
            f"{why} to decide: {op}, {describe_group(group)}: only {measured} of "
            f"{planned} sizes could be trusted; the model goes on choosing"
        )
    return lines


def _some(sizes: Sequence[int]) -> str:
    """Return a few sizes for people."""
    shown = ", ".join(human_nbytes(nbytes) for nbytes in sizes[:_SHOWN])
    more = len(sizes) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _undecided(recording: Recording, decisions: Iterable[Decision]) -> list[str]:
    """Return a line for operations without times, and one for those without winners."""
    decided = {decision.op for decision in decisions}
    failed = {failure.op for failure in recording.failures} - decided
    busy = {op for _, op, _, _ in undecided(recording)}
    missing = [one for one in COLLECTIVES if one not in decided | failed | busy]
    lines = []
    if missing:
        lines.append(
            f"Not measured, so the model goes on choosing: {', '.join(missing)}"
        )
    if failed:
        lines.append(
            f"Every candidate that was tried failed, so the model goes on choosing: "
            f"{', '.join(sorted(failed))}"
        )
    return lines


def _failures(recording: Recording) -> list[str]:
    first: dict[tuple[str, Candidate, int], Failure] = {}
    for one in recording.failures:
        first.setdefault((one.op, one.candidate, one.ranks), one)
    return [f"Left out: {describe_failure(one)}" for one in first.values()]


def describe_failure(failure: Failure) -> str:
    """Return what failed where, and the first line of why."""
    why, *_ = failure.reason.strip().splitlines() or ["no reason is written down"]
    return (
        f"{failure.candidate} for {failure.op} with {failure.ranks} ranks: "
        f"{why.rstrip(':')} "
        f"at {human_nbytes(failure.nbytes)}"
    )


def _quality(recording: Recording, regret: Regret) -> list[str]:
    judges = sum(one.held_out for one in recording.launches.values())
    if not regret.cells:
        if not judges:
            return ["Not checked: there was no launch to judge the table."]
        return [
            "Not checked: the launches to judge the table measured nothing of what "
            "auto picks with the same ranks and links."
        ]
    by = "a further launch" if judges == 1 else f"{judges} further launches"
    lines = [
        f"Checked by {by} at {regret.cells} sizes in between (geometric means):",
        f"  what auto picks takes {regret.regret:.3f} of the best candidate's time "
        f"(at worst {regret.worst:.3g}, and {regret.beyond:.3g} beyond the intervals)",
    ]
    if regret.by_launch is not None and regret.foresight is not None:
        lines.append(
            f"  launch by launch {regret.by_launch:.3f}, where what the other judging "
            f"launches found best at that very size takes {regret.foresight:.3f}"
        )
    if regret.versus_native is not None:
        on_host = all(one.device == "host" for one in recording.launches.values())
        own = "the MPI library's own collective (mpi/native)"
        if not on_host:
            own = "NCCL's own collective (nccl/native)"
        lines.append(f"  and {regret.versus_native:.2f} of the time of {own}")
    if regret.unmeasured:
        plural = "" if regret.unmeasured == 1 else "s"
        lines.append(
            f"  at {regret.unmeasured} further size{plural} what auto picks was not "
            f"measured"
        )
    return lines
