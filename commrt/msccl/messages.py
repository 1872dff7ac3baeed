# SPDX-License-Identifier: Apache-2.0
"""Messages between the tasks of all ranks: their ends, and an order that they allow.

Messages meet by connection: sender, receiver and channel. In a schedule the k-th send
from one rank to another meets its k-th receive there. So each rank's tasks are put into
an order in which that is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from commrt.errors import ScheduleError
from commrt.msccl.accesses import Task
from commrt.msccl.document import Algorithm
from commrt.schedule.ir import Op, Slice

__all__ = ["Tasks", "lines_text"]

Connection = tuple[int, int, int]
"""Sender, receiver and channel."""


def lines_text(lines: Iterable[int]) -> str:
    """Return ``, lines 4 and 12`` for messages, or nothing without lines."""
    told = [str(line) for line in sorted({*lines})]
    if len(told) < 2:
        return "".join(f", line {line}" for line in told)
    return f", lines {', '.join(told[:-1])} and {told[-1]}"


class Tasks:
    """The tasks of all ranks, and the messages between them."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.all: list[Task] = []
        self._algorithm = algorithm
        self._sends: dict[Connection, list[int]] = {}
        self._recvs: dict[Connection, list[int]] = {}

    def add(self, task: Task, channel: int = -1) -> int:
        """Add a task; return its number."""
        number = len(self.all)
        self.all.append(task)
        if task.op is Op.SEND:
            key = task.rank, task.peer, channel
            self._sends.setdefault(key, []).append(number)
        elif task.peer >= 0:
            key = task.peer, task.rank, channel
            self._recvs.setdefault(key, []).append(number)
        return number

    def connect(self) -> None:
        """Let the k-th send of each connection meet its k-th receive."""
        for key in {**self._sends, **self._recvs}:
            sends, recvs = self._sends.get(key, []), self._recvs.get(key, [])
            for send, recv in zip(sends, recvs, strict=False):
                one, other = self.all[send], self.all[recv]
                one.partner, other.partner = recv, send
                if _num(one.src) != _num(other.dst):
                    raise self._wrong(
                        [one.line, other.line],
                        f"gpu {key[0]} sends {_num(one.src)} chunks, and gpu {key[1]} "
                        f"receives {_num(other.dst)}; expected the same cnt",
                    )
            if len(sends) != len(recvs):
                met = min(len(sends), len(recvs))
                extra = (sends[met:] or recvs[met:])[0]
                raise self._wrong(
                    [self.all[extra].line],
                    f"gpu {key[0]} sends {len(sends)} messages to gpu {key[1]} on "
                    f"channel {key[2]}, which receives {len(recvs)}: this step has no "
                    f"other end",
                )

    def orders(self) -> list[list[int]]:
        """Return the tasks of each rank in an order that all messages allow."""
        missing = [len(task.deps) for task in self.all]
        followers: list[list[int]] = [[] for _ in self.all]
        for number, task in enumerate(self.all):
            for dep in task.deps:
                followers[dep].append(number)
        orders: list[list[int]] = [[] for _ in self._algorithm.gpus]
        ready = deque(number for number, count in enumerate(missing) if not count)
        num_done = 0
        while ready:
            number = ready.popleft()
            task = self.all[number]
            ends = [number]
            if task.partner >= 0:
                if missing[task.partner]:
                    continue  # The other end brings both along.
                ends.append(task.partner)
                # An end that was ready with the other one comes up twice.
                missing[number] = missing[task.partner] = 1
            for end in ends:
                orders[self.all[end].rank].append(end)
                num_done += 1
                for follower in followers[end]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        ready.append(follower)
        if num_done < len(self.all):
            done = {one for order in orders for one in order}
            raise self._deadlock(done)
        return orders

    def _deadlock(self, done: set[int]) -> ScheduleError:
        number = next(one for one in range(len(self.all)) if one not in done)
        seen: dict[int, None] = {}
        while number not in seen:
            seen[number] = None
            late = [dep for dep in self.all[number].deps if dep not in done]
            # Without one, it is its other end that cannot begin.
            number = min(late, default=self.all[number].partner)
        circle = [*seen][[*seen].index(number) :]
        lines = [self.all[one].line for one in circle]
        told = ", which waits for ".join(
            f"the {_NAMES[self.all[one].op]} of gpu {self.all[one].rank} on line "
            f"{self.all[one].line}"
            for one in (*circle, circle[0])
        )
        return self._wrong(lines, f"deadlock: {told}")

    def _wrong(self, lines: list[int], problem: str) -> ScheduleError:
        where = lines_text(lines)
        return ScheduleError(f"{self._algorithm.source}{where}: {problem}")


_NAMES = {
    Op.SEND: "send",
    Op.RECV: "receive",
    Op.RRED: "receive",
    Op.RED: "reduction",
    Op.COPY: "copy",
}


def _num(span: Slice | None) -> int:
    return 0 if span is None else span.hi - span.lo
