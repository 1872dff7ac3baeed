# SPDX-License-Identifier: Apache-2.0
"""Drawn programs in which calls of some ranks are refused, and their results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commrt.errors import RefusedError, UsageError

Array = np.ndarray[Any, Any]
COUNTS = (0, 1, 3, 17, 700, 5000, 70_000)


def value(rank: int, index: int, count: int) -> Array:
    """Return what a rank contributes to call ``index``, whose sums are exact."""
    return np.arange(count, dtype=np.float64) % 7 + 10 * rank + index


def ragged_counts(index: int, count: int, size: int) -> list[list[int]]:
    """Return how much each rank sends to each one in an alltoallv: row, column."""
    return [
        [count * ((sender + 2 * receiver + index) % 3) for receiver in range(size)]
        for sender in range(size)
    ]


def ragged_input(rank: int, index: int, counts: Sequence[int]) -> Array:
    """Return what a rank gives an alltoallv: for each one the same numbers."""
    return np.concatenate([value(rank, index, count) for count in counts])


@dataclass(frozen=True)
class Step:
    """One call of a program, the same on all ranks but for who is refused."""

    index: int
    name: str
    count: int
    root: int
    in_heap: bool
    is_apart: bool
    algorithm: str | None
    refused_by: frozenset[int]

    @property
    def is_awaited_by_all(self) -> bool:
        """True if no rank's part is done without every other rank."""
        return self.name in ("allreduce", "allgather", "alltoall", "barrier")

    def call(
        self,
        comm: Any,
        heap: Array | None,
        used: list[Array] | None = None,
        **options: Any,
    ) -> Any:
        """Make the call; UsageError where this rank is refused.

        The call's arrays are added to ``used``.
        """
        rank = comm.rank
        used = [] if used is None else used
        if rank in self.refused_by:
            options["timeout_s"] = -1
        if self.algorithm is not None:
            options["algorithm"] = self.algorithm
        if self.name == "barrier":
            return comm.barrier(**options)
        if self.name == "alltoallv":
            sent = ragged_counts(self.index, self.count, comm.size)
            used.append(ragged_input(rank, self.index, sent[rank]))
            received = [row[rank] for row in sent]
            return comm.alltoallv(
                used[-1], send_counts=sent[rank], recv_counts=received, **options
            )
        blocks = comm.size if self.name in ("alltoall", "reduce_scatter") else 1
        x = value(rank, self.index, self.count * blocks)
        if self.name == "scatter" and rank == self.root:
            x = value(rank, self.index, self.count * comm.size)
        if self.in_heap and heap is not None and len(x) <= len(heap):
            heap[: len(x)] = x
            x = heap[: len(x)]
        if self.name in ("bcast", "reduce", "gather", "scatter"):
            options["root"] = self.root
        used.append(x)
        if self.name == "scatter":
            used.append(np.empty(self.count))
            x_or_none = x if rank == self.root else None
            return comm.scatter(x_or_none, out=used[-1], **options)
        if self.is_apart and self.name in ("allreduce", "alltoall", "reduce", "scan"):
            used.append(np.empty_like(x))
            options["out"] = used[-1]
        elif self.is_apart and self.name == "allgather":
            used.append(np.empty((comm.size, *x.shape)))
            options["out"] = used[-1]
        return getattr(comm, self.name)(x, **options)

    def expected(self, rank: int, size: int) -> Array | None:
        """Return the result where nobody is refused; None where there is none."""
        index, n = self.index, self.count
        each = [value(r, index, n) for r in range(size)]
        wide = [value(r, index, n * size) for r in range(size)]
        match self.name:
            case "barrier":
                return None
            case "alltoallv":
                sent = ragged_counts(index, n, size)
                return np.concatenate(
                    [value(r, index, sent[r][rank]) for r in range(size)]
                )
            case "allreduce":
                return np.sum(each, axis=0)
            case "reduce":
                return np.sum(each, axis=0) if rank == self.root else None
            case "bcast":
                return each[self.root]
            case "allgather":
                return np.concatenate(each)
            case "gather":
                return np.concatenate(each) if rank == self.root else None
            case "scatter":
                return wide[self.root][rank * n : (rank + 1) * n]
            case "alltoall":
                return np.concatenate([w[rank * n : (rank + 1) * n] for w in wide])
            case "reduce_scatter":
                return np.sum([w[rank * n : (rank + 1) * n] for w in wide], axis=0)
            case "scan":
                return np.sum(each[: rank + 1], axis=0)
        raise AssertionError(self.name)


