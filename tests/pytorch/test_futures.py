# SPDX-License-Identifier: Apache-2.0
"""Futures of works: nobody who asks for one waits, and what callbacks may do.

Programs are held against gloo, where gloo has the call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from futures_of_works import LIMIT_S, hear, my_threads, numbers, started, tell
from process_groups import job, unequal

from commrt import _native
from commrt.errors import TimeoutError_
from commrt.torch import Options

DEADLINE_S = 300.0
Call = Callable[[], Any]


def both(program: Callable[[], Any], name: str) -> list[str]:
    """Run a program on gloo and on commrt; return what differs."""
    results = []
    for backend in ("gloo", "commrt"):
        with job(backend, name):
            results.append(program())
            dist.barrier()
    return unequal(*results, 1e-6, name)


# -- nobody who asks waits ------------------------------------------------------------


WITH_GLOO = [
    *("all_reduce", "long", "broadcast", "reduce", "all_gather"),
    *("all_to_all", "splits", "gather", "scatter", "barrier"),
    *("coalesced", "strided"),
]
WITHOUT_GLOO = [
    *("reduce_scatter", "messages", "long messages", "from anyone"),
    *("empty", "sparse", "managed"),
]
"""Kinds of which gloo has no futures, and those whose futures differ there."""


def late_partner(kind: str) -> list[Any]:
    """All ranks but the last ask for futures; it comes only then."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    key, ran, ended = f"late {kind}", [], threading.Event()
    if rank == last:
        for other in range(last):
            hear(key, other)
        work = started(kind)
        work.wait()
        return [True, *work.get_future().wait()]
    work = started(kind)
    future = work.get_future()
    chained = future.then(lambda f: (ran.append(1), f.value())[1])
    future.add_done_callback(lambda f: ended.set())
    # In a gather only the root has to wait, and a short message just leaves.
    is_open = rank > 0 or not (future.done() or chained.done() or ended.is_set())
    tell(key)
    found = chained.wait()
    assert ended.wait(LIMIT_S)
    assert ran == [1]
    assert work.wait()
    return [is_open, *found]


def late_partners() -> list[str]:
    found = []
    for kind in WITH_GLOO:
        # Only the root's tensor says something after a reduce.
        values = 1 if kind == "reduce" and os.environ["RANK"] != "0" else None
        found += both(lambda kind=kind, n=values: late_partner(kind)[:n], kind)
    with job("commrt", "rest"):
        size = dist.get_world_size()
        for kind in WITHOUT_GLOO:
            is_open, *got = late_partner(kind)
            found += [] if is_open else [f"{kind}: waited"]
            if kind == "sparse":
                found += unequal(torch.eye(3) * size, got[0].to_dense(), 0, kind)
            if kind == "managed":
                want = sum(torch.arange(2) + 10.0 * rank for rank in range(size))
                found += unequal(want, got[0], 0, kind)
        dist.barrier()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"COMMRT_PROGRESS": "on"}])
@pytest.mark.full(sample=2)
def test_futures_of_every_kind_of_work_wait_for_nobody(
    torchrun: Any, ranks: int, settings: dict[str, str]
) -> None:
    got = torchrun(ranks, late_partners, env=settings, deadline_s=DEADLINE_S)
    assert got == [[]] * ranks


BY_GLOO = [
    *("all_reduce", "long", "broadcast", "reduce", "all_gather", "reduce_scatter"),
    *("all_to_all", "splits", "gather", "scatter", "barrier"),
]
"""Kinds that gloo's own collectives run."""
ON_NODES = [*WITH_GLOO, *WITHOUT_GLOO, "batch", "coalesced messages"]


def late_on_nodes(kinds: list[str], algorithm: str | None) -> list[str]:
    """Return the kinds of which somebody waited, in their first call and later."""
    found = []
    for which in ("first", "second"):
        options = {"pg_options": Options(algorithm=algorithm)} if algorithm else {}
        with job("commrt", which, **options):
            size = dist.get_world_size()
            for kind in kinds if which == "first" else reversed(kinds):
                is_open, *got = late_partner(kind)
                found += [] if is_open else [f"{kind}, {which}: waited"]
                if kind in ("all_reduce", "coalesced", "managed"):
                    want = sum(torch.arange(2) + 10.0 * rank for rank in range(size))
                    found += unequal(want, got[0][:2], 0, kind)
            dist.barrier()
    return found


