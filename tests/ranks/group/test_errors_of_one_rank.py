# SPDX-License-Identifier: Apache-2.0
"""An error on one rank, for which the others wait in vain: all of them may call again.

And in check mode all ranks raise that error at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from commrt import Block, Cyclic, Layout
from commrt.comm import core_of
from commrt.errors import (
    BufferError_,
    CommError,
    MismatchError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.local import run

SIZE = 3
ODD_ONE = 1
IN_VAIN_S = 0.05
LIMIT_S = 300.0
ROWS = Layout((6, 6), (SIZE,), (Block(0), None))
COLUMNS = Layout((6, 6), (SIZE,), (None, Cyclic(0)))

Call = Callable[[Any, bool], Any]


def halo(cart: Any, wrong: bool) -> list[float]:
    field = np.full(3, float(cart.rank))
    cart.plan.halo_exchange(field, 2 if wrong else 1)()
    return list(field)


def accumulate(cart: Any, wrong: bool) -> float:
    field = np.ones(3)
    cart.plan.halo_reduce(field, 1, op="avg" if wrong else "sum")()
    return float(field[1])


def read_only(cart: Any, wrong: bool) -> float:
    field = np.ones(3)
    field.setflags(write=not wrong)
    cart.plan.halo_exchange(field, 1)()
    return float(field[0])


def redistribute(comm: Any, wrong: bool) -> Any:
    x = np.full((2 + wrong, 6), float(comm.rank))
    return comm.plan.redistribute(x, ROWS, COLUMNS)().tolist()


def short_layout(comm: Any, wrong: bool) -> Any:
    target = Layout((6, 6), (1,), (None, Block(0))) if wrong else COLUMNS
    return comm.plan.redistribute(np.ones((2, 6)), ROWS, target)().tolist()


def sparse(comm: Any, wrong: bool) -> float:
    indices = np.array([3, 1] if wrong else [1, 3])
    return float(comm.sparse_allreduce((indices, np.ones(2), 50)).values[0])


def topk(comm: Any, wrong: bool) -> float:
    return float(comm.topk_allreduce(np.ones(4), 5 if wrong else 1).values[0])


def total(comm: Any) -> float:
    return float(comm.allreduce(np.ones(2))[0])


def compressed(comm: Any, wrong: bool) -> float:
    x = np.ones(64, np.int32 if wrong else np.float32)
    return float(comm.allreduce(x, compress="float16")[0])


CALLS: dict[str, Call] = {
    "halo": halo,
    "accumulated halo": accumulate,
    "read-only halo": read_only,
    "redistribution": redistribute,
    "layout": short_layout,
    "sparse": sparse,
    "largest": topk,
    "neighbours": lambda c, wrong: c.neighbor_alltoall(np.ones(2 + wrong)).tolist(),
    "neighbours' counts": lambda c, wrong: c.neighbor_alltoallv(
        np.ones(2), send_counts=[1, 1], recv_counts=[1, -1] if wrong else [1, 1]
    ).tolist(),
    "neighbours' output": lambda c, wrong: c.neighbor_alltoall(
        np.ones(2), out=np.ones(2 + wrong)
    ).tolist(),
    "neighbours' flag": lambda c, wrong: c.neighbor_allgather(
        np.ones(1), nonblocking=7 if wrong else False
    ).tolist(),
    "compression": compressed,
    "dup": lambda c, wrong: total(c.dup(deterministic=3 if wrong else False)),
    "split": lambda c, wrong: total(c.split("red" if wrong else 0)),
    "cart": lambda c, wrong: total(c.cart((2,) if wrong else (SIZE,))),
    "sub": lambda c, wrong: total(c.sub(3 if wrong else 0)),
    "graph": lambda c, wrong: total(c.graph([9] if wrong else [], [])),
    "mesh": lambda c, wrong: total(c.mesh({"a": 2 if wrong else SIZE})["a"].dup()),
    "empty": lambda c, wrong: float(c.empty(-1 if wrong else 9).sum()),
}
GROUPS: dict[str, Any] = {
    "another rank": {"ranks": [0, 9]},
    "no list": {"ranks": 3},
    "a rank twice": {"ranks": [0, 2, 1, 1]},
    "its name": {"name": 5},
    "its flag": {"deterministic": "no"},
}
"""Arguments of ``create_group`` that one rank has and refuses."""
NAMED = [*CALLS][: [*CALLS].index("compression")]
"""Those whose errors name the rank by themselves."""
CHECKED = [name for name in CALLS if name != "empty"]
"""All that all ranks of a communicator call, and not those of a node alone."""


@pytest.mark.parametrize("name", [*CHECKED, "empty"])
def test_all_ranks_hear_of_it_and_call_again(name: str) -> None:
    call = CALLS[name]

    def rank_main(comm: Any) -> list[Any]:
        cart = comm.cart((SIZE,), periodic=True)
        for turn in range(4):
            odd = comm.rank == ODD_ONE
            with pytest.raises(UsageError if odd else RefusedError) as raised:
                call(cart, odd)
            assert odd or "rank 1 has refused its call" in str(raised.value)
            if turn == 2:  # from now on in the state that calls leave behind
                call(cart, False)
        # Whatever is made of it afterwards, too, is the same on all ranks.
        return [call(cart, False), total(cart.dup()), halo(cart, False), total(cart)]

    found = run(SIZE, rank_main, timeout_s=LIMIT_S)
    for rank, (_, *others) in enumerate(found):
        before, after = (rank - 1) % SIZE, (rank + 1) % SIZE
        assert others == [3.0, [before, rank, after], 3.0]


def group_of(cart: Any, ranks: Any, **others: Any) -> float:
    return total(cart.create_group(ranks, **others))


def group(name: str, cart: Any, wrong: bool) -> float:
    """``name``: of what is wrong, if something is."""
    return group_of(cart, **{"ranks": [0, 2, 1]} | (GROUPS[name] if wrong else {}))


@pytest.mark.parametrize("name", GROUPS)
def test_the_ranks_of_a_group_hear_of_it_and_call_again(name: str) -> None:
    def rank_main(comm: Any) -> list[Any]:
        cart = comm.cart((SIZE,), periodic=True)
        for turn in range(4):
            odd = comm.rank == ODD_ONE
            with pytest.raises(UsageError if odd else RefusedError) as raised:
                group(name, cart, odd)
            assert odd or "rank 1 has refused its call" in str(raised.value)
            if turn == 2:
                group(name, cart, False)
        return [group(name, cart, False), total(cart.dup()), total(cart)]

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [[3.0, 3.0, 3.0]] * SIZE


def test_groups_that_have_nothing_to_do_with_a_refused_one_are_made() -> None:
    def rank_main(comm: Any) -> list[float]:
        found = []
        for _ in range(3):
            if comm.rank == 0:
                with pytest.raises(UsageError):
                    comm.create_group([0, 1], name=5)
            elif comm.rank == 1:
                with pytest.raises(RefusedError):
                    comm.create_group([0, 1])
            # An error that all make alike, and one of a rank that is not in there.
            with pytest.raises(UsageError):
                comm.create_group([0, 9])
            if comm.rank == 2:
                with pytest.raises(UsageError, match="caller's rank 2"):
                    comm.create_group([0, 1])
            for ranks in ([0, 1], [1, 2], [2, 0], [0, 2, 1]):
                if comm.rank in ranks:
                    found.append(group_of(comm, ranks))
        return found

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [[2.0, 2.0, 3.0] * 3] * SIZE


def test_a_late_rank_meets_others_at_another_call_than_the_refused_one() -> None:
    """The others ask for something else; only the late rank's call was refused."""
    heard = threading.Event()

    def rank_main(comm: Any) -> float:
        if comm.rank == 0:
            assert heard.wait(LIMIT_S)
        with pytest.raises(UsageError if comm.rank == ODD_ONE else RefusedError):
            comm.create_group([0, 1, 2], name=5 if comm.rank == ODD_ONE else None)
        if comm.rank == 2:
            heard.set()
        return group_of(comm, [0, 1, 2], deterministic=True)

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [3.0] * SIZE


