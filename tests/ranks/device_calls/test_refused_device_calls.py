# SPDX-License-Identifier: Apache-2.0
"""A call on device arrays that one rank refuses is refused on all, which stay in step.

Whoever carries it: the host, NCCL or memory of peers. The rank that refused it makes a
stand-in, whose bytes nobody takes for a result. Deadlines here are far away.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from device_carriers import Run, duplicate
from staged_ranks import Rank

from commrt.comm import core_of
from commrt.errors import CommError, RefusedError, UsageError
from commrt.vocabulary.operations import operation

LENGTH = 840
"""Elements: a multiple of every number of ranks here."""


def total(rank: Rank, comm: Any, name: str, length: int = LENGTH) -> float:
    """Return a sum over the ranks, each of whose parts is one."""
    x = rank.array(np.ones(length, "f4"))
    comm.allreduce(x, backend=name, nonblocking=True).synchronize()
    seen = rank.fetch(x)
    rank.stream.synchronize()
    values = seen()
    assert {*values} == {values[0]}
    return float(values[0])


def told(start: Callable[[], Any]) -> str:
    """Return how a call fails, which has nothing to wait for."""
    with pytest.raises(RefusedError) as raised:
        start().synchronize()
    return str(raised.value)


def counts(rank: int, size: int) -> dict[str, list[int]]:
    """Return uneven counts of an alltoallv, with zeros."""
    return {
        "send_counts": [(rank + 2 * peer) % 4 for peer in range(size)],
        "recv_counts": [(peer + 2 * rank) % 4 for peer in range(size)],
    }


def shares(size: int) -> list[int]:
    return [3 * rank + (rank != 1) for rank in range(size)]


def _counted(rank: Rank, comm: Any, **more: Any) -> Any:
    own = counts(comm.rank, comm.size)
    x = rank.array(np.ones(sum(own["send_counts"]), "f4"))
    out = rank.array(np.zeros(sum(own["recv_counts"]), "f4"))
    return comm.alltoallv(x, out=out, **own, **more)


def _shared(name: str) -> Callable[..., Any]:
    def start(rank: Rank, comm: Any, **more: Any) -> Any:
        own, whole = shares(comm.size)[comm.rank], sum(shares(comm.size))
        sends_part = name in ("allgatherv", "gatherv")
        x = rank.array(np.ones(own if sends_part else whole, "f4"))
        out = rank.array(np.zeros(whole if sends_part else own, "f4"))
        return getattr(comm, name)(x, out=out, counts=shares(comm.size), **more)

    return start


def _simple(name: str, out: Callable[[int], int], **fixed: Any) -> Callable[..., Any]:
    def start(rank: Rank, comm: Any, **more: Any) -> Any:
        x = rank.array(np.ones(LENGTH, "f4"))
        taken = rank.array(np.zeros(out(comm.size), "f4"))
        return getattr(comm, name)(x, out=taken, **fixed, **more)

    return start


CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": _simple("allreduce", lambda size: LENGTH, op="max"),
    "premul_sum": _simple("allreduce", lambda s: LENGTH, op="premul_sum", factor=2),
    "reduce": _simple("reduce", lambda size: LENGTH, root=1),
    "bcast": _simple("bcast", lambda size: LENGTH, root=1),
    "allgather": _simple("allgather", lambda size: LENGTH * size),
    "gather": _simple("gather", lambda size: LENGTH * size, root=1),
    "scatter": _simple("scatter", lambda size: LENGTH // size, root=1),
    "reduce_scatter": _simple("reduce_scatter", lambda size: LENGTH // size),
    "alltoall": _simple("alltoall", lambda size: LENGTH),
    "scan": _simple("scan", lambda size: LENGTH),
    "exscan": _simple("exscan", lambda size: LENGTH),
    "alltoallv": _counted,
    "allgatherv": _shared("allgatherv"),
    "gatherv": _shared("gatherv"),
    "scatterv": _shared("scatterv"),
    "reduce_scatterv": _shared("reduce_scatterv"),
}


SPECS = {"premul_sum": "allreduce"}
"""The operation that a call is, where its name is another one."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.full(sample=24)
def test_every_collective_is_refused_in_its_place(
    carrier: tuple[str, Run], call: str, size: int
) -> None:
    name, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        start = CALLS[call]
        start(rank, comm, nonblocking=True).synchronize()
        for wrong in range(size):  # each rank in turn: a root, too
            if rank.rank == wrong:
                with pytest.raises(UsageError, match="'nowhere'"):
                    start(rank, comm, nonblocking=True, backend="nowhere")
            else:
                needs_all = operation(SPECS.get(call, call)).waits_for == "all"
                request = start(rank, comm, nonblocking=True)
                # An alltoallv need not exchange anything with that rank; others may
                # have had their result before.
                if needs_all and call != "alltoallv":
                    said = told(lambda r=request: r)
                    assert f"rank {wrong} has refused its call" in said
                    assert "'nowhere'" in said
                else:
                    with suppress(RefusedError):
                        request.synchronize()
        found = [total(rank, comm, name), float(comm.allreduce(np.ones(1))[0])]
        rank.stream.synchronize()
        comm.free()
        return found

    assert run(size, main) == [[size, size]] * size


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.full(sample=6)
def test_drawn_programs_stay_in_step(carrier: tuple[str, Run], seed: int) -> None:
    """Calls of all lengths, several under way, some refused by some ranks."""
    name, run = carrier
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    steps = [
        (
            [draw.choice([0, 1, 7, 1000, 70_000]) for _ in range(draw.randint(1, 4))],
            {
                at: frozenset(draw.sample(range(size), draw.randint(1, size)))
                for at in range(4)
                if draw.random() < 0.3
            },
            draw.random() < 0.5,
        )
        for _ in range(8)
    ]

    def main(rank: Rank) -> None:
        comm = duplicate(rank)
        total(rank, comm, name)  # the ranks have met
        for number, (lengths, refusers, has_host) in enumerate(steps):
            under_way = []
            for at, length in enumerate(lengths):
                x = rank.array(np.full(length, number + at + 1, "f4"))
                if rank.rank in refusers.get(at, ()):
                    out = rank.array(np.zeros(length + 1, "f4"))
                    with pytest.raises(UsageError, match="out has"):
                        comm.allreduce(x, out=out, backend=name, nonblocking=True)
                    continue
                request = comm.allreduce(x, backend=name, nonblocking=True)
                under_way.append((at, x, request))
            if has_host:
                assert comm.allreduce(np.ones(2))[1] == size
            for at, x, request in under_way:
                if at in refusers:
                    if x.size == 0:  # which may need no other rank
                        with suppress(RefusedError):
                            request.synchronize()
                        continue
                    assert "has refused its call" in told(lambda r=request: r)
                    continue
                request.synchronize()
                seen = rank.fetch(x)
                rank.stream.synchronize()
                assert {*seen()} <= {float(size * (number + at + 1))}
        rank.stream.synchronize()
        comm.free()

    run(size, main)


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_may_come_before_or_after_the_refusal(
    carrier: tuple[str, Run], early: bool
) -> None:
    name, run = carrier

    def main(rank: Rank) -> float:
        comm = duplicate(rank)
        total(rank, comm, name)
        x = rank.array(np.ones(100, "f4"))
        if rank.rank == 1:
            if early:
                rank.comm.barrier()
            with pytest.raises(UsageError):
                comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
            if not early:
                rank.comm.barrier()
        else:
            if not early:
                rank.comm.barrier()
            request = comm.allreduce(x, backend=name, nonblocking=True)
            if early:
                rank.comm.barrier()
            assert "rank 1 has refused its call" in told(lambda: request)
        found = total(rank, comm, name)
        comm.free()
        return found

    assert run(3, main) == [3.0] * 3


