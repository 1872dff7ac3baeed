# SPDX-License-Identifier: Apache-2.0
"""A call that some ranks refuse, with ranks on other nodes: all stay in step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi, settle
from refused_programs import Array, Outcomes, Step, check, draw
from relay_by_hand import RanksByHand
from relay_ranks import RelayRanks

from commrt import algorithms
from commrt.comm import Communicator, core_of
from commrt.errors import CommError, MismatchError, RefusedError, UsageError

NODES = (
    [[0], [1]],
    [[0], [1], [2]],
    [[0, 1], [2]],
    [[0, 2], [1, 3]],
    [[0, 1], [2], [3, 4]],
)
_HEAP_ELEMENTS = 1 << 16


def draw_for(nodes: list[list[int]], rng: random.Random, length: int) -> list[Step]:
    """Return a program for ranks on these nodes, of all schedules that they can run."""
    of = {rank: i for i, ranks in enumerate(nodes) for rank in ranks}
    where = tuple(of[rank] for rank in range(len(of)))
    return draw(
        rng,
        len(of),
        length,
        heap=True,
        schedules=lambda name: algorithms.names(name, len(of), where),
    )


class Program:
    """A drawn program, on all ranks of one thread, which steps them in a drawn order.

    Arrays are overwritten as soon as their call has ended.
    """

    def __init__(self, ranks: Any, rng: random.Random, length: int) -> None:
        self._ranks, self._rng = ranks, rng
        self._size = len(ranks.comms)
        self._steps = draw_for(ranks.nodes, rng, length)
        self._heaps = ranks.each(
            lambda comm: [comm.empty(_HEAP_ELEMENTS, "float64") for _ in range(2)]
        )
        self._outcomes = [Outcomes(rank, self._size) for rank in range(self._size)]
        self._open: list[list[tuple[Step, Any, Any, list[Array]]]]
        self._open = [[] for _ in range(self._size)]
        self._next = [0] * self._size
        self._overwritten: list[Array] = []
        self._most = rng.choice((1, 2, 4))
        self._eager = rng.choice((0.03, 0.3))

    def _start(self, rank: int) -> None:
        step = self._steps[self._next[rank]]
        taken = [id(heap) for _, _, heap, _ in self._open[rank]]
        free = [heap for heap in self._heaps[rank] if id(heap) not in taken]
        heap = free[0] if free else None
        self._next[rank] += 1
        used: list[Array] = []
        comm = self._ranks.comms[rank]
        try:
            request = step.call(comm, heap, used, nonblocking=True)
        except (UsageError, RefusedError) as error:
            self._end(rank, step, used, _raiser(error))
        else:
            self._open[rank].append((step, request, heap, used))

    def _end(
        self, rank: int, step: Step, used: list[Array], finish: Callable[[], Any]
    ) -> None:
        self._outcomes[rank].note(step, finish)
        for array in used:
            array.fill(-1e9)
            if array.base is None:  # the program uses the heap again
                self._overwritten.append(array)

    def run(self, bring: Callable[[], None] = lambda: None) -> None:
        """Run the program, and check what became of each call."""
        turns, ranks = 0, range(self._size)
        while any(self._next[r] < len(self._steps) or self._open[r] for r in ranks):
            turns += 1
            assert turns < 300_000, (self._next, self._open)
            rank = self._rng.randrange(self._size)
            if (
                self._next[rank] < len(self._steps)
                and len(self._open[rank]) < self._most
                and self._rng.random() < self._eager
            ):
                self._start(rank)
            self._ranks.step(rank)
            if self._rng.random() < 0.5:
                bring()
            for entry in [e for e in self._open[rank] if e[1].done]:
                self._open[rank].remove(entry)
                step, request, _, used = entry
                self._end(rank, step, used, request.wait)
        check(self._steps, self._outcomes)
        assert all((array == -1e9).all() for array in self._overwritten)


def _raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("turn", range(40))
@pytest.mark.timeout(240)
def test_calls_in_flight_stay_in_step_over_mpi(
    nodes: list[list[int]], turn: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {nodes} {turn}")
    with FakeMpi().ranks(nodes) as ranks:
        Program(ranks, rng, 30).run()


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("turn", range(40))
@pytest.mark.timeout(240)
def test_calls_in_flight_stay_in_step_over_a_relay(
    nodes: list[list[int]], turn: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    run_over_a_relay(nodes, random.Random(f"{seed} {nodes} {turn} relay"))


def run_over_a_relay(nodes: list[list[int]], rng: random.Random) -> None:
    with RanksByHand(nodes) as ranks:

        def bring() -> None:
            for carrier in ranks.carrier.carriers:
                carrier.give_all()
            ranks.bring()

        Program(ranks, rng, 30).run(bring)


@pytest.mark.timeout(240)
def test_receives_are_taken_back_before_messages_that_were_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 waited for ever: it forgot that it had skipped messages of later calls."""
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    run_over_a_relay([[0, 1], [2]], random.Random("577440 [[0, 1], [2]] 24 relay"))


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("carrier", ["mpi", "relay"])
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.timeout(240)
def test_blocking_calls_stay_in_step(
    carrier: str, nodes: list[list[int]], turn: int, seed: int
) -> None:
    """Each rank is a thread that makes one call after the other."""
    rng = random.Random(f"{seed} {carrier} {nodes} {turn}")
    steps = draw_for(nodes, rng, 30)
    ended: list[int] = []

    def main(comm: Communicator) -> Outcomes:
        mine = Outcomes(comm.rank, comm.size)
        heap = comm.empty(_HEAP_ELEMENTS, "float64")
        try:
            for step in steps:
                used: list[Array] = []
                mine.note(
                    step, lambda step=step, used=used: step.call(comm, heap, used)
                )
                for array in used:
                    array.fill(-1e9)
        finally:
            ended.append(comm.rank)
        # Others may wait for a rank to hear of a refusal, as it does until it ends.
        while len(ended) < comm.size:
            core_of(comm).world.engine.step()
        return mine

    with FakeMpi().ranks(nodes) if carrier == "mpi" else RelayRanks(nodes) as ranks:
        check(steps, ranks.each(main))


