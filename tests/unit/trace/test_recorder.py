# SPDX-License-Identifier: Apache-2.0
"""The recorder: its ring, and what methods that record know again of calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.trace.recorder import Group, Kind, recorder

F4 = np.float32


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    recorder().clear()
    yield
    recorder().clear()


def test_numbers_of_records_outlive_the_records() -> None:
    ring = _native.RecordRing(3)

    class Kind:
        counter = _native.RecordCounter()

    kind, site = Kind(), object()
    numbers = [ring.append(kind, site) for _ in range(5)]
    assert (len(ring), ring.num_dropped) == (3, 2)
    ring.end(numbers[0])
    ring.end(numbers[2])
    ring.take_back(numbers[3])  # in between: it leaves a hole
    rows = ring.snapshot()
    assert [row[2] for row in rows] == [2, 4]
    assert [row[4] > 0 for row in rows] == [True, False]
    ring.take_back(numbers[4])
    assert (len(ring), kind.counter.next) == (1, 4)
    assert ring.kind_of(numbers[2]) is kind
    assert [ring.kind_of(numbers[at]) for at in (0, 1, 3, 4)] == [None] * 4
    ring.resize(1)
    assert (ring.maxlen, len(ring)) == (1, 0)
    ring.append(kind, site)
    ring.clear()
    assert (len(ring), ring.num_dropped, ring.snapshot()) == (0, 0, [])


# -- recorded methods ------------------------------------------------------------


class Owner:
    """Has a method that returns what it is given."""

    def take(self, x: Any, **more: Any) -> Any:
        return x


def method_of(owner: Owner, reads: str, looked: list[Any]) -> Any:
    group = Group("key", "commrt", [0], 0, "job", 1, lambda: ("name", "", ""))

    def look(args: tuple[Any, ...], more: dict[str, Any]) -> tuple[Kind]:
        looked.append((*args, *more.values()))
        return (Kind(group, "allreduce", len(looked)),)

    this = weakref.ref(owner)
    return recorder().method("take", Owner.take, this, look, reads=reads, watch=print)


def test_more_kinds_of_calls_than_are_remembered() -> None:
    owner, looked = Owner(), []
    take = method_of(owner, "a", looked)
    lengths = (*range(4096), 7, 4096, 7, 7)
    for n in lengths:
        x = np.empty(n, np.uint8)
        assert take(x) is x
    assert [len(x) for (x,) in looked] == [*range(4096), 4096, 7]
    assert len(recorder().ring.snapshot()) == len(lengths)


def test_calls_are_of_one_kind_where_what_they_say_is_equal() -> None:
    owner, looked = Owner(), []
    take = method_of(owner, "a", looked)
    x, words = np.ones(4, F4), ("ring", "direct")
    for _ in range(2):
        for y in (x, x.astype(np.int32), x[:2], [x, x], [x[:3], x[:3]], None):
            take(y)
        for dest in (0, 1, 10**6):
            take(x, dest=dest)
        for word in words:
            take(x, algorithm=word, nonblocking=False, timeout_s=None)
        for counts in ((1, 2), (2, 1)):
            take(x, counts=counts)
        take(x, out=x[:2])
        take(x, out=x)
    assert len(looked) == 6 + 3 + 2 + 2 + 2
    before, counts_now = len(looked), [1, 2]
    for value in (2, 3, 2, 3):
        counts_now[1] = value
        take(x, counts=counts_now)
        take(None, sends=[(x, value), (x, 0, 5)], recvs=[[x[:2], 1]])
    assert len(looked) == before + 2 + 2
    for changing in ([1.5], [[1]], [1] * 100, {"chunk": 1}, np.float32(1)):
        before = len(looked)
        take(x, counts=changing)
        take(x, counts=changing)
        assert len(looked) == before + 2


def test_a_recorded_method_passes_on_what_it_is_given() -> None:
    owner, looked = Owner(), []
    take = method_of(owner, "s", looked)
    shapes = [np.ones((2, 3)), np.ones((3, 2)), [np.ones((2, 3))], np.ones((2, 3)).T]
    for _ in range(2):
        for x in shapes:
            assert take(x) is x
            assert take(*[x], tag=3) is x
    assert len(looked) == 6, "the last is of the second's shape"
    assert (take.__name__, take.__wrapped__) == ("take", Owner.take)
    with pytest.raises(TypeError, match="takes 2 positional"):
        take(1, 2)
    with pytest.raises(TypeError, match="missing 1"):
        take()
    assert len(recorder().ring) == 16


def test_an_owner_is_not_kept_by_its_method() -> None:
    owner, looked = Owner(), []
    take = method_of(owner, "a", looked)
    take(np.ones(1, F4))
    gone = weakref.ref(owner)
    del owner
    assert gone() is None


def test_an_owner_that_its_method_keeps_goes_with_it() -> None:
    owner = Owner()
    group = Group("g", "commrt", [0], 0, "job", 1, lambda: ("", "", ""))

    def look(args: Any, more: Any, by: Any = owner) -> Any:
        return (Kind(group, "allreduce", 4),)

    owner.take = recorder().method(  # type: ignore[method-assign]
        "take", Owner.take, owner, look, reads="a", watch=print
    )
    take, gone = owner.take, weakref.ref(owner)
    del owner, look
    gc.collect()
    x = np.ones(1, F4)
    assert take(x) is x
    del take
    gc.collect()
    assert gone() is None


def test_what_is_collected_while_a_log_is_made_may_push_its_records_out() -> None:
    class OnlyOne:
        counter = _native.RecordCounter()

    ring, counter = _native.RecordRing(4), _native.RecordCounter()

    class Calls:
        """As what is collected, and calls at its end."""

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            for _ in range(4):
                kind = OnlyOne()
                kind.counter = counter
                ring.append(kind, object())

    kept = gc.get_threshold()
    try:
        for _ in range(20):
            for _ in range(4):
                ring.append(OnlyOne(), object())
            Calls()
            gc.set_threshold(1)
            rows = ring.snapshot()
            gc.set_threshold(*kept)
            assert all(type(row[0]) is OnlyOne for row in rows)
    finally:
        gc.set_threshold(*kept)


def test_what_is_called_within_a_recorded_call_is_a_part_of_it() -> None:
    owner, looked = Owner(), []
    inner = method_of(owner, "a", looked)

    class Outer:
        def take(self, x: Any) -> Any:
            return inner(x)

    outer, group = Outer(), Group("g", "commrt", [0], 0, "job", 1, lambda: ("", "", ""))
    kind = Kind(group, "allreduce", 4)
    take = recorder().method(
        "take", Outer.take, outer, lambda args, more: (kind,), reads="a", watch=print
    )
    take(np.ones(1, F4))
    assert ([row[0] for row in recorder().ring.snapshot()], looked) == ([kind], [])
    inner(np.ones(1, F4))
    assert len(recorder().ring) == 2
