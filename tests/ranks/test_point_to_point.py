# SPDX-License-Identifier: Apache-2.0
"""send, recv and sendrecv between ranks that are threads, or one thread's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from commrt.backends.local import LocalRanks, run
from commrt.errors import BufferError_, TimeoutError_, TruncationError, UsageError
from commrt.request import wait_all

# Nothing, inline, one packet exactly, one more byte, and many packets.
LENGTHS = (0, 1, 40, 16384, 16385, 1_000_003)
IDLE_PASSES = 70
"""So many without progress, and nothing will happen: a rank that needs nothing looks
for messages in every 64th."""


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_message_arrives(nbytes: int) -> None:
    message = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)

    def rank_main(comm: Any) -> Any:
        if comm.rank == 0:
            return comm.send(message, dest=1, tag=3)
        out = np.zeros(nbytes, np.uint8)
        assert comm.recv(out, source=0, tag=3) is out
        return out

    sent, received = run(2, rank_main, timeout_s=20)
    assert sent is None
    np.testing.assert_array_equal(received, message)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_everybody_passes_a_message_around(nbytes: int) -> None:
    def rank_main(comm: Any) -> bool:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x, out = (np.full(nbytes, rank, np.uint8) for rank in (comm.rank, 99))
        comm.sendrecv(x, dest=right, out=out, source=left)
        return bool((out == left).all())

    for size in (1, 2, 3):
        assert run(size, rank_main, timeout_s=20) == [True] * size


def test_messages_of_a_tag_do_not_overtake_and_tags_select(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 100, 20_000, 50_000]) for _ in range(60)]
    tags = [rng.randrange(4) for _ in lengths]
    # The receiver asks tag by tag, in another order than the sender sent.
    order = sorted(range(60), key=lambda i: (-tags[i], i))
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        sends = [
            sender.send(np.full(n, i, np.int32), dest=1, tag=tag, nonblocking=True)
            for i, (n, tag) in enumerate(zip(lengths, tags, strict=True))
        ]
        outs = {i: np.full(lengths[i], -1, np.int32) for i in order}
        recvs = [
            receiver.recv(outs[i], source=0, tag=tags[i], nonblocking=True)
            for i in order
        ]
        for _ in range(100_000):
            ranks.step(rng.randrange(2))
            if all(request.done for request in [*sends, *recvs]):
                break
        wait_all([*sends, *recvs])
        assert all((outs[i] == i).all() for i in order)


def settle(ranks: LocalRanks) -> None:
    """Step both ranks until nothing moves."""
    idle = 0
    while idle < IDLE_PASSES:
        idle = 0 if ranks.step(0) | ranks.step(1) else idle + 1


def flood(comm: Any, messages: list[Any], tags: list[int]) -> list[Any]:
    """Send every message to rank 1; return the requests that are complete at once."""
    return [
        comm.send(message, dest=1, tag=tag, nonblocking=True)
        for message, tag in zip(messages, tags, strict=True)
    ]


@pytest.mark.parametrize(("number", "nbytes"), [(1000, 16384), (100_000, 8), (1, 0)])
def test_a_rank_holds_a_bounded_part_of_what_it_has_not_received(
    number: int, nbytes: int
) -> None:
    bound = 4 << 20
    message = np.zeros(nbytes, np.uint8)
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        messages = [np.full(nbytes // 8, i) for i in range(number)]
        sends = flood(sender, messages, [0] * number)
        settle(ranks)
        away = [request.done for request in sends]
        assert away == sorted(away, reverse=True)
        assert sum(away) == min(number, bound // (nbytes + 128))
        # The receiver is late, gets all of them in order, and gives room again.
        outs = [np.full(nbytes // 8, -1) for _ in range(number)]
        recvs = [receiver.recv(out, source=0, nonblocking=True) for out in outs]
        settle(ranks)
        wait_all([*sends, *recvs])
        assert all((out == i).all() for i, out in enumerate(outs))
        again = flood(sender, [message] * 100, [1] * 100)
        settle(ranks)
        assert all(request.done for request in again)
        wait_all(again)


def test_order_holds_where_short_messages_are_announced(seed: int) -> None:
    rng = random.Random(seed)
    number = 1500
    lengths = [rng.choice([0, 1, 2000, 2048, 2049]) for _ in range(number)]
    tags = [rng.randrange(3) for _ in lengths]
    order = sorted(range(number), key=lambda i: (-tags[i], i))
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        messages = [np.full(n, i) for i, n in enumerate(lengths)]
        sends = flood(sender, messages, tags)
        settle(ranks)
        assert not all(request.done for request in sends)
        outs = {i: np.full(2049, -1) for i in order}
        recvs = {
            i: receiver.recv(outs[i], source=0, tag=tags[i], nonblocking=True)
            for i in order
        }
        settle(ranks)
        wait_all([*sends, *recvs.values()])
        for i in order:
            assert recvs[i].received_nbytes == 8 * lengths[i]
            assert (outs[i][: lengths[i]] == i).all()
            assert (outs[i][lengths[i] :] == -1).all()


def test_short_message_reports_its_length() -> None:
    def rank_main(comm: Any) -> list[Any]:
        if comm.rank == 0:
            request = comm.send(np.arange(3.0), dest=1, nonblocking=True)
            request.wait()
            return [request.received_nbytes, request.source]
        out = np.full(5, -1.0)
        request = comm.recv(out, source=0, nonblocking=True)
        request.wait()
        return [request.received_nbytes, request.source, out.tolist()]

    sent, received = run(2, rank_main)
    assert sent == [-1, -1]
    assert received == [24, 0, [0.0, 1.0, 2.0, -1.0, -1.0]]


@pytest.mark.parametrize("sent", [10, 100_000])
def test_long_message_raises_and_the_communicator_stays_usable(sent: int) -> None:
    def rank_main(comm: Any) -> float:
        if comm.rank == 0:
            comm.send(np.ones(sent), dest=1, tag=5)
        else:
            out = np.zeros(4)
            with pytest.raises(TruncationError, match=f"message of {8 * sent} bytes"):
                comm.recv(out, source=0, tag=5)
            assert not out.any()
        return float(comm.allreduce(np.ones(1))[0])

    assert run(2, rank_main) == [2.0, 2.0]


def test_a_rank_sends_to_itself() -> None:
    def rank_main(comm: Any) -> list[float]:
        out = np.zeros(40_000)
        comm.send(np.arange(40_000.0), dest=comm.rank)
        comm.recv(out, source=comm.rank)
        return [float(out[-1])]

    assert run(2, rank_main) == [[39_999.0]] * 2


def test_wrong_arguments_post_nothing() -> None:
    def rank_main(comm: Any) -> float:
        peer, x, out = 1 - comm.rank, np.ones(3), np.zeros(3)
        both = {"dest": peer, "source": peer}
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(UsageError, match="dest=2 is not a rank of local"):
            comm.send(x, dest=2)
        with pytest.raises(UsageError, match=r"source=-1 .* expected 0\.\.1"):
            comm.recv(out, source=-1)
        with pytest.raises(UsageError, match="dest=True is not a rank"):
            comm.send(x, dest=True)
        for tag in (-1, 2**31, 1.0, "a"):
            with pytest.raises(UsageError, match=r"tag=.* must be an integer in 0"):
                comm.send(x, dest=peer, tag=tag)
            with pytest.raises(UsageError, match=r"recvtag=.* must be an integer"):
                comm.sendrecv(x, out=out, recvtag=tag, **both)
        with pytest.raises(BufferError_, match="recv: out is read-only"):
            comm.recv(frozen, source=peer)
        with pytest.raises(BufferError_, match="sendrecv: out is read-only"):
            comm.sendrecv(x, out=frozen, **both)
        with pytest.raises(BufferError_, match="not C-contiguous"):
            comm.sendrecv(np.ones(6)[::2], out=out, **both)
        with pytest.raises(UsageError, match="sendrecv: out overlaps x"):
            comm.sendrecv(x, out=x, **both)
        with pytest.raises(UsageError, match="timeout_s=-1 must be a number"):
            comm.recv(out, source=peer, timeout_s=-1)
        # Had one of these posted a receive, it would now take this message.
        comm.sendrecv(np.full(3, 7.0), out=out, **both)
        return float(out.sum())

    assert run(2, rank_main, timeout_s=20) == [21.0, 21.0]


def test_receive_without_a_message_times_out_and_stays_pending() -> None:
    def rank_main(comm: Any) -> float:
        out = np.zeros(1)
        if comm.rank == 0:
            with pytest.raises(TimeoutError_, match="no matching call") as raised:
                comm.recv(out, source=1, timeout_s=0.05)
            comm.barrier()
            assert raised.value.request.wait() is out  # type: ignore[attr-defined]
        else:
            comm.barrier()
            comm.send(np.full(1, 4.0), dest=0)
        return float(out[0])

    assert run(2, rank_main, timeout_s=20)[0] == 4.0
