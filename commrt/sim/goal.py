# SPDX-License-Identifier: Apache-2.0
"""Schedules in GOAL, the language of LogGOPSim and ATLAHS.

T. Hoefler, C. Siebert, A. Lumsdaine, "Group Operation Assembly Language - a flexible
way to express collective communication", ICPP 2009; T. Hoefler, T. Schneider, A.
Lumsdaine, "LogGOPSim - simulating large-scale applications in the LogGOPS model", LSAP
2010.

Each step of a rank is a line, and each wait of one step for another is one, too. A
receive that reduces is two lines: the receive, and the work that waits for it. The k-th
message from one rank to another has tag k, so no other one can be taken for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from commrt.schedule.ir import Op, RankProgram, Schedule, Slice
from commrt.sim.costs import Costs

__all__ = ["goal_text"]

_NS_PER_US = 1000


def goal_text(
    schedule: Schedule, num_elements: int, itemsize: int, costs: Costs | None = None
) -> str:
    """Return a schedule for a vector of so many elements, as a file in GOAL.

    Args:
        schedule: what the ranks do.
        num_elements: length of the operation's full vector.
        itemsize: bytes of an element.
        costs: work of reductions and copies; none, if left out. Overheads and latencies
            are parameters of the program that reads the file.
    """
    lines = [f"num_ranks {schedule.size}"]
    for program in schedule.programs():
        lines += ["", f"rank {program.rank} {{"]
        lines += _rank_lines(program, num_elements, itemsize, costs or Costs())
        lines.append("}")
    return "\n".join(lines) + "\n"


def _rank_lines(
    program: RankProgram, num_elements: int, itemsize: int, costs: Costs
) -> Iterator[str]:
    bounds = [space.bounds(num_elements) for space in program.spaces]
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    ends: list[str] = []
    """The line of each step after which it is done."""
    for number, step in enumerate(program.steps):
        label, nbytes = f"l{number}", _nbytes(step.src or step.dst, bounds, itemsize)
        if step.op is Op.SEND:
            tag = sent[step.peer]
            sent[step.peer] += 1
            yield f"{label}: send {nbytes}b to {step.peer} tag {tag}"
        elif step.op in (Op.RECV, Op.RRED):
            tag = received[step.peer]
            received[step.peer] += 1
            nbytes = _nbytes(step.dst, bounds, itemsize)
            yield f"{label}: recv {nbytes}b from {step.peer} tag {tag}"
        else:
            yield f"{label}: calc {_work_ns(step.op, nbytes, costs)}"
        yield from (f"{label} requires {ends[before]}" for before in step.deps)
        if step.op is Op.RRED:
            yield f"{label}r: calc {_work_ns(step.op, nbytes, costs)}"
            yield f"{label}r requires {label}"
            label += "r"
        ends.append(label)


def _nbytes(
    blocks: Slice | None, bounds: Sequence[Sequence[int]], itemsize: int
) -> int:
    assert blocks is not None  # each step has one
    own = bounds[blocks.space]
    return (own[blocks.hi] - own[blocks.lo]) * itemsize


def _work_ns(op: Op, nbytes: int, costs: Costs) -> int:
    per_byte = costs.copy_us_per_byte if op is Op.COPY else costs.reduce_us_per_byte
    return round(per_byte * nbytes * _NS_PER_US)
