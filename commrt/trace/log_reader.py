# SPDX-License-Identifier: Apache-2.0
"""Reads a rank's log, which may be cut short, damaged, or prepared by somebody else.

Each line has its schema, with types and ranges, so the code that joins and sums what
was read meets nothing but what a recorder writes.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from commrt.errors import UsageError
from commrt.files.plain_json import MOST_INTEGER, Field, MalformedError, parsed
from commrt.files.read import Kind, lines_of
from commrt.files.visible import visible
from commrt.trace.log import (
    FORMAT,
    KIND_FIELDS,
    MOST_CALLS,
    Log,
    LoggedGroup,
    Operation,
    Place,
)

__all__ = ["LOGS", "read_log"]

LOGS = Kind(
    f"log of {FORMAT}",
    "a .jsonl file that COMMRT_TRACE=FOLDER makes",
    most_nbytes=256 << 20,
    error=UsageError,
    most_line_nbytes=4 << 20,
)
_MOST_RANKS = 1 << 24
_MOST_TEXT = 4096
_HEAD = tuple(
    each.name for each in fields(Log) if each.name not in ("operations", "is_complete")
)
_OPTIONAL = ("num_dropped", "error")


def read_log(path: Path) -> Log:
    """Return the log in a file; one that ends early is not ``is_complete``.

    Raises UsageError where it is no log.
    """
    lines = lines_of(path, LOGS)
    try:
        reader = _Reader(_first(path, next(lines, "")))
        for number, line in enumerate(lines, 2):
            reader.take(number, line)
    except MalformedError as error:
        raise LOGS.refused(
            path,
            f"it is damaged: {error}; expected the lines that this version writes: "
            f"record the run again",
        ) from error
    return reader.log


def _first(path: Path, line: str) -> Field:
    """Return the first line's field; UsageError where it is of another format."""
    try:
        head = parsed(line, "line 1")
    except MalformedError:
        head = None
    value = None if head is None else head.value
    if head is None or not isinstance(value, dict) or value.get("format") != FORMAT:
        raise LOGS.refused(
            path,
            f"its first line is {visible(repr(line[:60]))}; logs are the .jsonl files "
            f"that COMMRT_TRACE=FOLDER makes",
        )
    return head


class _Reader:
    """Takes lines, and holds the log as far as it was read."""

    def __init__(self, head: Field) -> None:
        self.log = _log(head)
        self._groups: list[LoggedGroup] = []
        self._kinds: list[tuple[LoggedGroup, dict[str, Any]]] = []
        self._sites: list[Place] = []
        self._cut: str | None = None
        """The fault of the last line, which may be cut off."""

    def take(self, number: int, line: str) -> None:
        """Take one line more; MalformedError where one before the last is damaged."""
        if self._cut is not None:
            raise MalformedError(self._cut)
        place = f"line {number}"
        self.log.is_complete = False
        try:
            field = parsed(line, place)
        except MalformedError as error:
            self._cut = str(error)
            return
        if isinstance(field.value, list):
            self._operation(field)
            return
        for name, value in field.entries():
            if len(field.value) != 1 or name not in ("group", "kind", "site", "end"):
                break
            if name == "group":
                self._groups.append(_group(value))
            elif name == "kind":
                self._kinds.append(self._kind(value))
            elif name == "site":
                self._sites.append(_place(value))
            else:
                num_calls = value.integer()
                self.log.is_complete = num_calls == len(self.log.operations)
            return
        raise MalformedError(f"{place}: expected a call, group, kind, site or end")

    def _operation(self, field: Field) -> None:
        values = [*field.items(5)]
        if len(values) != 5:
            raise field.wrong("five numbers")
        if len(self.log.operations) == MOST_CALLS:
            raise MalformedError(f"{field.place}: more than {MOST_CALLS} calls")
        kind, site, seq, start, end = values
        group, said = self._kinds[kind.integer(0, len(self._kinds) - 1)]
        start_ns, end_ns = start.integer(), end.any_integer()
        if 0 < abs(end_ns) < start_ns:
            raise end.wrong(f"0, or a time from {start_ns} on")
        self.log.operations.append(
            Operation(
                group=group,
                **said,
                seq=seq.integer(),
                start_ns=start_ns,
                end_ns=abs(end_ns) or None,
                failed=end_ns < 0,
                site=self._sites[site.integer(0, len(self._sites) - 1)],
            )
        )

    def _kind(self, field: Field) -> tuple[LoggedGroup, dict[str, Any]]:
        each = [*field.items(1 + len(KIND_FIELDS))]
        if len(each) != 1 + len(KIND_FIELDS):
            raise field.wrong(f"{1 + len(KIND_FIELDS)} values")
        at, *values = each
        group = self._groups[at.integer(0, len(self._groups) - 1)]
        said = dict(zip(KIND_FIELDS, values, strict=True))
        found: dict[str, Any] = {
            name: said[name].text(_MOST_TEXT)
            for name in ("op", "dtype", "backend", "algorithm")
        }
        for name in ("nbytes", "out_nbytes", "itemsize"):
            found[name] = said[name].integer()
        for name in ("peer", "root"):
            found[name] = said[name].integer(-1, group.size - 1)
        found["tag"] = said["tag"].any_integer()
        found["stream"] = said["stream"].optional(lambda one: one.integer(0, 1 << 64))
        return group, {name: found[name] for name in KIND_FIELDS}


def _log(head: Field) -> Log:
    required = [name for name in _HEAD if name not in _OPTIONAL]
    said = head.fields(["format", *required], _OPTIONAL)
    size = said["size"].integer(1, _MOST_RANKS)
    return Log(
        job=said["job"].text(_MOST_TEXT),
        rank=said["rank"].integer(0, size - 1),
        size=size,
        host=said["host"].text(_MOST_TEXT),
        boot=said["boot"].text(_MOST_TEXT),
        pid=said["pid"].integer(),
        wall_offset_ns=said["wall_offset_ns"].any_integer(),
        num_dropped=said["num_dropped"].integer() if "num_dropped" in said else 0,
        error=said["error"].text(1 << 20) if "error" in said else "",
        is_complete=False,
    )


def _group(field: Field) -> LoggedGroup:
    said = field.fields(["key", "layer", "name", "desc", "dimension", "ranks", "rank"])
    ranks = said["ranks"].integers(0, _MOST_RANKS)
    if not ranks:
        raise said["ranks"].wrong("ranks")
    return LoggedGroup(
        key=said["key"].text(_MOST_TEXT),
        layer=said["layer"].text(_MOST_TEXT),
        name=said["name"].text(_MOST_TEXT),
        desc=said["desc"].text(_MOST_TEXT),
        dimension=said["dimension"].text(_MOST_TEXT),
        ranks=ranks,
        rank=said["rank"].integer(0, len(ranks) - 1),
    )


def _place(field: Field) -> Place:
    said = field.fields(["file", "line", "function"])
    return Place(
        said["file"].text(_MOST_TEXT),
        said["line"].integer(0, MOST_INTEGER),
        said["function"].text(_MOST_TEXT),
    )
