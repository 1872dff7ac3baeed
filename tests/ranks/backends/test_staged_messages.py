# SPDX-License-Identifier: Apache-2.0
"""Messages of device arrays: their order on simulated devices, with bugs planted in it,
and that they are messages like those of host arrays."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from staged_ranks import (
    Rank,
    SimRanks,
    WrongResultError,
    forget_ranks,
    found_by,
    hides_from,
    on_threads,
)

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.errors import (
    BufferError_,
    CommError,
    DeviceFailedError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.request import DeviceRequest, wait_all

SEEDS, FULL_SEEDS = 1, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 4, 200
ENOUGH = {"first_nbytes": 1 << 20}
"""So that nothing is allocated while others wait for their streams."""
FAILING = ("flags_kept", "not_copied")
"""Bugs of messages that fail."""
ONE_QUEUE = ("issued_at_once",)
"""Bugs only where streams share a hardware queue."""
LAZY_DEVICE = ("early_recycling", "sent_recycling", "end_early", "rest_ungated")
"""Bugs only where the host is ahead of the device."""
OF_LEAKS = ("block_lost",)
"""What is left behind: test_staged_leaks.py."""
BUGS = [
    bug
    for bug in _native.planted_message_bugs()
    if bug not in (*FAILING, *ONE_QUEUE, *OF_LEAKS)
]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def sent(rank: int, number: int, count: int) -> Any:
    """What a rank sends, different each time."""
    return np.arange(count, dtype="f4") + 1000 * number + 100 * rank


COUNTS = (4, 33, 0, 300, 8, 8, 1)
ROOM = 5
"""Elements that are left of a receive, and keep what they hold."""


def beside(rank: Rank, other: int) -> list[tuple[Any, Any]]:
    """Exchange messages that the caller's stream does not wait for: nothing but the end
    of one orders the next one's use of its memory."""
    comm, aside = rank.comm, DeviceStream(rank.device)
    xs = [rank.array(sent(rank.rank, 40 + i, 12)) for i in range(6)]
    outs = [rank.array(np.zeros(12, "f4")) for _ in xs]
    requests = []
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        coming = comm.recv(out, source=other, tag=9, nonblocking=True)
        coming.be_quiet()
        comm.send(x, dest=other, tag=9)
        for _ in range(25 if i % 2 else 0):  # the host gets ahead of the device
            core_of(comm).world.engine.step()
        coming.wait(stream=aside)
        for _ in range(25):
            core_of(comm).world.engine.step()
        requests.append(coming)
    for request in requests:
        request.wait()
    rank.asides.append(aside)
    return [(rank.fetch(out), sent(other, 40 + i, 12)) for i, out in enumerate(outs)]


LONG = 10_000
"""Elements of a message that is not sent before its receive is there."""


def late(rank: Rank, other: int) -> list[tuple[Any, Any]]:
    """Send long messages before anybody receives: they stay in pinned memory."""
    comm = rank.comm
    outs = [rank.array(np.zeros(LONG, "f4")) for _ in range(2)]
    for number in range(2):
        comm.send(rank.array(sent(rank.rank, number, LONG)), dest=other, tag=number)
        rank.stream.synchronize()
        while rank.messages.num_leaving:
            core_of(comm).world.engine.step()
    for number, out in enumerate(outs):
        comm.recv(out, source=other, tag=number)
    return [(rank.fetch(o), sent(other, i, LONG)) for i, o in enumerate(outs)]


def messages(rank: Rank) -> None:
    """Exchange messages in every way, as a program with host arrays may."""
    comm, other = rank.comm, 1 - rank.rank
    found: list[tuple[Any, Any]] = []
    for number, count in enumerate(COUNTS):
        x = rank.array(sent(rank.rank, number, count))
        out = rank.array(np.full(count + ROOM, -1.0, "f4"))
        want = np.append(sent(other, number, count), np.full(ROOM, -1.0, "f4"))
        # Receives before sends: this is no deadlock with host arrays, so it is none.
        coming = comm.recv(out, source=other, tag=number, nonblocking=True)
        coming.be_quiet()  # a run that ends in the middle drops them
        if number % 2:
            leaving = comm.send(x, dest=other, tag=number, nonblocking=True)
            leaving.wait()  # x is the caller's again
            rank.fill(x, -7.0)
        else:
            comm.send(x, dest=other, tag=number)
            rank.fill(x, -7.0)
        coming.wait()
        found.append((rank.fetch(out), want))
    a, b = (rank.array(sent(rank.rank, 20 + i, 9)) for i in range(2))
    c, d = (rank.array(np.zeros(9, "f4")) for _ in range(2))
    comm.sendrecv(a, dest=other, out=c, source=other)
    found.append((rank.fetch(c), sent(other, 20, 9)))
    both = comm.multi_sendrecv(
        sends=[(b, other, 3), (b, rank.rank, 4)],
        recvs=[(b, other, 3), (d, rank.rank, 4)],
        in_place=True,
        nonblocking=True,
    )
    both.be_quiet()
    assert both.wait() == (b, d)
    found.append((rank.fetch(b), sent(other, 21, 9)))
    found.append((rank.fetch(d), sent(rank.rank, 21, 9)))
    found += beside(rank, other)
    found += late(rank, other)
    rank.finish()
    rank.stream.synchronize()
    for i, (value, want) in enumerate(found):
        if not np.array_equal(value(), want):
            raise WrongResultError(f"rank {rank.rank}, {i}: {value()}, not {want}")


