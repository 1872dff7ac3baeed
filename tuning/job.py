# SPDX-License-Identifier: Apache-2.0
"""The job of one launch of the tuner, as one line of JSON for its ranks."""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commrt.files.write import write_file
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import operation

__all__ = ["NOBODY", "Item", "Job", "Turn", "middle", "size_pairs", "sizes"]

_SMALLEST_NBYTES = 8
_TURN = struct.Struct("<qQ")
NOBODY = -1
"""Number of no item."""
_STEP = 4
_SHORT_STEP_AT = 32
"""First size with one more step: from here to 128 bytes payloads leave the lines of
their messages."""
_TYPICAL_NBYTES = 16384
_SHORT_STEPS_FROM = 384 << 10
"""First size with short steps: from here on buffers outgrow one cache after the other,
and some candidates' buffers do so sooner. It is three times a power of two. The winner
at a power of two may lose at the sizes between, where most buffers lie
(docs/performance.md, How well auto chooses)."""


@dataclass(frozen=True)
class Item:
    """One thing to time."""

    op: str
    """Operation."""
    nbytes: int
    """Rule bytes."""
    candidate: str
    """Candidate, as text."""


@dataclass(frozen=True)
class Job:
    """The work of one launch."""

    ops: tuple[str, ...]
    """Operations."""
    dtype: str
    """Element type."""
    max_nbytes: int
    """Largest whole vector."""
    held_out: bool
    """True if the sizes lie off the grid, to judge the table."""
    seed: int
    """Seed of the order; different in every launch."""
    budget_s: float
    """Seconds that the ranks may measure."""
    flags: str | None = None
    """File of shared flags for the barrier; None: the communicator's barrier."""
    turn: str | None = None
    """File that says whose turn it is, as a Turn; None: nobody wants to know."""
    excluded: tuple[tuple[str, str], ...] = ()
    """(op, candidate) that failed earlier."""
    skipped: tuple[Item, ...] = ()
    """The cells that a restarted launch has done."""
    losers: tuple[tuple[Item, str], ...] = ()
    """Clear losers of earlier launches, and the class of the links where they lost."""
    variants: tuple[Item, ...] = ()
    """Candidates to measure beside those that the ranks find."""
    refined: tuple[tuple[str, int], ...] = ()
    """(op, rule bytes) to measure beside the grid."""
    model_ratio: float = 30.0
    """Candidates this much above the model's best are not tried; it is only a model."""
    loss_ratio: float = 1.5
    """A candidate whose fastest repetition is this much above the best is given up."""
    device: str = "cpu"
    """Memory of the arrays: cpu, cuda, or thread, a device of threads."""
    relative_ci: float = 0.05
    """Half width of the interval at which repetitions stop."""
    max_repetitions: int = 100
    """Repetitions at which they stop anyway."""

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that ``to_json`` wrote."""
        plain: dict[str, Any] = json.loads(text)
        plain["ops"] = tuple(plain["ops"])
        for name in ("excluded", "refined"):
            plain[name] = tuple((op, one) for op, one in plain[name])
        for name in ("skipped", "variants"):
            plain[name] = tuple(Item(**item) for item in plain[name])
        plain["losers"] = tuple((Item(**item), at) for item, at in plain["losers"])
        return cls(**plain)


class Turn:
    """A file with the number of the item that runs, and how many turns began.

    Written without a system call, before each turn: so the parent sees that the ranks
    live, and whom to blame if they do not.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _TURN.size)
        self._begun = 0

    @staticmethod
    def create(path: str) -> None:
        """Write the file, for no item."""
        write_file(path, _TURN.pack(NOBODY, 0))

    def set(self, index: int) -> None:
        """Say that a turn of item ``index`` begins now."""
        self._begun += 1
        self._map[:] = _TURN.pack(index, self._begun)

    @staticmethod
    def read(path: str) -> tuple[int, int]:
        """Return which item ran last, NOBODY if none did, and how many turns began."""
        index, begun = _TURN.unpack(Path(path).read_bytes())
        return index, begun


def sizes(op: str, size: int, job: Job) -> list[int]:
    """Return the rule bytes to measure: the grid of ``size_pairs``, or between."""
    pairs = size_pairs(op, size, job.dtype, job.max_nbytes)
    column = [between if job.held_out else grid for grid, between in pairs]
    column += [nbytes for refined_op, nbytes in job.refined if refined_op == op]
    ranks = _blocks(op, size)
    return sorted({nbytes for nbytes in column if nbytes * ranks <= job.max_nbytes})


def size_pairs(
    op: str, size: int, dtype: str, max_nbytes: int
) -> list[tuple[int, int]]:
    """Return the grid's sizes, each with the held-out size above it.

    The grid: 8, 32, 64, 128 bytes, then by 4 to 128 KiB, then 384 KiB, then by 2.
    Every size is a whole number of elements of the operation: of one element per rank
    where x is cut into blocks.
    """
    if operation(op).rule_bytes == "none":
        return [(1, 1)]  # a barrier has no bytes; any number stands for it
    unit = _unit(op, size, dtype)
    if operation(op).rule_bytes == "any":
        # No rank knows all lengths, so one rule is for all: one size stands for them.
        return [(_TYPICAL_NBYTES, -(-_TYPICAL_NBYTES * 9 // 5 // unit) * unit)]
    pairs, nbytes = [], _SMALLEST_NBYTES
    while nbytes * _blocks(op, size) <= max_nbytes:
        between = nbytes * 9 // 5
        pairs.append((-(-nbytes // unit) * unit, -(-between // unit) * unit))
        nbytes = _next_size(nbytes)
    return pairs


def _next_size(nbytes: int) -> int:
    """Return the size of the grid after ``nbytes``."""
    leaves = nbytes in (_SHORT_STEP_AT, 2 * _SHORT_STEP_AT)
    if leaves or nbytes >= _SHORT_STEPS_FROM:
        return 2 * nbytes
    far = _STEP * nbytes
    return _SHORT_STEPS_FROM if far > _SHORT_STEPS_FROM else far


def middle(op: str, size: int, dtype: str, low: int, high: int) -> int:
    """Return the size halfway between two of the grid; ``low`` if there is none."""
    if low < 1 or high <= 2 * low:
        return low
    unit = _unit(op, size, dtype)
    return round(math.sqrt(low * high) / unit) * unit


def _unit(op: str, size: int, dtype: str) -> int:
    """Return the number that the rule's bytes must be a multiple of."""
    spec = operation(op)
    scatters = spec.reduces and spec.out_count == "div_size"
    return dtype_by_name(dtype).itemsize * (size if scatters else 1)


def _blocks(op: str, size: int) -> int:
    """Return the length of the whole vector, in times of the rule's bytes."""
    return 1 if operation(op).rule_bytes == "whole" else size
