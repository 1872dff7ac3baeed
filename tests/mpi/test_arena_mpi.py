# SPDX-License-Identifier: Apache-2.0
"""Shared memory between processes: real mappings, nothing left after SIGKILL."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest


def write_and_read() -> list[int]:
    from commrt.bootstrap import connect
    from commrt.job.arena import share
    from commrt.launch.detect import detect

    peers = connect(detect())
    everybody = range(peers.size)
    with share(peers, everybody, "memory", 1, 20) as shared:
        shared.view()[peers.rank * shared.region_nbytes] = peers.rank + 1
        peers.exchange(everybody, "written", b"", 20)
        seen = [shared.view()[rank * shared.region_nbytes] for rank in everybody]
        peers.exchange(everybody, "read", b"", 20)
    return seen


@pytest.mark.parametrize("source", ["memfd", "devshm"])
def test_processes_see_what_the_others_write(mpirun: Any, source: str) -> None:
    assert mpirun(3, write_and_read, env={"COMMRT_SHM": source}) == [[1, 2, 3]] * 3


def nodes() -> list[list[int]]:
    from commrt.bootstrap import connect
    from commrt.job.arena import discover_nodes
    from commrt.launch.detect import detect

    return discover_nodes(connect(detect()), 20)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [[0, 1, 2]]),
        ({"COMMRT_NODES": "1,2"}, [[0], [1, 2]]),
        ({"COMMRT_SHM": "off"}, [[0], [1], [2]]),
    ],
)
def test_processes_of_one_machine_are_one_node_unless_told_otherwise(
    mpirun: Any, env: dict[str, str], expected: list[list[int]]
) -> None:
    assert mpirun(3, nodes, env=env) == [expected] * 3


def share_and_die() -> None:
    from commrt.bootstrap import connect
    from commrt.job.arena import share
    from commrt.launch.detect import detect

    peers = connect(detect())
    share(peers, range(peers.size), "memory", 1 << 20, 20)
    peers.exchange(range(peers.size), "shared", b"", 20)
    os.kill(os.getpid(), signal.SIGKILL)


def _named_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("commrt*")}


@pytest.mark.parametrize("source", ["memfd", "devshm"])
def test_killed_ranks_leave_no_shared_memory(mpirun: Any, source: str) -> None:
    before = _named_segments()
    done = mpirun.failing(2, share_and_die, env={"COMMRT_SHM": source})
    assert done.returncode != 0
    assert not done.timed_out
    assert _named_segments() <= before
