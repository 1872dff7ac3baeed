# SPDX-License-Identifier: Apache-2.0
"""Python objects between ranks: what arrives, and errors that reach every rank."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from started_operations import past_refusals

import commrt
from commrt.comm import core_of
from commrt.errors import (
    MismatchError,
    ObjectError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.local import run

SIZES = (1, 2, 3, 5)
LENGTHS = (0, 1, 8191, 8192, 300_001)
"""Of float64: small ones lie beside the pickle, those of 64 KiB go by themselves."""


def everywhere(size: int, main: Any) -> list[Any]:
    """Return what ``main(comm)`` returns on each rank."""
    return run(size, main, timeout_s=300)


def thing(rank: int, length: int) -> dict[str, Any]:
    """Return an object with arrays."""
    return {
        "rank": rank,
        "text": "é" * rank,
        "none": [None] * rank,
        "arrays": [np.full(length, float(rank)), np.arange(rank)],
    }


def same(found: Any, rank: int, length: int) -> bool:
    """Return whether an object is that of a rank."""
    wanted = thing(rank, length)
    arrays = zip(found["arrays"], wanted["arrays"], strict=True)
    plain = ("rank", "text", "none")
    return all(found[each] == wanted[each] for each in plain) and all(
        np.array_equal(a, b) and a.flags.writeable for a, b in arrays
    )


class Unpicklable:
    """Nothing makes bytes of it."""

    def __reduce__(self) -> Any:
        raise ValueError("not for sale")


_here = threading.local()


def only_on_others(rank: int) -> str:
    """Raise on a rank, where an object is unpickled."""
    if _here.rank == rank:
        raise LookupError("unknown here")
    return "fine"


class KnownElsewhere:
    """An object that one rank cannot unpickle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return only_on_others, (self.rank,)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_collective(size: int, length: int) -> None:
    def main(comm: Any) -> bool:
        mine, last = thing(comm.rank, length), comm.size - 1
        for root in {0, last}:
            sent = mine if comm.rank == root else None
            assert same(comm.bcast_object(sent, root), root, length)
            gathered = comm.gather_object(mine, root)
            assert (gathered is not None) == (comm.rank == root)
            for rank, each in enumerate(gathered or ()):
                assert same(each, rank, length)
            several = [thing(r, length) for r in range(comm.size)]
            part = comm.scatter_object(several if comm.rank == root else None, root)
            assert same(part, comm.rank, length)
        every = comm.allgather_object(mine)
        assert every[comm.rank] is mine
        return all(same(each, rank, length) for rank, each in enumerate(every))

    assert everywhere(size, main) == [True] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_messages_of_objects(size: int, length: int) -> None:
    def main(comm: Any) -> bool:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        mine = thing(comm.rank, length)
        requests = [
            comm.send_object(mine, right, tag, nonblocking=True) for tag in (0, 7, 0)
        ]
        assert all(isinstance(each, commrt.Request) for each in requests)
        found = [
            comm.recv_object(left, 7),
            comm.recv_object(left),
            comm.recv_object(),
        ]
        commrt.wait_all(requests)
        return all(same(each, left, length) for each in found)

    assert everywhere(size, main) == [True] * size


def test_the_source_of_an_object() -> None:
    def main(comm: Any) -> Any:
        if comm.rank:
            comm.send_object(["from", comm.rank], 0, tag=3)
            return None
        return sorted(
            comm.recv_object(tag=3, with_source=True) for _ in range(comm.size - 1)
        )

    assert everywhere(4, main)[0] == [(["from", r], r) for r in (1, 2, 3)]


def test_arrays_and_objects_do_not_meet() -> None:
    """Messages of one tag: an array, an object, an array."""

    def main(comm: Any) -> Any:
        if comm.rank == 0:
            comm.send(np.ones(2), 1)
            comm.send_object("object", 1)
            comm.send(np.zeros(2), 1)
            return None
        first = comm.recv_object()
        out = np.empty(2)
        one = comm.recv(out).tolist()
        assert comm.probe().nbytes == 16
        return first, one, comm.recv(out, 0).tolist()

    assert everywhere(2, main)[1] == ("object", [1.0, 1.0], [0.0, 0.0])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_raises_where_one_cannot_pickle(size: int) -> None:
    bad = size - 1

    def main(comm: Any) -> list[str]:
        mine: Any = Unpicklable() if comm.rank == bad else comm.rank
        several = [0] * bad + [Unpicklable()]
        said = []
        for call in (
            lambda: comm.bcast_object(mine, bad),
            lambda: comm.allgather_object(mine),
            lambda: comm.gather_object(mine, 0),
            lambda: comm.scatter_object(several, 0),
        ):
            with pytest.raises(
                UsageError, match=r"not for sale.*nothing was sent"
            ) as e:
                call()
            assert e.value.on_all_ranks
            said.append(str(e.value))
        assert comm.allgather_object(comm.rank) == list(range(comm.size))
        assert comm.allreduce(np.ones(1))[0] == comm.size
        return said

    found = everywhere(size, main)
    assert all(each == found[0] for each in found)
    assert (
        f"x cannot be pickled (ValueError: not for sale) on rank {bad}" in found[0][0]
    )
    assert f"x[{bad}] cannot be pickled" in found[0][3]


