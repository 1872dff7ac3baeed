# SPDX-License-Identifier: Apache-2.0
"""Algorithms of MSCCL as schedules: verified, simulated and drawn as all others are.

The file's order becomes dependencies, as few as are true:

- a step comes behind the last receive, copy or reduction of its thread block, and
behind the one that it waits for;
- of two steps that touch the same chunk, one writing, the later waits for the earlier
one where the file orders them. Where it does not, nobody waits: the verifier finds the
race;
- nothing waits for a send but what overwrites its chunks: the connection takes a
message from the sender before the receiver asks for it. (A real one holds a few
messages, and that limit is not modelled.)

Messages meet by channel, so a rank's steps are put into an order in which the k-th send
from one rank to another is its k-th receive there, whatever channels they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commrt.errors import ScheduleError, UsageError
from commrt.msccl.accesses import Accesses, Task
from commrt.msccl.buffers import Layout, layout_of
from commrt.msccl.document import Algorithm, Gpu
from commrt.msccl.messages import Tasks, lines_text
from commrt.msccl.waits import Timed, steps_in_order
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice
from commrt.schedule.ir import Step as ScheduleStep
from commrt.schedule.verify import Report, verify
from commrt.vocabulary.operations import operation

__all__ = ["FromFile", "forms_of", "from_msccl", "verify_msccl"]

Reached = dict[int, int]
"""Where thread blocks are: for each by its place, its last task that is no send."""


@dataclass(frozen=True)
class FromFile:
    """The schedule of a file, and the lines that its steps come from."""

    schedule: Schedule
    source: str
    lines: tuple[tuple[int, ...], ...]
    """The line of each step of each rank; that of ``<gpu>`` for copies around them."""
    gpu_lines: tuple[int, ...]
    """The line of ``<gpu>`` of each rank."""

    def line_of(self, rank: int, step: int) -> int:
        """Return the line of a step; of the whole rank if ``step`` is -1."""
        return self.gpu_lines[rank] if step < 0 else self.lines[rank][step]


def forms_of(algorithm: Algorithm) -> list[bool]:
    """Return the ways in which the file may be called: True for in place."""
    ways = (True, algorithm.in_place), (False, algorithm.out_of_place)
    return [way for way, has in ways if has]


def from_msccl(algorithm: Algorithm, *, in_place: bool, root: int = 0) -> FromFile:
    """Return the schedule of an algorithm of MSCCL.

    It is for vectors whose length is a multiple of ``nchunksperloop`` elements, as
    MSCCL asks for, too.

    Args:
        algorithm: what the file says.
        in_place: True for calls whose input and output share memory.
        root: of a broadcast or reduction; the file does not say it.

    Raises:
        UsageError: the file contradicts itself, or there is no such root.
        ScheduleError: a message has no other end or one of another length, or steps
            wait for each other for ever; the message has the lines.
    """
    size = len(algorithm.gpus)
    if not 0 <= root < size:
        raise UsageError(f"root {root} of {size} ranks; expected 0 to {size - 1}")
    tasks = Tasks(algorithm)
    layouts = []
    for gpu in algorithm.gpus:
        layouts.append(_add_gpu(tasks, algorithm, gpu, root, in_place))
    tasks.connect()
    orders = tasks.orders()
    programs = [
        _program(tasks, order, rank, layout)
        for rank, (order, layout) in enumerate(zip(orders, layouts, strict=True))
    ]
    reduces = operation(algorithm.coll).reduces
    schedule = Schedule(
        coll=algorithm.coll,
        algorithm=algorithm.name,
        size=size,
        root=root if operation(algorithm.coll).has_root else 0,
        make_program=programs.__getitem__,
        redop_class="commutative" if reduces else "none",
        divisor=algorithm.num_chunks,
    )
    lines = tuple(tuple(tasks.all[one].line for one in order) for order in orders)
    gpu_lines = tuple(gpu.line for gpu in algorithm.gpus)
    return FromFile(schedule, algorithm.source, lines, gpu_lines)


def verify_msccl(made: FromFile) -> Report:
    """Prove the schedule of a file right, as ``verify`` does.

    Raises:
        ScheduleError: it is wrong; the message has the lines of the steps.
    """
    try:
        return verify(made.schedule)
    except ScheduleError as error:
        lines = {made.line_of(*place) for place in error.places}
        where = f"{made.source}{lines_text(lines)}"
        raise ScheduleError(f"{where}: {error}", error.places) from error


def _add_gpu(
    tasks: Tasks, algorithm: Algorithm, gpu: Gpu, root: int, in_place: bool
) -> Layout:
    """Add the tasks of one GPU; return its spaces."""
    steps = steps_in_order(algorithm, gpu)
    num_passing = sum(one.step.num_chunks for one in steps if one.step.type == "rrs")
    layout = layout_of(algorithm, gpu.rank, root, in_place, num_passing)
    blocks = Accesses()

    def copy(src: Slice, dst: Slice) -> None:
        task = Task(gpu.rank, gpu.line, Op.COPY, src, dst)
        number = tasks.add(task)
        task.deps = blocks.waits(task, number, None)

    for src, dst in layout.before:
        copy(src, dst)
    reached: list[list[Reached]] = [[] for _ in gpu.blocks]
    passed = 0
    for timed in steps:
        now: Reached = dict(reached[timed.place][-1]) if reached[timed.place] else {}
        if timed.awaited is not None:
            place, number = timed.awaited
            for other, task_number in reached[place][number].items():
                now[other] = max(now.get(other, -1), task_number)
        passing = Slice(layout.passing, passed, passed + timed.step.num_chunks)
        for task in _tasks_of(timed, gpu.rank, layout, passing):
            number = tasks.add(task, timed.block.channel)
            task.deps = blocks.waits(task, number, timed) | {*now.values()}
            if task.op is not Op.SEND:
                now = {timed.place: number}
        passed += timed.step.num_chunks if timed.step.type == "rrs" else 0
        reached[timed.place].append(now)
    for src, dst in layout.behind:
        copy(src, dst)
    return layout


def _tasks_of(
    timed: Timed, rank: int, layout: Layout, passing: Slice
) -> Iterator[Task]:
    """Yield the steps of a schedule that one instruction becomes."""
    step, block = timed.step, timed.block
    src = None if step.src is None else layout.place(step.src)
    dst = None if step.dst is None else layout.place(step.dst)
    kept = passing if step.type == "rrs" else dst
    if step.type in ("r", "rcs"):
        yield Task(rank, step.line, Op.RECV, None, dst, block.recv)
    elif step.receives:
        yield Task(rank, step.line, Op.RRED, src, kept, block.recv)
    elif step.type in ("cpy", "re"):
        yield Task(rank, step.line, _LOCAL[step.type], src, dst)
    if step.sends:
        leaving = kept if step.receives else src
        yield Task(rank, step.line, Op.SEND, leaving, None, block.send)


_LOCAL = {"cpy": Op.COPY, "re": Op.RED}


def _program(tasks: Tasks, order: list[int], rank: int, layout: Layout) -> RankProgram:
    """Return the tasks of a rank, in order, as a program."""
    program = RankProgram(rank, layout.spaces)
    index = {number: at for at, number in enumerate(order)}
    for number in order:
        task = tasks.all[number]
        deps = tuple(sorted(index[dep] for dep in task.deps))
        program.steps.append(ScheduleStep(task.op, task.src, task.dst, task.peer, deps))
    return program
