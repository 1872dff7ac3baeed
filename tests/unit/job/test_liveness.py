# SPDX-License-Identifier: Apache-2.0
"""A rank knows which processes of its node have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from commrt.job.liveness import own_process, watch_seen
from commrt.launch.rank_process import Process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits for its end."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def said_of(name: str) -> dict[str, str]:
    return {**own_process(), "process": name, "host": "node7"}


@pytest.mark.parametrize("when", ["before it is watched", "later", "never"])
def test_the_end_of_a_process_is_known(
    when: str, other: subprocess.Popen[bytes]
) -> None:
    name = Process(other.pid).name
    if when == "before it is watched":
        other.send_signal(signal.SIGKILL)
        other.wait(250)
    liveness = watch_seen(0, [0, 1], [own_process(), said_of(name)])
    if when == "later":
        assert liveness.gone(1) == ""
        other.send_signal(signal.SIGKILL)
        other.wait(250)
    assert liveness.native.look(anew=True) == (when != "never")
    expected = "" if when == "never" else f"process {other.pid} on node7 has ended"
    assert liveness.gone(1) == expected
    assert liveness.gone(0) == ""


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    number = os.getppid()
    liveness = watch_seen(0, [0, 1], [own_process(), said_of(f"{number}-1")])
    assert liveness.native.look(anew=True)
    assert liveness.gone(1) == f"process {number} on node7 has ended"


def test_nothing_is_said_of_processes_elsewhere() -> None:
    elsewhere = {**said_of("999999999-1"), "space": "pid:[1]"}
    liveness = watch_seen(0, [0, 1, 2], [own_process(), elsewhere, said_of("")])
    assert not liveness.native.look(anew=True)