def test_all_ranks_that_cannot_pickle_are_named() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"on rank 0; .* on rank 2; nothing") as e:
            comm.allgather_object(Unpicklable() if comm.rank != 1 else 1)
        assert isinstance(e.value.__cause__, ValueError) == (comm.rank != 1)

    everywhere(3, main)


def test_the_receiver_hears_of_an_object_that_cannot_be_pickled() -> None:
    def main(comm: Any) -> Any:
        if comm.rank == 0:
            with pytest.raises(UsageError, match=r"not for sale.*rank 1 is told"):
                comm.send_object(Unpicklable(), 1)
            comm.send_object("corrected", 1)
            return None
        with pytest.raises(UsageError, match=r"not for sale.* on rank 0"):
            comm.recv_object(0)
        return comm.recv_object(0)

    assert everywhere(2, main)[1] == "corrected"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "x is a NoneType, expected a list of 3 objects on rank 1"),
        ("abc", "x is a str, expected a list"),
        ([1, 2], "x has 2 objects, expected one for each rank on rank 1"),
        ({1, 2, 3}, "x is a set"),
    ],
)
def test_a_wrong_list_of_the_root_is_told_to_all(wrong: Any, message: str) -> None:
    def main(comm: Any) -> Any:
        with pytest.raises(UsageError, match=message):
            comm.scatter_object(wrong if comm.rank == 1 else None, 1)
        return comm.scatter_object([5, 6, 7], 1)

    assert everywhere(3, main) == [5, 6, 7]


def test_a_rank_that_cannot_unpickle_raises_alone() -> None:
    def main(comm: Any) -> list[Any]:
        _here.rank = comm.rank
        found = []
        for call in (
            lambda: comm.bcast_object(KnownElsewhere(1), 0),
            lambda: comm.allgather_object(KnownElsewhere(1))[1 - comm.rank],
        ):
            try:
                found.append(type(call()).__name__)
            except ObjectError as error:
                found.append(type(error.__cause__).__name__)
        return [*found, comm.bcast_object("next", 1)]

    first, second = everywhere(2, main)
    assert first == ["KnownElsewhere", "str", "next"]
    assert second == ["LookupError", "LookupError", "next"]


def test_ranks_that_disagree_all_raise() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(
            MismatchError, match=r"rank 0: gather_object root=0\n.*root=1"
        ):
            comm.gather_object(1, comm.rank)
        with pytest.raises(
            MismatchError, match=r"0: allgather_object\n.*: gather_object"
        ):
            (comm.gather_object if comm.rank else comm.allgather_object)(1)
        assert comm.allgather_object(2) == [2, 2]

    everywhere(2, main)


def test_roots_that_differ_are_an_error_of_all_ranks() -> None:
    """Calls in which a rank alone sends would each go on without the other."""

    def main(comm: Any) -> None:
        for call in (comm.bcast_object, comm.scatter_object):
            with pytest.raises(MismatchError, match=r"root=0\n.*root=1"):
                call([1, 2], comm.rank)
        with pytest.raises(MismatchError, match=r"0: bcast_object.*\n.*: scatter"):
            (comm.scatter_object if comm.rank else comm.bcast_object)([1, 2])
        assert comm.allgather_object(2) == [2, 2]

    everywhere(2, main)


