# SPDX-License-Identifier: Apache-2.0
"""One tuning run: launch after launch within the budget, without what failed or lost.

Knows nothing of mpiexec: how ranks are started is passed in, so that the tests run it
on invented ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from statistics import median

from commrt.errors import BackendError
from commrt.tuning.job import Item, Job, size_pairs
from commrt.tuning.launch import Message, Start
from commrt.tuning.progress import Progress
from commrt.tuning.samples import Recording
from commrt.tuning.table_writer import NATIVES
from commrt.tuning.variants import sizes_to_refine, variants_to_try

__all__ = ["Options", "jobs_within", "losers", "run_launches"]

_MAX_RESTARTS = 8
_STARTUP_S = 1.5
"""Part of the budget for starting and ending ranks, until one launch has shown it."""
_THOROUGH_S = 150.0
"""A budget from which every parameter of the transport is tried."""
_SHAPING_PER_JUDGE = 3
_MOST_JUDGES = 5
"""The launch is the sample also of what the table is worth: one of them may be odd.
Both numbers are for each class of links that was met: a launch meets one at a size."""
_LONGEST_SHARE_S = 12.0
"""A launch may measure for so long; two short ones say more than a long one."""
_SMALLEST_SHARE_S = 1.0
"""A launch that could measure for less time is not worth its start."""


@dataclass(frozen=True)
class Options:
    """The user's request."""

    ranks: tuple[int, ...]
    """Rank counts to launch."""
    ops: tuple[str, ...]
    """Operations."""
    launches: int = 3
    """Launches per rank count that shape the table, at least; more judge it."""
    most_launches: int = 50
    """Most launches, if the budget lasts; at least ``launches``."""
    budget_s: float = 60.0
    """Seconds for everything together."""
    max_nbytes: int = 32 << 20
    """Largest whole vector."""
    dtype: str = "float32"
    """Element type."""
    device: str = "cpu"
    """Memory of the arrays: cpu, cuda, or thread, a device of threads."""
    seed: int = 1
    """Seed of the order of measurement."""


def run_launches(options: Options, progress: Progress, start: Start) -> Recording:
    """Return the recording of all launches.

    Rank counts alternate, so that a slow minute of the machine hits all of them. The
    rest of the budget, after the launches asked for, goes into further ones: the launch
    is the sample. The last ones of each rank count judge the table: one for three that
    shape it. Where the budget is too short there are fewer launches, and the notes say
    so.
    """
    run = _Run(options, progress, start)
    run.announce()
    took_s, done = [0.0], 0
    while done < max(options.launches, options.most_launches):
        further = done >= options.launches
        # Rounds become shorter as losers are left out.
        judges = _judges(done + 1, run.link_classes)
        if further and progress.left_s < (1 + judges) * max(took_s[-2:]):
            break
        if done and not run.affordable:
            break
        rounds_left = 1 + max(1, options.launches - done)
        begin_s = progress.elapsed_s
        run.round(max(1, min(rounds_left, run.affordable)), held_out=False)
        took_s.append(progress.elapsed_s - begin_s)
        done += 1
    judges = min(_judges(done, run.link_classes), run.affordable)
    for judged in range(judges):
        if run.affordable:
            run.round(min(judges - judged, run.affordable), held_out=True)
    if not judges:
        run.fell_short(done)
    return run.recording


