# SPDX-License-Identifier: Apache-2.0
"""What a program has called, counted by the places in it, beside what it should call.

The expected calls are a sum of ``calls(...)``, written from formulas; the found ones
come from the log that ``commrt.trace`` has written. Equal means: the same number of
calls, of the same bytes, of the same ranks, from the same functions, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from commrt.trace.job import load
from commrt.trace.log import Log, Operation

__all__ = ["Call", "Calls", "by_rank", "calls", "nbytes_of"]


class Call(NamedTuple):
    """What calls have in common."""

    place: str
    """Module and function of the program."""
    op: str
    """Operation, as commrt calls it."""
    ranks: tuple[int, ...]
    """Members of its group; of a message, the rank that sends and the one that gets."""
    nbytes: int
    """Bytes of each, as ``commrt.trace.volumes.MEANING`` says."""


Calls = Counter[Call]


def calls(
    place: str, op: str, ranks: Iterable[int], *nbytes: int, times: int = 1
) -> Calls:
    """Return calls of these lengths, each so many times."""
    found: Calls = Counter()
    for each in nbytes:
        found[Call(place, op, tuple(ranks), each)] += times
    return found


def by_rank(folder: str | Path) -> list[Calls]:
    """Return the calls of each rank whose logs are in a folder."""
    job = load([folder])
    assert job.notes == [], job.notes
    assert len(job.logs) == job.size
    return [_counted(log) for log in job.logs]


def _counted(log: Log) -> Calls:
    assert all(not one.failed for one in log.operations)
    return Counter(_call(one) for one in log.operations)


def _call(one: Operation) -> Call:
    # A class in the function's name is there from Python 3.11 on.
    function = one.site.function.rpartition(".")[2]
    ranks = one.group.ranks
    if one.op in ("send", "recv"):
        ends = (ranks[one.group.rank], ranks[one.peer])
        ranks = ends if one.op == "send" else ends[::-1]
    return Call(f"{Path(one.site.file).stem}.{function}", one.op, ranks, one.nbytes)


def nbytes_of(found: Calls) -> int:
    """Return the bytes of all calls together, receives left out."""
    return sum(n * call.nbytes for call, n in found.items() if call.op != "recv")
