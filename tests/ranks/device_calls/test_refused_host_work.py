# SPDX-License-Identifier: Apache-2.0
"""A call on device arrays that the host runs, and that one rank refuses.

The other ranks' call of that place fails at once, and all ranks go on in step, in
calls on the host and on devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

import commrt
from commrt.errors import BufferError_, CommError, RefusedError, UsageError

LENGTH = 600
LONG_S = 300.0
"""No rank may need its deadline."""

ADDED = commrt.reduction(lambda a, b: np.add(a, b, out=b), commutative=True)


def zeros(rank: Rank, length: int = LENGTH) -> Any:
    return rank.array(np.zeros(length, "f4"))


class Calls:
    """Calls of each kind on one rank's arrays, right and wrong ones."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.comm = rank.comm.dup()
        self.comm.timeout_s = LONG_S
        self.x = rank.array(np.ones(LENGTH, "f4"))
        self.indices = rank.array(np.arange(10, dtype="i8"))
        self.values = rank.array(np.ones(10, "f4"))

    def compressed(self, **more: Any) -> Any:
        more.setdefault("compress", "bfloat16")
        return self.comm.allreduce(self.x, out=self.out(more), nonblocking=True, **more)

    def user(self, **more: Any) -> Any:
        return self.comm.allreduce(
            self.x, out=self.out(more), op=ADDED, nonblocking=True, **more
        )

    def sparse(self, **more: Any) -> Any:
        vector = (self.indices, self.values, (LENGTH,))
        return self.comm.sparse_allreduce(
            more.pop("x", vector), out=self.out(more), nonblocking=True, **more
        )

    def topk(self, **more: Any) -> Any:
        k = more.pop("k", 10)
        return self.comm.topk_allreduce(self.x, k, nonblocking=True, **more)

    def out(self, more: dict[str, Any]) -> Any:
        return more.pop("out", None) or zeros(self.rank)


def host_vector(calls: Calls) -> Any:
    """A sparse vector whose indices alone are on the host."""
    return (np.arange(10), calls.values, (LENGTH,))


WRONG: dict[str, tuple[str, Callable[[Calls], dict[str, Any]], str]] = {
    "compressed-out": (
        "compressed",
        lambda calls: {"out": zeros(calls.rank, 7)},
        "out has 7",
    ),
    "compressed-residual": (
        "compressed",
        lambda calls: {"residual": np.zeros(LENGTH, "f4")},
        "residual",
    ),
    "compressed-algorithm": ("compressed", lambda _: {"algorithm": "ring"}, "leave it"),
    "user-out": ("user", lambda calls: {"out": zeros(calls.rank, 7)}, "out has 7"),
    "user-timeout": ("user", lambda _: {"timeout_s": -1}, "timeout_s"),
    "sparse-out": ("sparse", lambda calls: {"out": zeros(calls.rank, 7)}, "out has 7"),
    "sparse-place": ("sparse", lambda calls: {"x": host_vector(calls)}, "place|host"),
    "sparse-timeout": ("sparse", lambda _: {"timeout_s": "soon"}, "timeout_s"),
    "compressed-type": ("compressed", lambda _: {"compress": np.float16}, "compress="),
    "sparse-bare": ("sparse", lambda calls: {"x": calls.values}, "x is a DeviceArray"),
    "sparse-pair": (
        "sparse",
        lambda calls: {"x": (calls.indices, calls.values)},
        "x is a tuple",
    ),
    "topk-k": ("topk", lambda _: {"k": -4}, "k=-4"),
    "topk-residual": (
        "topk",
        lambda calls: {"residual": calls.x},
        "residual|overlap|same",
    ),
}


def fail(start: Callable[[], Any]) -> str:
    """Start a call and wait for it; return how it fails, which it does at once."""
    began_s = time.monotonic()
    with pytest.raises(RefusedError) as raised:
        start().synchronize()
    assert time.monotonic() - began_s < LONG_S / 4
    return str(raised.value)


def go_on(calls: Calls) -> None:
    """Make right calls of every kind; they have the right values."""
    size = calls.comm.size
    assert calls.comm.allreduce(np.ones(2)).tolist() == [size, size]
    made = [calls.compressed(), calls.user(), calls.sparse(), calls.topk()]
    found = [each.synchronize() for each in made]
    for each, count in zip(found, (LENGTH, LENGTH, 10, None), strict=True):
        if count is not None:
            value = calls.rank.fetch(each)
            calls.rank.stream.synchronize()
            assert set(value()[:count]) == {size}
    assert calls.comm.allreduce(np.ones(2)).tolist() == [size, size]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.full(sample=10)
