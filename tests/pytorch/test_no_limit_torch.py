# SPDX-License-Identifier: Apache-2.0
"""Limits that mean "no limit" where torch takes one."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commrt.torch

DEADLINE_S = 300.0
FOR_EVER = (timedelta.max, timedelta(days=109_575), timedelta(seconds=2**31))


def checked(group: Any = None) -> None:
    """Make calls of the group that wait."""
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait(timedelta.max)
    assert x.tolist() == [4.0] * 3
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.barrier(group=group)


def every_limit() -> float:
    for number, limit in enumerate(FOR_EVER):
        dist.init_process_group("commrt", timeout=limit)
        checked()
        group = dist.new_group(timeout=limit)
        checked(group)
        group.set_timeout(limit)
        checked(group)
        for written in (limit, timedelta.max, math.inf, 1e300, 10**400):
            dist.group.WORLD.monitored_barrier(timeout=written)
        with pytest.raises(ValueError, match="must be a timedelta, or seconds"):
            dist.group.WORLD.monitored_barrier(timeout=math.nan)
        options = commrt.torch.Options(timeout=(limit, math.inf, 1e300)[number])
        checked(dist.new_group(pg_options=options))
        dist.destroy_process_group()
    return commrt.init().timeout_s


def test_every_limit_of_groups(torchrun: Any) -> None:
    found = torchrun(
        2, every_limit, deadline_s=DEADLINE_S, env={"COMMRT_TIMEOUT_S": "1e300"}
    )
    assert found == [1e9, 1e9]


def by_address() -> None:
    """The store of tcp:// is torch's own."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")  # rank 0 is to host it
    url = "tcp://127.0.0.1:0?use_libuv=1"
    dist.init_process_group(
        "commrt", init_method=url, rank=0, world_size=1, timeout=timedelta.max
    )
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()


def test_no_limit_with_an_address(torchrun: Any) -> None:
    torchrun(1, by_address, deadline_s=DEADLINE_S)
