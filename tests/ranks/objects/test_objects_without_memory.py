# SPDX-License-Identifier: Apache-2.0
"""A rank without memory for an object: all ranks raise, and all can call again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from commrt.errors import CommError, MemoryError_, RefusedError
from commrt.local import run

SIZES = (2, 3, 5)
LONG = 100_000
_here = threading.local()


@pytest.fixture(autouse=True)
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make arrays of bytes fail where they are longer than this thread may have."""
    empty = np.empty

    def scarce_empty(shape: Any, dtype: Any = float, *args: Any, **more: Any) -> Any:
        most = getattr(_here, "most", None)
        if most is not None and dtype is np.uint8 and shape > most:
            raise MemoryError(f"no {shape} bytes")
        return empty(shape, dtype, *args, **more)

    monkeypatch.setattr(np, "empty", scarce_empty)


@contextmanager
def at_most(nbytes: int, *, here: bool = True) -> Iterator[None]:
    """Have little memory on this thread's rank."""
    _here.most = nbytes if here else None
    try:
        yield
    finally:
        _here.most = None


def large_arrays(rank: int) -> Any:
    """Return an object whose arrays go by themselves."""
    return [np.full(LONG, rank), "text", np.full(2 * LONG, rank + 1)]


def long_head(rank: int) -> Any:
    """Return an object of many small arrays, which go with its head."""
    return [np.full(1000, rank) for _ in range(100)]


def same(found: Any, wanted: Any) -> bool:
    """Return whether two objects are equal."""
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


Make = Callable[[int], Any]


def bcast(comm: Any, make: Make, root: int) -> bool:
    """Return whether an object came from the root."""
    found = comm.bcast_object(make(root) if comm.rank == root else None, root)
    return same(found, make(root))


def allgather(comm: Any, make: Make, root: int) -> bool:
    """Return whether objects came from all ranks."""
    found = comm.allgather_object(make(comm.rank))
    return all(same(each, make(rank)) for rank, each in enumerate(found))


def gather(comm: Any, make: Make, root: int) -> bool:
    """Return whether objects came from all ranks to the root."""
    found = comm.gather_object(make(comm.rank), root)
    if comm.rank != root:
        return found is None
    return all(same(each, make(rank)) for rank, each in enumerate(found))


def scatter(comm: Any, make: Make, root: int) -> bool:
    """Return whether this rank's object came from the root."""
    several = [make(rank) for rank in range(comm.size)]
    found = comm.scatter_object(several if comm.rank == root else None, root)
    return same(found, make(comm.rank))


def raised(call: Callable[[], Any]) -> CommError | None:
    """Return the error of a call; None where it does what it should."""
    try:
        assert call()
    except CommError as error:
        return error
    return None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [large_arrays, long_head])
@pytest.mark.parametrize("call", [bcast, allgather, gather, scatter])
def test_all_raise_where_one_has_no_memory(call: Any, make: Make, size: int) -> None:
    poor = size - 1

    def main(comm: Any) -> list[str]:
        root = poor if call is gather else 0
        said = []
        for most in (50_000, 900_000):
            with at_most(most, here=comm.rank == poor):
                error = raised(lambda: call(comm, make, root))
            said.append("" if error is None else type(error).__name__)
            if error is not None:
                assert error.on_all_ranks
                assert f"rank {poor}" in str(error)
                assert "nothing was delivered" in str(error)
            assert call(comm, make, root)
        assert comm.allgather_object(comm.rank) == list(range(size))
        assert comm.allreduce(np.ones(1))[0] == size
        return said

    *others, last = run(size, main, timeout_s=300)
    assert last[0] == "MemoryError_"
    assert all(each[0] == "RefusedError" for each in others)
    if make is large_arrays:  # the second of them does not fit
        assert last[1] == "MemoryError_"
        assert all(each[1] == "RefusedError" for each in others)
    elif call in (bcast, scatter):
        assert {last[1], *(each[1] for each in others)} == {""}


def test_all_ranks_without_memory_say_so() -> None:
    def main(comm: Any) -> bool:
        with at_most(100_000, here=comm.rank != 1):
            kind = RefusedError if comm.rank == 1 else MemoryError_
            with pytest.raises(kind, match=r"rank") as e:
                comm.bcast_object(large_arrays(1) if comm.rank == 1 else None, 1)
        if comm.rank == 1:
            text = "{0} has no memory for the 2400000 bytes that come"
            assert text.format("rank 0") in str(e.value)
            assert text.format("rank 2") in str(e.value)
        else:
            assert isinstance(e.value, MemoryError)
            assert isinstance(e.value.__cause__, MemoryError)
        return bcast(comm, large_arrays, 1)

    assert run(3, main, timeout_s=300) == [True] * 3


class NoMemoryToPickle:
    """There is no memory to make bytes of it."""

    def __reduce__(self) -> Any:
        raise MemoryError


