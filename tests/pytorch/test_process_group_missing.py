# SPDX-License-Identifier: Apache-2.0
"""A rank that never comes, and one that has ended: the error of the others names it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job

from commrt.errors import CommError, MismatchError, PeerFailedError, TimeoutError_

DEADLINE_S = 300.0
LIMIT = timedelta(seconds=0.2)
LONG = timedelta(seconds=300)
Call = Callable[[Any, int], Any]
Z = torch.zeros


def managed(group: Any) -> None:
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_reduce(Z(2), group=group)
        dist.all_reduce(Z(3), group=group)
    manager.wait()


def batch(group: Any, last: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, Z(3), last, group)]):
        work.wait()


# The last rank is not there; ``n`` is the number of ranks.
CALLS: dict[str, Call] = {
    "all_reduce": lambda g, n: dist.all_reduce(Z(3), group=g),
    "broadcast": lambda g, n: dist.broadcast(Z(3), n - 1, group=g),
    "all_gather": lambda g, n: dist.all_gather([Z(3)] * n, Z(3), group=g),
    "all_gather_single": lambda g, n: dist.all_gather_single(Z(n), Z(1), group=g),
    "uneven": lambda g, n: dist.all_gather([Z(i) for i in range(n)], Z(0), group=g),
    "reduce_scatter": lambda g, n: dist.reduce_scatter_single(Z(1), Z(n), group=g),
    "all_to_all": lambda g, n: dist.all_to_all_single(Z(n), Z(n), group=g),
    "splits": lambda g, n: dist.all_to_all_single(Z(n), Z(n), [1] * n, [1] * n, g),
    "gather": lambda g, n: dist.gather(Z(1), [Z(1)] * n, group=g),
    "scatter": lambda g, n: dist.scatter(Z(1), None, src=n - 1, group=g),
    "reduce": lambda g, n: dist.reduce(Z(1), 0, group=g),
    "barrier": lambda g, n: dist.barrier(group=g),
    "sparse": lambda g, n: dist.all_reduce(torch.eye(3).to_sparse(), group=g),
    "objects": lambda g, n: dist.all_gather_object([None] * n, 1, group=g),
    "coalesced": lambda g, n: g.allreduce_coalesced([Z(3), Z(4)]).wait(),
    "managed": lambda g, n: managed(g),
    "recv": lambda g, n: dist.recv(Z(3), n - 1, group=g),
    "send": lambda g, n: dist.send(Z(300_000), n - 1, group=g),
    "batch": lambda g, n: batch(g, n - 1),
}
# In a group whose own limit is long.
WAITS: dict[str, Call] = {
    "all_reduce": lambda g, n: dist.all_reduce(Z(2), group=g, async_op=True),
    "recv": lambda g, n: dist.irecv(Z(3), n - 1, group=g),
    "coalesced": lambda g, n: g.allreduce_coalesced([Z(2), Z(3)]),
}


def errors(
    limit: timedelta, expected: type[CommError] = TimeoutError_
) -> Iterator[tuple[str, str]]:
    """Yield what rank 0 is told, while the last rank is not there."""
    size = dist.get_world_size()
    groups = [dist.new_group(timeout=LONG) for _ in (*CALLS, *WAITS)]
    dist.barrier()
    if dist.get_rank() == size - 1:
        return
    for group in groups[: len(CALLS)]:
        group.set_timeout(limit)
    todo = [(name, call, group) for (name, call), group in zip(CALLS.items(), groups)]  # noqa: B905
    for name, call, group in todo:
        with pytest.raises(RuntimeError) as raised:
            call(group, size)
        assert isinstance(raised.value, expected), raised.value
        yield name, str(raised.value)
    for (name, call), group in zip(WAITS.items(), groups[len(CALLS) :], strict=True):
        work = call(group, size)
        with pytest.raises(expected) as late:
            work.wait(limit)
        yield f"{name}, waited for", str(late.value)
    ranks = [0, size - 1]
    for local in (False, True):
        with pytest.raises(expected) as raised:
            dist.new_group(ranks, timeout=limit, use_local_synchronization=local)
        yield f"new_group {local}", str(raised.value)
    alone = dist.new_group([0], timeout=limit)  # who is no member is not waited for
    assert alone.size() == 1


def gone(ends: bool) -> None:
    """The last rank has ended, or is late; what rank 0 is told is printed."""
    with job("commrt", timeout=LONG) as rank:
        store = dist.distributed_c10d._get_default_store()
        limit, expected = (LONG, PeerFailedError) if ends else (LIMIT, TimeoutError_)
        said = dict(errors(limit, expected))
        if rank == 0:
            print(json.dumps(said), flush=True)
            store.set("said", "")
        elif not ends:
            store.get("said")
        os._exit(0)  # what is in flight will not end


def check_named(said: dict[str, str], ends: bool) -> None:
    assert len(said) == len(CALLS) + len(WAITS) + 2
    for name, text in said.items():
        assert "rank 1 " in text, f"{name}: {text}"
        if ends:
            assert re.search(r"process \d+ on \S+ has ended", text), f"{name}: {text}"
            continue
        where = "process group '" if name.startswith("new_group") else "torch group "
        assert where in text or name == "sparse", f"{name}: {text}"
        # Of several calls the last one had what the first one left.
        is_several = name.startswith(("coalesced", "managed"))
        limit = "within 0." if is_several else "within 0.2 s"
        assert limit in text, f"{name}: {text}"


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_not_there_is_named_by_every_call(
    torchrun: Any, ends: bool
) -> None:
    done = torchrun.failing(2, gone, deadline_s=DEADLINE_S, ends=ends)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.describe_failure()
    check_named(json.loads(lines[0]), ends)


def not_begun() -> str:
    """Rank 1 does not come to the group that rank 0 begins."""
    if int(os.environ["RANK"]) == 1:
        return ""
    with pytest.raises(TimeoutError_) as raised, job(timeout=LIMIT):
        pass
    return str(raised.value)


@pytest.mark.full
def test_a_rank_that_does_not_come_to_init_is_named(torchrun: Any) -> None:
    text, _ = torchrun(2, not_begun, deadline_s=DEADLINE_S)
    assert text.startswith("process group '0' of ranks [0, 1]: rank 0: rank 1 did not")
    assert "within 0.2 s" in text
    assert "init_process_group(timeout=...)" in text


class Late:
    """A Work that does not end by itself; notes how it is waited for."""

    def __init__(self, error: Exception | None, ended: bool = False) -> None:
        self.error = error
        self.ended = ended
        self.limits: list[Any] = []
        self.looks = 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        self.looks += 1
        return self.ended

    def result(self) -> list[torch.Tensor]:
        return []


def test_calls_that_are_joined_share_one_limit() -> None:
    from commrt.torch.work import JoinedWork

    works = [Late(None), Late(TimeoutError_("late")), Late(TimeoutError_("later"))]
    with pytest.raises(TimeoutError_, match="late; the limit"):
        JoinedWork(works).wait()  # type: ignore[arg-type]
    assert [work.limits for work in works] == [[None], [None], []]
    assert [work.looks for work in works] == [0, 0, 1]
    # A limit is that of all together.
    works = [Late(None), Late(None)]
    JoinedWork(works).wait(timedelta(seconds=5))  # type: ignore[arg-type]
    first, second = (work.limits[0] for work in works)
    assert timedelta(0) < second <= first <= timedelta(seconds=5)
    # Where nobody is late, each is ended, and the first error is raised.
    works = [Late(MismatchError("a")), Late(MismatchError("b")), Late(None)]
    with pytest.raises(MismatchError, match="a"):
        JoinedWork(works).wait()  # type: ignore[arg-type]
    assert [len(work.limits) for work in works] == [1, 1, 1]


def test_futures_of_a_backward_pass_wait_for_one_limit() -> None:
    """While one is late those after it are looked at: a step has many buckets."""
    from commrt import _native
    from commrt.torch.completer import Completer

    completer, first, second = (
        Completer("g", _native.Engine()),
        Late(TimeoutError_("late")),
        Late(TimeoutError_("later")),
    )
    for work in (first, second):
        with pytest.raises(TimeoutError_, match=r"late$"):
            completer.waited_for(work)  # type: ignore[arg-type]
    assert [work.limits for work in (first, second)] == [[None], []]
    # Once the late one has ended, they are waited for again.
    first.ended = True
    with pytest.raises(TimeoutError_, match="later"):
        completer.waited_for(second)  # type: ignore[arg-type]
    assert second.limits == [None]
    # What has ended meanwhile has a value, whoever is late.
    third = Late(None, ended=True)
    assert completer.waited_for(third) == []  # type: ignore[arg-type]
