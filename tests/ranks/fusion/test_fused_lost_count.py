# SPDX-License-Identifier: Apache-2.0
"""A refused call of which nobody knows in which bucket others have it.

The rank that refused it has lost count of the others' buckets. Nothing that follows in
the context is delivered on any rank, and all are in step when it ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi
from relay_ranks import RelayRanks

from commrt import local
from commrt.comm import Communicator, core_of
from commrt.errors import (
    BufferError_,
    CommError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)

BUCKET_NBYTES = 2048
COUNTS = (1, 3, 100, 200, 255, 256, 3000)
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "object": (object(), {}),
    "strided": (np.ones(8)[::2], {}),
    "reduction": (np.ones(5), {"op": "summ"}),
    "nothing": (None, {"timeout_s": -1}),
}


@dataclass(frozen=True)
class Entry:
    """One step of a context, the same on all ranks but for who makes a mistake."""

    kind: str
    count: int = 0
    mistake: str = ""
    by: frozenset[int] = frozenset()


def draw(
    rng: random.Random, size: int, may_fail: bool, others: tuple[str, ...]
) -> list[Entry]:
    """Return the steps of one context."""
    kinds = ["sum"] * 6 + ["wait", *others]
    steps = [
        Entry(rng.choice(kinds), rng.choice(COUNTS)) for _ in range(rng.randint(1, 9))
    ]
    if may_fail:
        for _ in range(rng.choice((1, 1, 2))):
            by = rng.sample(range(size), rng.choice((1, 1, size)))
            wrong = Entry(
                "sum", rng.choice(COUNTS), rng.choice([*WRONG]), frozenset(by)
            )
            steps.insert(rng.randint(0, len(steps)), wrong)
    return steps


def outcome(call: Callable[[], Any], want: float) -> str:
    """Return "right", or the name of the error."""
    try:
        found = call()
    except CommError as error:
        return type(error).__name__
    return "right" if (np.asarray(found) == want).all() else f"wrong: {found}"


class Context:
    """One rank's steps in a context, and the outcome of each."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.said: dict[int, str] = {}
        self._open: dict[int, tuple[Any, float]] = {}

    def run(self, steps: list[Entry], limit_s: float | None) -> dict[int, str]:
        with self.comm.fused(nbytes=BUCKET_NBYTES, time_limit_s=limit_s):
            for number, step in enumerate(steps):
                self._do(number, step)
        self._wait()
        return self.said

    def _do(self, number: int, step: Entry) -> None:
        comm = self.comm
        if step.kind == "wait":
            self._wait()
        elif step.kind == "gather":
            x = np.full(2, 7.0)
            self.said[number] = outcome(lambda: comm.allgather(x), 7)
        elif step.kind == "split":
            self.said[number] = outcome(lambda: bool(comm.split(0).free()), False)
        elif comm.rank in step.by:
            x, options = WRONG[step.mistake]
            with pytest.raises(CommError) as raised:
                comm.allreduce(x, nonblocking=True, **options)
            self.said[number] = type(raised.value).__name__
        else:
            x = np.full(step.count, float(comm.rank + number))
            want = sum(rank + number for rank in range(comm.size))
            try:
                self._open[number] = comm.allreduce(x, nonblocking=True), want
            except RefusedError as error:  # it goes into no bucket
                self.said[number] = type(error).__name__

    def _wait(self) -> None:
        for number, (request, want) in self._open.items():
            self.said[number] = outcome(request.wait, want)
        self._open = {}


def check(programs: list[list[Entry]], said: list[list[dict[int, str]]]) -> None:
    """Compare what the ranks say of each step with what must become of it."""
    for context, steps in enumerate(programs):
        wrong = [number for number, step in enumerate(steps) if step.by]
        first = min(wrong, default=len(steps))
        for number, step in enumerate(steps):
            found = [rank[context].get(number, "") for rank in said]
            if step.kind == "wait":
                continue
            others = [each for r, each in enumerate(found) if r not in step.by]
            case = context, number, steps, found
            if number < first:
                # Nobody has a result that others have not.
                allowed = {"right", "RefusedError"} if wrong else {"right"}
                assert len({*found}) == 1, case
                assert {*found} <= allowed, case
            else:
                assert {*others} <= {"RefusedError"}, case


def main_of(
    programs: list[list[Entry]], limit_s: float | None
) -> Callable[[Communicator], list[dict[int, str]]]:
    def main(comm: Communicator) -> list[dict[int, str]]:
        said = []
        for steps in programs:
            said.append(Context(comm).run(steps, limit_s))
            assert (comm.allreduce(np.full(3, 2.0)) == 2 * comm.size).all()
        return said

    return main


def drawn(
    rng: random.Random, size: int, others: tuple[str, ...] = ("gather", "split")
) -> list[list[Entry]]:
    """Return the contexts of a program; ``others`` are not put into buckets."""
    return [draw(rng, size, rng.random() < 0.7, others) for _ in range(8)]


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("limit_s", [None, 0.01, 300.0])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("turn", range(20))
@pytest.mark.timeout(240)
def test_all_are_in_step_after_the_context(
    turn: int, size: int, limit_s: float | None, seed: int
) -> None:
    programs = drawn(random.Random(f"{seed} {turn} {size} {limit_s}"), size)
    check(programs, local.run(size, main_of(programs, limit_s)))


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("limit_s", [None, 0.01])
@pytest.mark.parametrize("carrier", ["mpi", "relay"])
@pytest.mark.parametrize(
    "nodes", [[[0], [1]], [[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1, 3]]], ids=str
)
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.timeout(240)
def test_ranks_on_other_nodes_are_in_step_too(
    turn: int, nodes: list[list[int]], carrier: str, limit_s: float | None, seed: int
) -> None:
    rng = random.Random(f"{seed} {turn} {nodes} {carrier} {limit_s}")
    # The stand-in for a library makes no communicators.
    others = ("gather",) if carrier == "mpi" else ("gather", "split")
    programs = drawn(rng, sum(map(len, nodes)), others)
    with FakeMpi().ranks(nodes) if carrier == "mpi" else RelayRanks(nodes) as ranks:
        check(programs, ranks.each(main_of(programs, limit_s)))


