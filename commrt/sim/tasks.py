# SPDX-License-Identifier: Apache-2.0
"""Tasks of ranks: the messages and the work that other simulators read.

A schedule becomes tasks, and so does the log of a run. ``goal.py`` and ``chakra.py``
write tasks in the languages of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from commrt.schedule.ir import Op, RankProgram, Schedule, Slice
from commrt.sim.costs import Costs

__all__ = ["Task", "program_tasks", "schedule_tasks"]

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """A message's end, or work, of one rank."""

    kind: Literal["send", "recv", "calc"]
    after: tuple[int, ...]
    """Earlier tasks of this rank that must be done first."""
    name: str
    """Its meaning in the schedule or the program, for people."""
    nbytes: int = 0
    """Bytes of a message."""
    peer: int = -1
    """Rank at a message's other end."""
    tag: int = -1
    """Tag of a message: no other one between these two ranks has it."""
    duration_ns: int = 0
    """Time that work takes."""


def schedule_tasks(
    schedule: Schedule, num_elements: int, itemsize: int, costs: Costs | None = None
) -> Iterator[list[Task]]:
    """Yield the tasks of each rank, for a vector of so many elements.

    Args:
        schedule: what the ranks do.
        num_elements: length of the operation's full vector.
        itemsize: bytes of an element.
        costs: work of reductions and copies; none, if left out. Overheads and latencies
            are parameters of the program that reads the tasks.
    """
    for program in schedule.programs():
        yield program_tasks(program, num_elements, itemsize, costs or Costs())


def program_tasks(
    program: RankProgram, num_elements: int, itemsize: int, costs: Costs
) -> list[Task]:
    """Return the tasks of one rank, each step in its place.

    A receive that reduces is two tasks: the receive, and the work that waits for it.
    The k-th message from one rank to another has tag k.
    """
    bounds = [space.bounds(num_elements) for space in program.spaces]
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    tasks: list[Task] = []
    ends: list[int] = []
    """The task of each step after which it is done."""
    for step in program.steps:
        after = tuple(dict.fromkeys(ends[before] for before in step.deps))
        blocks = step.src or step.dst
        assert blocks is not None  # each step has one
        nbytes = _nbytes(blocks, bounds, itemsize)
        name = f"{step.op.name.lower()} {program.describe(blocks)}"
        if step.op in (Op.RED, Op.COPY):
            work_ns = _work_ns(step.op, nbytes, costs)
            tasks.append(Task("calc", after, name, duration_ns=work_ns))
        else:
            counter = sent if step.op is Op.SEND else received
            tag = counter[step.peer]
            counter[step.peer] += 1
            kind: Literal["send", "recv"] = "send" if step.op is Op.SEND else "recv"
            tasks.append(Task(kind, after, name, nbytes, step.peer, tag))
        if step.op is Op.RRED:
            work_ns = _work_ns(step.op, nbytes, costs)
            before = (len(tasks) - 1,)
            tasks.append(Task("calc", before, name, duration_ns=work_ns))
        ends.append(len(tasks) - 1)
    return tasks


def _nbytes(blocks: Slice, bounds: Sequence[Sequence[int]], itemsize: int) -> int:
    own = bounds[blocks.space]
    return (own[blocks.hi] - own[blocks.lo]) * itemsize


def _work_ns(op: Op, nbytes: int, costs: Costs) -> int:
    per_byte = costs.copy_us_per_byte if op is Op.COPY else costs.reduce_us_per_byte
    return round(per_byte * nbytes * _NS_PER_US)
