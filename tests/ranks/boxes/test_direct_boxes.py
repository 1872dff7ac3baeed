# SPDX-License-Identifier: Apache-2.0
"""Halo exchange and redistribution without a plan at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt
from commrt.boxes.layouts import Block, Cyclic, Layout
from commrt.comm import core_of
from commrt.errors import MismatchError, UsageError
from commrt.local import run


def num_plans(comm: Any) -> int:
    """Return how many plans of boxes a communicator keeps."""
    plans = core_of(comm).kept_plans()
    return sum(plan.label.startswith("boxes/") for plan in plans)


def block(rank: int, shape: tuple[int, ...], turn: int) -> Any:
    rng = np.random.default_rng([rank, turn])
    return rng.integers(0, 99, shape).astype(np.float32)


@pytest.mark.parametrize("nonblocking", [False, True])
@pytest.mark.parametrize("what", ["halo_exchange", "halo_reduce"])
def test_a_direct_halo_call_does_what_its_plan_does(
    what: str, nonblocking: bool
) -> None:
    def main(comm: Any) -> None:
        cart = comm.cart((2, 2), periodic=(True, False))
        shape = (5, 6 + cart.coords[1])
        more: dict[str, Any] = {"corners": True, "direct": True}
        for turn in range(4):
            mine, same = (block(comm.rank, shape, turn) for _ in range(2))
            got = getattr(cart, what)(mine, (1, 2), nonblocking=nonblocking, **more)
            got = got.wait() if nonblocking else got
            assert got is mine
            getattr(cart.plan, what)(same, (1, 2), **more)()
            assert np.array_equal(mine, same)
        assert num_plans(cart) == 1

    run(4, main, timeout_s=300)


def test_ranks_whose_own_arguments_stay_may_meet_others() -> None:
    """Of three distributions a rank knows its part of two already: none may hang."""

    def main(comm: Any) -> None:
        cart = comm.cart((3,), periodic=False)
        for lengths in ((4, 5, 6), (4, 6, 5), (4, 5, 6), (5, 5, 6), (4, 6, 6)):
            mine = np.full(lengths[comm.rank], float(comm.rank))
            cart.halo_exchange(mine, 1)
            assert mine[0] == max(comm.rank - 1, 0)
            assert mine[-1] == min(comm.rank + 1, 2)
        assert num_plans(cart) == 2  # each rank's own

    run(3, main, timeout_s=300)


def test_strides_of_one_rank_alone_may_change() -> None:
    def main(comm: Any) -> None:
        cart = comm.cart((2,), periodic=True)
        for turn in range(4):
            step = 2 if comm.rank == 1 and turn % 2 else 1
            mine = np.full(5 * step, float(comm.rank))[::step]
            cart.halo_exchange(mine, 1)
            assert mine.tolist()[0] == mine.tolist()[-1] == 1 - comm.rank
        assert num_plans(cart) == 1 + comm.rank

    run(2, main, timeout_s=300)


@pytest.mark.parametrize("nonblocking", [False, True])
def test_a_direct_redistribution_does_what_its_plan_does(nonblocking: bool) -> None:
    rows = Layout((7, 5), (3,), (Block(0), None))
    turned = Layout((7, 5), (3,), (None, Cyclic(0)))

    def main(comm: Any) -> None:
        whole = np.arange(35.0).reshape(7, 5)
        for turn in range(3):
            mine = (whole + turn)[comm.rank * 7 // 3 : (comm.rank + 1) * 7 // 3].copy()
            out = np.zeros(turned.local_shape(comm.rank)) if turn else None
            got = comm.redistribute(
                mine, rows, turned, out=out, nonblocking=nonblocking
            )
            got = got.wait() if nonblocking else got
            assert out is None or got is out
            assert np.array_equal(got, (whole + turn)[:, comm.rank :: 3])
            back = comm.redistribute(got, turned, rows)
            assert np.array_equal(back, mine)
        assert num_plans(comm) == 2

    run(3, main, timeout_s=300)


def test_what_differs_is_every_ranks_error_and_keeps_nothing() -> None:
    def main(comm: Any) -> None:
        cart = comm.cart((2,), periodic=True)
        mine = np.full(6, float(comm.rank))
        for _ in range(2):
            with pytest.raises(MismatchError, match="disagree on width"):
                cart.halo_exchange(mine, 1 + comm.rank)
        assert num_plans(cart) == 0
        one, other = (Layout((6,), (2,), (dim,)) for dim in (Block(0), Cyclic(0)))
        target = one if comm.rank else other
        with pytest.raises(MismatchError):
            comm.redistribute(np.zeros(3), one, target)
        with pytest.raises(UsageError, match="nonblocking=1 must be"):
            cart.halo_exchange(mine, 1, nonblocking=1)
        with pytest.raises(UsageError, match="timeout_s=0 must be"):
            comm.redistribute(np.zeros(3), one, one, timeout_s=0)
        cart.halo_exchange(mine, 1)
        assert mine[0] == mine[-1] == 1 - comm.rank

    run(2, main, timeout_s=300)


def test_many_nonblocking_ones_at_once() -> None:
    def main(comm: Any) -> None:
        cart = comm.cart((comm.size,), periodic=True)
        fields = [np.full(4, 100.0 * i + comm.rank) for i in range(20)]
        started = [cart.halo_exchange(f, 1, nonblocking=True) for f in fields]
        commrt.wait_all(started[::-1])
        for i, mine in enumerate(fields):
            assert mine[0] == 100 * i + (comm.rank - 1) % comm.size
            assert mine[3] == 100 * i + (comm.rank + 1) % comm.size

    run(3, main, timeout_s=300)