def test_a_rank_that_refuses_need_not_wait(carrier: tuple[str, Run]) -> None:
    """Its error comes at once, and messages do not wait for the others either."""
    name, run = carrier

    def main(rank: Rank) -> float:
        comm = duplicate(rank)
        total(rank, comm, name)
        x = rank.array(np.ones(100, "f4"))
        word = np.ones(1)
        if rank.rank == 1:
            with pytest.raises(UsageError):
                comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
            comm.send(word, 0)
        else:
            comm.recv(word, 1)  # before its own call
            start = comm.allreduce(x, backend=name, nonblocking=True)
            assert "rank 1 has refused its call" in told(lambda: start)
        found = total(rank, comm, name)
        comm.free()
        return found

    assert run(2, main) == [2.0] * 2


@pytest.mark.parametrize("how", ["blocking", "waited", "planned"])
def test_the_next_call_tells_where_nobody_asked(
    carrier: tuple[str, Run], how: str
) -> None:
    """A blocking call does not block the host. The next one is made all the same."""
    name, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        x = rank.array(np.ones(100, "f4"))
        y = rank.array(np.ones(100, "f4"))
        planned = comm.plan.allreduce(x, backend=name)
        planned()
        rank.stream.synchronize()
        if rank.rank == 1:
            rank.comm.barrier()
            with pytest.raises(UsageError):
                comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
            comm.allreduce(y, backend=name)
        else:
            if how == "waited":
                request = comm.allreduce(x, backend=name, nonblocking=True)
                request.wait()
                rank.comm.barrier()
                while not request.done:
                    core_of(comm).world.engine.step()
            elif how == "planned":
                planned()
                rank.comm.barrier()
            else:
                comm.allreduce(x, backend=name)
                rank.comm.barrier()
            rank.stream.synchronize()
            with pytest.raises(RefusedError, match="rank 1 has refused") as raised:
                comm.allreduce(y, backend=name)
            assert raised.value.made is y
        seen = rank.fetch(y)
        rank.stream.synchronize()
        found = [float(seen()[0]), total(rank, comm, name)]
        comm.free()
        return found

    assert run(2, main) == [[2.0, 2.0]] * 2


