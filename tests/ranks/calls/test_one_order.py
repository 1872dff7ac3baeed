# SPDX-License-Identifier: Apache-2.0
"""deterministic=True where there are no schedules: sparse sums, and halos added up."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from rounding import numpy_dtype, same_numbers, telling

from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.local import LocalRanks, run
from commrt.sparse.vector import SparseVector

LENGTH = 4000
FLOATS = ("float32", "float64", "complex64", "float16", "bfloat16")
ALL = ("recursive_doubling", "split", "split_dense", "ring")


def entries(name: str, rank: int, density: float) -> tuple[Any, Any, int]:
    """Return a rank's sparse vector; indices meet those of other ranks."""
    rng = np.random.default_rng([rank, int(1000 * density)])
    at = np.flatnonzero(rng.random(LENGTH) < density).astype(np.int32)
    return at, telling(name, rank, len(at)), LENGTH


def sum_from_the_left(name: str, size: int, density: float) -> Any:
    total = np.zeros(LENGTH, numpy_dtype(name))
    with np.errstate(all="ignore"):
        for rank in range(size):
            at, values, _ = entries(name, rank, density)
            total[at] += values  # rounded at each addition
    return total


@pytest.mark.full(sample=24)
@pytest.mark.parametrize("density", [0.004, 0.05, 0.15, 0.7])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_sparse_sums_are_added_from_the_left(
    size: int, name: str, density: float
) -> None:
    def rank_main(comm: Any) -> bool:
        want = sum_from_the_left(name, size, density)
        mine = entries(name, comm.rank, density)
        right = []
        with comm.dup(deterministic=True) as same:
            for algorithm in (None, "split", "split_dense"):
                found = same.sparse_allreduce(mine, result="dense", algorithm=algorithm)
                right.append(same_numbers(found, want))
            sparse = same.sparse_allreduce(mine, result="sparse")
            right.append(same_numbers(sparse.to_dense(), want))
        return all(right)

    assert run(size, rank_main, timeout_s=300) == [True] * size


def test_without_it_sparse_algorithms_differ() -> None:
    """What the other tests compare would show another order."""

    def rank_main(comm: Any) -> int:
        mine = entries("float32", comm.rank, 0.15)
        return len(
            {
                comm.sparse_allreduce(mine, result="dense", algorithm=name).tobytes()
                for name in ALL
            }
        )

    assert all(found > 1 for found in run(4, rank_main, timeout_s=300))


def bits(result: Any) -> tuple[bytes, ...]:
    if isinstance(result, SparseVector):
        return result.indices.tobytes(), result.values.tobytes()
    return (result.tobytes(),)


def prepared(comm: Any) -> Any:
    """Return a communicator that has had its first sparse call, which makes more."""
    same = comm.dup(deterministic=True)
    same.sparse_allreduce(entries("float32", comm.rank, 0.1))
    return same


@pytest.mark.parametrize("size", [2, 4, 5])
def test_the_same_sparse_call_gives_the_same_whoever_is_late(
    size: int, seed: int
) -> None:
    """In shared memory and by messages: with many in flight, no half is free."""
    rng = random.Random(seed)
    with LocalRanks(size) as ranks:
        comms = ranks.each(prepared)
        for form, density in itertools.product(("auto", "sparse"), (0.004, 0.1)):
            requests = [
                [
                    comm.sparse_allreduce(
                        entries("float32", comm.rank, density),
                        result=form,
                        nonblocking=True,
                    )
                    for _ in range(5)
                ]
                for comm in comms
            ]
            todo = [request for row in requests for request in row]
            for _ in range(200_000):
                todo = [request for request in todo if not request.test()]
                if not todo:
                    break
                ranks.step(rng.randrange(size))
            found = {bits(request.wait()) for row in requests for request in row}
            assert len(found) == 1
        for comm in comms:
            comm.free()


def test_what_would_add_in_another_order_is_refused_and_said() -> None:
    def rank_main(comm: Any) -> tuple[str, ...]:
        x = entries("float32", comm.rank, 0.1)
        with comm.dup(deterministic=True) as same:
            for name in ("recursive_doubling", "ring", "two_level_ring"):
                with pytest.raises(UsageError, match=f"{name}.*one order"):
                    same.sparse_allreduce(x, algorithm=name, result="dense")
                with pytest.raises(UsageError, match=f"{name}.*one order"):
                    same.plan.sparse_allreduce(x, algorithm=name)
            # As its result is dense, where that of split may be sparse.
            with pytest.raises(UsageError, match=r"split_dense.*only split has it"):
                same.sparse_allreduce(x, algorithm="split_dense")
            same.sparse_allreduce(x, result="dense")
            found: tuple[str, ...] = same.sparse_report.candidates
            assert same.sparse_report.algorithm in found
            # Order changes no integer, and a dense result has no format to choose.
            whole = (x[0], np.ones(len(x[0]), np.int32), LENGTH)
            dense = [
                same.sparse_allreduce(whole, result="dense", algorithm=name).tobytes()
                for name in ALL
            ]
            assert len({*dense}) == 1
            return found

    assert run(3, rank_main, timeout_s=300) == [("split", "split_dense")] * 3


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_topk_gives_the_same_bits_every_time(name: str) -> None:
    def rank_main(comm: Any) -> int:
        found = set()
        with comm.dup(deterministic=True) as same:
            for turn in range(6):
                residual = np.zeros(LENGTH, numpy_dtype(name))
                x = telling(name, comm.rank, LENGTH)
                requests = [
                    same.sparse_allreduce(
                        entries(name, comm.rank, 0.1), nonblocking=True
                    )
                    for _ in range(turn)
                ]
                got = same.topk_allreduce(x, 300, residual=residual)
                for request in requests:
                    request.wait()
                found.add((bits(got), residual.tobytes()))
        return len(found)

    assert run(4, rank_main, timeout_s=300) == [1] * 4


