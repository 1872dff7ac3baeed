# SPDX-License-Identifier: Apache-2.0
"""split, dup, create_group, free, and several communicators and threads at once."""

from __future__ import annotations

import gc
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cases import run_cases, sample

from commrt import backends
from commrt.backends.base import Attached, Capabilities
from commrt.comm import core_of
from commrt.errors import BackendError, CommError
from commrt.local import run


def total(comm: Any) -> float:
    """Return the sum of the ranks' numbers, each plus one."""
    return float(comm.allreduce(np.array([1.0 + comm.rank]))[0])


def test_split_groups_by_color_and_orders_by_key() -> None:
    def rank_main(comm: Any) -> list[Any]:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        gathered = part.allgather(np.array([comm.rank])).reshape(-1).tolist()
        part.free()
        return [part.rank, part.size, gathered]

    odd, even = [3, 1], [4, 2, 0]
    assert run(5, rank_main) == [
        [2, 3, even],
        [1, 2, odd],
        [1, 3, even],
        [0, 2, odd],
        [0, 3, even],
    ]


def test_split_without_color_takes_part_and_gets_nothing() -> None:
    def rank_main(comm: Any) -> int:
        part = comm.split(None if comm.rank == 1 else -7)
        return 0 if part is None else part.size

    assert run(3, rank_main) == [2, 0, 2]


def test_dup_has_a_sequence_of_its_own() -> None:
    def rank_main(comm: Any) -> list[Any]:
        total(comm)
        with comm.dup(name=f"mine{comm.rank}") as copy:
            total(copy)
            total(copy)
            assert (copy.name, core_of(copy).next_seq) == (f"mine{comm.rank}", 2)
            # Names differ across ranks, and so do derived names: nobody is confused.
            with copy.dup() as third, copy.split(0) as fourth:
                assert total(third) == total(fourth) == 3.0
        return [core_of(comm).next_seq, total(comm)]

    assert run(2, rank_main) == [[1, 3.0]] * 2


def test_create_group_is_the_business_of_its_members_only() -> None:
    def rank_main(comm: Any) -> list[float]:
        sums = []
        # Overlapping groups, made in an order that only their members share.
        for members in ([2, 0], [1, 3], [0, 1, 2, 3], [3, 2]):
            if comm.rank in members:
                with comm.create_group(members) as group:
                    assert group.rank == members.index(comm.rank)
                    sums.append(total(group))
        return [*sums, total(comm)]

    assert run(4, rank_main) == [
        [3.0, 10.0, 10.0],
        [3.0, 10.0, 10.0],
        [3.0, 10.0, 3.0, 10.0],
        [3.0, 10.0, 3.0, 10.0],
    ]


def test_the_same_group_again_is_another_communicator() -> None:
    def rank_main(comm: Any) -> None:
        first, second = comm.create_group([0, 1]), comm.create_group([0, 1])
        order = [first, second] if comm.rank == 0 else [second, first]
        requests = [group.allreduce(np.ones(3), nonblocking=True) for group in order]
        assert [request.wait()[0] for request in requests] == [2.0, 2.0]
        first.free()
        second.free()

    run(2, rank_main)