def test_all_ranks_may_refuse_alike(carrier: tuple[str, Run]) -> None:
    name, run = carrier

    def main(rank: Rank) -> float:
        comm = duplicate(rank)
        total(rank, comm, name)
        x = rank.array(np.ones(4, "f4"))
        for _ in range(100):
            with pytest.raises(UsageError):
                comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
        found = total(rank, comm, name)
        comm.free()
        return found

    assert run(3, main) == [3.0] * 3


@pytest.mark.parametrize("looks_right", [True, False])
def test_a_first_call_may_be_refused(
    carrier: tuple[str, Run], looks_right: bool
) -> None:
    """Also by a rank that does not see that it is a call on a device.

    The ranks meet before a first call. Devices that only staged calls serve, as here,
    have nothing to meet for: there a rank has to see it.
    """
    name, run = carrier

    def main(rank: Rank) -> float:
        comm = duplicate(rank)
        x = rank.array(np.ones(500, "f4"))
        is_seen = looks_right or name == "staged"
        for _ in range(2):
            if rank.rank == 1:
                given, out = x if is_seen else object(), rank.array(np.ones(3, "f4"))
                with pytest.raises((UsageError, TypeError)):
                    comm.allreduce(given, out=out)
            else:
                start = partial(comm.allreduce, x, backend=name, nonblocking=True)
                assert "rank 1 has refused its call" in told(start)
        found = total(rank, comm, name)
        comm.free()
        return found

    assert run(2, main) == [2.0] * 2


def test_calls_of_other_kinds_are_in_order_with_it(carrier: tuple[str, Run]) -> None:
    """``split`` and others wait for their place, as do calls on host arrays."""
    name, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        total(rank, comm, name)
        found = []
        others: list[Callable[[], Any]] = [
            lambda: comm.split(0).size,
            lambda: comm.dup().size,
            lambda: comm.bcast_object(comm.size, 0),
            lambda: comm.allreduce(np.ones(3))[0],
        ]
        for other in others:
            x = rank.array(np.ones(100, "f4"))
            if rank.rank == 1:
                with pytest.raises(UsageError):
                    comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
            else:
                start = comm.allreduce(x, backend=name, nonblocking=True)
                assert "rank 1 has refused its call" in told(lambda r=start: r)
            found.append(float(other()))
        found.append(total(rank, comm, name))
        return found

    assert run(3, main) == [[3.0] * 5] * 3


def test_a_communicator_is_freed_while_it_asks(carrier: tuple[str, Run]) -> None:
    name, run = carrier

    def main(rank: Rank) -> None:
        comm = duplicate(rank)
        total(rank, comm, name)
        rank.comm.barrier()
        if rank.rank == 1:
            x = rank.array(np.ones(100, "f4"))
            with pytest.raises(UsageError):
                comm.allreduce(x, out=rank.array(np.zeros(3, "f4")), backend=name)
        comm.free()

    run(2, main)


def test_buckets_are_in_step(carrier: tuple[str, Run]) -> None:
    """Each rank refuses another one of three calls, in two buckets."""
    _, run = carrier

    def main(rank: Rank) -> list[str]:
        comm = duplicate(rank)
        wrong = rank.array(np.zeros(5, "f4"))
        said = []
        for _ in range(3):
            x = [rank.array(np.full(4, 10.0**k, "f4")) for k in range(3)]
            requests = []
            with comm.fused(nbytes=32):
                for k in range(3):
                    try:
                        out = wrong if k == rank.rank else None
                        requests.append(comm.allreduce(x[k], out=out, nonblocking=True))
                    except CommError as error:
                        said.append(type(error).__name__)
            for each in requests:
                try:
                    each.synchronize()
                except CommError as error:
                    said.append(type(error).__name__)
        assert total(rank, comm, "staged") == comm.size
        comm.free()
        return said

    for said in run(2, main):
        assert {*said} == {"UsageError", "RefusedError"}