class Unpicklable:
    """Nothing makes bytes of it."""

    def __reduce__(self) -> Any:
        raise ValueError("not for sale")


@pytest.mark.parametrize("size", SIZES)
def test_no_memory_to_pickle(size: int) -> None:
    poor = size - 1

    def main(comm: Any) -> None:
        mine: Any = NoMemoryToPickle() if comm.rank == poor else comm.rank
        several = [0] * poor + [NoMemoryToPickle()]
        kind = MemoryError_ if comm.rank == poor else RefusedError
        for call, called in (
            (lambda: comm.bcast_object(mine, poor), "x"),
            (lambda: comm.allgather_object(mine), "x"),
            (lambda: comm.gather_object(mine, 0), "x"),
            (lambda: comm.scatter_object(several, poor), rf"x\[{poor}\]"),
        ):
            text = f"no memory to pickle {called} on rank {poor}; nothing was sent"
            with pytest.raises(kind, match=text) as e:
                call()
            assert e.value.on_all_ranks
            assert comm.allgather_object(comm.rank) == list(range(size))

    run(size, main, timeout_s=300)


def test_no_memory_on_one_rank_and_a_wrong_object_on_another() -> None:
    """A rank without memory says so; the others have a call to mend."""

    def main(comm: Any) -> str:
        mine = [NoMemoryToPickle(), Unpicklable(), 2][comm.rank]
        with pytest.raises(
            CommError, match=r"on rank 0; .*not for sale.* on rank 1"
        ) as e:
            comm.allgather_object(mine)
        assert comm.allgather_object(comm.rank) == [0, 1, 2]
        return type(e.value).__name__

    assert run(3, main, timeout_s=300) == ["MemoryError_", "UsageError", "UsageError"]


def test_the_receiver_hears_of_a_sender_without_memory() -> None:
    def main(comm: Any) -> Any:
        if comm.rank == 0:
            with pytest.raises(MemoryError_, match=r"pickle x; rank 1 is told"):
                comm.send_object(NoMemoryToPickle(), 1)
            return comm.send_object("then", 1)
        with pytest.raises(RefusedError, match=r"no memory to pickle x on rank 0"):
            comm.recv_object(0)
        return comm.recv_object(0)

    assert run(2, main, timeout_s=300)[1] == "then"


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("make", [large_arrays, long_head])
def test_a_message_waits_for_memory(make: Make, source: int | None) -> None:
    """It can be received later, before those that were sent after it."""

    def main(comm: Any) -> bool:
        if comm.rank == 0:
            for tag, x in ((0, make(3)), (0, "next"), (1, "other tag")):
                comm.send_object(x, 1, tag, nonblocking=True).wait()
            return True
        for _ in range(3):
            with (
                at_most(50_000),
                pytest.raises(MemoryError_, match=r"can still be received"),
            ):
                comm.recv_object(source)
        assert same(comm.recv_object(source), make(3))
        assert comm.recv_object(source, 1) == "other tag"
        return bool(comm.recv_object(source) == "next")

    assert run(2, main, timeout_s=300) == [True] * 2


def test_messages_of_several_ranks_wait_for_memory() -> None:
    """A receive from another rank is not kept from its message."""

    def main(comm: Any) -> bool:
        if comm.rank:
            comm.send_object(large_arrays(comm.rank), 0)
            return True
        for source in (1, 2, 1):
            with at_most(900_000), pytest.raises(MemoryError_):
                comm.recv_object(source)
        assert same(comm.recv_object(2), large_arrays(2))
        return same(comm.recv_object(), large_arrays(1))

    assert run(3, main, timeout_s=300) == [True] * 3


def unpickled(rank: int) -> str:
    """Stand for an object that is too large on a rank once it is unpickled."""
    if _here.rank == rank:
        raise MemoryError("none left")
    return "fine"


class LargeOn:
    """Does not fit into a rank's memory."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return unpickled, (self.rank,)


def test_no_memory_to_unpickle() -> None:
    """By then the others have theirs: one rank raises, and all are in step."""

    def main(comm: Any) -> list[Any]:
        _here.rank = comm.rank
        found = []
        for call in (
            lambda: comm.bcast_object(LargeOn(1), 0),
            lambda: comm.allgather_object(LargeOn(1))[0],
            lambda: (comm.gather_object(LargeOn(1), 1) or [None])[0],
            lambda: comm.scatter_object([LargeOn(1)] * 2, 0),
            lambda: (
                comm.recv_object(0) if comm.rank else comm.send_object(LargeOn(1), 1)
            ),
        ):
            error = raised(lambda call=call: [call()])
            assert error is None or "none left" in str(error)
            found.append("" if error is None else type(error).__name__)
        return [*found, comm.bcast_object("next", 1)]

    first, second = run(2, main, timeout_s=300)
    assert second == ["MemoryError_"] * 5 + ["next"]
    assert first == [""] * 5 + ["next"]
