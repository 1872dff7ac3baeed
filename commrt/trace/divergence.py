# SPDX-License-Identifier: Apache-2.0
"""Compares the dumps of a job's ranks: where they diverged first, and who is missing.

The ranks of a communicator call the same operations in the same order. So the dumps are
compared number by number. The first number at which a rank has called another operation
than the others, or none, is where they diverged. Where several communicators have one,
the one that was called first comes first: the others mostly follow from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt.errors import UsageError
from commrt.trace.dump_reader import Dump, DumpedGroup, Entry, SeenRank
from commrt.vocabulary.operations import OPERATIONS, SENT

__all__ = ["Divergence", "Verdict", "compare", "verdict_lines"]

_SAME_COUNT = frozenset(
    spec.name
    for spec in OPERATIONS
    if spec.vector_of is None
    and not spec.is_empty
    and (spec.out_count == "same" or not spec.has_root)
)
"""Operations in which all ranks state the same number of elements."""
_MOST_LISTED = 12
_NS_PER_S = 1e9

GroupKey = tuple[str, tuple[int, ...]]


@dataclass
class Divergence:
    """The first operation of a communicator that its ranks did not call alike."""

    group: str
    """Name of the communicator."""
    seq: int
    """Number of the operation."""
    calls: dict[str, list[int]]
    """Ranks of the job by what they have called."""
    missing: dict[int, str]
    """Ranks that have not called it, and what is known of them."""
    unknown: list[int]
    """Ranks of which no dump tells whether they have."""
    began_ns: int
    """The first rank's call, since 1970."""


