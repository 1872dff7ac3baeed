# SPDX-License-Identifier: Apache-2.0
"""send, recv and sendrecv as native methods: what they take, what they hand over.

The native way and the Python function behind it must do and say the same.
"""

from __future__ import annotations

import array
import inspect
import pydoc
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16
import numpy as np
import pytest

from commrt import _native
from commrt.arrays.host import view
from commrt.comm import Communicator, core_of
from commrt.errors import BufferError_, TimeoutError_, TruncationError, UsageError
from commrt.local import LocalRanks, run
from commrt.vocabulary.dtypes import DTYPES

METHODS = ("send", "recv", "sendrecv")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (1,), (2, 3), (33,), (1000,))


def _handed_over(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError(f"not taken natively: {args[1:]}, {kwargs}")


NATIVE = {
    name: _native.make_message_method(name, kind, _handed_over)
    for kind, name in enumerate(METHODS)
}
PYTHON = {name: getattr(Communicator, name).__wrapped__ for name in METHODS}
BOTH = (NATIVE, PYTHON)


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with LocalRanks(2) as ranks:
        yield ranks.comms


def _same(a: Any, b: Any) -> bool:
    return bool(a.tobytes() == b.tobytes())


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_both_ways_move_every_type_and_shape(pair: Any, dtype: str) -> None:
    first, second = pair
    view(np.zeros(1, dtype), "x")  # the first of a foreign type makes it known
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        for sends, receives in ((a, b) for a in BOTH for b in BOTH):
            x = rng.integers(0, 2, shape).astype(dtype)
            out, back = np.ones(shape, dtype), np.ones(shape, dtype)
            assert sends["send"](first, x, dest=1, tag=2**31 - 1) is None
            # It has a message for its receive and room for its send: it need not wait.
            took = receives["sendrecv"](
                second, x, dest=0, out=out, source=0, sendtag=3, recvtag=2**31 - 1
            )
            assert took is out
            assert receives["recv"](first, back, source=1, tag=3) is back
            assert _same(out, x)
            assert _same(back, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_nonblocking_calls_and_messages_to_oneself(pair: Any, shape: Any) -> None:
    comm = pair[0]
    for ways in BOTH:
        x, out = np.full(shape, 7.0), np.zeros(shape)
        sent = ways["send"](comm, x, dest=0, tag=1, nonblocking=True)
        assert ways["recv"](comm, out, source=0, tag=1) is out
        assert _same(out, x)
        assert sent.wait() is None
        out[...] = 0
        got = ways["recv"](comm, out, source=0, nonblocking=True)
        assert ways["send"](comm, x, dest=0, nonblocking=False) is None
        assert got.wait() is out
        assert (got.received_nbytes, got.source) == (x.nbytes, 0)
        assert _same(out, x)
        out[...] = 0
        swapped = ways["sendrecv"](comm, x, dest=0, out=out, source=0, nonblocking=True)
        assert swapped.wait() is out
        assert ways["sendrecv"](comm, x, dest=0, out=out, source=0) is out
        assert _same(out, x)


def _frozen() -> Any:
    x = np.zeros(4)
    x.flags.writeable = False
    return x


X, OUT = np.ones(4), np.zeros(4)
WHOLE = np.zeros(8)
PEERS = {"dest": 1, "source": 1}
HOW: dict[str, dict[str, Any]] = {
    "send": {"dest": 1},
    "recv": {"source": 1},
    "sendrecv": {"out": OUT, **PEERS},
}
Wrong = tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]
WRONG: list[Wrong] = [
    *(
        ("send", (X,), {"dest": dest}, UsageError)
        for dest in (2, -1, 2**70, True, None)
    ),
    *(
        ("recv", (OUT,), {"source": source}, UsageError)
        for source in (2, -1, -(2**70), 1.0, "1", np.True_)
    ),
    *(
        ("send", (X,), {"dest": 1, "tag": tag}, UsageError)
        for tag in (-1, 2**31, 2**64, False, 1.0, None)
    ),
    ("recv", (OUT,), {"source": 1, "tag": 2**31}, UsageError),
    ("sendrecv", (X,), {"out": OUT, "sendtag": -1, **PEERS}, UsageError),
    ("sendrecv", (X,), {"out": OUT, "recvtag": 2**31, **PEERS}, UsageError),
    ("sendrecv", (X,), {"out": OUT, "dest": 1, "source": 2}, UsageError),
    ("sendrecv", (X,), {"out": OUT, "dest": 2, "source": 1}, UsageError),
    ("sendrecv", (X,), {"out": X, **PEERS}, UsageError),
    ("sendrecv", (WHOLE[:5],), {"out": WHOLE[4:], **PEERS}, UsageError),
    ("send", (X,), {"dest": 1, "nonblocking": 1}, UsageError),
    ("recv", (OUT,), {"source": 1, "nonblocking": None}, UsageError),
    ("recv", (OUT,), {"source": 1, "timeout_s": 0}, UsageError),
    ("send", (X,), {"dest": 1, "timeout_s": float("nan")}, UsageError),
    ("recv", (_frozen(),), {"source": 1}, BufferError_),
    ("sendrecv", (X,), {"out": _frozen(), **PEERS}, BufferError_),
    ("send", (X.astype(">f8"),), {"dest": 1}, BufferError_),
    ("recv", (OUT.astype(">i4"),), {"source": 1}, BufferError_),
    ("send", (WHOLE[::2],), {"dest": 1}, BufferError_),
    ("recv", (WHOLE[::-1],), {"source": 1}, BufferError_),
    ("send", (np.zeros((2, 3), order="F"),), {"dest": 1}, BufferError_),
    ("send", (np.zeros(9, np.uint8)[1:].view(np.float64),), {"dest": 1}, BufferError_),
    ("send", (np.zeros(2, object),), {"dest": 1}, BufferError_),
    ("send", (np.zeros(2, "M8[s]"),), {"dest": 1}, BufferError_),
    ("send", (np.ma.masked_less(X, 2),), {"dest": 1}, BufferError_),
    ("send", (["1.0"],), {"dest": 1}, BufferError_),
    ("send", ({1.0},), {"dest": 1}, BufferError_),
    ("send", (None,), {"dest": 1}, BufferError_),
    ("recv", (b"1234",), {"source": 1}, BufferError_),
    ("send", (X,), {}, TypeError),
    ("send", (), {"dest": 1}, TypeError),
    ("send", (X, 2), {}, UsageError),
    ("send", (X, 1, -1), {}, UsageError),
    ("send", (X, 1), {"dest": 1}, TypeError),
    ("send", (X, 1, 2, 3), {}, TypeError),
    ("recv", (OUT, "1"), {}, UsageError),
    ("recv", (OUT, 1, 2), {"tag": 2}, TypeError),
    ("recv", (), {}, TypeError),
    ("recv", (OUT,), {"dest": 1}, TypeError),
    ("send", (X,), {"dest": 1, "sendtag": 0}, TypeError),
    ("sendrecv", (X,), {**PEERS}, TypeError),
    ("sendrecv", (X,), {"out": OUT, "tag": 0, **PEERS}, TypeError),
    ("sendrecv", (X, OUT), {**PEERS}, TypeError),
    ("sendrecv", (X, 1, OUT), {}, TypeError),
    ("sendrecv", (X, 1, OUT, 2), {}, UsageError),
    ("sendrecv", (X, 1, OUT), {"out": OUT, "source": 1}, TypeError),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "error"), WRONG)