# -- one call ------------------------------------------------------------------------


def kind_of(call: Callable[[], Any]) -> str:
    """Return the class of the error that a call raises, or "right"."""
    try:
        call()
    except CommError as error:
        return type(error).__name__
    return "right"


def refuse(comm: Communicator) -> None:
    """Make a call that is refused, in the place of any other."""
    with pytest.raises(UsageError):
        comm.barrier(timeout_s=-1)


@pytest.mark.parametrize("number", [1, 1025, 400_000])
@pytest.mark.parametrize("nodes", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]])
def test_nobody_waits_for_the_rank_that_refused(
    nodes: list[list[int]], number: int
) -> None:
    """That rank does nothing any more, and long arrays are on their way to it."""
    with FakeMpi().ranks(nodes) as ranks:
        first, refusing, last = ranks.comms
        xs = [np.full(number, float(rank)) for rank in range(3)]
        how: dict[str, Any] = {"algorithm": "direct", "nonblocking": True}
        out = np.empty((3, number))
        requests = [first.allgather(xs[0], out=out, **how)]
        ranks.step(0)
        refuse(refusing)
        requests.append(last.allgather(xs[2], **how))
        for _ in range(500):
            ranks.step(0)
            ranks.step(2)
        said = "rank 1 has refused its call, and nothing was delivered: barrier: time"
        for request in requests:
            assert request.done
            with pytest.raises(RefusedError, match=said):
                request.wait()
        out.fill(-1.0)
        totals = [comm.allreduce(xs[comm.rank], **how) for comm in ranks.comms]
        settle(ranks)
        assert all((total.wait() == 3.0).all() for total in totals)
        assert (out == -1.0).all()
        assert ranks.mpi.on_the_way() == 0


def test_an_array_stays_while_somebody_may_take_it_for_the_value() -> None:
    """The last rank gets its part, though the root has heard of a refusal before."""
    number = 5000
    with FakeMpi().ranks([[0], [1], [2]]) as ranks:
        root, refusing, last = ranks.comms
        x, out = np.arange(3.0 * number), np.zeros(number)
        how: dict[str, Any] = {"algorithm": "direct", "nonblocking": True}
        sent = root.scatter(x, out=np.empty(number), **how)
        refuse(refusing)
        for _ in range(500):
            ranks.step(0)
        assert not sent.done, "MPI reads its array, and rank 2 may take what it reads"
        received = last.scatter(None, out=out, **how)
        while not sent.done:
            ranks.step(0)
            ranks.step(2)
        with pytest.raises(RefusedError):
            sent.wait()
        x.fill(-1.0)
        settle(ranks)
        if kind_of(received.wait) == "right":
            assert (out == np.arange(2.0 * number, 3.0 * number)).all()


