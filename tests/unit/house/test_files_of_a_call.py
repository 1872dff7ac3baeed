# SPDX-License-Identifier: Apache-2.0
"""The files that carry a first call: docs/internals/files-of-a-call.md has them all."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, forget_ranks, on_threads

import commrt
from commrt.local import run

ROOT = Path(__file__).parents[3]
PACKAGE = str(Path(commrt.__file__).parent) + "/"
PAGE = (ROOT / "docs" / "internals" / "files-of-a-call.md").read_text()
STEPS = {
    "arrays/host.py": "view_anywhere",  # the arrays are checked
    "select/policy.py": "choose",  # the algorithm is chosen
    "planning/host_plans.py": "schedule_plan",  # the plan is made
    "backends/staged/attached.py": "plan",
    "device_calls/collectives.py": "start",  # the device gets its commands
}


def carriers(steps: dict[str, str], call: Callable[[], object]) -> list[list[str]]:
    """Return the files on the stack at each step of a call, outermost first."""
    stacks: list[list[str]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename.removeprefix(PACKAGE)
        if event != "call" or frame.f_code.co_name != steps.get(name):
            return
        files: list[str] = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename.startswith(PACKAGE):
                files.append(at.f_code.co_filename.removeprefix(PACKAGE))
            at = at.f_back
        inside = files[: files.index("calls/channel.py") + 1]
        stacks.append([file for file, _ in groupby(reversed(inside))])

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stacks


def listed(heading: str) -> set[str]:
    """Return the files that the page lists under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\d+\. `commrt/([\w/.]+)`", text, re.M))


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Any:
    yield
    forget_ranks()


def check(stacks: list[list[str]], heading: str, most: int) -> None:
    for stack in stacks:
        assert len({*stack}) == len(stack), f"a file is entered twice: {stack}"
    files = {file for stack in stacks for file in stack}
    assert files == listed(heading)
    assert len(files) <= most


def test_a_first_call_on_host_arrays() -> None:
    def main(comm: Any) -> list[list[str]]:
        x = np.ones(1000, np.float32)
        return carriers(STEPS, lambda: comm.allreduce(x))

    for stacks in run(2, main):
        check(stacks, "On host arrays", 9)


def test_a_first_staged_call_on_device_arrays() -> None:
    # The host's part is planned as above; its files are counted there.
    steps = {name: step for name, step in STEPS.items() if "host_plans" not in name}

    def main(rank: Rank) -> list[list[str]]:
        # The ranks agree on what carries device arrays in the first call of all.
        rank.comm.allreduce(rank.array(np.ones(10, np.float32)))
        x = rank.array(np.ones(1000, np.float32))
        stacks = carriers(steps, lambda: rank.comm.allreduce(x, backend="staged"))
        rank.stream.synchronize()
        return stacks

    for stacks in on_threads(2, main):
        check(stacks, "On device arrays, through pinned memory", 8)
