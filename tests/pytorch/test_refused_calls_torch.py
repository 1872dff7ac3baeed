# SPDX-License-Identifier: Apache-2.0
"""A call of torch that one rank refuses fails on all ranks, and all stay in step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commrt.torch  # noqa: F401  the backend
from commrt.errors import RefusedError, UsageError

DEADLINE_S = 300.0


def calls_of(size: int) -> dict[str, Callable[[bool], Any]]:
    """Return calls by name, which are wrong if they are told so."""
    x, wide, part = torch.ones(4), torch.ones(4 * size), torch.ones(3)
    meta = torch.ones(4, device="meta")
    return {
        "all_reduce": lambda wrong: dist.all_reduce(meta if wrong else x),
        "asynchronous": lambda wrong: dist.all_reduce(
            meta if wrong else x, async_op=True
        ).wait(),
        "all_gather_into_tensor": lambda wrong: dist.all_gather_into_tensor(
            part if wrong else wide, x
        ),
        "reduce_scatter_tensor": lambda wrong: dist.reduce_scatter_tensor(
            part if wrong else x, wide
        ),
        "all_to_all_single": lambda wrong: dist.all_to_all_single(
            wide, wide.clone(), input_split_sizes=[9] if wrong else None
        ),
        "all_gather": lambda wrong: dist.all_gather(
            [meta if wrong else torch.ones(4) for _ in range(size)], x
        ),
    }


def one_rank_in_error() -> list[str]:
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for name, call in calls_of(size).items():
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                call(rank == 1)
            if rank != 1:
                assert isinstance(raised.value, RefusedError), (name, raised.value)
                assert "rank 1 has refused its call" in str(raised.value)
            else:
                assert not isinstance(raised.value, RefusedError)
        call(False)
        total = torch.ones(2)
        dist.all_reduce(total)
        found.append(f"{name} {total[0]:g}")
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_raise_and_stay_in_step(torchrun: Any, size: int) -> None:
    found = torchrun(size, one_rank_in_error, deadline_s=DEADLINE_S)
    assert found == [[f"{name} {size}" for name in calls_of(size)]] * size


def messages_and_refusals(debug: bool) -> list[float]:
    """Refuse messages at one end, in turn; the next ones meet."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("commrt")
    rank, found = dist.get_rank(), []
    meta = torch.ones(4, device="meta")
    for turn in range(6):
        is_wrong = rank == turn % 2
        for number in (4, 300_000):
            x = torch.full((number,), float(turn))
            call = dist.send if rank == 0 else dist.recv
            if is_wrong:
                with pytest.raises(RuntimeError) as raised:
                    call(meta, 1 - rank)
                assert not isinstance(raised.value, RefusedError)
            elif rank == 1 or number > 4:
                with pytest.raises(RefusedError):
                    call(x, 1 - rank)
            else:  # a short message was away before
                with suppress(RefusedError):
                    call(x, 1 - rank)
            call(x if rank == 0 else x.zero_(), 1 - rank)
            found.append(float(x.sum() / number))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("debug", [False, True])
def test_messages_meet_after_refusals_of_torch(torchrun: Any, debug: bool) -> None:
    found = torchrun(2, messages_and_refusals, deadline_s=DEADLINE_S, debug=debug)
    assert found == [[float(turn) for turn in range(6) for _ in range(2)]] * 2