def test_a_wrong_call_says_what_the_python_function_says(
    pair: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[Exception],
) -> None:
    said = []
    for call in (getattr(pair[0], name), PYTHON[name].__get__(pair[0])):
        with pytest.raises(error) as raised:
            call(*args, **kwargs)
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]
    assert said[0][1]
    assert core_of(pair[0])._records() == []


@pytest.mark.parametrize("state", ["freed", "failed"])
@pytest.mark.parametrize("name", METHODS)
def test_a_communicator_that_is_over_says_so(pair: Any, state: str, name: str) -> None:
    comm = pair[0]
    comm.free() if state == "freed" else core_of(comm).give_up("I had enough")
    words = "make a new communicator" if state == "freed" else r"call shrink\(\)"
    said = []
    for call in (getattr(comm, name), PYTHON[name].__get__(comm)):
        with pytest.raises(Exception, match=words) as raised:
            call(X if name != "recv" else OUT, **HOW[name])
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]


def test_unusual_calls_do_the_same(pair: Any) -> None:
    first, second = pair

    class Tagged(np.ndarray):  # type: ignore[type-arg]
        pass

    x = np.arange(3.0)
    calls: list[Callable[[], Any]] = [
        lambda: first.send(x=x, dest=1),
        lambda: first.send(x, dest=np.int64(1), tag=np.uint8(0)),
        lambda: first.send(x, dest=1, timeout_s=5),
        lambda: first.send(x, dest=1, timeout_s=None),
        lambda: first.send(x, **{"".join(("de", "st")): 1}),
        lambda: first.send(x.view(Tagged), dest=1),
        lambda: first.send(array.array("d", x), dest=1),
        lambda: Communicator.send(first, x, dest=1),
    ]
    outs: list[Any] = [np.zeros(3), np.zeros(3).view(Tagged), array.array("d", 3 * [0])]
    for call in calls:
        for out in outs:
            assert call() is None
            assert second.recv(out, source=0) is out
            assert list(out) == [0, 1, 2]