@pytest.mark.parametrize("count", [20, 70])
def test_a_rank_far_ahead_of_others_with_refused_groups_is_met_again(
    count: int,
) -> None:
    """It has refused so many before the others make their first call."""
    ahead = threading.Event()

    def rank_main(comm: Any) -> float:
        if comm.rank != ODD_ONE:
            assert ahead.wait(LIMIT_S)
        for number in range(count):
            odd = comm.rank == ODD_ONE
            with pytest.raises(UsageError if odd else RefusedError) as raised:
                comm.create_group([0, number + SIZE] if odd else [0, 1, 2])
            text = f"ranks={number + SIZE} is not a rank"
            if number < count - 64:
                text = "so many calls ago"
            assert odd or text in str(raised.value)
        ahead.set()
        return group_of(comm, [0, 1, 2])

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [3.0] * SIZE


@pytest.mark.parametrize("name", [*CHECKED, *GROUPS])
def test_a_rank_that_has_left_since_is_heard_of(name: str) -> None:
    """Others begin the call that it has refused, its last one, when it is gone."""

    def rank_main(comm: Any) -> bool:
        cart = comm.cart((SIZE,), periodic=True)
        odd, gone = comm.rank == ODD_ONE, core_of(comm).world.bootstrap.gone
        while not odd and not gone(ODD_ONE):
            core_of(comm).world.engine.step()
        with pytest.raises(UsageError if odd else RefusedError) as raised:
            CALLS.get(name, partial(group, name))(cart, odd)
        return odd or "rank 1 has refused its call" in str(raised.value)

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [True] * SIZE


