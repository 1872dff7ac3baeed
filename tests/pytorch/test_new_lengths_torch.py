# SPDX-License-Identifier: Apache-2.0
"""Process groups plan no call in Python that has nothing new but its lengths."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import new_lengths
import pytest
import torch
import torch.distributed as dist
from freed_communicators import (
    NUM_WINDOWS,
    count,
    heap_nbytes,
    left_by_each_window,
)

from commrt.calls.collectives import Collectives
from commrt.torch import group_methods

DEADLINE_S = 300.0
NOT_PLANNED = {"barrier", "monitored_barrier"}
"""Methods without lengths."""


def methods() -> set[str]:
    """Return the methods that make calls, each by the first of its names."""
    found: dict[Any, str] = {}
    for name, each in vars(group_methods.Collectives).items():
        if inspect.isfunction(each) and not name.strip("_").endswith("_coalescing"):
            found.setdefault(each, name)
    return {name for name in found.values() if not name.startswith("_")} - NOT_PLANNED


def entered() -> list[Any]:
    """Return whether calls of a new kind took the long way, and which others did.

    Then follow the calls with a wrong result, and the methods that no call came to.
    """
    dist.init_process_group("commrt")
    group: Any = dist.group.WORLD
    long_way, called = Collectives.run, set[str]()
    taken: list[str] = []

    def counted(self: Any, name: str, *rest: Any) -> Any:
        taken.append(f"{form}: {name}")
        return long_way(self, name, *rest)

    def noted(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any, **more: Any) -> Any:
            called.add(name)
            return method(self, *args, **more)

        return call

    for name in methods():
        for same, method in list(vars(group_methods.Collectives).items()):
            if method is vars(group_methods.Collectives)[name]:
                setattr(type(group), same, noted(name, method))
    Collectives.run = counted  # type: ignore[method-assign]
    wrong: list[str] = []
    for form in new_lengths.FORMS:
        for length in (1000, 1023):  # both ends of a range of one choice
            wrong += new_lengths.check(form, group, length)
    is_counted = bool(taken)
    taken.clear()
    for form in new_lengths.FORMS:
        for length in (1001, 1010, 1009):
            wrong += new_lengths.check(form, group, length)
    missing = sorted(methods() - called)
    dist.destroy_process_group()
    return [is_counted, taken, wrong, missing]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_new_lengths_are_planned_without_python(torchrun: Any, size: int) -> None:
    got = torchrun(size, entered, deadline_s=DEADLINE_S)
    assert got == [[True, [], [], []]] * size


def left_by_new_lengths() -> dict[str, int]:
    """Return what grows with each call: objects, blocks of Python, bytes of C."""
    dist.init_process_group("commrt")
    group: Any = dist.group.WORLD
    x, out = torch.ones(20_000), torch.zeros(20_000)
    lengths = iter(range(100, 3000))

    def window() -> None:
        for _ in range(300):
            length = next(lengths)
            sent, received = new_lengths.splits_of(group, length)
            mine, theirs = x[: sum(sent)], out[: sum(received)]
            dist.all_to_all_single(theirs, mine, received, sent)
            dist.all_to_all_single(theirs, mine, received, sent, async_op=True).wait()
            dist.all_reduce(x[:length])
            dist.all_gather_into_tensor(out[: group.size() * length], x[:length])

    counts = []
    for _ in range(NUM_WINDOWS + 1):
        window()
        count()
        blocks = sys.getallocatedblocks()
        counts.append(count(blocks=blocks, nbytes_of_c=heap_nbytes()))
    dist.destroy_process_group()
    return left_by_each_window(counts)


def test_calls_of_new_splits_leave_nothing(torchrun: Any) -> None:
    """Plans go when others need their memory; here the first window fills it."""
    few = {"COMMRT_PLAN_CACHE_NBYTES": str(128 << 10)}
    assert torchrun(2, left_by_new_lengths, env=few, deadline_s=DEADLINE_S) == [{}] * 2
