# SPDX-License-Identifier: Apache-2.0
"""A small host-staged allreduce of two ranks over devices, and its mutants.

Each rank has a caller and a progress thread. A call gives all its commands at once: per
chunk a copy to pinned memory, a flag that says so, a wait for the flag that says that
the sum is there, and a copy back. The progress thread touches memory only. The threads
stand for MPI with a mailbox in pinned memory.

``BUGS`` are wrong in one place each. Where the code below says ``self.has("...")`` it
is the bug that follows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

RANKS = 2
CHUNKS = 2
CHUNK = 16
COUNT = CHUNKS * CHUNK
ITEM = 4
NBYTES = COUNT * ITEM
LINE = 64
SLOTS = 2

SEVEN = {
    "B1": "the host sums before the flag of the copy to it",
    "B2": "the copy back does not wait for the sum",
    "B3": "the buffer is used again once the sum is made",
    "B4": "wait() does not wait for the end event",
    "B5": "the copy does not wait for the caller's stream",
    "B7": "the flag of the copy is written before the copy",
    "B8": "the end event is recorded before the copy back",
}
MORE = {
    "go-early": "the flag of the sum is stored before the sum is written",
    "go-all": "the first chunk's sum releases all chunks",
    "go-off-by-one": "the copy back waits for the sum of the chunk before",
    "stale-values": "flags do not count on when a buffer is used again",
    "return-at-call": "the buffer is used again by the next call",
    "return-twice": "the buffer is given back twice",
    "end-flag-early": "the end flag is written before the last copy back",
    "pool-unlocked": "the pool of buffers is used without its lock",
    "flag-other-stream": "the flag of the copy is written by the other stream",
    "wait-other-stream": "wait() lets an internal stream wait",
    "end-other-stream": "the end event is recorded in the stream of the first copies",
    "ready-after": "the stream is told to wait for an event that is recorded later",
    "ready-late": "the caller's stream is recorded after the first copy",
    "whole-back": "each chunk copies the whole buffer back",
    "freed": "the caller's memory is freed while the operation uses it",
    "unacknowledged": "a mailbox is written again before it was read",
    "unannounced": "a mailbox is read before it was written",
    "flags-kept": "a failed operation does not release its flags",
    "released-unordered": "a failed operation's copy back has only the flag before it",
}
ONE_QUEUE = {
    "B6": "the copy back is given late, and the caller's stream waits for a flag",
    "wrong-slot": "the copy back waits for the flag of the operation after",
}
"""Bugs only where streams share a hardware queue; as they do with so few of them."""
BUGS = SEVEN | MORE | ONE_QUEUE
FAILING = ("flags-kept", "released-unordered")
"""Bugs of operations that fail."""


class Harness(Protocol):
    """Devices and threads of whatever kind."""

    devices: list[Any]

    def run(self, threads: Mapping[str, Callable[[], object]]) -> Mapping[str, Any]: ...


class OnThreads:
    """A harness whose host threads are ordinary ones; who inherits has ``devices``."""

    devices: list[Any]

    def run(self, threads: Mapping[str, Callable[[], object]]) -> Mapping[str, object]:
        errors: list[BaseException] = []

        def main(function: Callable[[], object]) -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        started = [
            threading.Thread(target=main, args=(each,), name=name, daemon=True)
            for name, each in threads.items()
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(300)
        if errors:
            raise errors[0]
        assert [one.name for one in started if one.is_alive()] == []
        return {}


class WrongSumError(AssertionError):
    """The numbers are not those of an allreduce."""


@dataclass
class Operation:
    """What the progress thread is told."""

    buffer: int
    """Number of the pinned buffer."""
    use: int
    """How often that buffer was used before."""
    end: int
    """Event behind the last copy."""
    x: int
    """Address of the caller's memory."""
    fails: bool = False
    """Whether the exchange with the peer is to fail."""


