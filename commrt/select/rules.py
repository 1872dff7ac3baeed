# SPDX-License-Identifier: Apache-2.0
"""Rules of a table: their match, their use and their evidence.

Plain frozen data. ``schema.py`` builds it from text and checks it, ``table.py`` looks
rules up and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from commrt.select.facts import Candidate
from commrt.select.network import Network

__all__ = [
    "QUALITIES",
    "VERDICTS",
    "Cell",
    "Evidence",
    "Match",
    "Point",
    "Quality",
    "Rule",
    "RunnerUp",
    "Verdict",
]

Verdict = Literal["win", "tie", "unsure", "only", "extrapolated", "simulated"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Quality = Literal["good", "fair", "poor"]
QUALITIES: tuple[Quality, ...] = ("good", "fair", "poor")


class Cell(NamedTuple):
    """Everything a rule matches on except bytes; None means any.

    The ranges of one cell tile [0, ∞).
    """

    op: str
    ranks: int | None
    nodes: int | None
    ppn: int | None
    link_class: str | None
    device: str | None
    dtype: str | None
    redop: str | None
    network: Network | None


@dataclass(frozen=True)
class Match:
    """Facts that a rule needs to apply; None means any."""

    lo: int
    """First byte count of the half-open range [lo, hi)."""
    hi: int | None
    """First byte count beyond the range; None: no end."""
    ranks: int | None = None
    """Communicator size."""
    nodes: int | None = None
    """Nodes spanned."""
    ppn: int | None = None
    """Ranks on the fullest node."""
    link_class: str | None = None
    """Distance of the ranks."""
    device: str | None = None
    """Kind of memory."""
    dtype: str | None = None
    """Element type."""
    redop: str | None = None
    """Reduction."""
    network: Network | None = None
    """The network between nodes; rules hold for networks that are like it."""


@dataclass(frozen=True)
class Point:
    """One measured time of the rule's choice."""

    nbytes: int
    """Rule bytes."""
    us: float
    """Median over launches of the median over repetitions of the slowest rank."""
    ci: tuple[float, float]
    """Interval of the median, by order statistics."""
    n: int
    """Repetitions in all launches."""
    launches: int
    """Launches."""
    native_us: float | None = None
    """Time of ``mpi/native``, or of ``nccl/native`` on devices, at the same bytes in
    the same launches."""
    disturbed: int = 0
    """Further repetitions, which do not count: other programs ran on the ranks' cores
    meanwhile."""


@dataclass(frozen=True)
class RunnerUp:
    """The best candidate that was not chosen."""

    candidate: Candidate
    """The candidate."""
    nbytes: int
    """The place where the two were compared."""
    us: float
    """Its time there."""
    ci: tuple[float, float]
    """Interval of its median."""


@dataclass(frozen=True)
class Evidence:
    """Measurements that support a rule."""

    verdict: Verdict
    """win: clearly fastest; tie: the simpler of equals; unsure: another one was faster,
    but not for sure; only: nothing to compare; simulated: nothing was measured."""
    points: tuple[Point, ...] = ()
    """Measurements inside the range."""
    runner_up: RunnerUp | None = None
    """The runner-up."""
    crossover: str | None = None
    """Note on the lower end of the range: where it lies, and by which times."""
    date: str | None = None
    """Date of the measurement, ISO 8601."""
    quality: Quality | None = None
    """How far the measurements can be trusted; None: an older commrt measured."""


@dataclass(frozen=True)
class Rule:
    """One rule: for these operations and bytes, use this candidate."""

    op: str
    """Operation."""
    match: Match
    """Facts that the rule needs to apply."""
    use: Candidate
    """The candidate to run."""
    evidence: Evidence | None = None
    """Measurements behind the rule; tables written by hand may have none."""
    line: int = field(default=0, compare=False)
    """Line of the file, for messages."""

    @property
    def cell(self) -> Cell:
        """The rule's match without bytes."""
        match = self.match
        return Cell(
            self.op,
            match.ranks,
            match.nodes,
            match.ppn,
            match.link_class,
            match.device,
            match.dtype,
            match.redop,
            match.network,
        )