def test_memory_of_a_buffer_cannot_move_while_a_message_is_awaited(pair: Any) -> None:
    first, second = pair
    out = array.array("d", [0.0])
    request = second.recv(out, source=0, nonblocking=True)
    with pytest.raises(BufferError):
        out.extend([0.0] * 10_000)
    first.send(np.ones(1), dest=1)
    assert request.wait() is out
    assert out[0] == 1.0


def test_an_older_receive_of_the_same_messages_comes_first(pair: Any) -> None:
    first, second = pair
    older, newer, other = np.zeros(1), np.zeros(1), np.zeros(1)
    request = second.recv(older, source=0, tag=1, nonblocking=True)
    for number, tag in ((1.0, 1), (2.0, 2), (3.0, 1)):
        first.send(np.full(1, number), dest=1, tag=tag)
    second.recv(newer, source=0, tag=1)
    second.recv(other, source=0, tag=2)
    assert request.wait() is older
    assert (older[0], newer[0], other[0]) == (1.0, 3.0, 2.0)


def test_long_and_short_messages_of_a_tag_keep_their_order() -> None:
    lengths = [40_000, 1, 4, 40_000, 5, 0, 2048, 2049]

    def rank_main(comm: Any) -> list[float]:
        if comm.rank == 0:
            sends = [
                comm.send(np.full(n, float(i)), dest=1, nonblocking=True)
                for i, n in enumerate(lengths)
            ]
            comm.send(np.full(1, -1.0), dest=1)
            for request in sends:
                request.wait()
            return []
        got = []
        for n in [*lengths, 1]:
            out = np.zeros(n)
            comm.recv(out, source=0)
            got.append(float(out.mean()) if n else 5.0)
        return got

    assert run(2, rank_main, timeout_s=300)[1] == [0, 1, 2, 3, 4, 5, 6, 7, -1]


def test_a_message_that_is_too_long_raises_and_is_gone(pair: Any) -> None:
    first, second = pair
    for tag in (0, 1):  # found in the packets, and found among those that came
        first.send(np.ones(10), dest=1)
        first.send(np.full(4, 2.0), dest=1)
        first.send(np.ones(1), dest=1, tag=1)
        if tag == 1:
            second.recv(np.zeros(1), source=0, tag=1)
        out = np.zeros(4)
        with pytest.raises(
            TruncationError, match=r"message of 80 bytes from rank 0 \(tag 0\) is"
        ):
            second.recv(out, source=0)
        assert not out.any()
        second.recv(out, source=0)
        assert (out == 2.0).all()
    assert [row[6] for row in core_of(second)._records()] == [2, 1, 1, 2, 1]


def test_what_needs_no_operation_leaves_its_record(pair: Any) -> None:
    send, recv, uint8, done = 64, 65, 5, 1
    first, second = pair
    first.send(np.ones(2), dest=1, tag=4)
    second.sendrecv(np.ones(1), dest=0, sendtag=7, out=np.zeros(3), source=0, recvtag=4)
    first.recv(np.zeros(5), source=1, tag=7)
    mine, theirs = core_of(first)._records(), core_of(second)._records()
    assert [row[:7] for row in mine] == [
        (0, send, uint8, 0, 16, 0, done),
        (1, recv, uint8, 0, 40, 0, done),
    ]
    assert [row[:7] for row in theirs] == [
        (0, recv, uint8, 0, 24, 0, done),
        (1, send, uint8, 0, 8, 0, done),
    ]
    assert [row[11:] for row in mine + theirs] == [(1, 4), (1, 7), (0, 4), (0, 7)]
    assert all(row[8] >= row[7] > 0 for row in mine + theirs)