@dataclass
class Staged:
    """One rank."""

    device: Any
    rank: int
    mail: list[int]
    """Address of each rank's mailbox: a flag, an acknowledgement, data."""
    bugs: frozenset[str] = frozenset()
    queue: deque[Operation] = field(default_factory=deque)
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    uses: list[int] = field(default_factory=lambda: [0] * SLOTS)
    unfinished: list[Operation] = field(default_factory=list)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    failed: int = 0
    memory: list[int] = field(default_factory=list)
    """What the caller computes on."""

    def has(self, bug: str) -> bool:
        return bug in self.bugs

    def open(self) -> None:
        device = self.device
        self.pool = device.pinned_alloc(SLOTS * NBYTES)
        self.flags = device.pinned_alloc((SLOTS * 3 + 2) * LINE)
        self.d2h = device.stream_create(-1)
        self.h2d = device.stream_create(-1)
        self.ready = device.event_create()
        self.copied = device.event_create()
        self.told, self.stop = 0, self.flag(SLOTS, 1)
        device.write(self.flags, bytes((SLOTS * 3 + 2) * LINE))
        self.messages = 0

    def flag(self, slot: int, which: int) -> int:
        """Address of a flag: a buffer's start, go, end; the rank's told, stop."""
        return int(self.flags) + (slot * 3 + which) * LINE

    # --- the pool ---

    def locked(self, action: Callable[[], Any], unlocked: bool = False) -> Any:
        if unlocked:
            return action()
        token = id(self.mutex)
        self.device.lock(token)
        try:
            with self.mutex:
                return action()
        finally:
            self.device.unlock(token)

    def take(self) -> int:
        unlocked = self.has("pool-unlocked")
        while True:
            buffer = self.locked(
                lambda: self.free.pop(0) if self.free else None, unlocked
            )
            if buffer is not None:
                return int(buffer)
            self.device.pause()

    def give_back(self, buffer: int) -> None:
        unlocked = self.has("pool-unlocked")
        for _ in range(1 + self.has("return-twice")):
            self.locked(lambda: self.free.append(buffer), unlocked)
        # Who waits for a buffer is in pause().
        self.device.flag_store(self.flag(SLOTS, 0), self.told)

    # --- the call: all commands at once ---

    def allreduce(self, x: int, user: int, fails: bool = False) -> Operation:
        device = self.device
        buffer = self.take()
        use = 0 if self.has("stale-values") else self.uses[buffer]
        self.uses[buffer] += 1
        memory = self.pool + buffer * NBYTES
        start, go, end_flag = (self.flag(buffer, which) for which in range(3))
        if self.has("wrong-slot"):
            go = self.flag(1 - buffer, 1)
        end = device.event_create()
        if self.has("ready-after"):
            device.stream_wait_event(self.d2h, self.ready)
        if not self.has("ready-late"):
            device.event_record(self.ready, user)
        if not ({"B5", "ready-after", "ready-late"} & self.bugs):
            device.stream_wait_event(self.d2h, self.ready)
        for chunk in range(CHUNKS):
            at, nbytes = chunk * CHUNK * ITEM, CHUNK * ITEM
            value = use * CHUNKS + chunk + 1
            flagged_by = self.h2d if self.has("flag-other-stream") else self.d2h
            if self.has("B7"):
                device.write_value32(self.d2h, start, value)
            device.memcpy_async(memory + at, x + at, nbytes, self.d2h)
            if self.has("ready-late") and chunk == 0:
                device.event_record(self.ready, user)
                device.stream_wait_event(self.d2h, self.ready)
            if not self.has("B7"):
                device.write_value32(flagged_by, start, value)
            if self.has("B6"):
                continue
            if not self.has("released-unordered"):
                # Not only by flags: the device sees this order, and a failed operation
                # may release its flags at once.
                device.event_record(self.copied, self.d2h)
                device.stream_wait_event(self.h2d, self.copied)
            last = chunk == CHUNKS - 1
            if not self.has("B2"):
                less = 1 if self.has("go-off-by-one") else 0
                device.wait_value32_geq(self.h2d, go, value - less)
            if self.has("B8") and last:
                device.event_record(end, self.h2d)
            if self.has("end-flag-early") and last:
                device.write_value32(self.h2d, end_flag, use + 1)
            if self.has("whole-back"):
                device.memcpy_async(x, memory, NBYTES, self.h2d)
            else:
                device.memcpy_async(x + at, memory + at, nbytes, self.h2d)
        if self.has("end-other-stream"):
            device.event_record(end, self.d2h)
        elif not self.has("B8"):
            device.event_record(end, self.h2d)
        if not ({"end-flag-early", "B6"} & self.bugs):
            device.write_value32(self.h2d, end_flag, use + 1)
        if self.has("return-at-call"):
            self.give_back(buffer)
        operation = Operation(buffer, use, end, x, fails)
        self.locked(lambda: self.queue.append(operation))
        self.told += 1
        device.flag_store(self.flag(SLOTS, 0), self.told)
        return operation

    def wait(self, operation: Operation, user: int) -> None:
        if self.has("B6"):
            end_flag = self.flag(operation.buffer, 2)
            self.device.wait_value32_geq(user, end_flag, operation.use + 1)
        elif not self.has("B4"):
            waits = self.h2d if self.has("wait-other-stream") else user
            self.device.stream_wait_event(waits, operation.end)
        self.device.event_destroy(operation.end)

    # --- the progress thread: memory only ---

    def until(self, flag: int, value: int) -> None:
        while self.device.flag_load(flag) < value:
            self.finish()
            self.device.pause()

    def finish(self) -> None:
        """Give buffers back whose operations have ended."""
        for operation in list(self.unfinished):
            end = self.device.flag_load(self.flag(operation.buffer, 2))
            if end >= operation.use + 1:
                self.unfinished.remove(operation)
                self.give_back(operation.buffer)

    def progress(self) -> None:
        while True:
            stop = self.device.flag_load(self.stop)
            operation = self.locked(
                lambda: self.queue.popleft() if self.queue else None
            )
            if operation is not None:
                self.serve(operation)
            elif stop and not self.unfinished:
                return
            else:
                self.finish()
                self.device.pause()

    def serve(self, operation: Operation) -> None:
        if operation.fails:
            return self.fail(operation)
        device, buffer = self.device, operation.buffer
        memory, go = self.pool + buffer * NBYTES, self.flag(buffer, 1)
        for chunk in range(CHUNKS):
            at, nbytes = memory + chunk * CHUNK * ITEM, CHUNK * ITEM
            value = operation.use * CHUNKS + chunk + 1
            if not self.has("B1"):
                self.until(self.flag(buffer, 0), value)
            mine = device.read(at, nbytes)
            theirs = self.exchange(mine)
            total = np.frombuffer(mine, "f4") + np.frombuffer(theirs, "f4")
            released = operation.use * CHUNKS + CHUNKS if self.has("go-all") else value
            if self.has("go-early"):
                device.flag_store(go, released)
            device.write(at, total.tobytes())
            if not self.has("go-early"):
                device.flag_store(go, released)
        if self.has("B6"):
            device.memcpy_async(operation.x, memory, NBYTES, self.h2d)
            device.write_value32(self.h2d, self.flag(buffer, 2), operation.use + 1)
        if self.has("B3"):
            self.give_back(buffer)
        elif not self.has("return-at-call"):
            self.unfinished.append(operation)

    def fail(self, operation: Operation) -> None:
        """The peer is gone: let the streams go on, and say so."""
        self.failed += 1
        if not self.has("flags-kept"):
            released = (operation.use + 1) * CHUNKS
            self.device.flag_store(self.flag(operation.buffer, 1), released)
        self.unfinished.append(operation)

    def exchange(self, mine: bytes) -> bytes:
        """Send bytes to the other rank, and return its own of the same call."""
        device = self.device
        own, other = self.mail[self.rank], self.mail[1 - self.rank]
        # The other rank has taken what was there.
        if not self.has("unacknowledged"):
            self.until(own + LINE, self.messages)
        self.messages += 1
        device.write(own + 2 * LINE, mine)
        device.flag_store(own, self.messages)
        if not self.has("unannounced"):
            self.until(other, self.messages)
        theirs: bytes = device.read(other + 2 * LINE, len(mine))
        device.flag_store(other + LINE, self.messages)
        return theirs


