# SPDX-License-Identifier: Apache-2.0
"""Futures whose operations fail or do not end, and ends of groups and programs."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from futures_of_works import LIMIT_S, LONG, hear, my_threads, numbers, started, tell
from process_groups import job

DEADLINE_S = 300.0
SHORT = timedelta(seconds=0.3)


def limits() -> list[str]:
    """The last rank does not come: every open future has the error, after one limit."""
    with job("commrt", "limits", timeout=LONG) as rank:
        last, found = dist.get_world_size() - 1, []
        kinds = ["all_reduce", "all_gather", "barrier", "coalesced", "managed"]
        kinds += ["strided", "messages", "long messages", "from anyone", "sparse"]
        groups = [dist.new_group() for _ in kinds]
        x = torch.eye(3).to_sparse()
        dist.all_reduce(x)  # the first one makes what the others use
        dist.barrier()
        if rank == last:
            hear("over", 0)
            os._exit(0)
        world: Any = dist.group.WORLD
        for kind, _ in zip(kinds, groups, strict=True):
            world.set_timeout(SHORT)
            ran = threading.Event()
            future = started(kind).get_future()
            seen = future.then(lambda f, ran=ran: (ran.set(), f.value())[1])
            for each in (future, seen):
                try:
                    each.wait()
                except RuntimeError as error:
                    text = str(error)
                    if "TimeoutError_" not in text or "within 0.3 s" not in text:
                        found.append(f"{kind}: {text}")
                else:
                    found.append(f"{kind}: no error")
            if not ran.is_set():
                found.append(f"{kind}: no callback")
        if rank == 0:
            for other in range(1, last):
                hear("done", other)
            tell("over")
        else:
            tell("done")
        return found


def ended_late() -> None:
    print(f"found {limits()}", flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.full(sample=1)
def test_a_future_has_the_error_of_an_operation_that_runs_out_of_time(
    torchrun: Any, ranks: int
) -> None:
    done = torchrun.failing(ranks, ended_late, deadline_s=DEADLINE_S)
    said = [line for line in done.stdout.splitlines() if "found" in line]
    assert [line[line.index("found") :] for line in said] == ["found []"] * (ranks - 1)


def failed() -> list[str]:
    """Ranks that disagree: the error is in the future, with its text."""
    with job("commrt", "failed") as rank:
        group = dist.new_group()
        x = numbers(3)
        if rank == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
        else:
            work = dist.broadcast(x, 0, group=group, async_op=True)
        future = work.get_future()
        texts = []
        for each in (future.then(lambda f: f.value()), future):
            with suppress(RuntimeError):
                each.wait()
                continue
            try:
                each.wait()
            except RuntimeError as error:
                texts.append(str(error))
        dist.barrier()
        return texts


def test_a_future_has_the_error_of_a_mismatch(torchrun: Any) -> None:
    texts = torchrun(2, failed, deadline_s=DEADLINE_S)
    said = [text for each in texts for text in each]
    assert said
    assert all("MismatchError" in text or "RevokedError" in text for text in said)


def destroyed() -> list[Any]:
    """Open futures have an error once their group has been destroyed."""
    found: list[Any] = []
    for end in ("destroy", "abort"):
        with job("commrt", f"destroyed by {end}") as rank:
            group: Any = dist.new_group()
            out = torch.zeros(3)
            future = dist.irecv(out, (rank + 1) % 2, group=group).get_future()
            seen = future.then(lambda f: f.value())
            dist.barrier()
            if end == "abort":
                group.abort()
            else:
                dist.destroy_process_group(group)
            for each in (future, seen):
                try:
                    each.wait()
                except RuntimeError as error:
                    text = str(error)
                    found.append("ClosedError" in text or "RevokedError" in text)
            dist.barrier()
        found.append(my_threads())
    with job("commrt", "destroyed by a callback") as rank:
        group = dist.new_group()
        ended = threading.Event()

        def finish(_: Any) -> None:
            dist.destroy_process_group(group)
            ended.set()

        if rank == 0:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            work.get_future().add_done_callback(finish)
            tell("attached")
            found.append(ended.wait(LIMIT_S))
        else:
            hear("attached", 0)
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
    for thread in threading.enumerate():  # it ends by itself, after the callback
        if thread.name.startswith("commrt-futures"):
            thread.join(LIMIT_S)
    return [*found, my_threads()]


def test_a_group_ends_while_futures_are_open(torchrun: Any) -> None:
    first, second = torchrun(2, destroyed, deadline_s=DEADLINE_S)
    ends = [True, True, [], True, True, []]
    assert (first, second) == ([*ends, True, []], [*ends, []])


def forked() -> Any:
    """A child has no thread, and no future of its parent's ends there."""
    with job("commrt", "forked") as rank:
        out = torch.zeros(2)
        work = dist.irecv(out, 1 - rank)
        future = work.get_future()
        other = dist.irecv(torch.zeros(2), 1 - rank, tag=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                other.get_future().wait()
            except RuntimeError as error:
                status = 0 if "fork" in str(error) else 2
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        for tag in (0, 1):
            dist.isend(numbers(2), 1 - rank, tag=tag).wait()
        other.wait()
        return [os.waitstatus_to_exitcode(ended), future.wait()[0].tolist()]


def test_futures_after_a_fork(torchrun: Any) -> None:
    got = torchrun(2, forked, deadline_s=DEADLINE_S)
    assert got == [[0, [10.0, 11.0]], [0, [0.0, 1.0]]]


def not_destroyed() -> None:
    """The program ends with a future that is open."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("commrt", rank=rank, world_size=size)
    dist.irecv(torch.zeros(2), 1 - rank).get_future().then(lambda f: f.value())
    dist.barrier()


def test_a_program_ends_while_futures_are_open(torchrun: Any) -> None:
    assert torchrun(2, not_destroyed, deadline_s=DEADLINE_S) == [None, None]
