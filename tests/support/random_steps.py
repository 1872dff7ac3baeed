# SPDX-License-Identifier: Apache-2.0
"""Drawn calls of every kind that communicators have, each with its right result."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import halo_cases
import layout_cases
import neighbor_cases
import numpy as np
from cases import INEXACT, Attempt, Case, sample

import commrt
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import COLLECTIVES, FUSED, operation

Array = np.ndarray[Any, Any]
Finish = Callable[[], str | None]
"""Waits for a call, and returns what is wrong with its result; None: all is right."""
COUNTS = (0, 1, 3, 17, 700, 5001)
WRONG = {"timeout_s": -1}
"""An argument that every call refuses."""


@dataclass(frozen=True)
class Step(ABC):
    """One call of a program, the same on all ranks."""

    number: int
    """Place in the program. It is the tag of messages."""
    seed: int

    operation = ""
    """The operation by which a fault on purpose can be aimed at the call."""
    may_wait = False
    """True if the call may run while others go on."""
    refusable = False
    """True if a rank's wrong call is told to all other ranks."""

    @abstractmethod
    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call on one rank, with more arguments."""

    def refuse(self, comm: Any) -> None:
        """Make the call in a wrong way on one rank."""
        self.start(comm, **WRONG)

    @property
    def rng(self) -> random.Random:
        """Draws the call's details, the same on all ranks."""
        return random.Random(self.seed)


def compared(got: Any, want: Any) -> str | None:
    """Return what is wrong with an exact result."""
    try:
        np.testing.assert_array_equal(got, want)
    except AssertionError as error:
        return str(error)
    return None


def checked(check: Callable[..., object], *args: Any) -> str | None:
    """Run a check that asserts; return what it says."""
    try:
        check(*args)
    except AssertionError as error:
        return str(error)
    return None


def after(begun: Any, nonblocking: bool, verdict: Callable[[Any], Any]) -> Finish:
    """Return what waits for a begun call, and looks at its result."""
    return lambda: verdict(begun.wait() if nonblocking else begun)


def wait_for_each(requests: list[Any]) -> list[Any]:
    """Wait for each request, also after an error of one; return their results."""
    results: list[Any] = []
    with ExitStack() as waits:
        for request in reversed(requests):
            waits.callback(lambda each=request: results.append(each.wait()))
    return results


@contextmanager
def several() -> Iterator[list[Any]]:
    """Give a list for requests, which are waited for where a later one cannot begin."""
    begun: list[Any] = []
    try:
        yield begun
    except BaseException:
        wait_for_each(begun)
        raise


def numbers(rank: int, count: int, salt: int) -> Array:
    """Return small integers, whose sums are exact in any order."""
    return ((np.arange(count) * 3 + salt) % 5 + rank).astype(np.float32)


@dataclass(frozen=True)
class Collective(Step):
    """A collective of any type, reduction, length, root and algorithm."""

    case: Case
    may_wait = True
    refusable = True

    @property
    def operation(self) -> str:  # type: ignore[override]
        """Return the collective's name."""
        return self.case.coll

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        return self.attempted(Attempt(self.case, comm.rank), comm, nonblocking, more)

    def attempted(
        self, mine: Attempt, comm: Any, nonblocking: bool, more: dict[str, Any]
    ) -> Finish:
        """Make the call with arrays that are there."""
        begun = mine.start(comm, nonblocking=nonblocking, **more)

        def finish() -> str | None:
            if nonblocking:
                mine.result = begun.wait()
            return mine.verdict()

        return finish

    def with_nan(self, comm: Any, nonblocking: bool) -> Finish:
        """Make the call with an array that is not finite."""
        mine = Attempt(self.case, comm.rank)
        mine.x[-1] = np.nan
        return self.attempted(mine, comm, nonblocking, {})

    @property
    def is_float(self) -> bool:
        """True if its arrays can hold NaN, and none does."""
        kind = dtype_by_name(self.case.dtype).kind
        return kind == "float" and self.case.op in INEXACT

    def contributors(self) -> list[int]:
        """Return the ranks whose arrays have elements that are sent."""
        from_root = operation(self.case.coll).input_on == "root"
        ranks = [self.case.root] if from_root else range(self.case.size)
        empty = self.case.coll == "barrier"
        return [r for r in ranks if self.case.x_elements(r) and not empty]

    def changed(self, rng: random.Random) -> Collective:
        """Return a call that does not fit to this one."""
        case, row = self.case, operation(self.case.coll)
        ways = [replace(case, coll=name, op="sum") for name in self._others()]
        if not row.is_empty:
            ways.append(replace(case, count=case.count + rng.choice((1, 3, 2000))))
            other = "int32" if case.dtype != "int32" else "float64"
            ways.append(replace(case, dtype=other, op="sum"))
        if row.has_root:
            ways.append(replace(case, root=(case.root + 1) % case.size))
        if row.reduces and case.count:
            is_complex = dtype_by_name(case.dtype).kind == "complex"
            others = ("sum", "prod") if is_complex else ("max", "min")
            ways.append(replace(case, op=others[case.op == others[0]]))
        plain = replace(rng.choice(ways), algorithm=None, params={}, in_place=False)
        return replace(self, case=plain)

    def _others(self) -> list[str]:
        names = ("allreduce", "allgather", "bcast", "barrier", "scan", "alltoall")
        return [name for name in names if name != self.case.coll]