@pytest.mark.parametrize("name", CHECKED)
def test_in_check_mode_all_ranks_raise_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")
    call = CALLS[name]

    def rank_main(comm: Any) -> list[str]:
        cart = comm.cart((SIZE,), periodic=True)
        with pytest.raises(UsageError, match="nothing was sent") as raised:
            call(cart, comm.rank == ODD_ONE)
        with pytest.raises(UsageError, match="nothing was sent"):
            (call if comm.rank == ODD_ONE else lambda c, _: total(c))(cart, True)
        call(cart, False)
        assert total(cart) == SIZE
        return [type(raised.value).__name__, str(raised.value)]

    told = run(SIZE, rank_main, timeout_s=LIMIT_S)
    assert told == [told[0]] * SIZE
    assert "rank 1" in told[0][1]


@pytest.mark.parametrize("name", NAMED)
def test_the_error_names_rank_and_argument(name: str) -> None:
    call = CALLS[name]

    def rank_main(comm: Any) -> str:
        cart = comm.cart((SIZE,), periodic=True)
        if comm.rank != ODD_ONE:
            return ""
        with pytest.raises((UsageError, BufferError_)) as raised:
            call(cart, True)
        return str(raised.value)

    text = run(SIZE, rank_main, timeout_s=LIMIT_S)[ODD_ONE]
    assert ", rank 1: " in text


def test_calls_of_several_kinds_meet_and_are_told_apart() -> None:
    def rank_main(comm: Any) -> str:
        cart = comm.cart((SIZE,), periodic=True)
        with pytest.raises(MismatchError) as raised:
            (halo if comm.rank else redistribute)(cart, False)
        assert total(cart.dup()) == SIZE
        return str(raised.value)

    told = run(SIZE, rank_main, timeout_s=LIMIT_S)
    assert told == [told[0]] * SIZE
    assert "rank 0: redistribute\n  rank 1: halo_exchange" in told[0]


