# SPDX-License-Identifier: Apache-2.0
"""multi_sendrecv: lists of messages as one operation, natively and by Python."""

from __future__ import annotations

import array
import gc
import inspect
import random
import weakref
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from fake_mpi import FakeMpi

from commrt import _native
from commrt._native import Request
from commrt.comm import Communicator, core_of
from commrt.errors import (
    BufferError_,
    ClosedError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.local import LocalRanks, run
from commrt.request import wait_all

# Nothing, in the line, all that fits there, one more byte, one packet exactly, one more
# byte, and many packets.
LENGTHS = (0, 1, 32, 33, 16384, 16385, 300_007)
DTYPES = ("uint8", "int16", "float32", "float64", "complex64", "bool")


def _handed_over(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError(f"not taken natively: {args[1:]}, {kwargs}")


NATIVE = _native.make_message_method("multi_sendrecv", 3, _handed_over)
PYTHON: Any = Communicator.multi_sendrecv.__wrapped__
WAYS = {"native": NATIVE, "python": PYTHON}
FORMS = ("blocking", "nonblocking", "persistent", "persistent start")


def call(way: Any, form: str, comm: Any, **lists: Any) -> Any:
    """Run one multi_sendrecv to its end; return what it returns."""
    if form == "blocking":
        return way(comm, **lists)
    if form == "nonblocking":
        return way(comm, **lists, nonblocking=True).wait()
    planned = comm.plan.multi_sendrecv(**lists)
    return planned() if form == "persistent" else planned.start().wait()


class Drawn(NamedTuple):
    """A message that some ranks exchange."""

    source: int
    dest: int
    tag: int
    nbytes: int
    dtype: str
    value: int

    def sent(self) -> Any:
        x = np.full(self.nbytes, self.value % 251, np.uint8)
        return x.view(self.dtype) if self.dtype != "bool" else x % 2 == 1


def draw(rng: random.Random, size: int) -> list[Drawn]:
    """Return messages; those of one pair and tag meet in this order."""
    found = []
    for value in range(rng.randrange(8 * size)):
        dtype = rng.choice(DTYPES)
        itemsize = np.dtype(dtype).itemsize
        nbytes = rng.choice(LENGTHS) // itemsize * itemsize
        ends = rng.randrange(size), rng.randrange(size)
        found.append(Drawn(*ends, rng.choice((0, 1, 2**31 - 1)), nbytes, dtype, value))
    return found


def shuffled(rng: random.Random, messages: list[Drawn], end: str) -> list[Drawn]:
    """Return the messages in another order, except those of one pair and tag."""
    keys = [(getattr(each, end), each.tag) for each in messages]
    queues = {key: [m for m, k in zip(messages, keys, strict=True) if k == key]
              for key in keys}  # fmt: skip
    rng.shuffle(keys)
    return [queues[key].pop(0) for key in keys]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_drawn_messages_arrive_in_any_order_of_the_lists(
    way: str, form: str, size: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {way} {form} {size}")
    rounds = [draw(rng, size) for _ in range(6)]
    order = {
        (number, rank, end): shuffled(
            rng, [m for m in messages if getattr(m, mine) == rank], end
        )
        for number, messages in enumerate(rounds)
        for rank in range(size)
        for mine, end in (("source", "dest"), ("dest", "source"))
    }

    def rank_main(comm: Any) -> int:
        compared = 0
        for number in range(len(rounds)):
            leaving = order[number, comm.rank, "dest"]
            coming = order[number, comm.rank, "source"]
            outs = [np.zeros_like(m.sent()) for m in coming]
            got = call(
                WAYS[way], form, comm,
                sends=[(m.sent(), m.dest, m.tag) for m in leaving],
                recvs=[(out, m.source, m.tag)
                       for out, m in zip(outs, coming, strict=True)],
            )  # fmt: skip
            assert type(got) is tuple
            assert all(a is b for a, b in zip(got, outs, strict=True))
            for out, m in zip(outs, coming, strict=True):
                assert np.array_equal(out, m.sent())
                compared += 1
        assert core_of(comm).comes_to_rest()  # answers may be on their way
        return compared

    assert sum(run(size, rank_main, timeout_s=300)) == sum(map(len, rounds))


@pytest.mark.parametrize("way", WAYS)
def test_messages_meet_ordinary_ones(way: str) -> None:
    def rank_main(comm: Any) -> bool:
        n = 30_000
        if comm.rank == 0:
            a, b = np.zeros(n), np.zeros(3)
            WAYS[way](
                comm,
                sends=[(np.full(n, 1.0), 1), (np.full(3, 2.0), 1, 5)],
                recvs=[(a, 1, 7), (b, 1)],
            )
            return bool((a == 3.0).all() and (b == 4.0).all())
        c, d = np.zeros(n), np.zeros(3)
        comm.send(np.full(3, 4.0), dest=0)
        comm.sendrecv(np.full(n, 3.0), dest=0, sendtag=7, out=c, source=0)
        comm.recv(d, source=0, tag=5)
        return bool((c == 1.0).all() and (d == 2.0).all())

    assert run(2, rank_main, timeout_s=300) == [True, True]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_empty_lists_end_at_once(way: str, form: str) -> None:
    with LocalRanks(2) as ranks:
        comm = ranks.comms[0]
        assert call(WAYS[way], form, comm, sends=[], recvs=()) == ()
        assert comm.multi_sendrecv() == ()
        assert core_of(comm)._records() == []
        out = np.zeros(2)
        ranks.comms[1].send(np.ones(2), dest=0)
        assert call(WAYS[way], form, comm, sends=(), recvs=[(out, 1)])[0] is out
        assert call(WAYS[way], form, comm, sends=((out, 1),), recvs=()) == ()
        ranks.comms[1].recv(out, source=0)


def test_many_messages_to_one_peer_keep_their_order() -> None:
    number = 700
    lengths = [(0, 1, 4, 2048, 2049)[i % 5] for i in range(number)]

    def rank_main(comm: Any) -> bool:
        peer = 1 - comm.rank
        outs = [np.full(n, -1.0) for n in lengths]
        comm.multi_sendrecv(
            sends=[(np.full(n, float(i)), peer) for i, n in enumerate(lengths)],
            recvs=[(out, peer) for out in outs],
        )
        return all((out == i).all() for i, out in enumerate(outs))

    assert run(2, rank_main, timeout_s=300) == [True, True]


# -- in place -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_in_place_what_comes_replaces_what_went(way: str, form: str, size: int) -> None:
    def rank_main(comm: Any) -> list[bool]:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        right_ones = []
        for nbytes in LENGTHS:
            x, y = (np.full(nbytes, 10 * comm.rank + i, np.uint8) for i in (0, 1))
            copy = np.zeros(nbytes, np.uint8)
            got = call(
                WAYS[way], form, comm, in_place=True,
                # One array goes to two ranks, and is replaced by a third one's.
                sends=[(x, right), (y, left, 2), (x, left, 1)],
                recvs=[(y, right, 2), (copy, right, 1), (x, left)],
            )  # fmt: skip
            assert got[2] is x
            wanted = ((x, 10 * left), (y, 10 * right + 1), (copy, 10 * right))
            right_ones += [bool((array == value).all()) for array, value in wanted]
        return right_ones

    assert run(size, rank_main, timeout_s=300) == [[True] * 3 * len(LENGTHS)] * size


@pytest.mark.parametrize("way", WAYS)
def test_in_place_a_late_receiver_gets_what_went(way: str) -> None:
    """The replacement arrives long before the message itself is asked for."""
    with LocalRanks(3) as ranks:
        first, second, third = ranks.comms
        x = np.full(50_000, 1.0)
        sent = second.send(np.full(50_000, 7.0), dest=0, nonblocking=True)
        request = WAYS[way](
            first, sends=[(x, 2)], recvs=[(x, 1)], in_place=True, nonblocking=True
        )
        while not (x == 7.0).all():
            ranks.step(0), ranks.step(1)
        sent.wait()
        assert not request.done
        out = np.zeros(50_000)
        taken = third.recv(out, source=0, nonblocking=True)
        while not (request.done and taken.done):
            ranks.step(0), ranks.step(2)
        assert request.wait()[0] is x
        assert taken.wait() is out
        assert (out == 1.0).all()


# -- what is wrong is said before anything is sent ------------------------------------

X, OUT, WHOLE = np.ones(4), np.zeros(4), np.zeros(8)
FROZEN = np.zeros(4)
FROZEN.flags.writeable = False
FORM = r"\(x, dest\) or \(x, dest, tag\)"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sends": [(X, 2)]}, UsageError, r"sends\[0\]: dest=2 is not a rank of local"),
    ({"sends": [(X, 1), (X, -1)]}, UsageError, r"sends\[1\]: dest=-1 is not"),
    ({"recvs": [(OUT, True)]}, UsageError, r"recvs\[0\]: source=True is not"),
    ({"sends": [(X, 1, -1)]}, UsageError, r"sends\[0\]: tag=-1 must be"),
    ({"recvs": [(OUT, 1, 2**31)]}, UsageError, r"recvs\[0\]: tag=2147483648 must"),
    ({"recvs": [(OUT, 1, None)]}, UsageError, r"recvs\[0\]: tag=None must be"),
    ({"sends": [(X,)]}, UsageError, rf"sends\[0\] is a tuple of 1, expected {FORM}"),
    ({"sends": [(X, 1, 0, 0)]}, UsageError, r"sends\[0\] is a tuple of 4"),
    ({"sends": [X]}, UsageError, rf"sends\[0\] is a ndarray, expected {FORM}"),
    ({"recvs": [None]}, UsageError, r"recvs\[0\] is a NoneType, expected \(out, sou"),
    ({"sends": (X, 1)}, UsageError, r"sends\[0\] is a ndarray, expected"),
    ({"sends": None}, UsageError, rf"sends=None must be a list of {FORM}"),
    ({"recvs": {1: OUT}}, UsageError, r"recvs=.* must be a list of \(out, source\)"),
    ({"recvs": [(FROZEN, 1)]}, BufferError_, r"recvs\[0\]: out is read-only"),
    ({"sends": [(["a"], 1)]}, BufferError_, r"sends\[0\]: x is a list of other thing"),
    ({"recvs": [(b"1", 1)]}, BufferError_, r"recvs\[0\]: out is read-only"),
    ({"sends": [(WHOLE[::2], 1)]}, BufferError_, r"sends\[0\]: x .* not C-contig"),
    ({"sends": [(X, 1)], "recvs": [(X, 1)]}, UsageError,
     r"recvs\[0\]: out overlaps x of sends\[0\]; pass separate arrays, or in_place"),
    ({"recvs": [(OUT, 1), (WHOLE[:5], 1), (WHOLE[4:], 0)]}, UsageError,
     r"recvs\[2\]: out overlaps that of recvs\[1\]; pass separate arrays"),
    ({"recvs": [(OUT, 1), (OUT, 1)]}, UsageError, r"recvs\[1\]: out overlaps that of"),
    ({"recvs": [(WHOLE, 1), (WHOLE[2:3], 1)]}, UsageError, r"recvs\[1\]: out overlaps"),
    ({"sends": [(OUT, 1), (WHOLE[3:5], 1)],
      "recvs": [(WHOLE[:3], 1), (WHOLE[3:4], 1)]}, UsageError,
     r"recvs\[1\]: out overlaps x of sends\[1\]"),
    ({"sends": [(WHOLE, 1)], "recvs": [(WHOLE[1:2], 1)], "in_place": True}, UsageError,
     r"recvs\[0\]: out overlaps x of sends\[0\]; in place they must be the same mem"),
    ({"sends": [(WHOLE[:2], 1)], "recvs": [(WHOLE[:3], 1)], "in_place": True},
     UsageError, "in place they must be the same memory"),
    ({"recvs": [(OUT, 1), (OUT, 1)], "in_place": True}, UsageError, "overlaps that of"),
    ({"in_place": 1}, UsageError, "in_place=1 must be True or False"),
    ({"nonblocking": 1}, UsageError, "nonblocking=1 must be True or False"),
    ({"timeout_s": 0}, UsageError, "timeout_s=0 must be a number of seconds above 0"),
    ({"send": []}, TypeError, "unexpected keyword argument 'send'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "text"), WRONG)
def test_a_wrong_call_sends_nothing(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with LocalRanks(2) as ranks:
        comm = ranks.comms[0]
        # What is right in the lists is not sent, either.
        given = {"sends": [(X.copy(), 1)], **given}
        said = []
        for way in (comm.multi_sendrecv, PYTHON.__get__(comm)):
            with pytest.raises(error, match=text) as raised:
                way(**given)
            said.append(str(raised.value))
        assert said[0] == said[1]
        if not {"nonblocking", "timeout_s"} & {*given}:
            with pytest.raises(error, match=text):
                comm.plan.multi_sendrecv(**given)
        assert core_of(comm)._records() == []
        assert core_of(comm).idle


def test_lists_are_keyword_arguments() -> None:
    with LocalRanks(1) as ranks, pytest.raises(TypeError, match="positional argument"):
        ranks.comms[0].multi_sendrecv([(X, 0)])


def test_arrays_that_touch_or_are_empty_do_not_overlap() -> None:
    with LocalRanks(1) as ranks:
        x = np.arange(6.0)
        got = ranks.comms[0].multi_sendrecv(
            sends=[(x[4:], 0, 1), (x[1:1], 0, 3), (x[4:5], 0, 2)],
            recvs=[(x[:2], 0, 1), (x[1:1], 0, 3), (x[2:3], 0, 2)],
        )
        assert x.tolist() == [4.0, 5.0, 4.0, 3.0, 4.0, 5.0]
        assert [part.size for part in got] == [2, 0, 1]


# -- what goes wrong later ----------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_message_too_long_is_named_and_the_others_arrive(way: str, form: str) -> None:
    def rank_main(comm: Any) -> float:
        if comm.rank == 0:
            wait_all(
                [
                    comm.send(np.full(n, float(tag)), dest=1, tag=tag, nonblocking=True)
                    for tag, n in ((1, 3), (2, 50_000), (3, 3), (4, 9))
                ]
            )
        else:
            outs = [np.zeros(n) for n in (3, 50_000, 2, 8)]
            lists = {"recvs": [(out, 0, tag) for tag, out in enumerate(outs, 1)]}
            with pytest.raises(
                TruncationError,
                match=r"^multi_sendrecv #\d of 0 sends and 4 receives, on local, rank "
                r"1: recv from rank 0, tag 3: message of 24 bytes from rank 0 .tag 3. "
                r"is longer than the receive buffer of 16 bytes: receive into an array "
                r"of that length, or send fewer bytes; and recv from rank 0, tag 4: "
                r"message of 72 bytes .* 64 bytes: receive into an array of that "
                r"length, or send fewer bytes$",
            ):
                call(WAYS[way], form, comm, sends=[], **lists)
            assert [float(out.mean()) for out in outs] == [1.0, 2.0, 0.0, 0.0]
        return float(comm.allreduce(np.ones(1))[0])

    assert run(2, rank_main, timeout_s=300) == [2.0, 2.0]


@pytest.mark.parametrize("way", WAYS)
def test_received_lengths(way: str) -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        outs = [np.full(5, -1.0) for _ in range(3)]
        for n in (2, 0):
            second.send(np.arange(float(n)), dest=0)
        request = WAYS[way](
            first,
            sends=[(outs[0][:0], 1)],
            recvs=[(out, 1) for out in outs],
            nonblocking=True,
        )
        assert request.each_received_nbytes == [0, 0, 0]
        assert not request.test()
        second.send(np.arange(4.0), dest=0)
        request.wait(timeout_s=300)
        assert request.each_received_nbytes == [16, 0, 32]
        assert (request.received_nbytes, request.source) == (48, -1)
        assert outs[2].tolist() == [0, 1, 2, 3, -1]
        second.recv(np.zeros(0), source=0)
        one = first.send(outs[0], dest=0, nonblocking=True)
        got = first.recv(outs[1], source=0, nonblocking=True)
        assert (one.each_received_nbytes, got.each_received_nbytes) == ([], [40])
        wait_all([one, got])


@pytest.mark.parametrize("way", WAYS)
def test_timeout_says_what_has_not_come_and_can_be_waited_for(way: str) -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        first.timeout_s = 0.05
        a, b = np.zeros(3), np.zeros(2)
        second.send(np.full(1, 5.0), dest=0, tag=1)
        sent = [(np.full(3, 6.0), 1), (np.ones(50_000), 1, 4)]
        with pytest.raises(
            TimeoutError_,
            match=r"^multi_sendrecv #0 of 2 sends and 2 receives, on local, rank 0: "
            r"not complete within 0\.05 s: send to rank 1, tag 4: no matching call: "
            r"rank 1 has called no recv from rank 0 with tag 4 for it; recv from rank "
            r"1, tag 2: no matching call: rank 1 has sent no message with tag 2 for it",
        ) as raised:
            WAYS[way](first, sends=sent, recvs=[(a, 1, 1), (b, 1, 2)])
        request: Any = raised.value.request  # type: ignore[attr-defined]
        assert type(request) is Request
        assert "multi_sendrecv #0 of 2 sends and 2 receives" in repr(request)
        taken = [np.zeros(3), np.zeros(50_000)]
        other = second.multi_sendrecv(
            sends=[(np.full(2, 8.0), 0, 2)],
            recvs=[(taken[0], 0), (taken[1], 0, 4)],
            nonblocking=True,
        )
        while not (request.done and other.done):
            ranks.step(0), ranks.step(1)
        got = request.wait()
        assert (got[0] is a, got[1] is b) == (True, True)
        assert (a.tolist(), b.tolist()) == ([5, 0, 0], [8, 8])
        assert request.each_received_nbytes == [8, 16]
        other.wait()
        assert (taken[0] == 6.0).all()
        assert taken[1].all()


def test_of_many_that_wait_or_fail_some_are_named() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        outs = [np.zeros(1) for _ in range(7)]
        request = first.multi_sendrecv(
            recvs=[(out, 1, tag) for tag, out in enumerate(outs)], nonblocking=True
        )
        with pytest.raises(TimeoutError_, match=r"tag 3 for it.*; and 3 more; it st"):
            request.wait(timeout_s=0.01)
        for tag in range(7):
            second.send(np.ones(2), dest=0, tag=tag)
        with pytest.raises(TruncationError, match=r"tag 3: mess.* bytes; and 3 more$"):
            request.wait(timeout_s=300)


@pytest.mark.parametrize("how", ["wait", "test"])
def test_what_a_peer_that_gave_up_will_not_answer_ends(how: str) -> None:
    ranks = LocalRanks(3)
    first, second, third = ranks.comms
    out = np.zeros(3)
    third.send(np.ones(3), dest=0)
    request = first.multi_sendrecv(
        sends=[(np.ones(50_000), 1)],
        recvs=[(np.zeros(3), 1), (out, 2)],
        nonblocking=True,
    )
    assert not request.test()
    core_of(second).give_up("it had enough")
    gone = (
        r"rank 1 gave up at operation #0 and makes no matching call any more: it had "
        r"enough"
    )
    with pytest.raises(
        RevokedError,
        match=f"send to rank 1, tag 0: {gone}; and recv from rank 1.*{gone}",
    ):
        request.wait(timeout_s=300) if how == "wait" else request.test()
    assert out.all()
    planned = None
    with pytest.raises(RevokedError, match="failed in an earlier operation"):
        planned = first.plan.multi_sendrecv(recvs=[(out, 1)])
    assert planned is None
    first.free()


@pytest.mark.parametrize("state", ["freed", "failed"])
def test_a_communicator_that_is_over_says_so(state: str) -> None:
    comm = LocalRanks(2).comms[0]
    planned = comm.plan.multi_sendrecv(sends=[(X, 0)], recvs=[(OUT, 0)])
    planned()
    comm.free() if state == "freed" else core_of(comm).give_up("I had enough")
    for attempt in (
        lambda: comm.multi_sendrecv(sends=[(X, 0)], recvs=[(OUT, 0)]),
        lambda: PYTHON(comm, sends=[(X, 0)]),
        planned,
        planned.start,
    ):
        with pytest.raises(
            ClosedError if state == "freed" else RevokedError,
            match="make a new communicator" if state == "freed" else r"call shrink\(\)",
        ):
            attempt()


def test_dropped_request_warns_and_its_buffers_outlive_it() -> None:
    with LocalRanks(2) as ranks:
        alive: list[weakref.ref[Any]] = []

        def start_and_drop() -> None:
            x, out = np.full(50_000, 1.0), np.zeros(50_000)
            alive.extend([weakref.ref(x), weakref.ref(out)])
            ranks.comms[0].multi_sendrecv(
                sends=[(x, 1)], recvs=[(out, 1)], nonblocking=True
            )

        with pytest.warns(
            ResourceWarning, match="multi_sendrecv #0 of 1 send and 1 re"
        ):
            start_and_drop()
        gc.collect()
        assert all(ref() is not None for ref in alive)
        got = np.zeros(50_000)
        other = ranks.comms[1].multi_sendrecv(
            sends=[(np.full(50_000, 2.0), 0)], recvs=[(got, 0)], nonblocking=True
        )
        while not (other.done and core_of(ranks.comms[0]).idle):
            ranks.step(0), ranks.step(1)
        other.wait()
        assert (got == 1.0).all()
        # Ended references are dropped by the next call.
        ranks.comms[0].multi_sendrecv()
        ranks.comms[0].send(np.zeros(0), dest=0)
        ranks.comms[0].recv(np.zeros(0), source=0)
        gc.collect()
        assert all(ref() is None for ref in alive)


def test_each_message_has_its_record() -> None:
    send, recv, uint8, done, running = 64, 65, 5, 1, 0
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        second.send(np.ones(1), dest=0, tag=4)
        request = first.multi_sendrecv(
            sends=[(np.ones(2), 1, 7)],
            recvs=[(np.zeros(3), 1, 4), (np.zeros(1), 1, 5)],
            nonblocking=True,
        )
        rows = [
            (0, send, uint8, 0, 16, 0, done),
            (1, recv, uint8, 0, 24, 0, done),
            (2, recv, uint8, 0, 8, 0, running),
        ]
        assert [row[:7] for row in core_of(first)._records()] == rows
        second.send(np.ones(1), dest=0, tag=5)
        request.wait(timeout_s=300)
        assert [row[6] for row in core_of(first)._records()] == [done] * 3
        second.recv(np.zeros(2), source=0, tag=7)


def test_unusual_lists_and_arrays() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        x, out = array.array("d", [1.0, 2.0]), array.array("d", [0.0, 0.0])
        got = first.multi_sendrecv(
            sends=([x, np.int64(0)], (x, 1, np.uint8(3))), recvs=[[out, np.int32(0)]]
        )
        assert got[0] is out
        assert out == x
        back = np.zeros(2)
        second.multi_sendrecv(recvs=[(back, 0, 3)], timeout_s=300)
        assert back.tolist() == [1.0, 2.0]


def test_a_persistent_one_sees_new_values_and_says_what_it_is() -> None:
    def rank_main(comm: Any) -> bool:
        peer = 1 - comm.rank
        x, out = np.zeros(3), np.zeros(3)
        swap = comm.plan.multi_sendrecv(sends=[(x, peer)], recvs=[(out, peer)])
        assert swap.operation == "multi_sendrecv"
        assert repr(swap) == (
            "<commrt.PersistentMessages multi_sendrecv of 1 sends and 1 receives>"
        )
        right = []
        for number in range(5):
            x[:] = 10 * number + comm.rank
            assert (swap() if number % 2 else swap.start().wait())[0] is out
            right.append(bool((out == 10 * number + peer).all()))
        return all(right)

    assert run(2, rank_main, timeout_s=300) == [True, True]
    with LocalRanks(1) as ranks:
        assert "multi_sendrecv" in dir(ranks.comms[0].plan)


# -- between nodes ------------------------------------------------------------------


def test_between_nodes_it_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    messages = draw(rng, 2) + draw(rng, 2)
    outs: list[tuple[Any, Drawn]] = []
    with FakeMpi().ranks([[0], [1]]) as ranks:
        requests = []
        for rank, comm in enumerate(ranks.comms):
            leaving = shuffled(rng, [m for m in messages if m.source == rank], "dest")
            coming = shuffled(rng, [m for m in messages if m.dest == rank], "source")
            mine = [np.zeros_like(m.sent()) for m in coming]
            pairs = list(zip(mine, coming, strict=True))
            outs += pairs
            requests.append(
                comm.multi_sendrecv(
                    sends=[(m.sent(), m.dest, m.tag) for m in leaving],
                    recvs=[(out, m.source, m.tag) for out, m in pairs],
                    nonblocking=True,
                )
            )
        while not all(request.done for request in requests):
            ranks.step(0), ranks.step(1)
        wait_all(requests)
        assert all(np.array_equal(out, m.sent()) for out, m in outs)


def test_tools_see_the_python_function() -> None:
    method = Communicator.multi_sendrecv
    assert isinstance(method, _native.MessageMethod)
    assert inspect.signature(method) == inspect.signature(PYTHON)
    assert (method.__name__, method.__doc__) == ("multi_sendrecv", PYTHON.__doc__)