def test_an_array_is_let_go_once_all_others_have_left() -> None:
    """The last rank says so in its call, and does nothing more."""
    with FakeMpi().ranks([[0], [1], [2]]) as ranks:
        first, refusing, last = ranks.comms
        x, out = np.ones(5000), np.empty((3, 5000))
        how: dict[str, Any] = {"algorithm": "direct", "nonblocking": True}
        request = first.allgather(x, out=out, **how)
        refuse(refusing)
        for rank in [0, 2] * 500:
            ranks.step(rank)
        assert not request.done
        other = last.allgather(x, **how)
        assert kind_of(other.wait) == "RefusedError"
        for _ in range(500):
            ranks.step(0)
        assert kind_of(request.wait) == "RefusedError"


def test_what_a_rank_of_the_node_has_left_is_not_read() -> None:
    """The root hears of the refusal first, and writes to what it had shown."""
    with FakeMpi().ranks([[0, 1], [2]]) as ranks:
        heaps = ranks.each(lambda comm: comm.empty(_HEAP_ELEMENTS, "float64"))
        how: dict[str, Any] = {"root": 0, "algorithm": "direct", "nonblocking": True}
        heaps[0].fill(1.0)
        request = ranks.comms[0].bcast(heaps[0], **how)
        refuse(ranks.comms[2])
        while not request.done:
            ranks.step(0)
        assert kind_of(request.wait) == "RefusedError"
        heaps[0].fill(-1.0)
        other = ranks.comms[1].bcast(heaps[1], **how)
        while not other.done:
            ranks.step(1)
        assert kind_of(other.wait) == "RefusedError"


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_rank_may_be_many_refused_calls_ahead(nodes: list[list[int]]) -> None:
    def main(comm: Communicator) -> tuple[int, float]:
        refused = 0
        for _ in range(100):
            with suppress(RefusedError, UsageError):
                out = np.ones(3 if comm.rank == 0 else 2)
                comm.allreduce(np.ones(2), out=out, algorithm="direct")
                refused -= 1
            refused += 1
        return refused, float(comm.allreduce(np.ones(1), algorithm="direct")[0])

    with FakeMpi().ranks(nodes) as ranks:
        size = len(ranks.comms)
        assert ranks.each(main) == [(100, float(size))] * size


@pytest.mark.parametrize("ahead", [10, 80])
def test_a_root_that_is_ahead(ahead: int) -> None:
    """The root's messages of its last calls are taken back, and not older ones."""
    with FakeMpi().ranks([[0], [1]]) as ranks:
        root, other = ranks.comms
        how: dict[str, Any] = {"root": 0, "algorithm": "direct", "nonblocking": True}
        sent = [root.bcast(np.full(3, float(i)), **how) for i in range(ahead)]
        assert all(request.done for request in sent)
        refuse(other)
        outs = [np.zeros(3) for _ in range(ahead - 1)]
        requests = [other.bcast(out, **how) for out in outs]
        settle(ranks)
        kinds = {kind_of(request.wait) for request in requests}
        assert {kind_of(request.wait) for request in sent} == {"right"}
        if ahead < 64:
            assert kinds == {"right"}
            assert [float(out[0]) for out in outs] == [*range(1, ahead)]
        else:
            assert kinds == {"RevokedError"}
            for comm in ranks.comms:
                assert kind_of(comm.barrier) == "RevokedError"
                ranks.step(0)


def test_another_call_beside_a_refused_one_is_still_a_mismatch() -> None:
    with FakeMpi().ranks([[0], [1], [2]]) as ranks:
        how: dict[str, Any] = {"algorithm": "direct", "nonblocking": True}
        refuse(ranks.comms[2])
        requests = [comm.allreduce(np.ones(4), **how) for comm in ranks.comms[:2]]
        requests += [
            comm.allreduce(np.ones(4), op="max" if comm.rank == 1 else "sum", **how)
            for comm in ranks.comms
        ]
        settle(ranks)
        assert [kind_of(one.wait) for one in requests[:2]] == ["RefusedError"] * 2
        with pytest.raises(MismatchError, match="op='max'"):
            requests[2].wait()