def batches_that_one_rank_refuses(debug: bool) -> list[list[float]]:
    """Refuse each message of a batch in turn; return what comes in the next step."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    meta, found = torch.ones(4, device="meta"), []
    peers = [rank - 1, rank + 1] if 0 < rank < size - 1 else [abs(rank - 1)]
    for turn in range(8):
        wrong, is_of_all = turn % 4, turn >= 4
        for is_wrong in ((rank == 1 or is_of_all), False):
            x = torch.full((4,), float(10 * turn + rank))
            outs = [torch.zeros(4) for _ in peers]
            messages = [
                message
                for peer, out in zip(peers, outs, strict=True)
                for message in (
                    dist.P2POp(dist.isend, x, peer),
                    dist.P2POp(dist.irecv, out, peer),
                )
            ][:: -1 if turn % 2 else 1]
            if is_wrong:
                messages[wrong % len(messages)].tensor = meta
                with pytest.raises(RuntimeError) as raised:
                    dist.batch_isend_irecv(messages)
                assert not isinstance(raised.value, RefusedError)
                continue
            for work in dist.batch_isend_irecv(messages):
                with suppress(RefusedError):
                    work.wait()
        found.append([float(out[0] - 10 * turn) for out in outs])
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_batches_meet_after_one_that_a_rank_refuses(
    torchrun: Any, size: int, debug: bool
) -> None:
    """torch calls no message of a batch behind the one that raises."""
    found = torchrun(
        size, batches_that_one_rank_refuses, deadline_s=DEADLINE_S, debug=debug
    )
    peers = {2: [[1.0], [0.0]], 3: [[1.0], [0.0, 2.0], [1.0]]}[size]
    assert found == [[each] * 8 for each in peers]


def calls_that_torch_refuses(size: int) -> dict[str, Callable[[bool, Any], Any]]:
    """Return calls whose mistake torch finds, so that no group hears of them."""

    def double() -> torch.Tensor:
        return torch.ones(4, dtype=torch.float64)

    def parts(wrong: bool) -> list[torch.Tensor]:
        return [double() if wrong else torch.ones(4) for _ in range(size)]

    def unpicklable() -> None:
        pass

    return {
        "all_reduce": lambda wrong, x: dist.all_reduce("x" if wrong else x),
        "keyword": lambda wrong, x: dist.all_reduce(x, **({"to": 1} if wrong else {})),
        "all_gather": lambda wrong, x: dist.all_gather(parts(wrong), x),
        "gather": lambda wrong, x: dist.gather(
            double() if wrong else x, parts(False) if dist.get_rank() == 1 else None, 1
        ),
        "group": lambda wrong, x: dist.broadcast(
            "x" if wrong else x, 0, dist.group.WORLD
        ),
        "all_to_all": lambda wrong, x: dist.all_to_all(
            parts(wrong), [torch.ones(4) for _ in range(size)]
        ),
        "all_gather_object": lambda wrong, _: dist.all_gather_object(
            [None] * size, unpicklable if wrong else 1
        ),
        "broadcast_object_list": lambda wrong, _: dist.broadcast_object_list(
            [unpicklable if wrong else 1], 1
        ),
    }


def one_rank_that_torch_stops(debug: bool) -> list[str]:
    """Make each call twice wrongly on rank 1, then rightly; return the sums between."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for name, call in calls_that_torch_refuses(size).items():
        for turn in range(2):
            if rank == 1:
                with pytest.raises((TypeError, ValueError, AttributeError)):
                    call(True, torch.ones(4))
            else:  # a root may have had its result before
                with suppress(RefusedError, UsageError):
                    call(False, torch.ones(4))
            total = torch.full((4,), float(turn + 1))
            dist.all_reduce(total)
            found.append(f"{name} {total[0]:g}")
        call(False, torch.ones(4))
    for turn in range(2):
        x = torch.full((4,), float(turn))
        if rank == 1:
            with pytest.raises(TypeError):
                dist.send("x", 0, tag=3)
            dist.send(x, 0, tag=3)
        elif rank == 0:
            with pytest.raises(RefusedError):
                dist.recv(x, 1, tag=3)
            dist.recv(x, 1, tag=3)
            found.append(f"recv {x[0]:g}")
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_torch_refuses_take_their_places(
    torchrun: Any, size: int, debug: bool
) -> None:
    """The next call of that rank would meet the one that the others still wait in."""
    first, *others = torchrun(
        size, one_rank_that_torch_stops, deadline_s=DEADLINE_S, debug=debug
    )
    expected = [
        f"{name} {size * (turn + 1)}"
        for name in calls_that_torch_refuses(size)
        for turn in range(2)
    ]
    assert first == [*expected, "recv 0", "recv 1"]
    assert others == [expected] * (size - 1)
