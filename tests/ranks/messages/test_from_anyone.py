# SPDX-License-Identifier: Apache-2.0
"""Receives from whichever rank sends, and looks at what waits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import TimeoutError_, TruncationError, UsageError
from commrt.local import LocalRanks, run

LENGTHS = (0, 1, 7, 5000, 300_001)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_message_of_each_rank(size: int, length: int) -> None:
    def main(comm: Any) -> list[int]:
        sent = comm.send(np.full(length, comm.rank), 0, nonblocking=True)
        found = []
        for _ in range(comm.size if comm.rank == 0 else 0):
            out = np.full(length, -1)
            request = comm.recv(out, nonblocking=True)
            assert isinstance(request, commrt.Request)
            assert request.wait() is out
            assert request.wait() is out
            assert (out == request.source).all()
            assert request.received_nbytes == out.nbytes
            found.append(request.source)
        sent.wait()
        return found

    assert sorted(run(size, main, timeout_s=300)[0]) == list(range(size))


def test_a_blocking_receive_returns_the_array() -> None:
    def main(comm: Any) -> Any:
        if comm.rank:
            comm.send(np.full(2, float(comm.rank)), 0, comm.rank)
            return None
        out = np.empty(2)
        assert comm.recv(out, None, 2) is out
        second = out.tolist()
        assert comm.recv(out, tag=1) is out
        return second + out.tolist()

    assert run(3, main)[0] == [2.0, 2.0, 1.0, 1.0]


def test_it_takes_its_message_when_it_is_asked() -> None:
    with LocalRanks(2) as local:
        ranks = local.comms
        receiver, sender = ranks
        out = np.zeros(3)
        request = receiver.recv(out, nonblocking=True)
        assert not request.test()
        assert not request.done
        assert request.source == -1
        assert "any rank" in repr(request)
        sender.send(np.ones(3), 0)
        while not request.test():
            pass
        assert request.source == 1
        assert request.done
        assert out.tolist() == [1, 1, 1]
        assert commrt.wait_any([request])[0] == 0
        assert commrt.wait_all([request])[0] is out


def test_no_rank_is_always_first() -> None:
    with LocalRanks(4) as local:
        ranks = local.comms
        for sender in ranks[1:]:
            for _ in range(3):
                sender.send(np.full(1, sender.rank), 0)
        out, seen = np.empty(1, int), []
        for _ in range(9):
            seen.append(int(ranks[0].recv(out)[0]))
        assert sorted(seen) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_messages_of_one_rank_keep_their_order() -> None:
    with LocalRanks(2) as local:
        ranks = local.comms
        for number in range(5):
            ranks[1].send(np.full(1, number), 0)
        found = [int(ranks[0].recv(np.empty(1, int))[0]) for _ in range(5)]
        assert found == [0, 1, 2, 3, 4]


def test_two_threads_that_wait_for_one_receive_take_one_message() -> None:
    with LocalRanks(2) as local:
        receiver, sender = local.comms
        out = np.zeros(1)
        request = receiver.recv(out, nonblocking=True)
        found: list[Any] = []
        waiting = [
            threading.Thread(target=lambda: found.append(request.wait()))
            for _ in range(4)
        ]
        for each in waiting:
            each.start()
        sender.send([1.0], 0)
        sender.send([2.0], 0)
        for each in waiting:
            each.join()
        assert [each is out for each in found] == [True] * 4
        assert out.item() == 1.0
        assert receiver.recv(np.empty(1)).item() == 2.0


def test_a_receive_that_nobody_serves_ends_with_its_deadline() -> None:
    with LocalRanks(2) as local:
        ranks = local.comms
        receiver, sender = ranks
        out = np.empty(1)
        with pytest.raises(
            TimeoutError_, match=r"no rank has sent .* tag 3 .*0.05 s"
        ) as e:
            receiver.recv(out, tag=3, timeout_s=0.05)
        sender.send(np.ones(1), 0, 3)
        assert e.value.request.wait() is out
        with pytest.raises(TimeoutError_, match="rank 1 has not sent"):
            receiver.probe(1, timeout_s=0.05)


def test_wrong_arguments() -> None:
    with LocalRanks(2) as local:
        ranks = local.comms
        comm, frozen = ranks[0], np.empty(1)
        frozen.flags.writeable = False
        for call, message in (
            (lambda: comm.recv(frozen), "out is read-only"),
            (lambda: comm.recv(np.empty(1), tag=-1), "tag=-1"),
            (lambda: comm.recv(np.empty(1), "0"), "source='0' is not a rank"),
            (lambda: comm.sendrecv(np.ones(1), 1, np.empty(1), None), "source=None"),
            (lambda: comm.plan.recv(np.empty(1), None), "source=None"),
            (lambda: comm.probe(2), "probe: source=2 is not a rank"),
            (
                lambda: comm.recv(np.empty(1), -1),
                r"0\.\.1, or no source, for whichever",
            ),
            (lambda: comm.probe(-2), "or no source, for whichever rank sends"),
            (lambda: comm.probe(tag=0.5), "probe: tag=0.5"),
            (lambda: comm.probe(nonblocking=1), "probe: nonblocking=1"),
            (lambda: comm.probe(timeout_s=0), "probe: timeout_s=0"),
        ):
            with pytest.raises(UsageError, match=message):
                call()


def test_a_longer_message_is_truncated_with_an_error() -> None:
    with LocalRanks(2) as local:
        ranks = local.comms
        ranks[1].send(np.ones(4), 0)
        with pytest.raises(TruncationError):
            ranks[0].recv(np.empty(2))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_look_says_what_waits_and_leaves_it(length: int) -> None:
    def main(comm: Any) -> None:
        if comm.rank == 2:
            comm.send(np.full(length, 2, np.int16), 0, 9)
        if comm.rank:
            comm.barrier()
            return
        for source in (None, 2):
            found = comm.probe(source, 9)
            seen = found.source, found.tag, found.nbytes, found.dtype
            assert seen == (2, 9, 2 * length, "int16")
        assert comm.probe(1, 9, nonblocking=True) is None
        assert comm.probe(2, 8, nonblocking=True) is None
        out = np.empty(found.nbytes, np.uint8).view(found.dtype)
        comm.recv(out, found.source, found.tag)
        assert (out == 2).all()
        assert comm.probe(2, 9, nonblocking=True) is None
        comm.barrier()

    run(3, main, timeout_s=300)


def test_a_look_at_messages_to_oneself() -> None:
    def main(comm: Any) -> Any:
        sent = comm.send([1, 2], comm.rank, nonblocking=True)
        found = comm.probe()
        comm.recv(np.empty(2, int), found.source)
        sent.wait()
        return found.source, found.nbytes

    assert run(1, main) == [(0, 16)]
