# SPDX-License-Identifier: Apache-2.0
"""Measurements: launches, samples and failures, and the lines that carry them.

A worker prints one JSON object per line. The parent collects them into a Recording,
which can be saved and read back, so that every decision can be repeated without ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from commrt.bench.raw_data import write_data
from commrt.errors import TableError
from commrt.select.facts import Candidate, CommFacts
from commrt.select.fingerprint import Machine
from commrt.select.network import Network
from commrt.select.plain import plain_machine

__all__ = ["Failure", "Group", "Launch", "Recording", "Sample", "line"]


class Group(NamedTuple):
    """Samples that can be compared: equal ranks, placement, links and memory."""

    ranks: int
    nodes: int
    ppn: int
    link_class: str
    device: str = "host"
    network: Network | None = None


@dataclass(frozen=True)
class Launch:
    """One start of the ranks."""

    index: int
    """Counted over the whole run."""
    facts: CommFacts
    """Facts of the communicator."""
    held_out: bool
    """True if it only judges the table, and does not shape it."""
    device: str = "host"
    """Kind of memory, as rules name it."""

    @property
    def group(self) -> Group:
        """Group of launches that it may be compared with."""
        facts = self.facts
        where = facts.nodes, facts.ppn, facts.link_class
        return Group(facts.size, *where, self.device, facts.network)


@dataclass(frozen=True)
class Sample:
    """The repetitions of one candidate at one size in one launch."""

    launch: int
    """Number of the launch."""
    op: str
    """Operation."""
    nbytes: int
    """Rule bytes."""
    candidate: Candidate
    """The candidate that ran."""
    us: tuple[float, ...]
    """Microseconds of each repetition, of the slowest rank."""
    link_class: str = ""
    """Class of the links meanwhile, where it was seen; else the launch's holds."""
    disturbed: int = 0
    """Further repetitions, without a time, as something else ran on a rank's core."""


@dataclass(frozen=True)
class Failure:
    """A candidate that hung, crashed or computed wrongly."""

    ranks: int
    """Ranks of the launch."""
    op: str
    """Operation."""
    nbytes: int
    """Rule bytes."""
    candidate: Candidate
    """The candidate that ran."""
    reason: str
    """The error, in words."""


