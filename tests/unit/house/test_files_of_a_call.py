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
    "select/policy.py": "span",  # the algorithm is chosen
    "planning/templates.py": "schedule_template",  # the plan is made
    "backends/staged/attached.py": "plan",
    "device_calls/collectives.py": "start",  # the device gets its commands
}
QUESTIONS = {
    "backends/shm.py": "candidates",  # what can run the call
    "planning/prediction.py": "predicted_us",  # what a candidate costs
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


def entered(call: Callable[[], object]) -> set[str]:
    """Return every file of the package in which a call runs a function."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def listed(heading: str) -> set[str]:
    """Return the files that the page lists under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\d+\. `commrt/([\w/.]+)`", text, re.M))


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Any:
    yield
    forget_ranks()


def files_on(stacks: list[list[str]]) -> set[str]:
    """Return the files on some stacks, none of which has a file twice."""
    for stack in stacks:
        assert len({*stack}) == len(stack), f"a file is entered twice: {stack}"
    return {file for stack in stacks for file in stack}


def check(stacks: list[list[str]], heading: str, most: int) -> None:
    files = files_on(stacks)
    assert files == listed(heading)
    assert len(files) <= most


def test_a_first_call_on_host_arrays() -> None:
    def main(comm: Any) -> list[list[str]]:
        x = np.ones(1000, np.float32)
        return carriers(STEPS, lambda: comm.allreduce(x))

    for stacks in run(2, main):
        check(stacks, "On host arrays", 9)


def test_the_policys_questions_on_the_way() -> None:
    def main(comm: Any) -> list[list[str]]:
        x = np.ones(1000, np.float32)
        return carriers(QUESTIONS, lambda: comm.allreduce(x))

    carry, asked = listed("On host arrays"), listed("What the policy asks")
    for stacks in run(2, main):
        assert {stack[-1] for stack in stacks} == {*QUESTIONS}
        assert files_on(stacks) - carry == asked
    [both] = re.findall(r"with the nine carriers, that is (\d+) files", PAGE)
    assert len(carry | asked) == int(both)


def test_all_files_of_a_first_call() -> None:
    def main(comm: Any) -> set[str]:
        x = np.ones(1000, np.float32)
        return entered(lambda: comm.allreduce(x))

    # Fewer where an earlier call has made schedules that are kept.
    [most] = re.findall(r"enters (\d+) files", PAGE)
    for files in run(2, main):
        assert len(files) <= int(most)


def stacks_of_staged_calls(steps: dict[str, str]) -> list[list[list[str]]]:
    """Return, for each rank, the stacks of a first staged call at these steps."""

    def main(rank: Rank) -> list[list[str]]:
        # The ranks agree on what carries device arrays in the first call of all.
        rank.comm.allreduce(rank.array(np.ones(10, np.float32)))
        x = rank.array(np.ones(1000, np.float32))
        stacks = carriers(steps, lambda: rank.comm.allreduce(x, backend="staged"))
        rank.stream.synchronize()
        return stacks

    return on_threads(2, main)


def test_a_first_staged_call_on_device_arrays() -> None:
    # The host's part is planned as above; its files are counted there.
    steps = {name: step for name, step in STEPS.items() if "templates" not in name}

    for stacks in stacks_of_staged_calls(steps):
        check(stacks, "On device arrays, through pinned memory", 8)


def test_the_policys_questions_of_a_staged_call() -> None:
    steps = {**QUESTIONS, "backends/staged/attached.py": "candidates"}

    for stacks in stacks_of_staged_calls(steps):
        assert "backends/staged/attached.py" in files_on(stacks)