# -- halos -------------------------------------------------------------------------

SHAPES = {(4,): (7,), (2, 2): (6, 7), (2, 3): (7, 8), (2, 2, 2): (6, 7, 6)}


def halo_sum(grid: Any, name: str, rank: int, shape: Any, width: int, op: str) -> Any:
    """Return a rank's own cells by definition: direction by direction, own first."""
    inner = tuple(extent - 2 * width for extent in shape)
    own = tuple(slice(width, extent - width) for extent in shape)
    total = field(name, rank, shape)[own].copy()
    for offset in itertools.product((-1, 0, 1), repeat=len(shape)):
        if not any(offset):
            continue
        # What moves to `offset` in an exchange comes back from there.
        there = grid.at_offset(rank, offset)
        theirs = field(name, there, shape)
        edge, halo = [], []
        for extent, step in zip(inner, offset, strict=True):
            before = {-1: 0, 0: 0, 1: extent - width}[step]
            edge.append(slice(before, before + (width if step else extent)))
            start = {-1: extent + width, 0: width, 1: 0}[step]
            halo.append(slice(start, start + (width if step else extent)))
        with np.errstate(all="ignore"):
            part = theirs[tuple(halo)]
            place = total[tuple(edge)]
            total[tuple(edge)] = place * part if op == "prod" else place + part
    return total


def field(name: str, rank: int, shape: Any) -> Any:
    return telling(name, rank, int(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize("dims", SHAPES)
def test_halos_are_added_up_in_one_order(
    dims: tuple[int, ...], name: str, op: str
) -> None:
    shape, size = SHAPES[dims], int(np.prod(dims))

    def rank_main(comm: Any) -> bool:
        with comm.dup(deterministic=True) as same:
            cart = same.cart(dims, periodic=True)
            want = halo_sum(core_of(cart).grid, name, comm.rank, shape, 2, op)
            own = tuple(slice(2, extent - 2) for extent in shape)
            right = []
            for direct in (None, True):
                mine = field(name, comm.rank, shape)
                cart.plan.halo_reduce(mine, 2, op=op, direct=direct)()
                right.append(same_numbers(mine[own].copy(), want))
                # What else moves changes nothing.
                fields = [
                    field("float64", comm.rank, (40, *shape)),
                    field(name, comm.rank, (1, *shape)),
                ]
                axes = tuple(range(1, len(dims) + 1))
                cart.halo_reduce(fields, 2, op=op, axes=axes, direct=direct)
                right.append(same_numbers(fields[1][0][own].copy(), want))
        return all(right)

    assert run(size, rank_main, timeout_s=300) == [True] * size


def test_without_it_ways_to_add_halos_up_differ() -> None:
    def rank_main(comm: Any) -> int:
        cart = comm.cart((2, 2), periodic=True)
        found = set()
        for direct in (False, True):
            mine = field("float32", comm.rank, (6, 7))
            cart.plan.halo_reduce(mine, 2, direct=direct)()
            found.add(mine[2:-2, 2:-2].tobytes())
        return len(found)

    assert run(4, rank_main, timeout_s=300) == [2] * 4


def test_halos_by_dimension_are_refused_where_order_matters() -> None:
    def rank_main(comm: Any) -> str:
        with comm.dup(deterministic=True) as same:
            cart = same.cart((2, 2), periodic=True)
            x = np.ones((6, 6), np.float32)
            with pytest.raises(UsageError, match=r"direct=False.*deterministic=True"):
                cart.plan.halo_reduce(x, 1, direct=False)
            label: str = cart.plan.halo_reduce(x, 1).label
            for fields, more in (
                (x, {"op": "max"}),
                (x.astype(int), {}),
                (x, {"corners": False}),
            ):
                cart.plan.halo_reduce(fields, 1, direct=False, **more)()
            assert cart.plan.halo_exchange(x, 1).label == "boxes/by_dimension"
            return label

    assert run(4, rank_main, timeout_s=300) == ["boxes/direct"] * 4
