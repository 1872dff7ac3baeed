# SPDX-License-Identifier: Apache-2.0
"""Ranks of one node in other spaces of process numbers, as containers have: one ends.

``unshare`` makes such a space for some of the ranks; they share memory with the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_ranks import RunRanks

import commrt
from commrt.comm import core_of
from commrt.errors import CommError
from commrt.launch.detect import detect

APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    try:
        done = subprocess.run([*APART, "true"], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if done.returncode != 0:
        pytest.skip(f"this user may not unshare: {done.stderr.decode().strip()}")
    return RunRanks(tmp_path)


def move_apart() -> None:
    """Go on as the first process of a space of its own."""
    if os.getpid() != 1:
        os.execvp(APART[0], [*APART, sys.executable, *sys.orig_argv[1:]])


def error_of(comm: commrt.Communicator) -> list[str]:
    try:
        comm.allreduce(np.ones(5))
    except CommError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def loses(apart: list[int], dies: int) -> list[Any]:
    if detect().rank in apart:
        move_apart()
    comm = commrt.init()
    comm.allreduce(np.ones(5))
    if comm.rank == dies:
        os._exit(0)  # the first process of a space takes no signal from itself
    said = [error_of(comm), error_of(comm)]
    made = comm.shrink()
    return [*said, core_of(made).nodes, float(made.allreduce(np.ones(1))[0])]


@pytest.mark.parametrize(("apart", "dies"), [([1], 1), ([1], 0), ([1, 2], 2)])
def test_who_ends_is_named(ranks: RunRanks, apart: list[int], dies: int) -> None:
    found = ranks.survivors(3, loses, apart=apart, dies=dies)
    assert sorted(found) == [rank for rank in range(3) if rank != dies]
    for first, later, nodes, total in found.values():
        assert first[0] == later[0] == "PeerFailedError"
        assert re.search(rf"rank {dies} has died: process \d+ on \S+ has", first[1])
        assert nodes == [[0, 1]]
        assert total == 2.0
