# SPDX-License-Identifier: Apache-2.0
"""Communicators end with the one that they were made from, also where ranks left them.

Ranks 0 and 1 wait for each other in vain. The others have freed the communicator in
which they do, and then revoke what it was made from.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relay_ranks import RelayRanks

from commrt import local
from commrt.comm import Communicator, core_of
from commrt.errors import RevokedError

Make = Callable[[Communicator], Communicator]
MAKERS: dict[str, Make] = {
    "dup": lambda comm: comm.dup(),
    "split": lambda comm: comm.split(color=0),
    "cart": lambda comm: comm.cart((comm.size,), periodic=True),
    "a child of a child": lambda comm: comm.dup().split(color=0),
}


def _grandchild(comm: Communicator) -> Communicator:
    """Make a child of a child, which is gone then."""
    between = comm.dup()
    made = between.split(color=0)
    core = weakref.ref(core_of(between))
    del between
    while core() is not None:
        gc.collect()
    return made


MAKERS["a child of one that is gone"] = _grandchild


def _recv(part: Communicator) -> Any:
    return part.recv(np.empty(3), source=1 - part.rank, nonblocking=True)


def _long_send(part: Communicator) -> Any:
    return part.send(np.ones(1 << 20), 1 - part.rank, nonblocking=True)


def _both(part: Communicator) -> Any:
    x, out = np.ones(3), np.empty(3)
    peer = 1 - part.rank
    return part.multi_sendrecv(
        sends=[(x, peer, 1)], recvs=[(out, peer, 2)], nonblocking=True
    )


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "recv": _recv,
    "send": _long_send,
    "multi_sendrecv": _both,
}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("by_test", [False, True])
def test_ranks_that_wait_where_others_have_left_hear_of_a_revoke(
    size: int, call: str, make: str, by_test: bool
) -> None:
    made_it = threading.Barrier(size)
    waiting = threading.Barrier(size)

    def main(comm: Communicator) -> None:
        comm.timeout_s = 240
        part = MAKERS[make](comm)
        made_it.wait(240)
        if comm.rank > 1:
            part.free()
            waiting.wait(240)
            comm.revoke("step 17 hangs")
            return
        request = CALLS[call](part)
        waiting.wait(240)
        with pytest.raises(RevokedError, match=r"made from local.*step 17 hangs"):
            _end(request, by_test=by_test)
        with pytest.raises(RevokedError, match="step 17 hangs"):
            part.allreduce(np.ones(3))
        part.free()

    local.run(size, main, timeout_s=600)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("nodes", [[[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1]]])
def test_ranks_on_other_nodes_hear_of_it(nodes: list[list[int]], make: str) -> None:
    waiting = threading.Barrier(3)
    heard: list[int] = []

    def main(comm: Communicator) -> None:
        part = MAKERS[make](comm)
        if comm.rank == 2:
            part.free()
            waiting.wait(240)
            comm.revoke("step 17 hangs")
            while len(heard) < 2:
                core_of(comm).world.engine.step()
            return
        request = _recv(part)
        waiting.wait(240)
        try:
            with pytest.raises(RevokedError, match=r"made from local.*rank 2"):
                request.wait(timeout_s=240)
        finally:
            heard.append(comm.rank)
        part.free()

    with RelayRanks(nodes) as ranks:
        ranks.each(main)


def _end(request: Any, *, by_test: bool) -> None:
    while by_test and not request.test():
        pass
    request.wait()


@pytest.mark.parametrize("size", [3, 4])
def test_a_collective_of_neighbors_ends_too(size: int) -> None:
    """Rank 1 does not come to it; the others have no part in it."""
    waiting = threading.Barrier(size)

    def main(comm: Communicator) -> None:
        comm.timeout_s = 240
        peers = [1 - comm.rank] if comm.rank < 2 else []
        graph = comm.graph(peers, peers)
        if comm.rank == 0:
            request = graph.neighbor_allgather(np.ones(3), nonblocking=True)
            waiting.wait(240)
            with pytest.raises(RevokedError, match=r"made from local.*all is lost"):
                request.wait()
            return
        if comm.rank > 1:
            graph.free()
        waiting.wait(240)
        if comm.rank == 2:
            comm.revoke("all is lost")

    local.run(size, main, timeout_s=600)


def test_a_communicator_outlives_the_one_that_it_was_made_from() -> None:
    def main(comm: Communicator) -> float:
        parent = comm.dup()
        child = parent.split(color=0)
        parent.free()
        total = child.allreduce(np.ones(1))
        child.free()
        return float(total[0])

    assert local.run(3, main) == [3.0] * 3
