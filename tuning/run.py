# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune run``: from options to a table on disk and a summary."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from json import loads
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from commrt.errors import TableError, UsageError
from commrt.files.write import check_writable
from commrt.select.fingerprint import this_machine
from commrt.select.locate import user_table_path
from commrt.select.rules import Rule
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.select.table import Table, load_file
from commrt.tuning.decide import decide, undecided
from commrt.tuning.job import Job
from commrt.tuning.launch import Ended, Message, choose_launcher, start_ranks
from commrt.tuning.progress import Progress
from commrt.tuning.regret import Regret, held_out_regret
from commrt.tuning.samples import Group, Recording
from commrt.tuning.summary import describe_failure, summarise
from commrt.tuning.table_writer import make_table, write_table
from commrt.tuning.tested_pairs import keep_pairs
from commrt.tuning.tuner import Options, jobs_within, run_launches

if TYPE_CHECKING:
    from commrt.tuning.measure import Session

__all__ = [
    "check_outputs",
    "finish",
    "launched",
    "not_measured",
    "other_memory",
    "table_at",
    "terminated_like_interrupted",
    "within",
]

_BUSY_LOAD = 0.7
"""Runnable processes, averaged over a minute, before any rank was started."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SHARES = (0.75, 0.25)
"""Shares of the budget: to shape the table, to judge it."""


def launched(
    options: Options,
    *,
    out: Path | None,
    raw: Path | None,
    mpiexec: str | None,
    hang_s: float,
) -> str:
    """Start ranks of our own, measure, write the table; return the summary."""
    check_outputs(out, raw, options.device)
    launcher = choose_launcher(mpiexec)
    progress = Progress(options.budget_s)
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD:
        progress.note(
            f"commrt-tune: other programs use this machine (load {load:.1f}): some "
            f"operations may be left undecided; tune again when it is quiet"
        )

    def start(job: Job, ranks: int, on_message: Callable[[Message], None]) -> Ended:
        return start_ranks(job, ranks, on_message, launcher=launcher, hang_s=hang_s)

    try:
        with terminated_like_interrupted():
            recording = run_launches(options, progress, start)
    finally:
        progress.close()
    return finish(recording, options, out=out, raw=raw)


def within(options: Options, *, out: Path | None, raw: Path | None) -> str | None:
    """Measure on the ranks that this process belongs to; the summary is rank 0's.

    Here a hang cannot be cut out: whoever started the ranks has to end them.
    """
    from commrt.tuning.measure import Session
    from commrt.tuning.worker import measure

    session = Session(None, device=options.device)
    if not _done_by_rank_0(session, lambda: check_outputs(out, raw, options.device)):
        return None
    recording = Recording()
    progress = Progress(options.budget_s)
    for number, share in enumerate(_SHARES):
        job = jobs_within(options, number, share * options.budget_s)
        measure(session, job, partial(_take, recording, progress, number))
    progress.close()
    summaries: list[str] = []
    _done_by_rank_0(
        session,
        lambda: summaries.append(finish(recording, options, out=out, raw=raw)),
    )
    return summaries[0] if summaries else None


def _done_by_rank_0(session: Session, work: Callable[[], None]) -> bool:
    """Run ``work`` on rank 0, where its error is raised; return whether it worked.

    The other ranks wait for it, and say nothing about an error that rank 0 reports.
    """
    problem: Exception | None = None
    if session.rank == 0:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below
            problem = error
    failed = session.agree(float(problem is not None))
    if problem is not None:
        raise problem
    return not failed


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Make SIGTERM and a closed terminal what Ctrl-C is: ranks must not outlive us."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in _ENDING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def check_outputs(out: Path | None, raw: Path | None, device: str = "cpu") -> None:
    """Raise UsageError, before anything is measured, if a file cannot be written.

    Times of a device of threads say nothing of a GPU, and no program should find them.
    """
    if device == "thread" and out is None:
        raise UsageError(
            "-d thread: its times are those of threads, and a table of them would be "
            "taken for a GPU's: name a file to look at with --out"
        )
    table = out or user_table_path(this_machine())
    if raw is not None and raw.absolute() == table.absolute():
        raise UsageError(f"--raw {raw} is the table's file, too: give it another name")
    for option, path in (("--out", table), ("--raw", raw)):
        try:
            if path is not None:
                check_writable(path, parents=True)
        except OSError as error:
            raise UsageError(
                f"{option} {path} cannot be written, so nothing was measured: {error}"
            ) from error


def _take(recording: Recording, progress: Progress, number: int, line: str) -> None:
    message = loads(line)
    if message["tune"] == "begin":
        count = f"{message['index'] + 1}/{message['items']}"
        item = f"{message['op']} {message['nbytes']} B {message['candidate']}"
        progress.show(f"{count}: {item}")
    recording.add(number, number > 0, message)


def finish(
    recording: Recording,
    options: Options,
    *,
    out: Path | None,
    raw: Path | None = None,
    date: str | None = None,
) -> str:
    """Decide, write the table, return the summary; TableError without measurements."""
    machine = recording.machine = this_machine()
    recording.date = date or datetime.date.today().isoformat()
    if raw is not None:
        recording.save(raw)
    decisions = decide(recording, DEFAULT_TIE_MARGIN)
    if not decisions:
        raise TableError(f"no table was written: {'; '.join(_why_nothing(recording))}")
    regret = held_out_regret(recording, decisions)
    path = out or user_table_path(machine)
    before = None if out is not None else table_at(path)
    kept = () if before is None else other_memory(before, options.device)
    if kept:
        recording.notes.append(
            f"{len(kept)} rules for arrays elsewhere are kept as they were"
        )
    others = [] if before is None else not_measured(before, recording, options.device)
    if others:
        recording.notes.append(
            f"{len(others)} rules for other operations or placements of ranks are kept "
            f"as they were"
        )
        kept = (*kept, *others)
    earlier = [] if before is None else _still_true(before, recording)
    if earlier:
        recording.notes.append(
            f"{len(earlier)} rules for what this run was too busy to decide are kept "
            f"as they were"
        )
        kept = (*kept, *earlier)
    together = keep_pairs(
        [] if before is None else [("the table that was here", before)],
        [("this run", recording.software)],
    )
    recording.notes += together.lines
    table = make_table(
        decisions,
        machine,
        software=recording.software,
        method=_method(options, regret),
        tie_margin=DEFAULT_TIE_MARGIN,
        date=recording.date,
        kept=kept,
        together=together,
    )
    write_table(table, path)
    return summarise(recording, decisions, regret, str(path), in_force=out is None)


def table_at(path: Path) -> Table | None:
    """Return the table that is replaced; None where none is, or none can be read."""
    if not path.exists():
        return None
    from commrt.tuning.measure import catalog

    try:
        return load_file(path, catalog())
    except TableError:
        return None


def other_memory(table: Table, device: str) -> Sequence[Rule]:
    """Return the rules of a table that a run on ``device`` says nothing about."""
    if device == "cpu":
        return [rule for rule in table.rules if rule.match.device == "cuda"]
    return [rule for rule in table.rules if rule.match.device in (None, "host")]


def not_measured(table: Table, recording: Recording, device: str) -> list[Rule]:
    """Return the rules for operations and placements that a run has not planned.

    Those of other memory are left out; ``other_memory`` has them.
    """
    measured = [
        (group, op)
        for group in recording.groups()
        for op in recording.orders
        if recording.planned(group.ranks, op)
    ]
    others = other_memory(table, device)
    return [
        rule
        for rule in table.rules
        if not any(_is_of(rule, *one) for one in measured) and rule not in others
    ]


def _is_of(rule: Rule, group: Group, op: str) -> bool:
    """Return whether a rule is for an operation of ranks that lie as these do."""
    match = rule.match
    place = match.ranks, match.nodes, match.ppn
    if (rule.op, *place) != (op, group.ranks, group.nodes, group.ppn):
        return False
    if match.network is None or group.network is None:
        return True
    return match.network.is_like(group.network)


def _still_true(table: Table, recording: Recording) -> list[Rule]:
    """Return the rules for what a run could not decide, of candidates that still work.

    A table that a quiet run wrote is better than the model.
    """
    failed = {(one.op, one.candidate) for one in recording.failures}
    found: list[Rule] = []
    for group, op, _, _ in undecided(recording):
        rules = [
            rule
            for rule in table.rules
            if _is_of(rule, group, op) and rule.match.device == group.device
        ]
        if not any((rule.op, rule.use) in failed for rule in rules):
            found += rules
    return found


def _why_nothing(recording: Recording) -> list[str]:
    """Return why there is nothing to decide from."""
    reasons = []
    if recording.failures:
        # One that failed at any size is left out, whatever it did at the others.
        failed = {(one.op, one.candidate, one.ranks) for one in recording.failures}
        reasons.append(
            f"every candidate that was tried failed somewhere, {len(failed)} in all; "
            f"the first was {describe_failure(recording.failures[0])}"
        )
    if late := recording.missing("budget"):
        reasons.append(
            f"the budget ended before {len(late)} operations and sizes were measured: "
            f"raise --budget"
        )
    if busy := recording.missing("busy"):
        reasons.append(
            f"other programs ran on the ranks' cores during {len(busy)} measurements, "
            f"too many to decide anything: tune again when the machine is quieter"
        )
    if moved := recording.missing("links"):
        reasons.append(
            f"the links between the ranks changed during {len(moved)} measurements: "
            f"tune again when the machine is quieter"
        )
    if not reasons:
        reasons += [
            f"{op}: the times of only {trusted} of {planned} sizes can be trusted, and "
            f"half of them must be: tune again when the machine is quieter"
            for _, op, trusted, planned in undecided(recording)
        ]
    return reasons or ["no size of these operations fits into --max-bytes"]


def _method(options: Options, regret: Regret) -> Mapping[str, object]:
    job = Job((), options.dtype, options.max_nbytes, False, options.seed, 0.0)
    return {
        "sync": "barrier",
        "launches": options.launches,
        "order": "random",
        "seed": options.seed,
        "reps": {"min": 3, "max": job.max_repetitions},
        "stop": {"rel_ci": job.relative_ci, "level": 0.95},
        "per_rep": "max_over_ranks",
        "stat": "median",
        "outliers": "none",
        "dtype": options.dtype,
        "budget_s": options.budget_s,
        "held_out": regret.for_table(),
        "command": " ".join(["commrt-tune", *sys.argv[1:]]),
    }