@pytest.mark.parametrize("limit_s", [None, 1.0])
def test_errors_name_rank_and_reason(limit_s: float | None) -> None:
    def main(comm: Communicator) -> list[str]:
        said = []
        with comm.fused(time_limit_s=limit_s):
            x: Any = ["a"] if comm.rank == 1 else np.ones(4)
            for each in (x, np.ones(4)):
                try:
                    comm.allreduce(each, nonblocking=True).wait()
                except CommError as error:
                    said.append(str(error))
        return said

    for rank, said in enumerate(local.run(3, main)):
        assert len(said) == 2
        for text in said[rank == 1 :]:
            assert "rank 1 has refused" in text
            assert "list" in text


def test_calls_before_an_exception_leave_the_ranks_in_step() -> None:
    """The context of the rank in error ends by its exception."""

    def main(comm: Communicator) -> float:
        requests: list[Any] = []
        with pytest.raises(CommError):
            leave_early(comm, requests)
        for each in requests:
            with pytest.raises(RefusedError):
                each.wait()
        return float(comm.allreduce(np.ones(1))[0])

    assert local.run(3, main) == [3.0] * 3


def leave_early(comm: Communicator, requests: list[Any]) -> None:
    """Make calls of which rank 0 cannot read all but the first, and wait for them."""
    x: Any = None if comm.rank == 0 else np.ones(700)
    with comm.fused(nbytes=BUCKET_NBYTES):
        for each in (np.ones(9), x, x, x):
            requests.append(comm.allreduce(each, nonblocking=True))
        requests[-1].wait()


def test_messages_within_go_on() -> None:
    def main(comm: Communicator) -> list[float]:
        with comm.fused():
            with pytest.raises(CommError):
                comm.allreduce(
                    object() if comm.rank == 0 else np.ones(3), nonblocking=True
                ).wait()
            if comm.rank == 0:
                comm.send(np.full(2, 5.0), 1)
                return [5.0, 5.0]
            return [float(each) for each in comm.recv(np.empty(2), 0)]

    assert local.run(2, main) == [[5.0, 5.0]] * 2


def test_a_rank_that_nobody_helps_ends_by_its_deadline() -> None:
    """The other one stays within its context, and ends it only afterwards."""

    def main(comm: Communicator) -> str:
        comm.timeout_s = 300
        mine = comm.dup()
        mine.timeout_s = 0.2 if comm.rank == 0 else 300
        if comm.rank == 0:
            with pytest.raises(TimeoutError_, match=r"came to its end within 0\.2 s"):
                lose(mine)
            comm.send(np.ones(1), 1)
        else:
            with mine.fused():
                request = mine.allreduce(np.ones(3), nonblocking=True)
                comm.recv(np.empty(1), 0)
            with pytest.raises((RefusedError, RevokedError)):
                request.wait()
        with pytest.raises(RevokedError) as raised:
            mine.allreduce(np.ones(1))
        return str(raised.value)

    for said in local.run(2, main):
        assert "not in step" in said


def lose(comm: Communicator) -> None:
    with comm.fused(), pytest.raises(BufferError_):
        comm.allreduce(object(), nonblocking=True)


def test_a_rank_that_fails_within_ends_the_wait_for_it() -> None:
    said: list[str] = []

    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("no data")
        with pytest.raises(CommError) as raised:
            lose(comm)
        said.append(str(raised.value))

    with pytest.raises(ValueError, match="no data"):
        local.run(2, main)
    assert len(said) == 1
    assert "rank 1" in said[0]


def test_the_numbers_of_ranks_are_equal_afterwards() -> None:
    def main(comm: Communicator) -> tuple[int, int]:
        begin = core_of(comm).next_seq
        requests = []
        with comm.fused(nbytes=64):
            for k in range(6):
                x: Any = object() if (comm.rank, k) == (0, 2) else np.ones(8)
                with suppress(BufferError_, RefusedError):
                    requests.append(comm.allreduce(x, nonblocking=True))
        for each in requests:
            with suppress(RefusedError):
                each.wait()
        return begin, core_of(comm).next_seq

    first, second = local.run(2, main)
    assert first == second
    assert second[1] == second[0] + 6


@pytest.mark.parametrize(
    ("x", "arguments", "kind", "message"),
    [
        (np.ones(8), {"op": "nonsense"}, UsageError, "nonsense"),
        (np.ones(16)[::2], {}, BufferError_, "not C-contiguous"),
        (["a"], {}, BufferError_, "list"),
    ],
)
def test_what_has_no_bucket_ends_the_context_alone(
    x: Any, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """All ranks refuse it alike, and none can know that."""

    def rank_main(comm: Any) -> list[float]:
        with comm.fused():
            requests = [comm.allreduce(np.ones(8), nonblocking=True)]
            for _ in range(2):
                with pytest.raises(kind, match=message):
                    comm.allreduce(x, nonblocking=True, **arguments)
            requests.append(comm.allreduce(np.ones(8), nonblocking=True))
            for each in requests:
                with pytest.raises(RefusedError, match=message):
                    each.wait()
        with comm.fused():
            again = comm.allreduce(np.ones(2), nonblocking=True)
        total: list[float] = again.wait().tolist()
        return total

    assert local.run(2, rank_main) == [[2.0, 2.0]] * 2
