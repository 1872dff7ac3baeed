# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity are found in just those parts of arrays that leave their rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt import Block, Cyclic, Layout
from commrt.comm import Communicator
from commrt.errors import NotFiniteError, RefusedError
from commrt.local import run

SIZE, ODD_ONE = 4, 1
SHAPE = (6, 5)
WHOLE = (12, 10)
BLOCKS = Layout(WHOLE, (2, 2), (Block(0), Block(1)))
DEALT = Layout(WHOLE, (4,), (Cyclic(0, 2), None))

Call = Callable[[Any, Any], Any]

EXCHANGES: dict[str, Call] = {
    "halo": lambda comm, x: comm.halo_exchange(x, 1),
    "halo, width 2 and 1": lambda comm, x: comm.halo_exchange(x, (2, 1)),
    "halo, no corners": lambda comm, x: comm.halo_exchange(x, 1, corners=False),
    "halo, direct": lambda comm, x: comm.halo_exchange(x, 1, direct=True),
    "halo, other axes": lambda comm, x: comm.halo_exchange(x, 1, axes=(1, 0)),
    "reduce": lambda comm, x: comm.halo_reduce(x, 1, op="max"),
    "neighbours": lambda comm, x: comm.neighbor_alltoall(x[:4].reshape(-1).copy()),
    "gathered": lambda comm, x: comm.neighbor_allgather(x),
    "redistributed": lambda comm, x: comm.redistribute(x, BLOCKS, DEALT),
}
PLANNED: dict[str, Call] = {
    "halo": lambda comm, x: comm.plan.halo_exchange(x, 1)(),
    "reduce": lambda comm, x: comm.plan.halo_reduce(x, 1, op="max")(),
    "neighbours": lambda comm, x: comm.plan.neighbor_alltoall(x.reshape(-1)[:20])(),
    "redistributed": lambda comm, x: comm.plan.redistribute(x, BLOCKS, DEALT)(),
}


def grid(comm: Any, *, periodic: bool) -> Any:
    cart = comm.cart((2, 2), periodic=periodic)
    cart.timeout_s = 300
    return cart


def numbered(rank: int) -> Any:
    """Return an array whose elements are all different, also between ranks."""
    return 1000.0 * (rank + 1) + np.arange(np.prod(SHAPE)).reshape(SHAPE)


def seen_elsewhere(name: str, calls: dict[str, Call], *, periodic: bool) -> set[int]:
    """Return the elements of one rank's array that other ranks get."""

    def main(comm: Communicator) -> Any:
        found = calls[name](grid(comm, periodic=periodic), numbered(comm.rank))
        return np.array(found).reshape(-1)

    found = run(SIZE, main)
    first = 1000.0 * (ODD_ONE + 1)
    values = np.concatenate([found[r] for r in range(SIZE) if r != ODD_ONE])
    count = int(np.prod(SHAPE))
    return {int(v - first) for v in values if first <= v < first + count}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("periodic", [True, False])
def test_what_leaves_is_looked_at_and_nothing_else(name: str, periodic: bool) -> None:
    call = EXCHANGES[name]
    leaves = seen_elsewhere(name, EXCHANGES, periodic=periodic)
    if name == "reduce":  # a sum leaves: its parts may be small
        leaves = ghosts(periodic=periodic)
    assert len(leaves) > 0

    def main(comm: Communicator) -> list[int]:
        cart = grid(comm, periodic=periodic)
        cart.nan_check = True
        found = []
        for at in range(int(np.prod(SHAPE))):
            x = numbered(comm.rank)
            if comm.rank == ODD_ONE:
                x.reshape(-1)[at] = np.inf
            said = ended_by(lambda x=x: call(cart, x))
            if comm.rank == ODD_ONE:
                assert not said or f"has infinity at element {at} of" in said
            elif said:
                assert f"rank {ODD_ONE} has refused its call" in said
                assert f"element {at} of" in said
            if said:
                found.append(at)
        assert cart.allreduce(np.ones(1))[0] == SIZE
        return found

    found = run(SIZE, main)
    assert found[ODD_ONE] == sorted(leaves)
    # A rank that gets nothing from there may have had its result before.
    assert all({*each} <= leaves for each in found)
    assert {
        at for rank, each in enumerate(found) if rank != ODD_ONE for at in each
    } == leaves


