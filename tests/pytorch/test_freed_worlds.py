# SPDX-License-Identifier: Apache-2.0
"""Worlds between nodes that gloo connects: ``free()`` gives everything back at once.

No garbage collector helps. What ends late is the peers' answer to a last message.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from freed_communicators import FREED, garbage_of
from store_ranks import StoreRanks

import commrt
from commrt.bootstrap.base import poll_until
from commrt.comm import Communicator
from commrt.core import Core

DEADLINE_S = 280.0
TURNS = 6


@pytest.fixture
def ranks(tmp_path: Path) -> StoreRanks:
    return StoreRanks(tmp_path)


def held() -> list[int]:
    """Return the descriptors and threads of this process."""
    return [len(os.listdir("/proc/self/fd")), threading.active_count()]


def use(comm: Communicator) -> None:
    """Make connections, threads and memory."""
    comm.allreduce(np.ones(100_000), nonblocking=True).wait()
    comm.allreduce(np.ones(5), algorithm="gloo/native")
    comm.split(0).free()
    comm.barrier()


def shrinks_and_frees(keeps: bool) -> list[Any]:
    """Return what there is more than one world has, and which cores.

    ``keeps``: the program keeps the freed communicators.
    """
    comm = commrt.init()
    use(comm)
    one = held()
    gc.collect()
    gc.disable()
    kept = []
    for _ in range(TURNS):
        comm.revoke()
        old, comm = comm, comm.shrink()
        old.free()
        kept += [old] * keeps
        del old
        use(comm)
    if not poll_until(lambda: held() <= one, DEADLINE_S / 2):
        return [one, held()]
    cores = sum(isinstance(each, Core) for each in gc.get_objects())
    return [cores - len(kept)]


@pytest.mark.parametrize(
    ("nodes", "keeps"), [("1,2", False), ("1,2", True), ("1", False)]
)
def test_freed_worlds_need_no_collector(
    ranks: StoreRanks, nodes: str, keeps: bool
) -> None:
    env = {"COMMRT_NODES": nodes}
    found = ranks(3, shrinks_and_frees, env=env, deadline_s=DEADLINE_S, keeps=keeps)
    assert found == [[1]] * 3


def test_freed_communicators_between_nodes_need_no_collector(ranks: StoreRanks) -> None:
    env = {"COMMRT_NODES": "1"}
    found = ranks(2, garbage_of, env=env, deadline_s=DEADLINE_S, kinds=FREED)
    assert found == [dict.fromkeys(FREED, 0)] * 2