def test_groups_of_groups_use_their_own_ranks() -> None:
    def rank_main(comm: Any) -> list[float]:
        half = comm.split(comm.rank // 3)
        pair = half.split(0 if half.rank < 2 else 1)
        sums = [total(half), total(pair)]
        out = np.zeros(1)
        if pair.size == 2:
            x = np.array([float(comm.rank)])
            pair.sendrecv(x, dest=1 - pair.rank, out=out, source=1 - pair.rank)
        for group in (pair, half):
            group.free()
        return [*sums, float(out[0])]

    assert run(6, rank_main) == [
        [6.0, 3.0, 1.0],
        [6.0, 3.0, 0.0],
        [6.0, 1.0, 0.0],
        [6.0, 3.0, 4.0],
        [6.0, 3.0, 3.0],
        [6.0, 1.0, 0.0],
    ]


def test_a_communicator_of_one_rank_runs_everything(seed: int) -> None:
    def rank_main(comm: Any) -> list[str]:
        with comm.create_group([comm.rank]) as alone:
            return run_cases(alone, sample("allreduce", 1, seed, 20))

    assert run(2, rank_main) == [[], []]


def test_operations_on_several_communicators_interleave(seed: int) -> None:
    def rank_main(comm: Any) -> None:
        rng = random.Random(f"{seed} {comm.rank}")
        comms = [comm, *(comm.dup() for _ in range(4))]
        requests = [
            # Each communicator sees its operations in order; between them any will do.
            [each.allreduce(np.full(700 * i, 1.0), nonblocking=True) for i in range(12)]
            for each in rng.sample(comms, len(comms))
        ]
        flat = [request for row in requests for request in row]
        for request in rng.sample(flat, len(flat)):
            assert (request.wait() == 3.0).all()
        for each in comms[1:]:
            each.free()

    run(3, rank_main)


def test_threads_of_one_rank_take_turns(seed: int) -> None:
    """Each thread has a communicator of its own, all share the engine."""

    def rank_main(comm: Any) -> list[str]:
        comms = [comm.dup() for _ in range(4)]
        wrong: list[str] = []

        def work(index: int) -> None:
            cases = sample("allreduce", 2, seed + index, 15)
            try:
                wrong.extend(run_cases(comms[index], cases))
            except (AssertionError, CommError) as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in comms:
            each.free()
        return wrong

    assert run(2, rank_main) == [[], []]


def test_threads_may_share_a_communicator_where_order_does_not_matter() -> None:
    """Equal operations from several threads: any order is the same order."""

    def rank_main(comm: Any) -> list[float]:
        sums: list[float] = []

        def work() -> None:
            for _ in range(50):
                sums.append(float(comm.allreduce(np.ones(100))[99]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert core_of(comm).next_seq == 200
        return sums

    assert run(2, rank_main) == [[2.0] * 200] * 2


def test_counters() -> None:
    def rank_main(comm: Any) -> None:
        total(comm)
        total(comm)
        stats = comm.stats()
        assert (stats.name, stats.operations, stats.in_flight) == ("local", 2, False)
        assert stats.plans == 1
        assert repr(comm) == f"<Communicator local: rank {comm.rank} of 2>"
        assert comm.nodes == [[0, 1]]
        assert core_of(comm).shares_memory_with(1 - comm.rank)

    run(2, rank_main)


@pytest.mark.full
def test_many_lengths_do_not_grow_the_caches_without_bound() -> None:
    def rank_main(comm: Any) -> int:
        for number in range(5000):
            comm.allreduce(np.zeros(number, np.int8))
        return comm.stats().plans

    (plans,) = run(1, rank_main)
    assert plans <= 4096


@pytest.mark.parametrize("size", [2, 3])
def test_communicators_come_and_go(size: int) -> None:
    def rank_main(comm: Any) -> None:
        for _ in range(30):
            with comm.dup() as copy:
                assert total(copy) == size * (size + 1) / 2

    run(size, rank_main)


class Unattachable:
    """A backend of another package that cannot be attached to some communicators."""

    name = "unattachable"
    capabilities = Capabilities()

    def __init__(self) -> None:
        self.fails_in = "attach"
        self.is_bad = False
        self.num_closed = 0

    def attach(self, group: Any, beside: Any) -> Attached:
        self.fail("attach")
        return _Unattachable(self, group, beside)

    def fail(self, where: str) -> None:
        if self.is_bad and self.fails_in == where:
            raise BackendError(f"no {where} here")


class _Unattachable(Attached):
    backend: Unattachable

    def join(self, timeout_s: float) -> None:
        self.backend.fail("join")

    def measure(self) -> None:
        self.backend.fail("measure")

    def close(self, *, may_call: bool = True) -> None:
        self.backend.num_closed += 1


@pytest.mark.parametrize("where", ["attach", "join", "measure"])
def test_a_communicator_that_cannot_be_made_leaves_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = Unattachable()
    theirs.fails_in = where
    known = {**backends.all_backends(), theirs.name: theirs}
    monkeypatch.setattr(backends, "all_backends", lambda: known)
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    barrier = threading.Barrier(2)

    def rank_main(comm: Any) -> float:
        barrier.wait()
        theirs.is_bad = True
        with pytest.raises(BackendError, match=f"no {where} here"):
            comm.dup()
        barrier.wait()
        theirs.is_bad = False
        gc.collect()
        closed = theirs.num_closed
        with comm.dup() as copy:
            result = total(copy)
        assert theirs.num_closed > closed
        return result

    assert run(2, rank_main) == [3.0, 3.0]
    gc.collect()
    assert ignored == []


@pytest.mark.parametrize("limit_s", [250.0, 299.5])
def test_a_communicator_begins_with_the_limit_of_its_origin(limit_s: float) -> None:
    def rank_main(comm: Any) -> None:
        comm.timeout_s = limit_s
        cart = comm.cart((comm.size,))
        made = [
            comm.split(0),
            comm.dup(),
            comm.create_group([*range(comm.size)]),
            cart,
            cart.sub(0),
            comm.dup().dup(),
            comm.graph([1 - comm.rank], [1 - comm.rank]),
            comm.mesh({"a": comm.size})["a"],
        ]
        assert [each.timeout_s for each in made] == [limit_s] * len(made)
        made[1].timeout_s = 280.0
        assert made[1].dup().timeout_s == 280.0
        assert comm.timeout_s == limit_s

    run(2, rank_main)