def ghosts(*, periodic: bool) -> set[int]:
    """Return the elements in the halo of width 1 that have an owner elsewhere."""
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    if periodic:
        inner = numbers[1:-1, 1:-1]
        return {*map(int, numbers.reshape(-1))} - {*map(int, inner.reshape(-1))}
    # Rank 1 is first in the first dimension, and last in the second.
    return {*map(int, numbers[-1, :-1])} | {*map(int, numbers[1:, 0])}


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_call_looks_at_each_run(name: str) -> None:
    leaves = seen_elsewhere(name, PLANNED, periodic=True)
    at = 0 if name == "reduce" else max(leaves)

    def main(comm: Communicator) -> list[bool]:
        cart = grid(comm, periodic=True)
        cart.nan_check = True
        raised = []
        x = numbered(comm.rank)
        bound = {
            "halo": lambda: cart.plan.halo_exchange(x, 1),
            "reduce": lambda: cart.plan.halo_reduce(x, 1, op="max"),
            "neighbours": lambda: cart.plan.neighbor_alltoall(x.reshape(-1)[:20]),
            "redistributed": lambda: cart.plan.redistribute(x, BLOCKS, DEALT),
        }[name]()
        for start in (bound, bound.start):
            x[:] = numbered(comm.rank)
            bound()
            x[:] = numbered(comm.rank)
            if comm.rank == ODD_ONE:
                x.reshape(-1)[at] = np.nan
                with pytest.raises(NotFiniteError, match=f"NaN at element {at} of"):
                    start()
            else:
                said = ended_by(start)
                assert said == "" or f"rank {ODD_ONE} has refused its call" in said
                raised.append(said != "")
        cart.nan_check = False
        bound()
        return raised

    found = run(SIZE, main)
    # Those who get nothing from there may have had their results before.
    assert [
        any(each) for each in zip(*(each for each in found if each), strict=True)
    ] == [
        True,
        True,
    ]


def ended_by(start: Callable[[], Any]) -> str:
    """Start a call, and wait; return the words of what refuses it; empty: nothing."""
    try:
        request = start()
        if hasattr(request, "wait"):
            request.wait()
    except (NotFiniteError, RefusedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("name", PLANNED)
def test_arrays_on_devices(name: str, planned: bool) -> None:
    leaves = seen_elsewhere(name, PLANNED, periodic=True)
    at = 0 if name == "reduce" else max(leaves)

    def main(rank: Rank) -> str:
        cart = grid(rank.comm, periodic=True)
        cart.nan_check = True
        good = rank.array(numbered(rank.rank))
        values = numbered(rank.rank)
        if rank.rank == ODD_ONE:
            values.reshape(-1)[at] = np.nan
        bad = rank.array(values)
        flat = {
            "x": bad if name != "neighbours" else rank.array(values.reshape(-1)[:20])
        }
        others = (
            good if name != "neighbours" else rank.array(numbered(0).reshape(-1)[:20])
        )
        out = None
        if name == "redistributed":
            out = rank.array(np.zeros(DEALT.local_shape(rank.rank)))
        plans: dict[str, Callable[[Any], Any]] = {
            "halo": lambda x: (cart.plan if planned else cart).halo_exchange(x, 1),
            "reduce": lambda x: (cart.plan if planned else cart).halo_reduce(
                x, 1, op="max"
            ),
            "neighbours": lambda x: (cart.plan if planned else cart).neighbor_alltoall(
                x
            ),
            "redistributed": lambda x: (cart.plan if planned else cart).redistribute(
                x, BLOCKS, DEALT, out=out
            ),
        }

        def start(x: Any) -> None:
            made = plans[name](x)
            if planned:
                made()

        start(others)
        rank.stream.synchronize()
        said = ended_by(lambda: start(flat["x"]))
        rank.stream.synchronize()
        # A blocking call has not waited for its end: the next one tells, and is made.
        said += ended_by(lambda: cart.allreduce(np.ones(1)))
        assert cart.allreduce(np.ones(1))[0] == SIZE
        assert said == "" or f"NaN at element {at} of" in said
        rank.stream.synchronize()
        return said

    said = on_threads(SIZE, main)
    assert said[ODD_ONE] != ""
    assert any("has refused its call" in each for each in said)
