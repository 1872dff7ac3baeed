# SPDX-License-Identifier: Apache-2.0
"""Reads a dump of a rank, which may be cut short, damaged, or made by somebody else.

Each field has its type and range, so the code that compares ranks meets nothing but
what the engine writes. Words are those of torch's flight recorder where it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commrt.errors import UsageError
from commrt.files.plain_json import Field, MalformedError, parsed
from commrt.files.read import Kind, read_text
from commrt.files.visible import visible
from commrt.vocabulary.dtypes import DTYPES
from commrt.vocabulary.operations import ROWS

__all__ = [
    "DUMPS",
    "Dump",
    "DumpedGroup",
    "Entry",
    "SeenRank",
    "find_dumps",
    "read_dump",
]

FORMAT = "commrt-flight/1"
UNNAMED = "an operation"
"""The engine's word for one that has no row in the table of operations."""
DUMPS = Kind(
    f"dump of {FORMAT}",
    "a .json file that COMMRT_DUMP=FOLDER makes",
    most_nbytes=64 << 20,
    error=UsageError,
)
_MOST_RANKS = 1 << 24
_MOST_GROUPS = 2048
_MOST_ENTRIES = 100_000
_MOST_STATES = 1_000_000
_MOST_TEXT = 8192
_MOST_MEMBERS_TEXT = 16 << 20
_STATES = ("started", "completed", "failed")
_DOES = ("writing", "waiting", "computing", "stopped", "dead", "left", "unknown")
_MESSAGES = ("send", "recv")
_TITLE = "commrt:"
_TYPES = tuple(dtype.name for dtype in DTYPES)


@dataclass(frozen=True)
class DumpedGroup:
    """A communicator, as a dump tells it."""

    key: str
    """Its name in the dump."""
    name: str
    """Its name in messages."""
    ranks: tuple[int, ...]
    """Its members, as ranks of the job."""
    rank: int
    """The place of the dump's rank among them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation that a rank has started."""

    group: DumpedGroup
    """The communicator."""
    op: str
    """The operation, as commrt calls it."""
    seq: int
    """Its number; collectives and messages count each by themselves."""
    count: int
    """Elements; of a message its bytes."""
    dtype: str
    """Element type."""
    reduction: str
    """Reduction; empty for operations that have none."""
    root: int
    """Rank of the group; -1: it has none."""
    peer: int
    """The other rank of a message, -1: any, or no message."""
    tag: int
    """Tag of a message."""
    state: str
    """``started``, ``completed`` or ``failed``."""
    created_ns: int
    """Time since 1970."""
    took_ms: float | None
    """Its duration, where that is known."""

    @property
    def is_message(self) -> bool:
        """True for a send or a receive."""
        return self.op in _MESSAGES


@dataclass(frozen=True)
class SeenRank:
    """What the rank that wrote a dump could tell of another rank of its node."""

    group: DumpedGroup
    """The communicator."""
    rank: int
    """Rank of the group."""
    state: str
    """As in RankState; ``writing`` for the dump's own rank."""
    started: int
    """Collectives that it had started there."""
    last: str
    """The latest of these."""
    age_ms: float
    """Since that began."""