@dataclass(frozen=True)
class Planned(Collective):
    """A persistent plan of a collective, run twice."""

    may_wait = False
    refusable = False

    def attempted(
        self, mine: Attempt, comm: Any, nonblocking: bool, more: dict[str, Any]
    ) -> Finish:
        """Make the plan, and run it."""
        arguments = self.case.arguments(mine.rank) | more
        given = () if self.case.coll == "barrier" else (mine.x,)
        usual = mine.out is mine.x and operation(self.case.coll).in_place
        if mine.out is not None and not usual:
            arguments["out"] = mine.out
        before = mine.x.copy()
        plan = getattr(comm.plan, self.case.coll)(*given, **arguments)
        for turn in range(2):
            mine.x[...] = before
            mine.result = plan.start().wait() if turn else plan()
        return mine.verdict


@dataclass(frozen=True)
class Messages(Step):
    """Messages with a tag: around a ring, in pairs, in lists, or to one from all."""

    kind: str
    count: int
    may_wait = True

    @property
    def operation(self) -> str:  # type: ignore[override]
        """Return the name of a message in faults."""
        return "send"

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        return getattr(self, f"_{self.kind}")(comm, nonblocking, more)

    def _x(self, rank: int) -> Array:
        return numbers(rank, self.count, self.number)

    def _ring(self, comm: Any, nonblocking: bool, more: dict[str, Any]) -> Finish:
        far = 1 + self.seed % comm.size
        dest, source = (comm.rank + far) % comm.size, (comm.rank - far) % comm.size
        tags = {"sendtag": self.number, "recvtag": self.number}
        out = np.empty(self.count, np.float32)
        more = more | tags | {"nonblocking": nonblocking}
        begun = comm.sendrecv(self._x(comm.rank), dest, out, source, **more)
        return after(begun, nonblocking, lambda got: compared(got, self._x(source)))

    def _pairs(self, comm: Any, nonblocking: bool, more: dict[str, Any]) -> Finish:
        peer = comm.rank ^ 1
        if peer >= comm.size:
            return lambda: None
        out = np.empty(self.count, np.float32)
        x = self._x(comm.rank)
        with several() as begun:
            begun.append(comm.recv(out, peer, self.number, nonblocking=True, **more))
            sent = comm.send(x, peer, self.number, nonblocking=nonblocking, **more)
        if nonblocking:
            begun.append(sent)
        return lambda: compared(wait_for_each(begun)[0], self._x(peer))

    def _list(self, comm: Any, nonblocking: bool, more: dict[str, Any]) -> Finish:
        ranks = range(comm.size)
        outs = [np.empty(self.count, np.float32) for _ in ranks]
        begun = comm.multi_sendrecv(
            sends=[(self._x(comm.rank) + dest, dest, self.number) for dest in ranks],
            recvs=[(outs[source], source, self.number) for source in ranks],
            nonblocking=nonblocking,
            **more,
        )
        want = [self._x(source) + comm.rank for source in ranks]
        return after(begun, nonblocking, lambda _: compared(outs, want))

    def _anyone(self, comm: Any, nonblocking: bool, more: dict[str, Any]) -> Finish:
        if comm.rank:
            begun = comm.send(
                self._x(comm.rank), 0, self.number, nonblocking=nonblocking, **more
            )
            return after(begun, nonblocking, lambda _: None)
        outs = [np.full(self.count, -1, np.float32) for _ in range(comm.size - 1)]
        more = more | {"nonblocking": True}
        with several() as begun_here:
            for out in outs:
                begun_here.append(comm.recv(out, None, self.number, **more))

        def finish() -> str | None:
            wait_for_each(begun_here)
            want = [self._x(rank) for rank in range(1, comm.size)]
            return compared(sorted(map(list, outs)), sorted(map(list, want)))

        return finish