@dataclass
class Recording:
    """Everything that one tuning run measured."""

    launches: dict[int, Launch] = field(default_factory=dict)
    """Launches by index."""
    samples: list[Sample] = field(default_factory=list)
    """Samples in the order of measurement."""
    failures: list[Failure] = field(default_factory=list)
    """Failures in the order of appearance."""
    orders: dict[str, list[Candidate]] = field(default_factory=dict)
    """Candidates seen, by operation; the simplest first."""
    software: dict[str, Any] = field(default_factory=dict)
    """Versions that the ranks reported."""
    machine: Machine | None = None
    """Machine that was measured; None if the commrt that measured did not record it."""
    date: str = ""
    """Date of the measurement, ISO 8601; empty if the commrt that measured did not
    record it."""
    unfinished: dict[tuple[int, str, int], str] = field(default_factory=dict)
    """Reason why a launch that shapes the table left a size out, by ranks, operation
    and bytes: ``budget``, ``links``, or ``busy`` where other programs ran on the ranks'
    cores."""
    notes: list[str] = field(default_factory=list)
    """Other remarks for the summary. Not saved."""
    unasked: dict[tuple[int, str, str, int], Candidate] = field(default_factory=dict)
    """What the ranks would run without a table, by ranks, class of the links, operation
    and bytes."""

    def add(self, launch: int, held_out: bool, message: Mapping[str, Any]) -> None:
        """Take one line of a worker; kinds that only report progress are ignored."""
        kind = message["tune"]
        if kind == "hello":
            said = dict(message["facts"])
            if said.get("network") is not None:
                said["network"] = Network(**said["network"])
            device = message.get("device", "host")
            self.begin(Launch(launch, CommFacts(**said), held_out, device))
            self.software = dict(message["software"])
        elif kind == "unasked":
            facts = self.launches[launch].facts
            op, nbytes = str(message["op"]), int(message["nbytes"])
            self.unasked[facts.size, facts.link_class, op, nbytes] = Candidate.parse(
                message["candidate"]
            )
        elif kind == "order":
            self._merge_order(message["op"], message["candidates"])
        elif kind == "sample":
            candidate = Candidate.parse(message["candidate"])
            op, nbytes = str(message["op"]), int(message["nbytes"])
            us = tuple(float(value) for value in message["us"])
            links = str(message.get("link_class", ""))
            disturbed = int(message.get("disturbed", 0))
            self.samples.append(
                Sample(launch, op, nbytes, candidate, us, links, disturbed)
            )
        elif kind == "unfinished" and not held_out:
            ranks = self.launches[launch].facts.size
            for op, nbytes in message["cells"]:
                self.unfinished[ranks, op, nbytes] = message["why"]
        elif kind == "wrong":
            self.fail(self.launches[launch].facts.size, message, message["reason"])

    def fail(self, ranks: int, item: Mapping[str, Any], reason: str) -> None:
        """Record that the candidate of ``item`` failed."""
        candidate = Candidate.parse(item["candidate"])
        op, nbytes = str(item["op"]), int(item["nbytes"])
        self.failures.append(Failure(ranks, op, nbytes, candidate, reason))

    def missing(self, why: str) -> list[tuple[int, str, int]]:
        """Return ranks, operation and bytes that no launch measured for this reason."""
        measured = {
            (self.launches[one.launch].facts.size, one.op, one.nbytes)
            for one in self.samples
            if not self.launches[one.launch].held_out
        }
        return sorted(
            cell
            for cell, reason in self.unfinished.items()
            if reason == why and cell not in measured
        )

    def planned(self, ranks: int, op: str) -> set[int]:
        """Return the sizes that launches of so many ranks were to measure."""
        found = {n for each, name, n in self.unfinished if (each, name) == (ranks, op)}
        for one in self.samples:
            launch = self.launches[one.launch]
            if not launch.held_out and (launch.facts.size, one.op) == (ranks, op):
                found.add(one.nbytes)
        return found

    def begin(self, launch: Launch) -> None:
        """Add a launch; a network that is like an earlier launch's is that one.

        Measured values never come out twice the same.
        """
        seen = launch.facts.network
        if seen is not None:
            for earlier in self.launches.values():
                known = earlier.facts.network
                if known is not None and known.is_like(seen):
                    facts = replace(launch.facts, network=known)
                    launch = replace(launch, facts=facts)
                    break
        self.launches.setdefault(launch.index, launch)

    def _merge_order(self, op: str, candidates: list[str]) -> None:
        known = self.orders.setdefault(op, [])
        known += [
            candidate
            for candidate in map(Candidate.parse, candidates)
            if candidate not in known
        ]

    def group_of(self, sample: Sample) -> Group:
        """Return the group of a sample, which it may be compared with."""
        group = self.launches[sample.launch].group
        return group._replace(link_class=sample.link_class or group.link_class)

    def groups(self) -> list[Group]:
        """Return the groups of the samples that shape the table, in order."""
        shaping = (
            one for one in self.samples if not self.launches[one.launch].held_out
        )
        return list(dict.fromkeys(map(self.group_of, shaping)))

    def of(self, group: Group, held_out: bool) -> Iterator[Sample]:
        """Yield the samples of a group."""
        for sample in self.samples:
            if self.launches[sample.launch].held_out != held_out:
                continue
            if self.group_of(sample) == group:
                yield sample

    def to_json(self) -> str:
        """Return the recording as text."""
        return json.dumps(
            {
                "launches": [asdict(launch) for launch in self.launches.values()],
                "samples": [_plain(sample) for sample in self.samples],
                "failures": [_plain(failure) for failure in self.failures],
                "orders": {op: list(map(str, c)) for op, c in self.orders.items()},
                "unasked": [
                    [*cell, str(candidate)] for cell, candidate in self.unasked.items()
                ],
                "unfinished": [[*cell, why] for cell, why in self.unfinished.items()],
                "software": self.software,
                "machine": self.machine and plain_machine(self.machine),
                "date": self.date,
            }
        )

    def save(self, path: Path) -> None:
        """Write the recording to a file, compressed where its name ends in .gz."""
        try:
            write_data(path, self.to_json())
        except OSError as error:
            raise TableError(
                f"cannot write the recording to {path}: {error}"
            ) from error


def _plain(item: Sample | Failure) -> dict[str, Any]:
    return {**item.__dict__, "candidate": str(item.candidate)}


def line(kind: str, **content: object) -> str:
    """Return one line of a worker."""
    return json.dumps({"tune": kind, **content})