def test_the_others_hear_of_it(case: str, is_first: bool, size: int) -> None:
    kind, arguments, words = WRONG[case]

    def main(rank: Rank) -> None:
        calls = Calls(rank)
        if not is_first:
            go_on(calls)
        for refuses in (0, 1):
            if rank.rank == refuses:
                with pytest.raises(UsageError, match=words):
                    getattr(calls, kind)(**arguments(calls))
            else:
                told = fail(getattr(calls, kind))
                assert f"rank {refuses} has refused its call" in told
            go_on(calls)
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(size, main)


@pytest.mark.parametrize("kind", ["compressed", "user"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_bound_call_whose_array_has_moved(kind: str, size: int) -> None:
    class Moves:
        """An array of a foreign library; ``held`` is what it has at that moment."""

        def __init__(self, held: Any) -> None:
            self.held = held

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            found: dict[str, Any] = self.held.__cuda_array_interface__
            return found

    def main(rank: Rank) -> None:
        calls = Calls(rank)
        x = Moves(zeros(rank))
        more = {"compress": "bfloat16"} if kind == "compressed" else {"op": ADDED}
        bound = calls.comm.plan.allreduce(x, **more)
        bound.start().synchronize()
        first = x.held
        if rank.rank == 0:
            x.held = zeros(rank)
            with pytest.raises(UsageError, match="has other memory"):
                bound()
            x.held = first
        else:
            assert "rank 0 has refused its call" in fail(bound.start)
        bound.start().synchronize()
        go_on(calls)
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(size, main)


@pytest.mark.parametrize("refuses", [0, 1])
def test_a_service_is_opened_while_calls_are_in_flight(refuses: int) -> None:
    """Calls of another kind go on in the host's thread, on each rank at its pace."""

    def main(rank: Rank) -> None:
        calls = Calls(rank)
        made = [calls.user() for _ in range(5)]
        if rank.rank == refuses:
            with pytest.raises(UsageError, match="out has 7"):
                calls.compressed(out=zeros(rank, 7))
        else:
            assert "has refused its call" in fail(calls.compressed)
        made += [calls.user() for _ in range(5)]
        calls.compressed().synchronize()
        for each in made:
            each.synchronize()
        go_on(calls)
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(2, main)


def test_a_refused_call_is_told_of_by_a_rank_that_frees() -> None:
    """The communicator's thread may end before it comes to the refused call."""

    def main(rank: Rank) -> None:
        for _ in range(5):
            calls = Calls(rank)
            calls.compressed().synchronize()
            rank.comm.barrier()
            if rank.rank == 0:
                with pytest.raises(UsageError, match="out has 7"):
                    calls.compressed(out=zeros(rank, 7))
            else:
                assert "rank 0 has refused its call" in fail(calls.compressed)
            with suppress(CommError):
                calls.comm.free()
            rank.comm.barrier()

    on_threads(2, main)


def test_a_refused_call_behind_one_that_nobody_drives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits for the earlier call takes the place of the refused one, too."""
    monkeypatch.setenv("COMMRT_PROGRESS", "off")

    def main(rank: Rank) -> None:
        calls = Calls(rank)
        calls.compressed().synchronize()
        earlier = calls.compressed()
        if rank.rank == 0:
            with pytest.raises(UsageError, match="out has 7"):
                calls.compressed(out=zeros(rank, 7))
            earlier.synchronize()
        else:
            later = calls.compressed()
            earlier.synchronize()
            assert "rank 0 has refused its call" in fail(lambda: later)
        assert calls.comm.allreduce(np.ones(1))[0] == 2
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(2, main)


class Odd:
    """An array whose error has text that UTF-8 cannot write."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("bad \udc80 text")


def test_an_error_with_odd_text_is_told_of() -> None:
    def main(rank: Rank) -> None:
        calls = Calls(rank)
        calls.compressed().synchronize()
        if rank.rank == 0:
            with pytest.raises(BufferError_):
                calls.compressed(out=Odd())
        else:
            assert "rank 0 has refused its call" in fail(calls.compressed)
        go_on(calls)
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(2, main)


@pytest.mark.parametrize("kind", ["sparse-out", "compressed-out", "topk-k"])
def test_in_check_mode_all_ranks_raise_and_go_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")
    name, arguments, words = WRONG[kind]

    def main(rank: Rank) -> None:
        calls = Calls(rank)
        go_on(calls)
        more = arguments(calls) if rank.rank == 1 else {}
        with pytest.raises(CommError, match=words):
            getattr(calls, name)(**more).synchronize()
        go_on(calls)
        rank.stream.synchronize()
        calls.comm.free()

    on_threads(2, main)