MAILBOX = 2 * LINE + CHUNK * ITEM


def given(rank: int, number: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(COUNT, dtype="f4") * (number + 1) + 100 * rank


def caller(one: Staged, operations: int, fails_at: int | None = None) -> None:
    """Start all operations of a rank, each on memory that its stream has just written.

    ``fails_at`` lets that operation, the last one, fail.
    """
    device = one.device
    user = device.stream_create()
    source = device.pinned_alloc(operations * NBYTES)
    target = device.pinned_alloc(operations * NBYTES)
    xs = one.memory = [device.alloc(NBYTES) for _ in range(operations)]
    for number in range(operations):
        device.write(source + number * NBYTES, given(one.rank, number).tobytes())
    requests = []
    for number, x in enumerate(xs):
        device.memcpy_async(x, source + number * NBYTES, NBYTES, user)
        requests.append(one.allreduce(x, user, fails=number == fails_at))
        if one.has("freed"):
            device.free(x)
    for number, (x, request) in enumerate(zip(xs, requests, strict=True)):
        one.wait(request, user)
        if not one.has("freed"):
            device.memcpy_async(target + number * NBYTES, x, NBYTES, user)
    device.stream_synchronize(user)
    for number in range(operations):
        got = np.frombuffer(device.read(target + number * NBYTES, NBYTES), "f4")
        expected = sum(given(rank, number) for rank in range(RANKS))
        if number != fails_at and not np.array_equal(got, expected):
            raise WrongSumError(f"rank {one.rank}, operation {number}: {got}")
    device.flag_store(one.stop, 1)


def run(
    harness: Harness,
    bugs: frozenset[str] = frozenset(),
    operations: int = 4,
    fails_at: int | None = None,
) -> list[Staged]:
    """Run all threads of both ranks to their end."""
    mail = [harness.devices[0].pinned_alloc(MAILBOX) for _ in range(RANKS)]
    for each in mail:
        harness.devices[0].write(each, bytes(MAILBOX))
    ranks = [Staged(harness.devices[rank], rank, mail, bugs) for rank in range(RANKS)]
    threads: dict[str, Callable[[], object]] = {}
    for one in ranks:
        one.open()
        threads[f"caller {one.rank}"] = lambda one=one: caller(
            one, operations, fails_at
        )
        threads[f"progress {one.rank}"] = one.progress
    harness.run(threads)
    # Not before: a free waits for the whole device, and lets nobody give it anything
    # meanwhile. Where the other rank has given half of an operation, which its progress
    # thread hears of behind the other half, both would wait for ever.
    for one in ranks:
        for x in one.memory:
            if not one.has("freed"):
                one.device.free(x)
    return ranks
