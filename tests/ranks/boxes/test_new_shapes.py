# SPDX-License-Identifier: Apache-2.0
"""Calls that move boxes of new shapes: planned alone, and kept within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt import Block, Cyclic, Layout
from commrt.comm import core_of
from commrt.errors import MismatchError
from commrt.group.compare import Comparison
from commrt.local import run


def check_halo(cart: Any, rows: int, columns: int) -> None:
    """Exchange halos of one cell around the ring of ranks."""
    rank, size = cart.rank, cart.size
    mine = np.full((rows, columns), float(rank), np.float32)
    cart.halo_exchange(mine, 1, axes=(0,))
    assert (mine[0] == (rank - 1) % size).all()
    assert (mine[-1] == (rank + 1) % size).all()
    assert (mine[1:-1] == rank).all()


def check_halo_sum(cart: Any, rows: int) -> None:
    mine = np.ones((rows, 3))
    cart.halo_reduce(mine, 1, axes=(0,))
    assert (mine[[1, -2]] == (3 if rows == 3 else 2)).all()


def check_neighbors(cart: Any, count: int) -> None:
    rank, size = cart.rank, cart.size
    x = np.arange(2.0 * count) + 1000 * rank
    got = cart.neighbor_alltoall(x)
    before, behind = (rank - 1) % size, (rank + 1) % size
    wanted = [
        *(np.arange(count, 2 * count) + 1000 * before),
        *(np.arange(count) + 1000 * behind),
    ]
    assert got.ravel().tolist() == wanted
    counts = [count, count + 3]
    x = np.arange(2.0 * count + 3) + 1000 * rank
    got = np.zeros(2 * count + 3)
    cart.neighbor_alltoallv(x, send_counts=counts, recv_counts=counts[::-1], out=got)
    wanted = [
        *(np.arange(count, 2 * count + 3) + 1000 * before),
        *(np.arange(count) + 1000 * behind),
    ]
    assert got.tolist() == wanted


def check_redistribution(comm: Any, rows: int) -> None:
    shape, grid = (rows, 5), (comm.size,)
    one = Layout(shape, grid, (Block(0), None))
    sizes = (*[1] * (comm.size - 1), 5 - comm.size + 1)
    kinds = (None, Block(0, sizes)), (Cyclic(0, 1 + rows % 3), None), (None, Cyclic(0))
    whole = np.arange(rows * 5.0).reshape(shape)
    low, high = (place * rows // comm.size for place in (comm.rank, comm.rank + 1))
    for dims in kinds:
        other = Layout(shape, grid, dims)
        there = comm.redistribute(whole[low:high].copy(), one, other)
        assert there.shape == other.local_shape(comm.rank)
        back = comm.redistribute(there, other, one)
        assert np.array_equal(back, whole[low:high])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_new_shapes_are_planned_without_the_other_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[str] = []
    meet = Comparison.meet

    def noted(self: Comparison, what: str, *rest: Any) -> Any:
        met.append(what)
        return meet(self, what, *rest)

    def main(comm: Any) -> None:
        cart = comm.cart((size,), periodic=True)
        comm.barrier()
        met.clear()
        comm.barrier()
        for turn in range(5):
            check_halo(cart, 3 + turn, 7 - turn)
            check_halo_sum(cart, 3 + turn)
            check_neighbors(cart, 2 + turn)
            check_redistribution(comm, 4 + turn)

    monkeypatch.setattr(Comparison, "meet", noted)
    run(size, main, timeout_s=300)
    assert met == []


def test_a_thousand_shapes_stay_within_the_bound() -> None:
    size, limit = 2, 96 << 10

    def main(comm: Any) -> None:
        cart = comm.cart((size,), periodic=True)
        cores = core_of(comm), core_of(cart)
        for core in cores:
            core.plans_limit_nbytes = limit
        for turn in range(1, 401):
            check_halo(cart, 3 + turn % 90, 1 + turn // 11)
            check_neighbors(cart, turn)
            if turn % 10 == 0:
                check_halo_sum(cart, 3 + turn)
                check_redistribution(comm, turn)
            assert all(core.plans_nbytes <= limit for core in cores)
        assert 5 < comm.stats().plans < 500
        assert 5 < cart.stats().plans < 500
        check_halo(cart, 4, 1)  # which has gone meanwhile

    run(size, main, timeout_s=300)


def test_families_that_go_come_again() -> None:
    """More kinds of calls than there is memory for what each has in common."""
    size, limit = 2, 64 << 10

    def main(comm: Any) -> None:
        cart = comm.cart((size,), periodic=True)
        core = core_of(cart)
        core.plans_limit_nbytes = limit
        for turn in range(120):
            mine = np.full((20 + 2 * turn, 1), float(cart.rank))
            width = 1 + turn % 60
            if mine.shape[0] >= 3 * width:
                cart.halo_exchange(mine, width, axes=(0,))
                assert (mine[:width] == 1 - cart.rank).all()
                assert (mine[-width:] == 1 - cart.rank).all()
            assert core.plans_nbytes <= limit
        assert len(core.families) < 60

    run(size, main, timeout_s=300)


WRONG: list[tuple[str, dict[int, dict[str, Any]]]] = [
    ("2 cells in dimension 2 on rank 3, but 3 on rank 0", {3: {"shape": (6, 6, 2)}}),
    ("7 cells in dimension 0 on rank 1, but 6 on rank 0", {1: {"shape": (7, 6, 3)}}),
    ("7 cells in dimension 1 on rank 2, but 6 on rank 0", {2: {"shape": (6, 7, 3)}}),
    ("disagree on dtypes", {2: {"dtype": "float64"}}),
    ("disagree on width", {1: {"width": 2}, 2: {"width": 2}}),
    ("disagree on corners", {0: {"corners": False}}),
    ("has 4 dimensions on rank 1", {1: {"shape": (6, 6, 3, 1)}}),
]


@pytest.mark.parametrize(("message", "others"), WRONG)
def test_what_does_not_fit_is_named_at_first_sight_too(
    message: str, others: dict[int, dict[str, Any]]
) -> None:
    """Ranks of a 2 x 2 grid whose blocks have to fit those beside them."""

    def main(comm: Any) -> None:
        cart = comm.cart((2, 2), periodic=True)
        mine: dict[str, Any] = {
            "shape": (6, 6, 3),
            "dtype": "float32",
            "width": 1,
            "corners": True,
            **others.get(comm.rank, {}),
        }
        fields = np.zeros(mine["shape"], mine["dtype"])
        for _ in range(2):
            with pytest.raises(MismatchError, match=message):
                cart.halo_exchange(
                    fields, mine["width"], axes=(0, 1), corners=mine["corners"]
                )
        right = np.full((6, 6, 3), float(cart.rank))
        cart.halo_exchange(right, 1, axes=(0, 1))
        assert (right[0, 1:-1] == (cart.rank + 2) % 4).all()

    run(4, main, timeout_s=300)