@pytest.mark.parametrize("call", ["bcast_object", "gather_object", "scatter_object"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_root_stays_in_step_with_a_rank_that_refuses(size: int, call: str) -> None:
    """A root that went on to later steps of the call would be ahead of the others."""

    def main(comm: Any) -> list[Any]:
        found = []
        for turn in range(12):
            wrong, root = turn % size, turn // size % size
            kind = UsageError if comm.rank == wrong else RefusedError
            with pytest.raises(kind):
                getattr(comm, call)([turn] * size, size if comm.rank == wrong else root)
            found.append(comm.bcast_object(turn, root))
        return found

    assert everywhere(size, main) == [[*range(12)]] * size


def test_a_late_rank_is_waited_for_again() -> None:
    """The call that ran out of time goes on, and the next one is behind it."""
    came = threading.Event()

    def main(comm: Any) -> Any:
        comm.allgather_object(None)  # the ranks make what such calls use
        if comm.rank == 1:
            assert came.wait(240)
            return comm.allgather_object("late"), comm.allgather_object("then")
        with pytest.raises(TimeoutError_, match="allgather_object on local") as e:
            comm.allgather_object("early", timeout_s=0.05)
        came.set()
        second = comm.allgather_object("second")
        return e.value.request.wait(), second

    assert everywhere(2, main) == [(["early", "late"], ["second", "then"])] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.bcast_object(1, 5), "bcast_object: root=5 is not a rank"),
        (lambda c: c.gather_object(1, None), "gather_object: root=None is not a rank"),
        (lambda c: c.send_object(1, -1), "send_object: dest=-1 is not a rank"),
        (lambda c: c.send_object(1, 0, -1), "send_object: tag=-1 must be an integer"),
        (lambda c: c.send_object(1, 0, 2**31 - 1), "tag=2147483647 must be an integer"),
        (lambda c: c.send_object(1, 0, nonblocking=1), "nonblocking=1 must be True"),
        (lambda c: c.recv_object("0"), "recv_object: source='0' is not a rank"),
        (lambda c: c.recv_object(with_source=1), "with_source=1 must be True"),
        (lambda c: c.recv_object(timeout_s=0), "timeout_s=0 must be a number"),
        (lambda c: c.allgather_object(1, timeout_s="1"), "timeout_s='1' must be"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    call: Any, message: str
) -> None:
    def main(comm: Any) -> None:
        for _ in range(3):  # later with what the first call leaves behind
            if comm.rank == 1:
                with pytest.raises(UsageError, match=message):
                    call(comm)
            found = past_refusals(lambda: comm.allgather_object(comm.rank))
            assert found == [0, 1]
        assert comm.allreduce(1) == 2

    everywhere(2, main)


def test_a_receive_that_nobody_serves_says_so() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(
            TimeoutError_, match=r"recv_object on .* tag 4 within 0.05 s"
        ):
            comm.recv_object(tag=4, timeout_s=0.05)

    everywhere(1, main)


def test_nothing_is_unpickled_that_was_not_asked_for() -> None:
    """An object that waits is bytes until recv_object asks for it."""
    unpickled = []

    def main(comm: Any) -> None:
        _here.rank = comm.rank
        if comm.rank == 0:
            comm.send_object(KnownElsewhere(1), 1)
            comm.send(np.ones(1), 1)
            return
        comm.recv(np.empty(1), 0)
        assert comm.probe(nonblocking=True) is None
        unpickled.append("before")
        with pytest.raises(ObjectError):
            comm.recv_object(0)

    everywhere(2, main)
    assert unpickled == ["before"]


def test_many_threads_of_one_rank_send_and_receive() -> None:
    """Objects of several messages each, of two threads, to two threads."""
    number, threads = 20, 3

    def main(comm: Any) -> list[int]:
        found: list[int] = []

        def send(which: int) -> None:
            for at in range(number):
                array = np.full(20_000, which * number + at)
                comm.send_object((array, array[::-1].copy()), 1)

        def receive(_: int) -> None:
            for _ in range(number):
                first, second = comm.recv_object(0)
                assert (first == first[0]).all()
                assert (second == first[0]).all()
                found.append(int(first[0]))

        work = send if comm.rank == 0 else receive
        running = [threading.Thread(target=work, args=(t,)) for t in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        return sorted(found)

    assert everywhere(2, main)[1] == list(range(number * threads))


def test_objects_on_every_kind_of_communicator() -> None:
    def main(comm: Any) -> list[Any]:
        half, cart = comm.split(comm.rank % 2), comm.cart((comm.size,))
        found = [half.allgather_object(comm.rank), cart.bcast_object(comm.rank, 1)]
        half.free()
        cart.free()
        return found

    assert everywhere(3, main) == [[[0, 2], 1], [[1], 1], [[0, 2], 1]]


def test_a_freed_communicator_refuses() -> None:
    def main(comm: Any) -> None:
        comm.bcast_object(1)
        comm.free()
        for call in (comm.bcast_object, comm.allgather_object, comm.recv_object):
            with pytest.raises(commrt.errors.ClosedError, match="freed"):
                call(1) if call != comm.recv_object else call()

    everywhere(1, main)


def test_check_mode_compares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COMMRT_DEBUG", "check")

    def main(comm: Any) -> None:
        with pytest.raises(MismatchError, match="root"):
            comm.bcast_object(1, comm.rank)
        with pytest.raises(UsageError, match="root=9"):
            comm.bcast_object(1, 9 if comm.rank else 0)
        assert comm.bcast_object(comm.rank, 1) == 1
        assert core_of(comm).checker is not None

    everywhere(2, main)