def verdict(seed: int, queues: int, bug: str | None, **switches: Any) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    if bug in LAZY_DEVICE:
        switches.setdefault("preempt", 0.05)
    ranks = SimRanks(2, seed, queues, message_bug=bug, staging=ENOUGH, **switches)
    return found_by(ranks, messages)


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_messages_are_ordered_whatever_happens_when(
    queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {each: found for each in seeds if (found := verdict(each, queues, None))}
    assert wrong == {}


def test_flags_of_messages_count_on_beyond_their_end(seeds: range) -> None:
    start = {**ENOUGH, "first_value": 2**32 - 5}
    for each in seeds:
        ranks = SimRanks(2, each, 2, staging=start)
        ranks.run(messages)
        ranks.close()


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    # Where the host has to be ahead, one interleaving in a hundred hides it.
    tries = 3 if bug in LAZY_DEVICE else 1

    def is_found(each: int) -> bool:
        return any(verdict(each + n * FULL_SEEDS, queues, bug) for n in range(tries))

    assert [each for each in seeds if not is_found(each)] == []


@pytest.mark.parametrize("bug", ONE_QUEUE)
def test_a_wait_that_is_given_at_the_call_is_a_deadlock(bug: str, seeds: range) -> None:
    assert all("deadlock" in verdict(each, 1, bug) for each in seeds)


# --- failures ---


def outcome(request: Any) -> str:
    """What a request says in the end, by the name of its error."""
    try:
        request.synchronize()
    except CommError as error:
        return type(error).__name__
    return ""


def given_up(rank: Rank) -> list[str]:
    """Wait in a stream for what never comes, as the peer gives up."""
    other = 1 - rank.rank
    if rank.rank == 1:
        core_of(rank.comm).give_up("it was told to")
        return []
    # What has not come to the host is let go with the rest.
    outs = [rank.array(np.zeros(40, "f4")) for _ in range(3)]
    requests = [
        rank.comm.recv(out, source=other, tag=i, nonblocking=True)
        for i, out in enumerate(outs)
    ]
    for request in requests[:2]:
        with suppress(RevokedError):
            request.wait()
    rank.stream.synchronize()
    found = [outcome(request) for request in requests]
    rank.finish()  # the host sees the end of what failed, too
    return found


@pytest.mark.parametrize("queues", [1, 8])
def test_a_peer_that_gives_up_lets_the_streams_go(queues: int, seeds: range) -> None:
    for each in seeds:
        ranks = SimRanks(2, each, queues, staging=ENOUGH)
        found = ranks.run(given_up)
        ranks.world.check()
        assert found[0] == ["RevokedError"] * 3, f"seed {each}"
        assert all(not core_of(rank.comm).devices.outstanding for rank in ranks.ranks)
        forget_ranks()


def gives_up(rank: Rank) -> list[str]:
    """Give up at once what waits in a stream."""
    outs = [rank.array(np.zeros(40, "f4")) for _ in range(3)]
    requests = [
        rank.comm.recv(out, source=1 - rank.rank, tag=i, nonblocking=True)
        for i, out in enumerate(outs)
    ]
    for request in requests:
        with suppress(RevokedError):
            request.wait()
    core_of(rank.comm).give_up("it was told to")
    rank.stream.synchronize()
    return [outcome(request) for request in requests]


def test_what_is_given_up_lets_the_streams_go(seeds: range) -> None:
    for each in seeds:
        ranks = SimRanks(2, each, 8, staging=ENOUGH, preempt=0.05)
        assert ranks.run(gives_up) == [["RevokedError"] * 3] * 2, f"seed {each}"
        ranks.world.check()
        forget_ranks()


def too_long(rank: Rank) -> list[str]:
    """Receive what is longer than the array, as the device gets the copy back."""
    other = 1 - rank.rank
    x, tight = rank.array(sent(rank.rank, 1, 5)), rank.array(np.zeros(2, "f4"))
    failed = rank.comm.recv(tight, source=other, nonblocking=True)
    rank.comm.send(x, dest=other)
    found = [outcome(failed)]
    rank.finish()
    return found


@pytest.mark.parametrize("queues", [1, 8])
def test_a_receive_that_fails_leaves_no_stream_waiting(
    queues: int, full: bool, seed: int
) -> None:
    for each in range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS)):
        ranks = SimRanks(2, each, queues, staging=ENOUGH, preempt=0.05)
        assert ranks.run(too_long) == [["TruncationError"]] * 2, f"seed {each}"
        ranks.world.run_until_idle()  # which a stream that waits makes an error
        ranks.close()


