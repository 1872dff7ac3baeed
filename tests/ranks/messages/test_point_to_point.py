# SPDX-License-Identifier: Apache-2.0
"""send, recv and sendrecv between ranks that are threads, or one thread's."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from commrt._native import Request
from commrt.comm import core_of
from commrt.errors import (
    BufferError_,
    RefusedError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.local import LocalRanks, run
from commrt.request import wait_all

# Nothing, in the line, all that fits there, one more byte, one packet exactly, one more
# byte, and many packets.
LENGTHS = (0, 1, 32, 33, 16384, 16385, 1_000_003)
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

    sent, received = run(2, rank_main, timeout_s=300)
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
        assert run(size, rank_main, timeout_s=300) == [True] * size


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
        assert sum(away) == min(number, bound // (nbytes + 192))
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


def test_wrong_arguments_deliver_nothing() -> None:
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
        with pytest.raises(UsageError, match="sendrecv: nonblocking=1 must be True or"):
            comm.sendrecv(x, out=out, nonblocking=1, **both)
        with pytest.raises(UsageError, match="timeout_s=-1 must be a number"):
            comm.recv(out, source=peer, timeout_s=-1)
        # Eight of these would have sent something, and six would have received.
        for _ in range(2):
            with pytest.raises(RefusedError):
                comm.recv(out, source=peer)
        comm.sendrecv(np.full(3, 7.0), out=out, **both)
        return float(out.sum())

    assert run(2, rank_main, timeout_s=300) == [21.0, 21.0]


def test_receive_without_a_message_times_out_and_stays_pending() -> None:
    def rank_main(comm: Any) -> float:
        out = np.zeros(1)
        if comm.rank == 0:
            with pytest.raises(TimeoutError_, match="no matching call") as raised:
                comm.recv(out, source=1, timeout_s=0.05)
            assert "in recv #0 from rank 1" in str(raised.value)
            comm.barrier()
            request = raised.value.request  # type: ignore[attr-defined]
            assert request.wait(timeout_s=300) is out
        else:
            comm.barrier()
            comm.send(np.full(1, 4.0), dest=0)
        return float(out[0])

    assert run(2, rank_main, timeout_s=300)[0] == 4.0


def swap(comm: Any, x: Any, out: Any, **how: Any) -> Any:
    """Start a sendrecv with the other of two ranks."""
    peer = 1 - comm.rank
    return comm.sendrecv(x, dest=peer, out=out, source=peer, nonblocking=True, **how)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_nonblocking_sendrecv_is_one_request(nbytes: int) -> None:
    with LocalRanks(2) as ranks:
        xs = [np.full(nbytes, rank, np.uint8) for rank in range(2)]
        outs = [np.full(nbytes + 1, 99, np.uint8) for _ in range(2)]
        requests = [
            swap(
                comm,
                xs[comm.rank],
                outs[comm.rank],
                sendtag=comm.rank,
                recvtag=1 - comm.rank,
            )
            for comm in ranks.comms
        ]
        assert all(type(request) is Request for request in requests)
        assert repr(requests[0]) == (
            "<commrt.Request sendrecv #0 to rank 1, tag 0, from rank 1, tag 1, "
            "on local: pending>"
        )
        settle(ranks)
        for rank, request in enumerate(requests):
            assert request.test()
            assert request.wait() is outs[rank]
            assert (request.received_nbytes, request.source) == (nbytes, 1 - rank)
            assert (outs[rank][:-1] == 1 - rank).all()
            assert outs[rank][-1] == 99


def test_nonblocking_sendrecv_ends_with_the_later_half() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        x, out = np.ones(50_000), np.zeros(1)
        request = swap(first, x, out)
        second.send(np.full(1, 3.0), dest=0)
        settle(ranks)
        assert out[0] == 3.0
        assert not request.done, "its own message has not been received"
        taken = np.zeros(50_000)
        other = second.recv(taken, source=0, nonblocking=True)
        settle(ranks)
        assert request.wait() is out
        assert other.wait().all()


def test_failed_half_of_a_sendrecv_is_reported_once_both_have_ended() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        request = swap(first, np.ones(50_000), np.zeros(1))
        second.send(np.ones(2), dest=0)
        settle(ranks)
        assert not request.done
        says = "message of 16 bytes from rank 1 .tag 0. is longer"
        with pytest.raises(TimeoutError_, match=f"failed: {says}.*; send to rank 1"):
            request.wait(timeout_s=0.01)
        other = second.recv(np.zeros(50_000), source=0, nonblocking=True)
        settle(ranks)
        other.wait()
        for _ in range(2):
            with pytest.raises(
                TruncationError, match=f"recv from rank 1, tag 0: {says}"
            ):
                request.wait()


def test_dropped_sendrecv_warns_and_its_buffers_outlive_it() -> None:
    with LocalRanks(2) as ranks:
        alive: list[weakref.ref[Any]] = []

        def start_and_drop() -> None:
            x, out = np.full(50_000, 1.0), np.zeros(50_000)
            alive.extend([weakref.ref(x), weakref.ref(out)])
            swap(ranks.comms[0], x, out)

        with pytest.warns(
            ResourceWarning, match="sendrecv #0 to rank 1, .* was dropped"
        ):
            start_and_drop()
        gc.collect()
        assert all(ref() is not None for ref in alive)
        other = swap(ranks.comms[1], np.full(50_000, 2.0), np.zeros(50_000))
        settle(ranks)
        assert other.wait()[-1] == 1.0
        dropped = alive[1]()
        assert dropped is not None
        assert dropped[-1] == 2.0
        del dropped
        # Ended references are dropped by the next call.
        wait_all(flood(ranks.comms[0], [np.zeros(0)], [9]))
        gc.collect()
        assert all(ref() is None for ref in alive)
        ranks.comms[1].recv(np.zeros(0), source=0, tag=9)


def test_timeout_names_peer_tag_and_number_and_what_is_missing() -> None:
    with LocalRanks(3) as ranks:
        first, second, _ = ranks.comms
        second.send(np.ones(1), dest=0, tag=5)
        receiving = first.recv(np.zeros(1), source=1, tag=7, nonblocking=True)
        sending = first.send(np.ones(50_000), dest=2, tag=8, nonblocking=True)
        for request, text in (
            (
                receiving,
                r"^recv #0 from rank 1, tag 7, on local, rank 0: not complete within "
                r"0\.01 s: no matching call: rank 1 has sent no message with tag 7 for "
                r"it; messages of it wait for their receives, tag 5; it stays in",
            ),
            (
                sending,
                r"^send #1 to rank 2, tag 8, on local, rank 0: .*: rank 2 has called "
                r"no recv from rank 0 with tag 8 for it; it stays",
            ),
        ):
            with pytest.raises(TimeoutError_, match=text):
                request.wait(timeout_s=0.01)
        assert (receiving.seq, sending.seq) == (0, 1)
        second.send(np.ones(1), dest=0, tag=7)
        taken = ranks.comms[2].recv(np.zeros(50_000), source=0, tag=8, nonblocking=True)
        for _ in range(IDLE_PASSES):
            for rank in range(3):
                ranks.step(rank)
        wait_all([receiving, sending, taken])
        first.recv(np.zeros(1), source=1, tag=5)


def test_timeout_of_a_message_on_its_way_says_how_far_it_is() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        sending = first.send(np.ones(100_000), dest=1, nonblocking=True)
        taken = second.recv(np.zeros(100_000), source=0, nonblocking=True)
        with pytest.raises(
            TimeoutError_, match="262144 of 800000 bytes are on their way"
        ):
            sending.wait(timeout_s=0.01)
        with pytest.raises(
            TimeoutError_, match="262144 of 800000 bytes have come from"
        ):
            taken.wait(timeout_s=0.01)
        settle(ranks)
        wait_all([sending, taken])


# -- peers that have given up -------------------------------------------------------

GAVE_UP = r"rank 1 gave up at operation #0 and makes no matching call any more"


@pytest.mark.parametrize("how", ["wait", "test"])
@pytest.mark.parametrize("call", ["recv", "send", "sendrecv"])
def test_what_a_peer_that_gave_up_will_not_answer_ends(call: str, how: str) -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    x, out = np.ones(50_000), np.zeros(3)
    request = {
        "recv": lambda: first.recv(out, source=1, tag=7, nonblocking=True),
        "send": lambda: first.send(x, dest=1, tag=7, nonblocking=True),
        "sendrecv": lambda: swap(first, x, out),
    }[call]()
    assert not request.test()
    core_of(second).give_up("it had enough")
    with pytest.raises(
        RevokedError, match=rf"{call} #0 .* on local, rank 0: .*{GAVE_UP}"
    ):
        request.wait(timeout_s=300) if how == "wait" else request.test()
    with pytest.raises(RevokedError, match="failed in an earlier operation"):
        first.barrier()
    # Nothing of it is left.
    first.free()


def test_a_collective_that_a_peer_gave_up_ends_in_test() -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    request = first.allreduce(np.ones(3), nonblocking=True)
    assert not request.test()
    core_of(second).give_up("it had enough")
    with pytest.raises(RevokedError, match="rank 1 gave up at operation #0"):
        request.test()


def test_what_was_sent_before_its_sender_gave_up_arrives() -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    for tag in (1, 2):
        second.send(np.full(3, float(tag)), dest=0, tag=tag)
    core_of(second).give_up("it had enough")
    for tag in (2, 1):
        out = first.recv(np.zeros(3), source=1, tag=tag, nonblocking=True)
        assert out.test()
        assert out.wait()[0] == tag
    with pytest.raises(RevokedError, match=GAVE_UP):
        first.recv(np.zeros(3), source=1, tag=1, timeout_s=300)


def test_a_matched_message_outlives_its_peer_giving_up() -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    taken = second.recv(np.zeros(50_000), source=0, nonblocking=True)
    sending = first.send(np.ones(50_000), dest=1, nonblocking=True)
    core_of(second).world.engine.step()
    core_of(second).give_up("it had enough")
    assert not sending.test()
    settle(ranks)
    assert sending.test()
    assert taken.wait().all()


def test_a_receive_whose_sender_gave_the_message_up_ends() -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    taken = second.recv(np.zeros(50_000), source=0, nonblocking=True)
    sending = first.send(np.ones(50_000), dest=1, nonblocking=True)
    core_of(second).give_up("it had enough")
    # The receiver has not seen the announcement yet, so its answer comes too late.
    with pytest.raises(RevokedError, match=GAVE_UP):
        sending.test()
    settle(ranks)
    with pytest.raises(RevokedError, match="rank 0 gave the message up"):
        taken.test()


def test_a_message_to_oneself_ends_with_the_communicator() -> None:
    ranks = LocalRanks(1)
    comm = ranks.comms[0]
    request = comm.recv(np.zeros(1), source=0, nonblocking=True)
    assert not request.test()
    core_of(comm).give_up("I had enough")
    with pytest.raises(RevokedError, match="this rank gave up: I had enough"):
        request.test()
    comm.free()


def test_every_message_leaves_a_record() -> None:
    send, recv, uint8 = 64, 65, 5
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        request = first.allreduce(np.ones(3), nonblocking=True)
        receiving = first.recv(np.zeros(1), source=1, tag=7, nonblocking=True)
        first.send(np.ones(2), dest=1, tag=4)
        (one, two, three) = core_of(first)._records()
        assert one[1] == 0
        assert (one[11], one[12]) == (-1, -1)
        assert two[:7] == (0, recv, uint8, 0, 8, 0, 0)
        assert three[:7] == (1, send, uint8, 0, 16, 0, 1)
        assert [row[11:] for row in (two, three)] == [(1, 7), (1, 4)]
        assert two[8] == 0
        assert three[8] >= three[7] >= two[7] >= one[7]
        other = second.allreduce(np.ones(3), nonblocking=True)
        taken = second.recv(np.zeros(1), source=0, tag=4, nonblocking=True)
        second.send(np.ones(1), dest=0, tag=7)
        settle(ranks)
        wait_all([request, other, receiving])
        with pytest.raises(TruncationError):
            taken.wait()
        assert [row[6] for row in core_of(first)._records()] == [1, 1, 1]
        assert [row[6] for row in core_of(second)._records()] == [1, 2, 1]
        many = flood(first, [np.ones(0)] * 300, [0] * 300)
        settle(ranks)
        wait_all(many)
        rows = [row for row in core_of(first)._records() if row[1] == send]
        assert [row[0] for row in rows] == list(range(302 - 256, 302))
        taken = [
            second.recv(np.zeros(0), source=0, nonblocking=True) for _ in range(300)
        ]
        settle(ranks)
        wait_all(taken)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_whose_message_waits_is_known_before_it_is_received(nbytes: int) -> None:
    def rank_main(comm: Any) -> list[int]:
        if comm.rank != 1:
            x = np.full(nbytes, comm.rank, np.uint8)
            comm.send(x, dest=1, tag=4)
            return []
        found = []
        out = np.zeros(nbytes, np.uint8)
        assert core_of(comm).waiting_source(5, 0) == -1
        while len(found) < 2:
            source = core_of(comm).waiting_source(4, 2)
            if source >= 0:
                comm.recv(out, source=source, tag=4)
                assert not nbytes or out[-1] == source
                found.append(source)
        assert core_of(comm).waiting_source(4, 0) == -1
        return sorted(found)

    assert run(3, rank_main, timeout_s=300) == [[], [0, 2], []]


def test_a_message_to_oneself_waits_too() -> None:
    def rank_main(comm: Any) -> int:
        sent = comm.send(np.ones(3), dest=comm.rank, tag=1, nonblocking=True)
        source = int(core_of(comm).waiting_source(1, 0))
        comm.recv(np.zeros(3), source=source, tag=1)
        sent.wait()
        return source

    assert run(1, rank_main) == [0]
    assert run(2, rank_main) == [0, 1]
