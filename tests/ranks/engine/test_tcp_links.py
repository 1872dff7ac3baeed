# SPDX-License-Identifier: Apache-2.0
"""Streams between nodes whose other end is not what it should be."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from relay_by_tcp import RanksByTcp

from commrt import _native
from commrt.bootstrap.base import poll_until

DEADLINE_S = 300.0
MESSAGE, CLEAR, DONE, ANSWER, BYE, EXPECT = 0, 3, 4, 6, 7, 8


def head(kind: int, nbytes: int = 0, where: int = 0) -> bytes:
    """Return a frame's head: kind, tag, bytes that follow, id, number of a payload."""
    return struct.pack("=IiQQQ", kind, 0, nbytes, 0, where)


class End:
    """Rank 1's ends of its connections with rank 0, to write anything to."""

    def __init__(self) -> None:
        self.relay = _native.Relay(0, 2)
        (mine, self.frames), (others, self.payloads) = (
            socket.socketpair() for _ in range(2)
        )
        self.links = _native.TcpLinks(self.relay, [(1, mine.detach(), others.detach())])

    def why_lost(self) -> str:
        assert poll_until(lambda: bool(self.relay.failure_of(1)), DEADLINE_S)
        return str(self.relay.failure_of(1))

    def close(self) -> None:
        self.links.stop()
        self.frames.close()
        self.payloads.close()


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("lane", "said", "why"),
    [
        ("frames", head(77), "a frame of kind 77"),
        ("frames", head(EXPECT), f"a frame of kind {EXPECT}"),
        ("frames", head(MESSAGE, 1 << 40), "a frame of 1099511627776 bytes"),
        ("frames", head(ANSWER, 1 << 30), "a frame of 1073741824 bytes"),
        ("frames", head(DONE, 8, 1), "a frame of another connection"),
        ("payloads", head(MESSAGE, 8), "a frame of another connection"),
        ("payloads", head(CLEAR), "a frame of another connection"),
        ("payloads", head(DONE, 8, 1), "a frame whose payload nobody expects"),
    ],
)
def test_what_is_no_frame_ends_the_connection(
    end: End, lane: str, said: bytes, why: str
) -> None:
    getattr(end, lane).sendall(said)
    assert end.why_lost() == f"{why} is no frame of commrt's"
    assert poll_until(lambda: end.links.num_open == 0, DEADLINE_S)


@pytest.mark.parametrize("lane", ["frames", "payloads"])
@pytest.mark.parametrize("said", [b"", head(MESSAGE, 100), head(MESSAGE)[:7]])
def test_a_connection_that_closes_is_a_lost_rank(
    end: End, lane: str, said: bytes
) -> None:
    end.frames.sendall(said)
    getattr(end, lane).close()
    assert "rank 1 of the job, on another node, has ended" in end.why_lost()
    assert poll_until(lambda: end.links.num_open == 0, DEADLINE_S)


def test_the_last_frame_counts_once_both_lanes_have_it(end: End) -> None:
    """A payload may come after what the other lane has."""
    end.frames.sendall(head(BYE))
    end.frames.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.frames.recv(100)
    end.payloads.sendall(head(BYE))
    end.frames.settimeout(DEADLINE_S)
    for one in (end.frames, end.payloads):
        assert one.recv(100) == head(BYE)
    assert poll_until(lambda: end.links.num_open == 0, DEADLINE_S)
    assert end.relay.failure_of(1) == ""


@pytest.mark.parametrize("count", [0, 1, 257, 70_001, 3_000_001])
def test_messages_that_cross_each_other_come_whole(count: int) -> None:
    """Longer ones than the kernel has room for, on both sides at once."""
    with RanksByTcp([[0], [1]]) as ranks:

        def run(comm: object) -> bool:
            peer = 1 - comm.rank  # type: ignore[attr-defined]
            x = np.arange(count, dtype=np.int32) + comm.rank  # type: ignore[attr-defined]
            out = np.zeros(count, np.int32)
            requests = [
                comm.send(x, dest=peer, tag=tag, nonblocking=True)  # type: ignore[attr-defined]
                for tag in range(4)
            ]
            for tag in (2, 0, 3, 1):
                comm.recv(out, source=peer, tag=tag)  # type: ignore[attr-defined]
                assert (out == np.arange(count) + peer).all()
            for request in requests:
                request.wait()
            return True

        assert ranks.each(run) == [True, True]


@pytest.mark.parametrize("seed", range(4))
def test_short_and_long_frames_in_any_order_come_whole(seed: int) -> None:
    """Behind a long frame little is read ahead, behind a short one much."""
    lengths = [0, 1, 40, 2040, 4000, 4095, 4096, 4097, 16_368, 66_000, 300_001]
    order = np.random.default_rng(seed).choice(lengths, 40).tolist()
    with RanksByTcp([[0], [1]]) as ranks:

        def run(comm: object) -> bool:
            peer = 1 - comm.rank  # type: ignore[attr-defined]
            for count in order:
                x = np.arange(count, dtype=np.int32) + comm.rank  # type: ignore[attr-defined]
                total = comm.allreduce(x.copy(), algorithm="direct")  # type: ignore[attr-defined]
                assert (total == 2 * np.arange(count) + 1).all()
                both = np.concatenate([x, x + 7])
                blocks = comm.alltoall(both, algorithm="direct")  # type: ignore[attr-defined]
                mine = comm.rank * 7  # type: ignore[attr-defined]
                theirs = np.arange(count) + peer + mine
                assert (blocks[peer * count : (peer + 1) * count] == theirs).all()
            return True

        assert ranks.each(run) == [True, True]


def open_sockets() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of this listing itself
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {each for each in found if each.startswith("socket:")}


def test_a_forked_child_has_no_connections(end: End) -> None:
    """A peer sees that this process has ended, whatever its children do."""
    before = open_sockets()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"%d" % len(before - open_sockets()))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        assert said.read() == "2"
    assert os.waitpid(child, 0)[1] == 0
    assert end.links.num_open == 2