def test_ranks_that_only_send_to_each_other_make_room(pair: Any) -> None:
    first, second = pair
    for number in range(300):
        first.send(np.full(1, number), dest=1)
        second.send(np.full(1, -number), dest=0)
    out = np.zeros(1, int)
    for number in range(300):
        assert second.recv(out, source=0)[0] == number
        assert first.recv(out, source=1)[0] == -number


def test_a_receiver_tells_what_it_has_received(pair: Any) -> None:
    first, second = pair
    x, out = np.zeros(16384, np.uint8), np.ones(16384, np.uint8)
    # Ten times of what may be there without having been received.
    for number in range(2560):
        x[-1] = number % 251
        first.send(x, dest=1, timeout_s=5)
        second.recv(out, source=0)
        assert out[-1] == x[-1]


def test_a_sendrecv_whose_message_is_away_waits_for_the_other(pair: Any) -> None:
    first, second = pair
    first.timeout_s = 0.05
    for ways in BOTH:
        number = (
            core_of(first)._records()[-1][0] + 1 if core_of(first)._records() else 0
        )
        out, taken = np.zeros(1), np.zeros(1)
        with pytest.raises(TimeoutError_) as raised:
            ways["sendrecv"](first, np.full(1, 5.0), dest=1, out=out, source=1)
        assert str(raised.value).startswith(
            f"sendrecv #{number} to rank 1, tag 0, from rank 1, tag 0, on local, rank "
            f"0: not complete within 0.05 s: recv from rank 1, tag 0: no matching "
            f"call: rank 1 has sent no message with tag 0 for it; it stays in flight"
        )
        assert [row[6] for row in core_of(first)._records()[-2:]] == [0, 1]
        second.recv(taken, source=0)
        second.send(np.full(1, 6.0), dest=0)
        assert raised.value.request.wait() is out  # type: ignore[attr-defined]
        assert (taken[0], out[0]) == (5.0, 6.0)


def test_threads_of_a_rank_exchange_at_once() -> None:
    """Each of a rank's threads has a tag, and all share the communicator."""
    rounds, threads = 60, 3

    def rank_main(comm: Any) -> list[str]:
        wrong: list[str] = []

        def exchange(tag: int) -> None:
            rng = np.random.default_rng(tag)
            for number in range(rounds):
                n = int(rng.choice([0, 1, 4, 5, 700, 3000]))
                peer, call = 1 - comm.rank, number % 3
                x, out = np.full(n, 10.0 * number + tag), np.zeros(n)
                if call == 0:
                    comm.sendrecv(
                        x, dest=peer, out=out, source=peer, sendtag=tag, recvtag=tag
                    )
                else:
                    later = call == 1 or n > 2048
                    sent = comm.send(x, dest=peer, tag=tag, nonblocking=later)
                    comm.recv(out, source=peer, tag=tag)
                    if sent is not None:
                        sent.wait()
                if not (out == x).all():
                    wrong.append(f"tag {tag}, round {number}: {out[:4]}")

        workers = [threading.Thread(target=exchange, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return wrong

    assert run(2, rank_main, timeout_s=300) == [[], []]


@pytest.mark.parametrize("name", METHODS)
def test_tools_see_the_python_function(name: str, pair: Any) -> None:
    method, function = getattr(Communicator, name), PYTHON[name]
    assert isinstance(method, _native.MessageMethod)
    assert inspect.isfunction(function)
    assert (method.__name__, method.__doc__) == (name, function.__doc__)
    assert inspect.signature(method) == inspect.signature(function)
    bound = inspect.signature(getattr(pair[0], name))
    assert list(bound.parameters) == list(inspect.signature(function).parameters)[1:]
    assert repr(method) == f"<commrt operation {name}>"
    text = pydoc.render_doc(method, renderer=pydoc.plaintext)
    assert f"{name}(self, {'out' if name == 'recv' else 'x'}: " in text
    assert function.__doc__.splitlines()[0] in text
    with pytest.raises(TypeError, match=f"{name}.. missing"):
        method()
    with pytest.raises(AttributeError):
        method(object(), X, **HOW[name])