def _judges(shaping: int, link_classes: int) -> int:
    """Return the number of launches that judge the ``shaping`` ones."""
    wanted = min(_MOST_JUDGES, shaping // _SHAPING_PER_JUDGE)
    return max(1, min(shaping // 2, link_classes * wanted))


class _Run:
    """Rounds of launches, one per rank count, and what each needs of the budget."""

    def __init__(self, options: Options, progress: Progress, start: Start) -> None:
        self.recording = Recording()
        self._options = options
        self._progress = progress
        self._start = start
        self._numbers = count()
        self._startup_s = dict.fromkeys(options.ranks, _STARTUP_S)

    @property
    def _round_s(self) -> float:
        """The least that a round takes."""
        return sum(one + _SMALLEST_SHARE_S for one in self._startup_s.values())

    @property
    def _needed_s(self) -> float:
        return (self._options.launches + 1) * self._round_s

    @property
    def link_classes(self) -> int:
        """Most classes of links that the ranks of one count have met."""
        met: dict[int, set[str]] = {}
        for group in self.recording.groups():
            met.setdefault(group.ranks, set()).add(group.link_class)
        return max(map(len, met.values()), default=1)

    @property
    def affordable(self) -> int:
        """Rounds that the rest of the budget allows."""
        return int(self._progress.left_s / self._round_s)

    def announce(self) -> None:
        """Say before the work if the budget is too short for the launches asked for."""
        options = self._options
        if options.budget_s < self._needed_s:
            self._progress.note(
                f"commrt-tune: --budget {options.budget_s:g} is short: "
                f"{options.launches} launches per rank count and one to judge the "
                f"table take about {self._needed_s:.0f} s; there will be fewer"
            )

    def fell_short(self, done: int) -> None:
        """Note the launches that were made instead, as the budget ended too soon."""
        options = self._options
        self.recording.notes.append(
            f"--budget {options.budget_s:g} allowed {done} launch"
            f"{'' if done == 1 else 'es'} per rank count, and none to judge the table: "
            f"{options.launches} and one that judges take {self._needed_s:.0f} s here, "
            f"or more"
        )

    def round(self, rounds_left: int, held_out: bool) -> None:
        """Launch every rank count once, with a fair share of the budget."""
        progress, every = self._progress, self._options.ranks
        for place, ranks in enumerate(every):
            launches_left = rounds_left * len(every) - place
            share_s = progress.left_s / launches_left - self._startup_s[ranks]
            # Where the launches asked for leave time, there will be further ones.
            share_s = min(share_s, _LONGEST_SHARE_S)
            launch = _Launch(
                self.recording,
                self._options,
                progress,
                next(self._numbers),
                ranks,
                held_out,
            )
            try:
                launch.run(self._start, max(_SMALLEST_SHARE_S, share_s))
            except BackendError as error:
                if not self.recording.samples:
                    raise
                progress.note(f"commrt-tune: a launch is left out: {error}")
                first = str(error).partition("\n")[0]
                self.recording.notes.append(f"A launch is left out: {first}")
                continue
            self._startup_s[ranks] = launch.startup_s or self._startup_s[ranks]


class _Launch:
    """One launch, restarted without the candidate that hung or crashed it."""

    def __init__(
        self,
        recording: Recording,
        options: Options,
        progress: Progress,
        index: int,
        ranks: int,
        held_out: bool,
    ) -> None:
        self._recording = recording
        self._options = options
        self._progress = progress
        self._index = index
        self._ranks = ranks
        self._held_out = held_out
        self._begun: dict[int, Item] = {}
        self._running: Item | None = None
        self._done: list[Item] = []
        self._span_s: tuple[float, float] | None = None
        self.startup_s = 0.0
        """Seconds that starting and ending the ranks took, if they have ended well."""

    def run(self, start: Start, share_s: float) -> None:
        """Start the ranks until the job is done; BackendError if they cannot start."""
        until_s = self._progress.left_s - share_s
        for _ in range(_MAX_RESTARTS):
            left_s = max(_SMALLEST_SHARE_S / 2, self._progress.left_s - until_s)
            self._begun, self._running, self._span_s = {}, None, None
            begin_s = self._progress.elapsed_s
            ended = start(self._job(left_s), self._ranks, self._take)
            if ended.ok:
                first_s, last_s = self._span_s or (0.0, 0.0)
                took_s = self._progress.elapsed_s - begin_s
                self.startup_s = took_s - (last_s - first_s)
                return
            item = self._running
            if ended.turn is not None:
                item = self._begun.get(ended.turn)
            if item is None:
                raise BackendError(
                    f"{self._ranks} ranks could not be measured: {ended.reason}"
                )
            self._recording.fail(self._ranks, item.__dict__, ended.reason)
            first = ended.reason.partition("\n")[0]
            self._progress.note(
                f"commrt-tune: {item.candidate} for {item.op} at {item.nbytes} B with "
                f"{self._ranks} ranks is left out: {first}"
            )

    def _job(self, left_s: float) -> Job:
        options = self._options
        failed = {
            (one.op, str(one.candidate))
            for one in self._recording.failures
            if one.ranks == self._ranks
        }
        return Job(
            ops=options.ops,
            dtype=options.dtype,
            max_nbytes=options.max_nbytes,
            held_out=self._held_out,
            seed=options.seed * 1000 + self._index,
            budget_s=left_s,
            excluded=tuple(sorted(failed)),
            skipped=tuple(self._done),
            losers=self._losers(),
            device=options.device,
            variants=self._variants(),
            refined=() if self._held_out else self._refined(),
        )

    def _refined(self) -> tuple[tuple[str, int], ...]:
        options = self._options
        found = sizes_to_refine(
            self._recording, self._ranks, options.dtype, options.max_nbytes
        )
        return tuple(cell for cell in found if cell[0] in options.ops)

    def _variants(self) -> tuple[Item, ...]:
        options = self._options
        found = variants_to_try(
            self._recording,
            self._ranks,
            options.dtype,
            options.max_nbytes,
            held_out=self._held_out,
            thorough=options.budget_s >= _THOROUGH_S,
        )
        return tuple(item for item in found if item.op in options.ops)

    def _losers(self) -> tuple[tuple[Item, str], ...]:
        lost = losers(self._recording, self._ranks)
        if not self._held_out:
            return tuple(lost)
        # A held-out size lies just above the grid's: who lost there need not be tried.
        above = {
            (op, grid): between
            for op in self._options.ops
            for grid, between in size_pairs(
                op, self._ranks, self._options.dtype, self._options.max_nbytes
            )
        }
        return tuple(
            (Item(one.op, above[one.op, one.nbytes], one.candidate), links)
            for one, links in lost
            if (one.op, one.nbytes) in above
        )

    def _take(self, message: Message) -> None:
        kind, now_s = message["tune"], self._progress.elapsed_s
        if kind in ("begin", "end"):
            self._span_s = (self._span_s or (now_s, now_s))[0], now_s
        if kind == "begin":
            self._running = self._begun[message["index"]] = _item(message)
            number = f"{message['index'] + 1}/{message['items']}"
            self._progress.show(
                f"{self._ranks} ranks, launch {self._index + 1}, {number}: "
                f"{message['op']} {message['nbytes']} B {message['candidate']}"
            )
        elif kind in ("sample", "wrong"):
            self._done.append(_item(message))
            self._running = None
        self._recording.add(self._index, self._held_out, message)


def _item(message: Message) -> Item:
    return Item(message["op"], message["nbytes"], message["candidate"])


def losers(
    recording: Recording, ranks: int, ratio: float = 1.5
) -> list[tuple[Item, str]]:
    """Return what later launches need not repeat, and in which class of the links.

    That is what took more than ``ratio`` times the best of its launch, in every launch
    that met this class so far and in two at least, as one may have met another state of
    the machine. The library's own collective is always repeated: it is what people
    compare with. So is what would run without a table: it is what others must beat.
    """
    cells: dict[tuple[int, str, int, str], dict[str, float]] = {}
    for sample in recording.samples:
        launch = recording.launches[sample.launch]
        if launch.facts.size == ranks and not launch.held_out and sample.us:
            links = recording.group_of(sample).link_class
            cell = (sample.launch, sample.op, sample.nbytes, links)
            cells.setdefault(cell, {})[str(sample.candidate)] = median(sample.us)
    unasked = {
        (Item(op, nbytes, str(candidate)), links)
        for (_, links, op, nbytes), candidate in recording.unasked.items()
    }
    lost: dict[tuple[Item, str], list[bool]] = {}
    for (_, op, nbytes, links), times in cells.items():
        best = min(times.values())
        for candidate, us in times.items():
            verdicts = lost.setdefault((Item(op, nbytes, candidate), links), [])
            verdicts.append(us > ratio * best)
    return [
        (item, links)
        for (item, links), verdicts in lost.items()
        if all(verdicts)
        and len(verdicts) >= 2
        and item.candidate not in NATIVES
        and (item, links) not in unasked
    ]


def jobs_within(options: Options, number: int, share_s: float) -> Job:
    """Return the job of ranks that were started by someone else.

    They are one launch: its first part shapes the table, its second part judges it.
    """
    return Job(
        ops=options.ops,
        dtype=options.dtype,
        max_nbytes=options.max_nbytes,
        held_out=number > 0,
        device=options.device,
        seed=options.seed * 1000 + number,
        budget_s=share_s,
    )