@dataclass(frozen=True)
class Objects(Step):
    """Objects of Python, by any of their calls."""

    kind: str
    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        each = [{"rank": r, "text": "x" * (self.seed % 5000)} for r in range(comm.size)]
        root = self.seed % comm.size
        mine = each[comm.rank]
        is_root = comm.rank == root
        got, want = {
            "bcast": lambda: (
                comm.bcast_object(mine if is_root else None, root, **more),
                each[root],
            ),
            "allgather": lambda: (comm.allgather_object(mine, **more), each),
            "gather": lambda: (
                comm.gather_object(mine, root, **more),
                each if is_root else None,
            ),
            "scatter": lambda: (
                comm.scatter_object(each if is_root else None, root, **more),
                mine,
            ),
        }[self.kind]()
        return lambda: None if got == want else f"{self.kind}_object: {got}"


@dataclass(frozen=True)
class Sparse(Step):
    """A sparse sum, or one of the largest elements of dense arrays."""

    count: int
    largest: bool
    may_wait = True
    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        more = more | {"nonblocking": nonblocking}
        each = [self._dense(rank) for rank in range(comm.size)]
        want = np.sum(each, axis=0)
        mine = each[comm.rank]
        if self.largest:
            begun = comm.topk_allreduce(mine, self.count, **more)
        else:
            at = np.flatnonzero(mine)
            vector = commrt.SparseVector(at, mine[at], shape=self.count)
            begun = comm.sparse_allreduce(vector, **more)

        def verdict(got: Any) -> str | None:
            dense = got.to_dense() if isinstance(got, commrt.SparseVector) else got
            return compared(dense, want)

        return after(begun, nonblocking, verdict)

    def _dense(self, rank: int) -> Array:
        rng = np.random.default_rng((self.seed, rank))
        there = rng.random(self.count) < 0.1
        return np.where(there, rng.integers(1, 5, self.count), 0).astype(np.float32)


@dataclass(frozen=True)
class Halo(Step):
    """Halo exchange or reduction on a grid of its own."""

    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the calls."""
        case = halo_cases.draw(self.rng, comm.size, 3)
        wrong = checked(halo_cases.check, comm, case)
        return lambda: wrong

    def refuse(self, comm: Any) -> None:
        """Ask for a grid that cannot be."""
        comm.cart((comm.size + 1,))


@dataclass(frozen=True)
class Neighbors(Step):
    """All neighbour collectives on a grid or a graph of its own."""

    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the calls."""
        rng = self.rng
        if self.seed % 2:
            dims, periodic = neighbor_cases.draw_grid(rng, comm.size)
            edges = neighbor_cases.grid_edges(dims, periodic)
            outgoing = [2 * len(dims)] * comm.size
            made = comm.cart(dims, periodic)
        else:
            sources, destinations, edges = neighbor_cases.draw_graph(rng, comm.size)
            outgoing = [len(each) for each in destinations]
            made = comm.graph(sources[comm.rank], destinations[comm.rank])
        with made:
            wrong = checked(neighbor_cases.check_all, made, edges, outgoing, self.seed)
        return lambda: wrong

    def refuse(self, comm: Any) -> None:
        """Ask for a grid or a graph that cannot be."""
        if self.seed % 2:
            comm.cart((comm.size + 1,))
        else:
            comm.graph([comm.size], [])


@dataclass(frozen=True)
class Redistributed(Step):
    """An array that moves between two drawn layouts."""

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the calls."""
        wrong = checked(layout_cases.move_drawn, comm, self.rng)
        return lambda: wrong


@dataclass(frozen=True)
class Part(Step):
    """A collective on a new communicator: of some ranks, or of all."""

    count: int
    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the communicator, use and free it."""
        colors = self.rng.choice((1, 2, 3))
        kind = self.seed % 3
        if kind == 0:
            made, members = comm.dup(), range(comm.size)
        elif kind == 1:
            made = comm.split(comm.rank % colors, key=-comm.rank)
            members = range(comm.rank % colors, comm.size, colors)
        else:
            made = comm.split(None if comm.rank == 0 else 7)
            members = range(1, comm.size)
        if made is None:
            return lambda: None
        with made:
            each = [numbers(rank, self.count, self.number) for rank in members]
            mine = numbers(comm.rank, self.count, self.number)
            wrong = compared(made.allreduce(mine), np.sum(each, axis=0))
        return lambda: wrong

    def refuse(self, comm: Any) -> None:
        """Ask for a communicator by a wrong argument."""
        if self.seed % 3 == 0:
            comm.dup(deterministic="maybe")
        else:
            comm.split("red")


