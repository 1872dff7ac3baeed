# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of reconfiguration (test_c10d_fault_tolerance.py), on commrt.

They are told again and not run, as torch's class of tests lists its backends by name.
Several run in each launch, each with a group of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reconfigured_groups import Changing, changing

from commrt.torch.backend import can_be_made

DEADLINE_S = 300.0
pytestmark = pytest.mark.skipif(
    not can_be_made(), reason="torch has reconfiguration from 2.14 on"
)
Scenario = Callable[[Changing], None]


def basic(it: Changing) -> None:
    """test_reconfigure_basic"""
    assert dist._supports_reconfigure()
    assert it.backend.supports_reconfigure
    assert dist.get_rank() == it.group.rank() == it.backend.rank() == -1
    it.connect("basic", 100)
    assert (dist.get_rank(), dist.get_world_size()) == (it.rank, it.size)
    assert (it.backend.rank(), it.backend.size()) == (it.rank, it.size)


def then_all_reduce(it: Changing) -> None:
    """test_reconfigure_then_all_reduce"""
    it.connect("all_reduce", 200)
    assert it.is_right()


def then_send_recv(it: Changing) -> None:
    """test_reconfigure_then_send_recv"""
    it.connect("send_recv", 300)
    after, before = (it.rank + 1) % it.size, (it.rank - 1) % it.size
    sent, received = torch.full((4,), it.rank + 1.0), torch.zeros(4)
    works = [it.backend.send([sent], after, 0), it.backend.recv([received], before, 0)]
    for work in works:
        work.wait()
    assert received.tolist() == [before + 1.0] * 4


def shrink_last(it: Changing) -> None:
    """test_shrink_exclude_last_rank"""
    _shrink(it, it.size - 1, 400)


def shrink_middle(it: Changing) -> None:
    """test_shrink_exclude_middle_rank"""
    _shrink(it, it.size // 2, 500)


def _shrink(it: Changing, left_out: int, uuid: int) -> None:
    handles = it.connect("shrink", uuid)
    if it.rank != left_out:
        some = [handle for rank, handle in enumerate(handles) if rank != left_out]
        it.reconfigure(uuid + 1, some)
        rank = it.rank - (it.rank > left_out)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, it.size - 1)
        assert it.is_right()
    it.meet("shrunk")


def down_and_up(it: Changing) -> None:
    """test_reconfigure_scale_down_up"""
    it.reconfigure(600 + it.rank, [it.handle()])
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert it.is_right()
    it.reconfigure(610, it.handles("up"))
    assert (dist.get_rank(), dist.get_world_size()) == (it.rank, it.size)
    assert it.is_right()
    it.reconfigure(620 + it.rank, [it.handle()])
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    it.meet("down_and_up")


def single_to_all(it: Changing) -> None:
    """test_reconfigure_single_to_all"""
    it.reconfigure(700 + it.rank, [it.handle()])
    it.reconfigure(710, it.handles("all"))
    assert it.is_right()


def identity(it: Changing) -> None:
    """test_reconfigure_identity"""
    it.connect("identity", 800)
    it.reconfigure(801, it.handles("again"))
    assert it.is_right()


def late_join(it: Changing) -> None:
    """test_reconfigure_late_join"""
    first = it.size // 2
    handles = it.handles("first")
    if it.rank < first:
        it.reconfigure(900, handles[:first])
    it.reconfigure(901, it.handles("all"))
    assert it.is_right()


def merge_and_split(it: Changing) -> None:
    """test_reconfigure_merge_split"""
    split = it.size // 2
    handles = it.handles("parts")
    part = handles[:split] if it.rank < split else handles[split:]
    it.reconfigure(1000 + (it.rank < split), part)
    assert it.is_right()
    it.reconfigure(1002, it.handles("all"))
    assert it.is_right()
    it.reconfigure(1003 + (it.rank < split), part)
    assert it.is_right()
    it.meet("merge_and_split")


def after_abort(it: Changing) -> None:
    """test_reconfigure_after_abort"""
    it.connect("abort", 1200)
    it.backend.abort()
    assert it.backend.get_error().name == "COMM_ERROR"
    it.reconfigure(1201, it.handles("recover"))
    assert it.backend.get_error().name == "SUCCESS"
    assert it.is_right()


def after_timeout(it: Changing) -> None:
    """test_reconfigure_after_timeout, which gloo skips"""
    it.connect("timeout", 1300)
    assert it.is_right()
    it.backend.set_timeout(timedelta(seconds=1))
    ended = threading.Event()
    it.backend.register_abort_hook(0, ended.set)
    if it.rank != 0:
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        assert ended.wait(240), "an operation that timed out did not end the group"
        assert it.backend.get_error().name in ("TIMEOUT", "COMM_ERROR")
        with pytest.raises(RuntimeError, match="timed out"):
            dist.all_reduce(x, async_op=True)
        assert isinstance(work.exception(), RuntimeError)
    it.backend.unregister_abort_hook(0)
    it.backend.set_timeout(timedelta(seconds=300))
    it.meet("observed")
    it.reconfigure(1301, it.handles("recover"))
    assert it.is_right()


def used_uuid(it: Changing) -> None:
    """test_reconfigure_rejects_reused_uuid"""
    uuid = 1400 + it.rank
    it.reconfigure(uuid, [it.handle()])
    with pytest.raises(RuntimeError, match="already used"):
        it.reconfigure(uuid, [it.handle()])
    assert it.is_right()


SCENARIOS: tuple[Scenario, ...] = (
    *(basic, then_all_reduce, then_send_recv, shrink_last, shrink_middle, down_and_up),
    *(single_to_all, identity, late_join, merge_and_split, after_abort, after_timeout),
    used_uuid,
)


def run_all(**options: Any) -> list[str]:
    """Run all, each in a group of its own; return what fails."""
    for scenario in SCENARIOS:
        with changing(scenario.__name__, **options) as it:
            scenario(it)
    return []


@pytest.mark.parametrize("size", [3, 5])
def test_torchs_own_tests(torchrun: Any, size: int) -> None:
    assert torchrun(size, run_all, deadline_s=DEADLINE_S) == [[]] * size
