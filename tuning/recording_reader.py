# SPDX-License-Identifier: Apache-2.0
"""Reads a recording of ``commrt-tune run --raw``, which somebody else may have made.

Every field has a type and a range, and their numbers have limits: what decides and
draws meets nothing but what a run measures, and not more than it can look through.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import cast

from commrt.errors import TableError, UsageError
from commrt.files.plain_json import Field, MalformedError, parsed
from commrt.files.read import Kind, read_text
from commrt.select.facts import LINK_CLASSES, Candidate, CommFacts, LinkClass
from commrt.select.fingerprint import Cpu, Gpu, Machine, Nic
from commrt.select.network import Network
from commrt.select.schema import DEVICES
from commrt.tuning.samples import Failure, Launch, Recording, Sample

__all__ = ["RECORDINGS", "load_recording", "parse_recording"]

RECORDINGS = Kind(
    "recording",
    "what commrt-tune run --raw wrote",
    most_nbytes=32 << 20,
    error=TableError,
)
_MOST_RANKS = 1 << 20
_MOST_LAUNCHES = 1000
_MOST_OPERATIONS = 100
_MOST_SAMPLES = 200_000
_MOST_KINDS = 1000
"""Most sizes, and most candidates, of one operation."""
_MOST_LOOKS = 10**8
"""Most samples that decisions look at: each operation of each kind of communicators
looks through all."""
_MOST_US = 1e12
_SECTIONS = ("launches", "samples", "failures", "orders", "software")
_NEW_SECTIONS = ("machine", "date", "unasked", "unfinished")
_REASONS = ("budget", "links", "busy")


def load_recording(path: Path) -> Recording:
    """Return what ``Recording.save`` wrote; TableError if it is something else."""
    text = read_text(path, RECORDINGS)
    try:
        return parse_recording(text)
    except MalformedError as error:
        raise RECORDINGS.refused(
            path, f"{error}; expected {RECORDINGS.made_by}"
        ) from error


def parse_recording(text: str) -> Recording:
    """Return the recording that ``to_json`` wrote; MalformedError if it is none."""
    whole = parsed(text)
    said = whole.fields(_SECTIONS, _NEW_SECTIONS)
    found = Recording()
    for key, value in said["software"].entries(_MOST_KINDS):
        found.software[key] = _plain(value)
    if "machine" in said:
        found.machine = said["machine"].optional(_machine)
    if "date" in said:
        found.date = said["date"].text(64)
    for launch in map(_launch, said["launches"].items(_MOST_LAUNCHES)):
        if launch.index in found.launches:
            raise said["launches"].wrong(f"launch {launch.index} only once")
        found.begin(launch)
    found.samples = [
        _sample(each, found) for each in said["samples"].items(_MOST_SAMPLES)
    ]
    found.failures = [*map(_failure, said["failures"].items(_MOST_SAMPLES))]
    for op, candidates in said["orders"].entries(_MOST_OPERATIONS):
        found.orders[op] = [*map(_candidate, candidates.items(_MOST_KINDS))]
    if "unasked" in said:
        for each in said["unasked"].items(_MOST_SAMPLES):
            _unasked(each, found)
    if "unfinished" in said:
        for each in said["unfinished"].items(_MOST_SAMPLES):
            _unfinished(each, found)
    _check_amounts(found, said["samples"])
    return found


def _unasked(field: Field, found: Recording) -> None:
    ranks, links, op, nbytes, candidate = _row(field, 5)
    cell = (
        ranks.integer(1, _MOST_RANKS),
        links.one_of(LINK_CLASSES),
        op.text(64),
        nbytes.integer(),
    )
    found.unasked[cell] = _candidate(candidate)


def _unfinished(field: Field, found: Recording) -> None:
    ranks, op, nbytes, why = _row(field, 4)
    cell = (ranks.integer(1, _MOST_RANKS), op.text(64), nbytes.integer())
    found.unfinished[cell] = why.one_of(_REASONS)


def _row(field: Field, length: int) -> list[Field]:
    row = [*field.items(length)]
    if len(row) != length:
        raise field.wrong(f"a list of {length}")
    return row


def _check_amounts(found: Recording, samples: Field) -> None:
    """Raise where so much was measured that nobody could look through it."""
    sizes: dict[str, set[int]] = defaultdict(set)
    candidates: dict[str, set[Candidate]] = defaultdict(set)
    for sample in found.samples:
        sizes[sample.op].add(sample.nbytes)
        candidates[sample.op].add(sample.candidate)
    for what, kinds in (("sizes", sizes), ("candidates", candidates)):
        for op, each in kinds.items():
            if len(each) > _MOST_KINDS:
                raise MalformedError(
                    f"{samples.place}: {len(each)} {what} of {op[:40]!r}, and a run "
                    f"has at most {_MOST_KINDS}"
                )
    looks = len(found.groups()) * len(found.orders) * len(found.samples)
    if looks > _MOST_LOOKS:
        raise MalformedError(
            f"{samples.place}: {len(found.samples)} samples of {len(found.orders)} "
            f"operations on {len(found.groups())} kinds of communicators are more than "
            f"a run has"
        )


def _launch(field: Field) -> Launch:
    said = field.fields(["index", "facts", "held_out"], ["device"])
    index, held_out = said["index"].integer(), said["held_out"].flag()
    device = said["device"].one_of(DEVICES) if "device" in said else "host"
    return Launch(index, _facts(said["facts"]), held_out, device)


def _facts(field: Field) -> CommFacts:
    needed = ["size", "nodes", "ppn", "cores", "link_class"]
    said = field.fields(needed, ["layout", "network"])
    size = said["size"].integer(1, _MOST_RANKS)
    nodes = said["nodes"].integer(1, size)
    layout: tuple[int, ...] = ()
    if "layout" in said:
        layout = said["layout"].integers(0, nodes - 1)
        if len(layout) not in (0, size):
            raise said["layout"].wrong(f"the nodes of {size} ranks")
    return CommFacts(
        size,
        nodes,
        ppn=said["ppn"].integer(1, size),
        cores=_cores(said["cores"]),
        link_class=cast("LinkClass", said["link_class"].one_of(LINK_CLASSES)),
        layout=layout,
        network=said["network"].optional(_network) if "network" in said else None,
    )


def _cores(field: Field) -> float:
    """Return a whole number, or a part of one core."""
    part = type(field.value) is float
    return field.number(above=0, most=1) if part else field.integer(1)


def _network(field: Field) -> Network:
    said = field.fields(["library", "gbps", "latency_us"])
    gbps, latency_us = (
        said[name].number(above=0.0, most=_MOST_US) for name in ("gbps", "latency_us")
    )
    return Network(said["library"].text(64), gbps, latency_us)


def _sample(field: Field, found: Recording) -> Sample:
    required = ["launch", "op", "nbytes", "candidate", "us"]
    said = field.fields(required, ["link_class", "disturbed"])
    launch = said["launch"].integer()
    if launch not in found.launches:
        raise said["launch"].wrong("the index of a launch")
    links = ""
    if "link_class" in said:
        links = said["link_class"].one_of(("", *LINK_CLASSES))
    return Sample(
        launch,
        said["op"].text(64),
        said["nbytes"].integer(1),
        _candidate(said["candidate"]),
        tuple(each.number(above=0.0, most=_MOST_US) for each in said["us"].items()),
        links,
        said["disturbed"].integer() if "disturbed" in said else 0,
    )


def _failure(field: Field) -> Failure:
    said = field.fields(["ranks", "op", "nbytes", "candidate", "reason"])
    return Failure(
        said["ranks"].integer(1, _MOST_RANKS),
        said["op"].text(64),
        said["nbytes"].integer(),
        _candidate(said["candidate"]),
        said["reason"].text(1 << 20),
    )


def _candidate(field: Field) -> Candidate:
    try:
        return Candidate.parse(field.text(1000))
    except UsageError as error:
        raise MalformedError(f"{field.place}: {error}") from error


def _machine(field: Field) -> Machine:
    said = field.fields(["cpu", "gpus", "nics", "kernel", "host"], ["fingerprint"])
    cpu = said["cpu"].fields(["model", "sockets", "cores"])
    return Machine(
        Cpu(cpu["model"].text(), cpu["sockets"].integer(), cpu["cores"].integer()),
        tuple(map(_gpu, said["gpus"].items(_MOST_KINDS))),
        tuple(map(_nic, said["nics"].items(_MOST_KINDS))),
        said["kernel"].text(),
        said["host"].text(),
    )


def _gpu(field: Field) -> Gpu:
    said = field.fields(["model", "count"])
    return Gpu(said["model"].text(), said["count"].integer())


def _nic(field: Field) -> Nic:
    said = field.fields(["model", "count"], ["gbps"])
    gbps = None
    if "gbps" in said:
        gbps = said["gbps"].optional(lambda one: one.number(above=0.0, most=1e9))
    return Nic(said["model"].text(), said["count"].integer(), gbps)


def _plain(field: Field, levels: int = 2) -> object:
    """Return what is recorded and decides nothing: words and numbers, few levels."""
    value = field.value
    if isinstance(value, dict) and levels:
        return {key: _plain(one, levels - 1) for key, one in field.entries(_MOST_KINDS)}
    if isinstance(value, list) and levels:
        return [_plain(one, levels - 1) for one in field.items(_MOST_KINDS)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return field.text()
    if isinstance(value, int):
        return field.any_integer()
    return field.number(above=-_MOST_US, most=_MOST_US)
