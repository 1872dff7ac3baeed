# SPDX-License-Identifier: Apache-2.0
"""Who is gone, as the relay knows it and tells it: ranks as threads, no network."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from relay_by_tcp import CARRIERS
from relay_ranks import RelayRanks

from commrt import _native
from commrt.comm import core_of
from commrt.errors import CommError, PeerFailedError, RevokedError

CLOSED = "gloo: Connection closed by peer"
NODES = ([[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 1], [2], [3, 4]])


def carried(sender: Any, receiver: Any, source: int, dest: int) -> None:
    """Bring one frame from a relay to another."""
    frame = (ctypes.c_uint8 * sender.frame_nbytes)()
    at = ctypes.addressof(frame)
    receiver.arrived(source, at, sender.next(dest, at)[0])


def test_what_one_node_sees_is_told_to_the_others() -> None:
    waits = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(waits, stdin=subprocess.PIPE)
    names = [f"process {100 + rank} on node{min(rank, 1)}" for rank in range(3)]
    far = _native.Liveness([], names)
    near = _native.Liveness([-1, -1, os.pidfd_open(child.pid)], names)
    relays = [_native.Relay(rank, 3) for rank in range(2)]
    relays[0].watch(far, [1, 2])
    relays[1].watch(near, [0])
    assert not near.look(anew=True)
    child.kill()
    child.communicate()
    assert near.look(anew=True)
    assert near.how(2) == "process 102 on node1 has ended"
    assert not far.look()
    carried(relays[1], relays[0], 1, 0)
    assert far.look()
    assert far.how(2) == "process 102 on node1 has ended, as rank 1 of the job says"
    assert far.has_ended(2)
    assert far.how(1) == ""


def test_the_first_word_on_a_rank_stays() -> None:
    liveness = _native.Liveness([], ["process 1 on a", "process 2 on b"])
    relay = _native.Relay(0, 2)
    relay.watch(liveness, [1])
    relay.lost(1, "lost", "Connection reset by peer")
    relay.lost(1, "lost", "No route to host")
    assert liveness.how(1) == "process 2 on b has ended, or has closed its connection"


@pytest.mark.parametrize("relayed", CARRIERS)
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_all_ranks_name_who_was_lost(
    relayed: type[RelayRanks], nodes: list[list[int]]
) -> None:
    """Those of its own node, too, which have no connection to it."""
    with relayed(nodes) as ranks:
        size, dies = len(ranks.comms), nodes[-1][-1]
        host = len(nodes) - 1

        def run(comm: Any) -> str:
            if comm.rank == dies:
                return ""
            if comm.rank not in nodes[-1]:
                ranks.relays[comm.rank].native.lost(dies, CLOSED)
            with pytest.raises(PeerFailedError) as raised:
                comm.allreduce(np.ones(7))
            return str(raised.value)

        said = ranks.each(run)
        died = f"rank {dies} has died: process {100 + dies} on node{host} has ended"
        assert all(died in said[rank] for rank in range(size) if rank != dies)
        core_of(ranks.comms[dies]).give_up("the test ends")


@pytest.mark.parametrize("relayed", CARRIERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.allreduce(np.ones(4)),
        lambda comm: comm.split(0),
        lambda comm: comm.dup(),
        lambda comm: comm.bcast_object({}, root=0),
        lambda comm: comm.recv(np.empty(3)),
        lambda comm: comm.probe(),
    ],
    ids=["allreduce", "split", "dup", "bcast_object", "recv", "probe"],
)
@pytest.mark.full(sample=3)
def test_a_death_that_only_a_rank_of_the_node_knows_of(
    relayed: type[RelayRanks], call: Any
) -> None:
    with relayed([[0, 1], [2]]) as ranks:
        first, second, third = ranks.comms
        ranks.relays[0].native.lost(2, CLOSED)
        with pytest.raises(PeerFailedError, match="rank 2 has died"):
            first.allreduce(np.ones(4))
        assert not core_of(second).who_died()
        with pytest.raises(PeerFailedError, match=r"rank 0 gave up .*rank 2 has died"):
            call(second)
        core_of(third).give_up("the test ends")


@pytest.mark.parametrize("relayed", CARRIERS)
def test_who_lost_a_rank_tells_those_that_reach_it(relayed: type[RelayRanks]) -> None:
    with relayed([[0], [1], [2]]) as ranks:
        first, second, third = ranks.comms
        out = np.zeros(3)
        waiting = second.recv(out, source=0, nonblocking=True)
        together = second.allreduce(np.ones(4), nonblocking=True)
        ranks.relays[0].native.lost(2, CLOSED)
        with pytest.raises(PeerFailedError, match="rank 2 has died"):
            first.allreduce(np.ones(4))

        for request in (together, waiting):
            with pytest.raises(PeerFailedError) as raised:
                request.wait()
            assert (
                "rank 2 has died: process 102 on node2 has ended or cannot be reached, "
                "as rank 0 of another node says" in str(raised.value)
            )
        core_of(third).give_up("the test ends")


@pytest.mark.parametrize("relayed", CARRIERS)
def test_a_rank_that_leaves_fails_what_needs_it_and_nothing_else(
    relayed: type[RelayRanks],
) -> None:
    with relayed([[0], [1], [2]]) as ranks:
        xs = [np.full(5, float(rank)) for rank in range(3)]
        done = [
            comm.bcast(x, root=2, nonblocking=True)
            for comm, x in zip(ranks.comms, xs, strict=True)
        ]
        while not done[2].test():
            ranks.step(0)
            ranks.step(1)
        ranks.relays[2].native.leave()
        for rank in (0, 1):
            while not core_of(ranks.comms[rank]).who_died(2):
                pass
        # It has done its part in the first, and none in the second.
        done[0].wait()
        done[1].wait()
        assert all((x == 2.0).all() for x in xs)

        def run(comm: Any) -> str:
            if comm.rank == 2:
                return ""
            with pytest.raises(CommError) as raised:
                comm.allreduce(np.ones(4))
            return f"{type(raised.value).__name__} {raised.value}"

        for text in ranks.each(run)[:2]:
            assert text.startswith("PeerFailedError")
            assert "rank 2 has left" in text
        core_of(ranks.comms[2]).give_up("the test ends")


@pytest.mark.parametrize("relayed", CARRIERS)
def test_what_a_rank_says_before_it_leaves_is_heard(
    relayed: type[RelayRanks],
) -> None:
    """Its word and its end may come together, before anybody has looked."""
    with relayed([[0], [1], [2]]) as ranks:
        done = [
            comm.allreduce(np.ones(5), nonblocking=True) for comm in ranks.comms[:2]
        ]
        ranks.comms[2].revoke()
        ranks.step(2)
        ranks.relays[2].native.leave()
        for rank in (0, 1):
            while not core_of(ranks.comms[rank]).who_died(2):
                pass
        for each in done:
            with pytest.raises(RevokedError, match="rank 2 of another node has ended"):
                each.wait()