@pytest.mark.parametrize("progress", ["off", "on"])
@pytest.mark.parametrize(("nodes", "ranks"), [("1", 2), ("2,1", 3), ("1", 3)])
@pytest.mark.parametrize("algorithm", [None, "gloo/native"])
@pytest.mark.full(sample=4)
def test_futures_across_nodes_wait_for_nobody(
    torchrun: Any, nodes: str, ranks: int, progress: str, algorithm: str | None
) -> None:
    got = torchrun(
        *(ranks, late_on_nodes),
        kinds=BY_GLOO if algorithm else ON_NODES,
        algorithm=algorithm,
        env={"COMMRT_NODES": nodes, "COMMRT_PROGRESS": progress},
        deadline_s=DEADLINE_S,
    )
    assert got == [[]] * ranks


def checked() -> list[str]:
    """Check mode compares calls before they start; messages it compares at the end."""
    found = []
    with job("commrt", "checked"):
        for kind in ("messages", "long messages", "from anyone"):
            found += [] if late_partner(kind)[0] else [kind]
        dist.barrier()
    return found


def test_futures_of_checked_messages_wait_for_nobody(torchrun: Any) -> None:
    got = torchrun(2, checked, env={"COMMRT_DEBUG": "check"}, deadline_s=DEADLINE_S)
    assert got == [[], []]


def other_order() -> Any:
    """Each rank asks groups in an order of its own, and waits for all at once."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group() for _ in range(3)]
    order = [(i + rank) % 3 for i in range(3)]
    totals = {i: numbers(4) + i for i in order}
    futures = [
        dist.all_reduce(totals[i], group=groups[i], async_op=True).get_future()
        for i in order
    ]
    torch.futures.wait_all(futures)
    # One after the other, each in the callback of the one before.
    halves = [
        future.then(lambda f, i=i: f.value()[0] / (i + 2))
        for i, future in zip(order, futures, strict=True)
    ]
    return [size, [totals[i] for i in range(3)], [h.wait().numel() for h in halves]]


def sent_by_all() -> list[torch.Tensor]:
    """All send before any receive is there, and more than leaves by itself."""
    size, rank = dist.get_world_size(), dist.get_rank()
    futures = []
    if dist.get_backend() == "commrt":
        work = dist.isend(numbers(400_000), (rank + 1) % size)
        futures.append(work.get_future().then(lambda f: f.value()[0].numel()))
    else:
        work = dist.isend(numbers(400_000), (rank + 1) % size)
    dist.barrier()
    got = torch.zeros(400_000)
    dist.irecv(got, (rank - 1) % size).wait()
    assert [f.wait() for f in futures] in ([], [400_000])
    work.wait()
    return [got[:5], got[-5:]]


def sparse_in_other_order() -> list[torch.Tensor]:
    """First sparse calls on new groups, each ended before the next is waited for."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for waits in (True, False):
        groups = [dist.new_group() for _ in range(3)]
        order = [(i + rank) % 3 for i in range(3)]
        totals = {i: torch.diag(numbers(4) + i).to_sparse() for i in order}
        works = [
            dist.all_reduce(totals[i], group=groups[i], async_op=True) for i in order
        ]
        for work in works:
            if waits:
                work.wait()
            else:
                work.get_future().wait()
        found += [totals[i].to_dense() for i in range(3)]
    return [torch.full((1,), size), *found]