NAMES = (
    "allreduce",
    "allgather",
    "alltoall",
    "reduce_scatter",
    "bcast",
    "reduce",
    "gather",
    "scatter",
    "scan",
    "barrier",
    "alltoallv",
)


def draw(
    rng: random.Random,
    size: int,
    length: int,
    heap: bool,
    schedules: Callable[[str], Sequence[str]] = lambda name: (),
) -> list[Step]:
    """Return a program of ``length`` calls, of which about a quarter is refused.

    They use any of the ``schedules``; where there is none, what is chosen.
    """
    steps = []
    for index in range(length):
        number = rng.choice((0, 0, 0, 0, 0, 1, 1, 2, size))
        name = rng.choice(NAMES)
        found = schedules(name)
        steps.append(
            Step(
                index,
                name,
                rng.choice(COUNTS),
                rng.randrange(size),
                heap and rng.random() < 0.5,
                rng.random() < 0.5,
                rng.choice(found) if found else None,
                frozenset(rng.sample(range(size), min(number, size))),
            )
        )
    return steps


@dataclass
class Outcomes:
    """What became of a program's calls on one rank: "right", "refused" or "own"."""

    rank: int
    size: int
    of: dict[int, str] = field(default_factory=dict)

    def note(self, step: Step, finish: Callable[[], Any]) -> None:
        """Note how a call ends that ``finish`` waits for."""
        try:
            result = finish()
        except (RefusedError, UsageError) as error:
            self.of[step.index] = self._kind_of(step, error)
        else:
            wanted = step.expected(self.rank, self.size)
            if wanted is not None:
                np.testing.assert_array_equal(
                    np.ravel(result), wanted, err_msg=f"{step}"
                )
            self.of[step.index] = "right"

    def _kind_of(self, step: Step, error: Exception) -> str:
        assert "timeout_s=-1" in str(error)
        if not isinstance(error, RefusedError):
            assert self.rank in step.refused_by
            return "own"
        assert any(f"rank {r} has refused" in str(error) for r in step.refused_by)
        return "refused"


def check(steps: Sequence[Step], ranks: Sequence[Outcomes]) -> None:
    """Check that each rank's calls ended as they must."""
    for step in steps:
        found = [one.of[step.index] for one in ranks]
        for rank, outcome in enumerate(found):
            if rank in step.refused_by:
                assert outcome == "own", (step, found)
            elif not step.refused_by:
                assert outcome == "right", (step, found)
            elif (step.is_awaited_by_all and step.count) or step.name == "barrier":
                assert outcome == "refused", (step, found)


def run_program(
    comm: Any, steps: Sequence[Step], draws: str, most: int, limit_s: float
) -> dict[str, str]:
    """Run a program on this rank; return its outcomes by the calls' numbers, as texts.

    Args:
        comm: the ranks.
        steps: the program.
        draws: seeds the order in which this rank waits for its calls.
        most: calls in flight at most; 0: blocking ones.
        limit_s: how long a call may take.
    """
    own = random.Random(f"{draws} {comm.rank}")
    mine = Outcomes(comm.rank, comm.size)
    in_flight: list[tuple[Step, Callable[[], Any], list[Array]]] = []

    def end(step: Step, finish: Callable[[], Any], used: list[Array]) -> None:
        mine.note(step, finish)
        for array in used:
            array.fill(-1e9)  # nobody takes that for a value

    for step in steps:
        used: list[Array] = []
        if most == 0:
            end(step, lambda step=step, used=used: step.call(comm, None, used), used)
            continue
        try:
            request = step.call(comm, None, used, nonblocking=True)
        except (UsageError, RefusedError) as error:
            mine.note(step, _raiser(error))
        else:
            in_flight.append((step, lambda r=request: r.wait(timeout_s=limit_s), used))
        while len(in_flight) >= most or (in_flight and own.random() < 0.3):
            end(*in_flight.pop(0))
    while in_flight:
        end(*in_flight.pop(0))
    return {str(index): outcome for index, outcome in mine.of.items()}


def _raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def check_found(steps: Sequence[Step], found: Sequence[dict[str, str]]) -> None:
    """Check what ``run_program`` has returned on each rank."""
    outcomes = [
        Outcomes(rank, len(found), {int(index): each for index, each in own.items()})
        for rank, own in enumerate(found)
    ]
    check(steps, outcomes)