@dataclass
class Dump:
    """The dump of one rank."""

    path: Path
    """The file."""
    job: str
    """Name of the job."""
    rank: int
    """Rank in the job."""
    size: int
    """Ranks of the job."""
    host: str
    """Name of the machine."""
    pid: int
    """Number of the process."""
    written_ns: int
    """Time since 1970."""
    reason: str
    """Why it was written: ``timeout``, ``signal``, ..."""
    message: str
    """The text of that."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """Faults before that: reasons and texts, the first one first."""
    groups: dict[str, DumpedGroup] = field(default_factory=dict)
    """Communicators by their keys."""
    seen: list[SeenRank] = field(default_factory=list)
    """Ranks of the node."""
    entries: list[Entry] = field(default_factory=list)
    """Operations, by communicator and in their order."""


def find_dumps(paths: Sequence[str | Path]) -> list[Path]:
    """Return the dumps among files and folders; UsageError where there is none."""
    found: list[Path] = []
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
        except ValueError as error:  # a null character
            raise UsageError(f"{visible(str(path))} is no path: {error}") from error
        inside = sorted(path.glob("dump-*.json")) if is_folder else [path]
        if not inside:
            raise UsageError(
                f"{visible(str(path))} has no dump-JOB-rankN.json: run the program "
                f"with COMMRT_DUMP={visible(str(path))}, or call commrt.trace.dump()"
            )
        found += inside
    if not found:
        raise UsageError("no files: name dumps, or the folder that COMMRT_DUMP named")
    return list(dict.fromkeys(found))


def read_dump(path: Path) -> Dump:
    """Return the dump in a file; UsageError that names the file where it is none."""
    text = read_text(path, DUMPS)
    try:
        return _dump(path, parsed(text))
    except MalformedError as error:
        raise DUMPS.refused(
            path,
            f"{error}; expected {DUMPS.made_by}: a file that was cut short cannot be "
            f"read, so copy it again or leave it out",
        ) from error


def _dump(path: Path, whole: Field) -> Dump:
    if not isinstance(whole.value, dict) or whole.value.get("format") != FORMAT:
        raise whole.wrong(f"a mapping with the format {FORMAT}")
    said = whole.fields(
        [
            *("format", "version", "job", "rank", "size", "host", "pid", "events"),
            *("written_ns", "reason", "message", "pg_config", "pg_status"),
            *("rank_states", "entries"),
        ]
    )
    size = said["size"].integer(1, _MOST_RANKS)
    dump = Dump(
        path=path,
        job=said["job"].text(_MOST_TEXT),
        rank=said["rank"].integer(0, size - 1),
        size=size,
        host=said["host"].text(_MOST_TEXT),
        pid=said["pid"].integer(),
        written_ns=said["written_ns"].integer(),
        reason=said["reason"].text(_MOST_TEXT),
        message=said["message"].text(_MOST_TEXT),
    )
    for each in said["events"].items(64):
        event = each.fields(["reason", "message", "time_ns"])
        event["time_ns"].integer()
        pair = (event["reason"].text(_MOST_TEXT), event["message"].text(_MOST_TEXT))
        dump.events.append(pair)
    for key, each in said["pg_config"].entries(_MOST_GROUPS):
        dump.groups[key] = _group(key, each, dump)
    for each in said["rank_states"].items(_MOST_STATES):
        dump.seen.append(_seen(each, dump))
    for each in said["entries"].items(_MOST_ENTRIES):
        dump.entries.append(_entry(each, dump))
    return dump


def _group(key: str, given: Field, dump: Dump) -> DumpedGroup:
    said = given.fields(["name", "desc", "ranks", "rank"])
    members = parsed(said["ranks"].text(_MOST_MEMBERS_TEXT), said["ranks"].place)
    ranks = members.integers(0, dump.size - 1)
    if not ranks or len({*ranks}) != len(ranks):
        raise said["ranks"].wrong("distinct ranks")
    rank = said["rank"].integer(0, len(ranks) - 1)
    if ranks[rank] != dump.rank:
        raise said["rank"].wrong(f"the place of rank {dump.rank} among the ranks")
    return DumpedGroup(key, said["name"].text(_MOST_TEXT), ranks, rank)


def _group_of(given: Field, dump: Dump) -> DumpedGroup:
    """Return the group that ``process_group``, a key and a description, names."""
    both = [each.text(_MOST_TEXT) for each in given.items(2)]
    if len(both) != 2 or both[0] not in dump.groups:
        raise given.wrong("the key of a group in pg_config, and a description")
    return dump.groups[both[0]]


def _milliseconds(given: Field) -> float:
    return given.number(above=-1.0, most=1e15)


def _seen(given: Field, dump: Dump) -> SeenRank:
    said = given.fields(
        ["pg_id", "process_group", "rank", "state", "started", "last", "age_ms"],
        ["waits_in", "waits_seq", "waits_on", "waits_peer", "waits_ms"],
    )
    said["pg_id"].integer()
    group = _group_of(said["process_group"], dump)
    return SeenRank(
        group=group,
        rank=said["rank"].integer(0, len(group.ranks) - 1),
        state=said["state"].one_of(_DOES),
        started=said["started"].integer(),
        last=said["last"].text(_MOST_TEXT),
        age_ms=_milliseconds(said["age_ms"]),
    )


def _entry(given: Field, dump: Dump) -> Entry:
    said = given.fields(
        [
            *("record_id", "pg_id", "process_group", "collective_seq_id"),
            *("p2p_seq_id", "op_id", "profiling_name", "time_created_ns"),
            *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
            *("state", "time_discovered_started_ns", "time_discovered_completed_ns"),
            *("duration_ms", "retired", "timeout_ms", "is_p2p", "frames"),
            *("reduction", "root", "peer", "tag"),
        ]
    )
    group = _group_of(said["process_group"], dump)
    last = len(group.ranks) - 1
    title = said["profiling_name"].text(_MOST_TEXT)
    if title not in _TITLES:
        raise said["profiling_name"].wrong("an operation of commrt's")
    is_message = said["is_p2p"].flag()
    op = title.removeprefix(_TITLE)
    if is_message != (op in _MESSAGES):
        raise said["is_p2p"].wrong("true for messages only")
    return Entry(
        group=group,
        op=op,
        seq=said["collective_seq_id"].integer(1) - 1,
        count=_only(said["input_sizes"], 2).integer(),
        dtype=_only(said["input_dtypes"], 1).one_of(_TYPES),
        reduction=said["reduction"].text(_MOST_TEXT),
        root=said["root"].integer(-1, last),
        peer=said["peer"].integer(-1, last),
        tag=said["tag"].any_integer(),
        state=said["state"].one_of(_STATES),
        created_ns=said["time_created_ns"].integer(),
        took_ms=said["duration_ms"].optional(_milliseconds),
    )


def _only(given: Field, depth: int) -> Field:
    """Return the one value in so many lists around it."""
    for _ in range(depth):
        inside = [*given.items(1)]
        if len(inside) != 1:
            raise given.wrong("a list of one")
        given = inside[0]
    return given


_TITLES = frozenset(f"{_TITLE}{row.name}" for row in ROWS) | {f"{_TITLE}{UNNAMED}"}