def orders() -> list[str]:
    return [
        *both(other_order, "orders"),
        *both(sent_by_all, "sent by all"),
        *both(sparse_in_other_order, "sparse"),
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_may_ask_in_any_order(torchrun: Any, ranks: int) -> None:
    assert torchrun(ranks, orders, deadline_s=DEADLINE_S) == [[]] * ranks


# -- many, and the thread -------------------------------------------------------------


def many() -> list[Any]:
    """Hundreds of futures, each with a callback, and messages received backwards."""
    with job("commrt", "many") as rank:
        size = dist.get_world_size()
        ran: list[int] = []
        tensors = [numbers(1 + i % 7) + i for i in range(400)]
        sums = [dist.all_reduce(x, async_op=True).get_future() for x in tensors]
        done = [
            f.then(lambda f, i=i: (ran.append(i), f.value()[0].sum())[1])
            for i, f in enumerate(sums)
        ]
        got = torch.futures.wait_all(done)
        right = [float(x.sum()) for x in tensors]
        is_right = [float(a) for a in got] == right and sorted(ran) == [*range(400)]
        others = [r for r in range(size) if r != rank]
        received = {(r, t): torch.zeros(2) for r in others for t in range(40)}
        futures = [
            dist.irecv(out, r, tag=t).get_future()
            for (r, t), out in reversed(received.items())
        ]
        for r in others:
            for t in range(40):
                dist.isend(torch.full((2,), 100.0 * rank + t), r, tag=t).get_future()
        torch.futures.wait_all(futures)
        is_right &= all(
            out.tolist() == [100.0 * r + t] * 2 for (r, t), out in received.items()
        )
        dist.barrier()
        return [is_right, len(my_threads())]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.full(sample=1)
def test_many_futures_are_open_at_once(torchrun: Any, ranks: int) -> None:
    got = torchrun(ranks, many, deadline_s=DEADLINE_S)
    assert [right for right, _ in got] == [True] * ranks
    assert max(threads for _, threads in got) <= 1


def threads() -> list[Any]:
    """No thread before somebody asks for a future that is open; none at the end."""
    with job("commrt", "threads") as rank:
        work = dist.all_reduce(numbers(2), async_op=True)
        work.wait()
        ended = work.get_future()
        here: list[Any] = []
        ended.add_done_callback(lambda f: here.append(threading.current_thread()))
        found = [ended.done(), here == [threading.current_thread()], my_threads()]
        if rank == 0:
            work = dist.all_reduce(numbers(2), async_op=True)
            future = work.get_future()
            name = future.then(lambda f: threading.current_thread().name)
            tell("asked")
            found += [work.get_future() is future, work.wait(), future.wait()[0]]
            assert torch.equal(found[-1], found.pop() + 0)
            found.append(name.wait().startswith("commrt-futures-"))
        else:
            hear("asked", 0)
            dist.all_reduce(numbers(2))
        dist.barrier()
    return [*found, my_threads()]


def test_there_is_a_thread_only_where_a_future_is_open(torchrun: Any) -> None:
    first, second = torchrun(2, threads, deadline_s=DEADLINE_S)
    assert first == [True, True, [], True, True, True, []]
    assert second == [True, True, [], []]


# -- callbacks ------------------------------------------------------------------------


def calls_in_callbacks() -> list[Any]:
    """Three collectives, each in the callback of the one before, waited for there."""

    def second(future: Any) -> Any:
        x = future.value()[0] * 2
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    def third(future: Any) -> Any:
        x = future.value().clone()
        dist.broadcast(x, dist.get_world_size() - 1)
        works = [dist.all_reduce(x + i, async_op=True) for i in range(3)]
        return torch.futures.wait_all([w.get_future() for w in works])

    found = []
    for _ in range(5):
        future = dist.all_reduce(numbers(3), async_op=True).get_future()
        found.append(future.then(second).then(third).wait())
    return found


def chained_within() -> list[Any]:
    """A callback asks for a future with a callback, which asks for another one."""

    def again(depth: int) -> Callable[[Any], Any]:
        def callback(future: Any) -> Any:
            x = future.value()[0] + 1
            work = dist.all_reduce(x, async_op=True)
            if depth == 0:
                work.wait()
                return x
            return work.get_future().then(again(depth - 1)).wait()

        return callback

    work = dist.all_reduce(numbers(3), async_op=True)
    return [work.get_future().then(again(3)).wait()]


def raising() -> list[Any]:
    """What a callback raises is the error of its future, and of no other one."""

    def wrong(_: Any) -> None:
        raise ValueError("of the callback")

    found: list[Any] = []
    for _ in range(2):
        future = dist.all_reduce(numbers(3), async_op=True).get_future()
        failed, fine = future.then(wrong), future.then(lambda f: f.value()[0])
        future.add_done_callback(wrong)
        try:
            failed.wait()
        except RuntimeError as error:
            found.append("of the callback" in str(error))
        found.append(fine.wait())
    return found


def dropped() -> torch.Tensor:
    """Futures that nobody keeps: their callbacks run, and the group goes on."""
    ran: list[threading.Event] = []
    for _ in range(20):
        ended = threading.Event()
        ran.append(ended)
        work = dist.all_reduce(numbers(3), async_op=True)
        work.get_future().add_done_callback(lambda f, ended=ended: ended.set())
        dist.all_reduce(numbers(2), async_op=True).get_future()
    assert all(ended.wait(LIMIT_S) for ended in ran)
    x = numbers(5)
    dist.all_reduce(x)
    return x


def within() -> list[str]:
    """gloo has two threads for a group: more callbacks in each other hang there."""
    found = both(calls_in_callbacks, "calls in callbacks")
    found += both(raising, "raising") + both(dropped, "dropped")
    with job("commrt", "chained within"):
        size = dist.get_world_size()
        (got,) = chained_within()
        want = sum(torch.arange(3) + 10.0 * rank for rank in range(size))
        for _ in range(4):
            want = (want + 1) * size
        found += unequal(want, got, 1e-6, "chained within")
        dist.barrier()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_callbacks_may_call_and_raise_and_be_forgotten(
    torchrun: Any, ranks: int
) -> None:
    assert torchrun(ranks, within, deadline_s=DEADLINE_S) == [[]] * ranks


class _Reduced(torch.autograd.Function):
    """Its backward pass sums gradients, with a callback that calls a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: str, late: bool) -> torch.Tensor:
        ctx.key, ctx.late = key, late
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.late:
            hear(ctx.key, 0)
        total = torch.ones(2)
        future = dist.all_reduce(total, async_op=True).get_future()

        def scaled(future: Any) -> torch.Tensor:
            mine = future.value()[0] * 3
            dist.all_reduce(mine)
            return mine

        kept = future.then(scaled)
        FOUND.append(kept)
        if not ctx.late:
            tell(ctx.key)
        return grad, None, None


FOUND: list[Any] = []


def in_order() -> list[float]:
    """On rank 0 callbacks run later, in the thread; on the others at once."""
    with job("commrt", "in order") as rank:
        x = torch.ones(2, requires_grad=True)
        y = x
        for i in range(6):
            y = _Reduced.apply(y, f"node {i}", rank != 0)  # type: ignore[no-untyped-call]
        y.sum().backward()
        return [float(each.wait()[0]) for each in FOUND]


@pytest.mark.parametrize("ranks", [2, 3])
def test_callbacks_of_a_backward_pass_keep_the_order_of_calls(
    torchrun: Any, ranks: int
) -> None:
    got = torchrun(ranks, in_order, deadline_s=DEADLINE_S)
    assert got == [[3.0 * ranks * ranks] * 6] * ranks


# -- without ranks --------------------------------------------------------------------


def test_a_future_for_hooks_in_cpp_has_tensors_of_cpp() -> None:
    """C++ takes no list of Python's: a compiled function stands for it."""
    from commrt.torch.futures import _after_typed

    reader = torch.jit.CompilationUnit(
        "def read(x: Future[List[Tensor]]) -> Tensor:\n"
        "    found = torch.jit.wait(x)\n"
        "    return found[0] + found[1]\n"
    )
    tensors = [torch.ones(2, dtype=torch.float16), torch.full((2,), 3.0)]
    source: Any = torch.futures.Future()
    later = _after_typed()(source.then(lambda _: [*tensors]), tensors)
    assert not later.done()
    source.set_result(None)
    assert reader.read(later).tolist() == [4.0, 4.0]

    def wrong(_: Any) -> None:
        raise ValueError("of an operation")

    source = torch.futures.Future()
    later = _after_typed()(source.then(wrong), tensors)
    source.set_result(None)
    with pytest.raises(RuntimeError, match="of an operation"):
        later.wait()


class Unended:
    """A Work that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait(LIMIT_S)

    def result(self) -> list[torch.Tensor]:
        return []

    def requests(self) -> None:
        return None

    def limit_s(self) -> float:
        return LIMIT_S

    def raise_if_late(self, limit_s: float) -> None:
        raise TimeoutError_("late")


def test_futures_are_completed_as_works_end_whatever_their_order() -> None:
    from commrt.torch.completer import Completer

    completer = Completer("g", _native.Engine())
    works, futures = [Unended() for _ in range(3)], []
    for work in works:
        source: Any = torch.futures.Future()
        futures.append(completer.completed(work, source))  # type: ignore[arg-type]
    for i in (2, 0, 1):
        works[i].ended.set()
        completer.wake()
        assert futures[i].wait() == []
        assert [f.done() for f in futures] == [w.ended.is_set() for w in works]
    completer.close()
    work = Unended()
    future = completer.completed(work, torch.futures.Future())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="ClosedError: the process group 'g' was"):
        future.wait()


def test_a_thread_ends_with_a_group_that_nobody_keeps() -> None:
    from commrt.torch.completer import Completer

    completer = Completer("gone", _native.Engine())
    work, source = Unended(), torch.futures.Future()
    future = completer.completed(work, source)  # type: ignore[arg-type]
    (thread,) = [t for t in threading.enumerate() if t.name == "commrt-futures-gone"]
    completer.close(joins=False)
    with pytest.raises(RuntimeError, match="ClosedError"):
        future.wait()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