@pytest.mark.parametrize("bug", FAILING)
def test_a_failure_with_a_planted_bug_is_caught(bug: str, seeds: range) -> None:
    def ranks_of(seed: int) -> SimRanks:
        return SimRanks(2, seed, 8, message_bug=bug, staging=ENOUGH, preempt=0.05)

    assert hides_from(seeds, ranks_of, gives_up) == []


# --- messages like any others ---


def mixed(rank: Rank) -> None:
    """Exchange messages between host arrays and device arrays, in the order of tags."""
    comm, other = rank.comm, 1 - rank.rank
    host = [sent(rank.rank, i, 50) for i in range(4)]
    xs = [rank.array(each) if i % 2 else each for i, each in enumerate(host)]
    requests = [comm.send(x, dest=other, tag=5, nonblocking=True) for x in xs]
    outs: list[Any] = []
    for i in range(4):
        on_host = i % 2 == rank.rank
        outs.append(np.zeros(50, "f4") if on_host else rank.array(np.zeros(50, "f4")))
    coming = [comm.recv(o, source=other, tag=5, nonblocking=True) for o in outs]
    assert [*map(id, wait_all(coming))] == [*map(id, outs)]
    wait_all(requests)
    for request in (*requests, *coming):
        if isinstance(request, DeviceRequest):
            request.synchronize()
    for i, out in enumerate(outs):
        got = out if isinstance(out, np.ndarray) else out.get()
        assert np.array_equal(got, sent(other, i, 50)), i


def bound(rank: Rank) -> None:
    """Run persistent calls on changing values."""
    comm, other = rank.comm, 1 - rank.rank
    x, out, y = (rank.array(np.zeros(6, "f4")) for _ in range(3))
    plan = comm.plan
    swap = plan.sendrecv(x, dest=other, out=out, source=other)
    both = plan.multi_sendrecv(sends=[(x, other, 2)], recvs=[(y, other, 2)])
    send, recv = plan.send(x, dest=other, tag=3), plan.recv(out, source=other, tag=3)
    assert swap.label == both.label == recv.label == "staged/messages"
    for number in range(3):
        x.put(sent(rank.rank, number, 6))
        assert swap() is out
        assert np.array_equal(out.get(), sent(other, number, 6))
        assert both.start().wait() == (y,)
        assert np.array_equal(y.get(), sent(other, number, 6))
        request = recv.start()
        send()
        assert request.synchronize() is out
        assert (request.received_nbytes, request.source) == (24, other)
        assert request.each_received_nbytes == [24]
        rank.stream.synchronize()


def short_and_long(rank: Rank) -> None:
    """Tell how much came, and what does not fit."""
    comm, other = rank.comm, 1 - rank.rank
    x, out = rank.array(sent(rank.rank, 1, 5)), rank.array(np.full(8, -1.0, "f4"))
    short = comm.recv(out, source=other, nonblocking=True)
    comm.send(x, dest=other)
    short.wait()
    assert out.get().tolist() == [*sent(other, 1, 5), -1, -1, -1]
    short.synchronize()
    assert (short.received_nbytes, short.source) == (20, other)
    tight = rank.array(np.full(2, -1.0, "f4"))
    failed = comm.recv(tight, source=other, tag=1, nonblocking=True)
    comm.send(x, dest=other, tag=1)
    with pytest.raises(TruncationError, match=r"longer than the receive buffer of 8"):
        failed.synchronize()
    assert tight.get().tolist() == [-1, -1]
    comm.sendrecv(x, dest=other, out=out, source=other)  # others go on
    rank.stream.synchronize()
    # Nobody asks a blocking call, so the communicator says it.
    comm.barrier()
    comm.send(x, dest=other, tag=2)
    comm.recv(tight, source=other, tag=2)
    rank.stream.synchronize()

    def later() -> None:
        for _ in range(1000):
            comm.send(x, dest=rank.rank, tag=3)

    with pytest.raises(RevokedError, match=r"longer than the receive buffer"):
        later()


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("program", [messages, mixed, bound, short_and_long])
def test_messages_on_devices_of_threads(program: Any, flags: bool, seed: int) -> None:
    on_threads(2, program, memory_flags=flags, seed=seed)