@dataclass
class Verdict:
    """What the dumps of a job tell together."""

    job: str
    """Name of the job."""
    size: int
    """Ranks of the job."""
    reasons: dict[int, tuple[str, str]]
    """For each rank that has a dump, the first fault it knew of."""
    absent: dict[int, str]
    """Ranks without a dump, and what others have seen of them."""
    divergences: list[Divergence]
    """One for each communicator that has any, the earliest first."""
    waiting: list[str] = field(default_factory=list)
    """Operations that no rank misses and that are not complete, and messages."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "job": self.job,
            "size": self.size,
            "reasons": {
                str(rank): {"reason": reason, "message": message}
                for rank, (reason, message) in self.reasons.items()
            },
            "absent": {str(rank): said for rank, said in self.absent.items()},
            "divergences": [
                {
                    "group": one.group,
                    "seq": one.seq,
                    "calls": [
                        {"call": call, "ranks": ranks}
                        for call, ranks in one.calls.items()
                    ],
                    "missing": {str(rank): why for rank, why in one.missing.items()},
                    "unknown": one.unknown,
                    "began_ns": one.began_ns,
                }
                for one in self.divergences
            ],
            "waiting": self.waiting,
        }


def compare(dumps: Sequence[Dump], job: str | None = None) -> Verdict:
    """Return what the dumps of one job tell.

    Raises UsageError where they are of several jobs and none is named, or where two are
    of one rank.
    """
    names = sorted({dump.job for dump in dumps})
    if job is None and len(names) > 1:
        raise UsageError(
            f"dumps of {len(names)} jobs: {', '.join(names[:_MOST_LISTED])}; name one "
            f"of them with --job, or its files alone"
        )
    of_job = [dump for dump in dumps if job in (None, dump.job)]
    if not of_job:
        raise UsageError(f"no dump of job {job!r}; there are {', '.join(names)}")
    by_rank: dict[int, Dump] = {}
    for dump in sorted(of_job, key=lambda one: one.rank):
        if dump.rank in by_rank:
            raise UsageError(
                f"two dumps of rank {dump.rank} of job {dump.job}: name one of them"
            )
        by_rank[dump.rank] = dump
    groups = _by_group(by_rank)
    found = [
        one
        for (name, ranks), entries in groups.items()
        if (one := _divergence(name, ranks, entries, by_rank)) is not None
    ]
    found.sort(key=lambda one: one.began_ns)
    size = max(dump.size for dump in by_rank.values())
    verdict = Verdict(
        job=next(iter(by_rank.values())).job,
        size=size,
        reasons={rank: _reason(dump) for rank, dump in by_rank.items()},
        absent=_absent(by_rank, size),
        divergences=found,
    )
    diverged = {(one.group, one.seq) for one in found}
    for (name, _), entries in groups.items():
        verdict.waiting += _in_flight(name, entries, diverged)
    verdict.waiting += _lone_messages(by_rank.values())
    return verdict


def _reason(dump: Dump) -> tuple[str, str]:
    return dump.events[0] if dump.events else (dump.reason, dump.message)


def _absent(by_rank: dict[int, Dump], size: int) -> dict[int, str]:
    """Return ranks without a dump that anybody has seen, or that are few."""
    known = {rank: "" for rank in range(min(size, 4096)) if rank not in by_rank}
    for dump in by_rank.values():
        for seen in dump.seen:
            rank = seen.group.ranks[seen.rank]
            if rank in known and not known[rank]:
                known[rank] = f"{seen.state}, as rank {dump.rank} has seen it"
    return known


def _by_group(
    by_rank: dict[int, Dump],
) -> dict[GroupKey, dict[int, dict[int, Entry]]]:
    """Return collectives by communicator, rank of the job and number."""
    found: dict[GroupKey, dict[int, dict[int, Entry]]] = {}
    for rank, dump in by_rank.items():
        for group in dump.groups.values():
            found.setdefault((group.key, group.ranks), {})[rank] = {}
        for entry in dump.entries:
            if not entry.is_message:
                key = (entry.group.key, entry.group.ranks)
                found[key][rank][entry.seq] = entry
    return found


def _divergence(
    key: str,
    ranks: tuple[int, ...],
    entries: dict[int, dict[int, Entry]],
    by_rank: dict[int, Dump],
) -> Divergence | None:
    """Return the first operation that ranks did not call alike; None: there is none."""
    first = max((min(said, default=0) for said in entries.values()), default=0)
    numbers = sorted({seq for said in entries.values() for seq in said if seq >= first})
    seen = _seen_of(key, ranks, by_rank)
    for seq in numbers:
        calls: dict[str, list[int]] = defaultdict(list)
        missing: dict[int, str] = {}
        unknown: list[int] = []
        for rank in ranks:
            if rank in entries:
                said = entries[rank]
                if seq in said:
                    calls[_words(said[seq])].append(rank)
                elif max(said, default=-1) < seq:
                    missing[rank] = _last_of(said, by_rank[rank])
            elif rank in seen and seen[rank][0].started <= seq:
                missing[rank] = _last_seen(*seen[rank])
            elif rank not in seen:
                unknown.append(rank)
        if len(calls) > 1 or missing:
            began = min(one[seq].created_ns for one in entries.values() if seq in one)
            name = _name_of(key, ranks, by_rank)
            return Divergence(name, seq, dict(calls), missing, unknown, began)
    return None


def _name_of(key: str, ranks: tuple[int, ...], by_rank: dict[int, Dump]) -> str:
    for dump in by_rank.values():
        group = dump.groups.get(key)
        if group is not None and group.ranks == ranks:
            return group.name
    return key


def _seen_of(
    key: str, ranks: tuple[int, ...], by_rank: dict[int, Dump]
) -> dict[int, tuple[SeenRank, Dump]]:
    """Return ranks without a dump as others have seen them, the latest of each."""
    found: dict[int, tuple[SeenRank, Dump]] = {}
    for dump in by_rank.values():
        for one in dump.seen:
            if one.group.key != key or one.group.ranks != ranks:
                continue
            rank = ranks[one.rank]
            if rank in by_rank:
                continue
            if rank not in found or found[rank][0].started < one.started:
                found[rank] = one, dump
    return found


def _words(entry: Entry) -> str:
    """Return what a rank has called, in all that the others have to call, too."""
    said = entry.op
    if entry.op in _SAME_COUNT:
        said += f" of {entry.count} {entry.dtype}"
    if entry.reduction:
        said += f", op {entry.reduction}"
    if entry.root >= 0:
        said += f", root {entry.root}"
    return said


def _last_of(said: dict[int, Entry], dump: Dump) -> str:
    if not said:
        return "has called nothing there"
    last = said[max(said)]
    age_s = (dump.written_ns - last.created_ns) / _NS_PER_S
    return f"its last call was {last.op} #{last.seq}, {age_s:.1f} s before its dump"


def _last_seen(seen: SeenRank, dump: Dump) -> str:
    said = f"no dump; {seen.state}, as rank {dump.rank} has seen it"
    if not seen.started:
        return f"{said}; it had called nothing there"
    return (
        f"{said}; its last call was {seen.last} #{seen.started - 1}, "
        f"{seen.age_ms / 1e3:.1f} s before"
    )


def _in_flight(
    key: str, entries: dict[int, dict[int, Entry]], diverged: set[tuple[str, int]]
) -> list[str]:
    """Return operations that all ranks have called and that are not complete."""
    pending: dict[int, list[int]] = defaultdict(list)
    texts: dict[int, str] = {}
    for rank, said in entries.items():
        for seq, entry in said.items():
            if entry.state == "started" and (entry.group.name, seq) not in diverged:
                pending[seq].append(rank)
                texts[seq] = f"{_words(entry)} (#{seq} on {entry.group.name})"
    return [
        f"{texts[seq]} is not complete on {listed(sorted(ranks))}"
        for seq, ranks in sorted(pending.items())
    ]


def _lone_messages(dumps: Iterable[Dump]) -> list[str]:
    """Return messages that are under way, with the other end that they lack."""
    found = []
    for dump in dumps:
        for entry in dump.entries:
            if not entry.is_message or entry.state != "started":
                continue
            group: DumpedGroup = entry.group
            towards = "to" if entry.op in SENT else "from"
            other = "any rank" if entry.peer < 0 else f"rank {group.ranks[entry.peer]}"
            found.append(
                f"{entry.op} of {entry.count} bytes {towards} {other}, tag "
                f"{entry.tag}, on {group.name} is not complete on rank {dump.rank}"
            )
    return found


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in words, shortened where they are many."""
    plural = "s" if len(ranks) != 1 else ""
    shown = ", ".join(map(str, ranks[:_MOST_LISTED]))
    rest = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return f"rank{plural} {shown}{rest}"


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return a verdict in words."""
    num_dumps = len(verdict.reasons)
    lines = [f"job {verdict.job}: {num_dumps} dumps of {verdict.size} ranks"]
    if verdict.absent:
        named = [rank for rank in verdict.absent if verdict.absent[rank]]
        lines.append(f"no dump of {listed([*verdict.absent])}")
        lines += [f"  rank {r}: {verdict.absent[r]}" for r in named[:_MOST_LISTED]]
    if not verdict.divergences:
        lines.append("all ranks have called the same, as far as their dumps go back")
    for number, one in enumerate(verdict.divergences[:_MOST_LISTED]):
        word = "first divergence" if number == 0 else "then"
        lines.append(f"{word}: operation #{one.seq} on {one.group}")
        for call, ranks in one.calls.items():
            lines.append(f"  {call}: {listed(ranks)}")
        for rank, why in [*one.missing.items()][:_MOST_LISTED]:
            lines.append(f"  missing: rank {rank}; {why}")
        if len(one.missing) > _MOST_LISTED:
            lines.append(f"  missing, too: {len(one.missing) - _MOST_LISTED} ranks")
        if one.unknown:
            lines.append(f"  not known: {listed(one.unknown)}")
    lines += verdict.waiting[:_MOST_LISTED]
    for reason, ranks in _reasons(verdict).items():
        lines.append(f"{reason}: {listed(ranks)}")
    return lines


def _reasons(verdict: Verdict) -> dict[str, list[int]]:
    """Return ranks by why they have a dump: the first line of it."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, (reason, message) in verdict.reasons.items():
        head = message.split("\n")[0].split("; it stays in flight")[0]
        head = head if len(head) <= 160 else f"{head[:160]}..."
        # The rank stands in the text of each.
        text = head.replace(f", rank {rank}:", ":")
        found[f"dumped because of {reason} ({text})"].append(rank)
    return found