@dataclass(frozen=True)
class FusedSums(Step):
    """Sums of short arrays that are joined into one."""

    count: int

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the calls."""
        assert "allreduce" in FUSED
        each = [numbers(rank, self.count, self.number) for rank in range(comm.size)]
        want = np.sum(each, axis=0)
        nbytes = self.rng.choice((100, 4096))
        with several() as begun, comm.fused(nbytes=nbytes):
            for turn in range(5):
                x = each[comm.rank] + turn
                begun.append(comm.allreduce(x, nonblocking=True))
        sums = [want + comm.size * turn for turn in range(5)]
        return lambda: compared(wait_for_each(begun), sums)


@dataclass(frozen=True)
class Compressed(Step):
    """A sum of numbers that stay exact where they are compressed."""

    count: int
    may_wait = True
    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        each = [numbers(rank, self.count, self.number) for rank in range(comm.size)]
        begun = comm.allreduce(
            each[comm.rank].copy(),
            compress=self.rng.choice(("float16", "bfloat16")),
            nonblocking=nonblocking,
            **more,
        )
        want = np.sum(each, axis=0)
        return after(begun, nonblocking, lambda got: compared(got, want))


@dataclass(frozen=True)
class Number(Step):
    """A sum of numbers of Python."""

    refusable = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the call."""
        got = comm.allreduce(comm.rank + 0.5, **more)
        want = sum(rank + 0.5 for rank in range(comm.size))
        return lambda: None if got == want else f"{got}, expected {want}"


@dataclass(frozen=True)
class Symmetric(Step):
    """A sum in symmetric memory."""

    count: int
    may_wait = True

    def start(self, comm: Any, nonblocking: bool = False, **more: Any) -> Finish:
        """Make the memory, and the call."""
        each = [numbers(rank, self.count, self.number) for rank in range(comm.size)]
        x = comm.empty(self.count, "float32")
        x[...] = each[comm.rank]
        begun = comm.allreduce(x, nonblocking=nonblocking, **more)
        want = np.sum(each, axis=0)
        return after(begun, nonblocking, lambda got: compared(got, want))


def draw(rng: random.Random, size: int, length: int) -> list[Step]:
    """Return a program of any calls."""
    return [draw_step(rng, size, number) for number in range(length)]


def draw_collective(
    rng: random.Random, size: int, number: int, kind: type[Collective] = Collective
) -> Collective:
    """Return any collective."""
    [case] = sample(rng.choice(COLLECTIVES), size, rng.randrange(1 << 30), 1)
    return kind(number, rng.randrange(1 << 30), case)


def draw_step(rng: random.Random, size: int, number: int) -> Step:
    """Return any call."""
    if rng.random() < 0.5:
        return draw_collective(rng, size, number)
    seed, count = rng.randrange(1 << 30), rng.choice(COUNTS)
    make: Callable[[], Step] = rng.choice(
        (
            lambda: draw_collective(rng, size, number, Planned),
            lambda: Messages(number, seed, rng.choice(_MESSAGES), count),
            lambda: Messages(number, seed, rng.choice(_MESSAGES), count),
            lambda: Objects(number, seed, rng.choice(_OBJECTS)),
            lambda: Sparse(number, seed, count, rng.random() < 0.4),
            lambda: Halo(number, seed),
            lambda: Neighbors(number, seed),
            lambda: Redistributed(number, seed),
            lambda: Part(number, seed, count),
            lambda: FusedSums(number, seed, count),
            lambda: Compressed(number, seed, count),
            lambda: Number(number, seed),
            lambda: Symmetric(number, seed, count),
        )
    )
    return make()


_MESSAGES = ("ring", "pairs", "list", "anyone")
_OBJECTS = ("bcast", "allgather", "gather", "scatter")