def test_what_is_in_flight_is_waited_for_where_one_rank_is_late() -> None:
    """Operations that were started stay: the others do not call again."""

    def rank_main(comm: Any) -> list[float]:
        cart = comm.cart((SIZE,), periodic=True)
        x = np.full(2, float(cart.rank))
        late = None
        if comm.rank != ODD_ONE:
            with pytest.raises(TimeoutError_) as raised:
                cart.neighbor_alltoall(x, timeout_s=IN_VAIN_S)
            late = raised.value.request  # type: ignore[attr-defined]
        core_of(comm).world.meet(range(SIZE), "later")
        found = cart.neighbor_alltoall(x) if late is None else late.wait()
        return [*map(float, found), total(cart)]

    assert run(SIZE, rank_main, timeout_s=LIMIT_S) == [
        [2.0, 1.0, 3.0],
        [0.0, 2.0, 3.0],
        [1.0, 0.0, 3.0],
    ]


def test_counts_that_never_come_are_not_taken_for_data() -> None:
    def rank_main(comm: Any) -> list[str]:
        found = []
        x = np.ones(2)  # as long as the counts
        limit = LIMIT_S if comm.rank == 0 else IN_VAIN_S
        for turn in range(2):
            if comm.rank == 1 or turn == 1:
                with pytest.raises(CommError) as raised:
                    comm.alltoallv(x, send_counts=[1, 1], timeout_s=limit)
                found.append(type(raised.value).__name__)
            core_of(comm).world.meet(range(2), f"turn {turn}")
        return found

    first, second = run(2, rank_main, timeout_s=LIMIT_S)
    assert first == [RevokedError.__name__]
    assert second == [TimeoutError_.__name__, RevokedError.__name__]


def test_an_exchange_of_counts_is_named_by_its_operation() -> None:
    def rank_main(comm: Any) -> str:
        call = partial(comm.alltoallv, np.ones(2), send_counts=[1, 1])
        if comm.rank == 0:
            call = partial(comm.allreduce, np.ones(7))
        with pytest.raises((MismatchError, RevokedError)) as raised:
            call()
        return str(raised.value)

    told = run(2, rank_main, timeout_s=LIMIT_S)
    assert told[1].startswith("alltoallv, whose recv_counts the ranks exchange, failed")


@pytest.mark.parametrize("name", ["sparse", "largest", "compression", "dup", "halo"])
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_caller_says(
    name: str,
) -> None:
    """Also where the first call makes what later ones use."""
    call = CALLS[name]

    def rank_main(comm: Any) -> str:
        cart = comm.cart((SIZE,), periodic=True)
        text, late = "", None
        if comm.rank != ODD_ONE:
            cart.timeout_s = IN_VAIN_S
            with pytest.raises(TimeoutError_) as raised:
                call(cart, False)
            text = str(raised.value)
            late = getattr(raised.value, "request", None)
            cart.timeout_s = LIMIT_S
        core_of(comm).world.meet(range(SIZE), "over")
        if late is None:
            call(cart, False)
        else:
            late.wait(timeout_s=LIMIT_S)
        return text

    told = run(SIZE, rank_main, timeout_s=LIMIT_S)
    for rank in (0, 2):
        assert f"within {IN_VAIN_S:g} s" in told[rank]


def test_the_limit_of_one_call_holds_for_what_the_first_one_makes() -> None:
    calls: list[Callable[..., Any]] = [
        lambda comm, **more: comm.sparse_allreduce(
            (np.array([1]), np.ones(1), 4), **more
        ),
        lambda comm, **more: comm.allreduce(np.ones(9, "f"), compress="int8", **more),
    ]

    def rank_main(comm: Any) -> list[str]:
        told = []
        for number, call in enumerate(calls):
            late = None
            if comm.rank == 0:
                with pytest.raises(TimeoutError_) as raised:
                    call(comm, timeout_s=IN_VAIN_S)
                told.append(str(raised.value))
                late = raised.value.request
            core_of(comm).world.meet(range(2), f"over {number}")
            if late is None:
                call(comm)
            else:
                late.wait(timeout_s=LIMIT_S)
        return told

    told = run(2, rank_main, timeout_s=LIMIT_S)[0]
    assert len(told) == 2
    assert all(f"within {IN_VAIN_S:g} s" in text for text in told)
