# SPDX-License-Identifier: Apache-2.0
"""Schedules and logs in GOAL, the language of LogGOPSim and ATLAHS.

T. Hoefler, C. Siebert, A. Lumsdaine, "Group Operation Assembly Language - a flexible
way to express collective communication", ICPP 2009; T. Hoefler, T. Schneider, A.
Lumsdaine, "LogGOPSim - simulating large-scale applications in the LogGOPS model", LSAP
2010.

Each task of a rank is a line, and each wait of one task for another is one, too. Times
of work are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from commrt.schedule.ir import Schedule
from commrt.sim.costs import Costs
from commrt.sim.tasks import Task, schedule_tasks

__all__ = ["goal_of_tasks", "goal_text"]


def goal_text(
    schedule: Schedule, num_elements: int, itemsize: int, costs: Costs | None = None
) -> str:
    """Return a schedule as a file in GOAL; arguments as ``schedule_tasks`` has them."""
    tasks = schedule_tasks(schedule, num_elements, itemsize, costs)
    return goal_of_tasks(schedule.size, tasks)


def goal_of_tasks(size: int, ranks: Iterable[Sequence[Task]]) -> str:
    """Return the tasks of ``size`` ranks, in rank order, as a file in GOAL."""
    lines = [f"num_ranks {size}"]
    for rank, tasks in enumerate(ranks):
        lines += ["", f"rank {rank} {{", *_lines(tasks), "}"]
    return "\n".join(lines) + "\n"


def _lines(tasks: Sequence[Task]) -> Iterator[str]:
    for number, task in enumerate(tasks):
        label = f"l{number}"
        if task.kind == "send":
            yield f"{label}: send {task.nbytes}b to {task.peer} tag {task.tag}"
        elif task.kind == "recv":
            yield f"{label}: recv {task.nbytes}b from {task.peer} tag {task.tag}"
        else:
            yield f"{label}: calc {task.duration_ns}"
        yield from (f"{label} requires l{before}" for before in task.after)