def test_what_is_dropped_still_comes(seed: int) -> None:
    def main(rank: Rank) -> None:
        other = 1 - rank.rank
        out = rank.array(np.zeros(6, "f4"))

        def drop() -> None:
            rank.comm.recv(out, source=other, nonblocking=True)
            gc.collect()

        drop()
        rank.comm.send(rank.array(sent(rank.rank, 0, 6)), dest=other)
        rank.finish()
        assert np.array_equal(out.get(), sent(other, 0, 6))

    # Around both ranks: who catches warnings in one thread catches those of all.
    with pytest.warns(ResourceWarning, match=r"dropped without wait"):
        on_threads(2, main, seed=seed)


def test_what_never_comes_is_an_error_in_time() -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            return
        out = rank.array(np.zeros(6, "f4"))
        request = rank.comm.recv(out, source=1, nonblocking=True, timeout_s=0.5)
        with pytest.raises(TimeoutError_, match=r"has sent no message with tag 0"):
            request.synchronize()
        assert not request.test()  # a limit of the host's wait ends nothing
        request.wait()
        rank.stream.synchronize()  # let go, when the time of the call is over
        with pytest.raises(TimeoutError_, match=r"came|complete within 0.5 s"):
            request.synchronize()

    on_threads(2, main)


def test_wrong_messages_are_refused_before_anything_is_sent() -> None:
    def main(rank: Rank) -> None:
        comm, other = rank.comm, 1 - rank.rank
        x, out = rank.array(np.zeros(6, "f4")), rank.array(np.zeros(6, "f4"))
        host = np.zeros(6, "f4")
        with pytest.raises(UsageError, match=r"sendrecv: its arrays are in different"):
            comm.sendrecv(x, dest=other, out=host, source=other)
        with pytest.raises(UsageError, match=r"device 0 and host memory"):
            comm.multi_sendrecv(sends=[(x, other)], recvs=[(host, other)])
        with pytest.raises(UsageError, match=r"stream= is for arrays on devices"):
            comm.send(host, dest=other, stream=rank.stream)
        with pytest.raises(UsageError, match=r"must be None, the integer handle"):
            comm.send(x, dest=other, stream="fast")
        with pytest.raises(UsageError, match=r"out overlaps x"):
            comm.sendrecv(x, dest=other, out=x, source=other)
        with pytest.raises(UsageError, match=r"pass separate arrays, or in_place"):
            comm.multi_sendrecv(sends=[(x, other)], recvs=[(x, other)])
        sealed = DeviceArray(rank.device, 6, readonly=True)
        with pytest.raises(BufferError_, match=r"out is read-only"):
            comm.recv(sealed, source=other)
        rank.arrays.append(sealed)
        assert comm.multi_sendrecv(sends=[(x, other)], recvs=[(out, other)]) == (out,)

    on_threads(2, main)


def test_a_device_that_fails_is_told_of_where_nobody_asks() -> None:
    """Neither rank asks: the one that waits in a stream of its own has to be told."""

    def main(rank: Rank) -> str:
        other, aside = 1 - rank.rank, DeviceStream(rank.device)
        out = rank.array(np.zeros(6, "f4"))
        request = rank.comm.recv(out, source=other, nonblocking=True)
        request.wait()
        rank.comm.barrier()  # of the host
        if rank.rank == 1:  # a command of the user's own breaks the device
            rank.device.fail_after(1)
            # Progress may have been the first to give a command.
            with suppress(DeviceFailedError):
                rank.device.memcpy_async(rank.stop, rank.stop + 32, 4, aside.handle)
        deadline = time.monotonic() + 30
        while not request.done and time.monotonic() < deadline:
            os.sched_yield()
        return outcome(request)

    found = on_threads(2, main, survives=False)
    assert found == ["RevokedError", "DeviceFailedError"]
