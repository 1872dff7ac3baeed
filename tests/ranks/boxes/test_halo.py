# SPDX-License-Identifier: Apache-2.0
"""Halo exchange and its reverse, on ranks as threads, against numpy.

An ordinary run draws cases, others each time; ``--full`` draws many more.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from halo_cases import Case, check, draw, expected, start
from started_operations import num_started, past_refusals

import commrt.boxes.host_plans as box_plans
from commrt.errors import BufferError_, MismatchError, UsageError
from commrt.local import LocalRanks, run

SIZES = range(1, 13)


def _all_right(size: int, cases: list[Case]) -> None:
    wanted = [expected(case) for case in cases]

    def rank_main(comm: Any) -> int:
        pairs = zip(cases, wanted, strict=True)
        return sum(check(comm, case, results) for case, results in pairs)

    assert sum(run(size, rank_main, timeout_s=300)) > 0


@pytest.mark.parametrize("size", SIZES)
def test_drawn_exchanges_agree_with_numpy(size: int, seed: int) -> None:
    rng = random.Random(f"halo {size} {seed}")
    _all_right(size, [draw(rng, size) for _ in range(6)])


@pytest.mark.parametrize("limit", [200, 1000])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_many_short_messages_and_few_slots(
    size: int, limit: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_plans, "LIMIT_NBYTES", limit)
    monkeypatch.setattr(box_plans, "_SLOTS_NBYTES", 0)
    monkeypatch.setattr(box_plans.TransportParams, "most_inline", lambda *_: 48)
    rng = random.Random(f"short {size} {limit} {seed}")
    _all_right(size, [draw(rng, size) for _ in range(4)])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
def test_hundreds_of_exchanges_agree_with_numpy(size: int, seed: int) -> None:
    rng = random.Random(f"full halo {size} {seed}")
    for _ in range(20):
        _all_right(size, [draw(rng, size) for _ in range(10)])


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("op", [None, "sum", "max", "min"])
@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_every_form_in_every_number_of_dimensions(
    ndim: int, op: str | None, direct: bool, corners: bool, seed: int
) -> None:
    rng = random.Random(f"{ndim} {op} {direct} {corners} {seed}")
    size = rng.choice((1, 2, 3, 4, 6))
    while len((case := draw(rng, size)).dims) != ndim or case.op != op:
        pass
    fields = {**vars(case), "corners": corners, "direct": direct}
    _all_right(size, [Case(**fields)])


SHORT_ROWS = [
    (dtype, width)
    for dtype in ("uint8", "int16", "float32", "float64", "complex128")
    for width in (1, 2, 3)
]


def _fill_short_rows(comm: Any, dims: tuple[int, ...], gap: int) -> int:
    """Exchange halos in rows of a few bytes, ``gap`` elements apart; count them."""
    cells = (5, 37, 6)
    cart = comm.cart(dims, periodic=True)
    coords = cart.coords
    whole = np.arange(np.prod(cells) * comm.size) % 251 + 1
    whole = whole.reshape([a * n for a, n in zip(dims, cells, strict=True)])
    for dtype, width in SHORT_ROWS:
        shape = [n + 2 * width for n in cells]
        memory = np.zeros((*shape[:-1], shape[-1] + gap), dtype)
        field = memory[..., : shape[-1]]
        own = (slice(width, -width),) * 3
        places = [
            slice(at * n, at * n + extent)
            for at, n, extent in zip(coords, cells, shape, strict=True)
        ]
        wanted = np.pad(whole, width, mode="wrap")[tuple(places)].astype(dtype)
        field[own] = wanted[own]
        exchange = cart.plan.halo_exchange(field, width)
        for _ in range(2):
            exchange()
            np.testing.assert_array_equal(field, wanted, f"{dtype}, {width} wide")
            assert not memory[..., shape[-1] :].any()
            field[:, :, :width] = field[:, :, -width:] = 0
    return len(SHORT_ROWS)


@pytest.mark.parametrize("store", ["plain", "stream_slots"])
@pytest.mark.parametrize("dims", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 1, 3)])
def test_opposite_faces_in_one_pass(
    dims: tuple[int, ...], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of each length with a loop of its own, that touch lines together."""
    params = box_plans.TransportParams
    monkeypatch.setattr(box_plans, "TransportParams", lambda: params(store=store))
    size = int(np.prod(dims))
    for gap in (0, 3):
        done = run(size, lambda comm, gap=gap: _fill_short_rows(comm, dims, gap))
        assert done == [len(SHORT_ROWS)] * size


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_any_interleaving_of_ranks_ends(
    size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks in one thread, stepped in any order, with hardly any slots."""
    monkeypatch.setattr(box_plans, "LIMIT_NBYTES", 300)
    monkeypatch.setattr(box_plans, "_SLOTS_NBYTES", 0)
    monkeypatch.setattr(box_plans, "_FEWEST_SLOTS", 1)
    monkeypatch.setattr(box_plans.TransportParams, "most_inline", lambda *_: 48)
    rng = random.Random(f"stepped {size} {seed}")
    case = draw(rng, size, 3)
    while case.op is not None or not any(map(sum, case.widths)):
        case = draw(rng, size, 3)
    wanted = expected(case)
    with LocalRanks(size) as ranks:
        fields = [
            [start(case, rank, i) for i in range(len(case.dtypes))]
            for rank in range(size)
        ]

        def plan(comm: Any) -> Any:
            cart = comm.cart(case.dims, case.periodic)
            return cart, cart.plan.halo_exchange(
                fields[comm.rank],
                case.widths,
                axes=case.axes,
                corners=case.corners,
                direct=case.direct,
            )

        made = ranks.each(plan)
        requests = [call.start() for _, call in made]
        for _ in range(200_000):
            if all(request.done for request in requests):
                break
            rank = rng.randrange(size)
            for _ in range(rng.choice((1, 1, 30))):
                ranks.step(rank)
        for rank, request in enumerate(requests):
            assert request.done, (case, rank)
            assert request.wait() is fields[rank]
            for field, right in zip(fields[rank], wanted[rank], strict=True):
                np.testing.assert_array_equal(field, right, repr(case))
        for cart, _ in made:
            cart.free()


def test_the_interior_can_be_computed_meanwhile() -> None:
    def rank_main(comm: Any) -> bool:
        cart = comm.cart((0, 0), periodic=True)
        field = np.zeros((40, 50))
        field[1:-1, 1:-1] = comm.rank
        exchange = cart.plan.halo_exchange(field, 1)
        assert exchange.operation == "halo_exchange"
        assert exchange.label == "boxes/by_dimension"
        for _ in range(3):
            request = exchange.start()
            inner = field[2:-2, 2:-2].sum()
            assert request.wait() is field
            assert inner == comm.rank * 36 * 46
        left, right = cart.shift(1)
        return bool((field[1:-1, 0] == left).all() and (field[1:-1, -1] == right).all())

    assert run(4, rank_main, timeout_s=300) == [True] * 4


def test_several_exchanges_may_be_in_flight() -> None:
    def rank_main(comm: Any) -> bool:
        cart = comm.cart((0,), periodic=True)
        fields = [np.full(4, float(comm.rank + 10 * i)) for i in range(20)]
        requests = [cart.plan.halo_exchange(one, 1).start() for one in fields]
        total = cart.allreduce(np.ones(100_000), nonblocking=True)
        for request in reversed(requests):
            request.wait()
        total.wait()
        left, right = cart.shift(0)
        return all(
            (one[0], one[3]) == (left + 10 * i, right + 10 * i)
            for i, one in enumerate(fields)
        )

    assert run(3, rank_main, timeout_s=300) == [True] * 3


def test_sums_are_the_same_in_every_run() -> None:
    def rank_main(comm: Any) -> set[bytes]:
        cart = comm.cart((2, 2), periodic=True)
        begin = np.random.default_rng(comm.rank).random((9, 9)).astype(np.float32)
        field = begin.copy()
        reverse = cart.plan.halo_reduce(field, 3, direct=True)
        seen = set()
        for _ in range(20):
            field[...] = begin
            reverse()
            seen.add(field.tobytes())
        return seen

    assert [len(seen) for seen in run(4, rank_main, timeout_s=300)] == [1] * 4


def frozen() -> Any:
    x = np.zeros((5, 5))
    x.flags.writeable = False
    return x


def halves() -> Any:
    x = np.zeros((5, 9))
    return [x[:, :5], x[:, 4:]]


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda p: p.halo_exchange([], 1), UsageError, "fields is empty"),
    (lambda p: p.halo_exchange([[1.0]], 1), BufferError_, r"fields\[0\] is a list"),
    (
        lambda p: p.halo_exchange(np.zeros((5, 5), object), 1),
        BufferError_,
        "fields has dtype object",
    ),
    (lambda p: p.halo_exchange(frozen(), 1), BufferError_, "fields is read-only"),
    (
        lambda p: p.halo_exchange(
            np.lib.stride_tricks.as_strided(np.zeros(9), (5, 5), (8, 8)), 1
        ),
        BufferError_,
        "elements that share memory",
    ),
    (
        lambda p: p.halo_exchange(halves(), 1),
        UsageError,
        r"fields\[1\] overlaps halo_exchange, rank 1: fields\[0\]",
    ),
    (lambda p: p.halo_exchange(np.zeros((5, 5)), -1), UsageError, "width=-1 must be"),
    (lambda p: p.halo_exchange(np.zeros((5, 5)), 1.5), UsageError, "width=1.5"),
    (lambda p: p.halo_exchange(np.zeros((5, 5)), (1,)), UsageError, "width="),
    (lambda p: p.halo_exchange(np.zeros((5, 5)), ((1, 2, 3), 1)), UsageError, "width="),
    (lambda p: p.halo_exchange(np.zeros(5), 1), UsageError, "1 dimensions and the gri"),
    (
        lambda p: p.halo_exchange(np.zeros((5, 5)), 1, axes=(0, 0)),
        UsageError,
        "2 different dimensions",
    ),
    (
        lambda p: p.halo_exchange(np.zeros((5, 5)), 1, axes=(0, 2)),
        UsageError,
        r"numbers in 0\.\.1",
    ),
    (
        lambda p: p.halo_exchange(np.zeros((5, 5)), 1, corners=1),
        UsageError,
        "corners=1 must be True or False",
    ),
    (
        lambda p: p.halo_exchange(np.zeros((5, 1)), 1),
        UsageError,
        "rank 1: fields has 1 cells in dimension 1, less than its halo of 1 . 1",
    ),
    (
        lambda p: p.halo_exchange(np.zeros((5, 5)), 2),
        UsageError,
        "rank 1: fields has a block of 1 cells in dimension 0, and a neighbour's halo",
    ),
    (
        lambda p: p.halo_reduce(np.zeros((5, 5)), 1, op="avg"),
        UsageError,
        "how many ranks contribute",
    ),
    (
        lambda p: p.halo_reduce(np.zeros((5, 5)), 1, op="med"),
        UsageError,
        "unknown redu",
    ),
    (
        lambda p: p.halo_reduce(np.zeros((5, 5), complex), 1, op="max"),
        UsageError,
        "not defined for complex128",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_before_anything_is_said(
    call: Any, error: type[Exception], message: str
) -> None:
    def rank_main(comm: Any) -> bool:
        cart = comm.cart((2, 1), periodic=True)
        before = num_started(cart)
        if comm.rank == 1:
            with pytest.raises(error, match=message):
                call(cart.plan)
        assert num_started(cart) == before
        field = np.full((3, 3), float(comm.rank))
        past_refusals(lambda: cart.plan.halo_exchange(field, 1))()
        return bool(field[0, 0] == 1 - comm.rank)

    assert run(2, rank_main, timeout_s=300) == [True, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, r: p.halo_exchange(np.zeros((6, 6)), 1 + (r == 1)), "on width"),
        (
            lambda p, r: p.halo_exchange(np.zeros((5, 5)), 1, corners=r == 1),
            "on corners",
        ),
        (lambda p, r: p.halo_exchange(np.zeros((5, 5), "fd"[r == 1]), 1), "on dtypes"),
        (
            lambda p, r: p.halo_reduce(np.zeros((5, 5)), 1, op=("sum", "max")[r == 1]),
            "on op",
        ),
        (
            lambda p, r: (p.halo_reduce if r == 1 else p.halo_exchange)(
                np.zeros((5, 5)), 1
            ),
            "on operation",
        ),
        (
            lambda p, r: p.halo_exchange(np.zeros((5, 6 + (r == 1))), 1),
            r"fields\[0\] has 7 cells in dimension 1 on rank 1, but 6 on rank 0",
        ),
        (
            lambda p, r: p.halo_exchange(
                np.zeros((5, 5, 2 + (r == 1))), 1, axes=(0, 1)
            ),
            r"fields\[0\] has 3 cells in dimension 2 on rank 1, but 2 on rank 0",
        ),
    ],
)
def test_ranks_that_differ_all_get_the_same_error(call: Any, message: str) -> None:
    def rank_main(comm: Any) -> str:
        cart = comm.cart((3, 1), periodic=True)
        with pytest.raises(MismatchError, match=message) as raised:
            call(cart.plan, comm.rank)
        assert num_started(cart) == 0
        field = np.zeros((4, 3))
        cart.plan.halo_exchange(field, 1)()
        return str(raised.value)

    assert len(set(run(3, rank_main, timeout_s=300))) == 1


def test_blocks_may_differ_from_place_to_place() -> None:
    def rank_main(comm: Any) -> bool:
        cart = comm.cart((3,))
        field = np.full((2 + comm.rank, 4), float(comm.rank))
        cart.plan.halo_exchange(field, ((1, 0),), axes=(0,))()
        return bool((field[0] == max(0, comm.rank - 1)).all())

    assert run(3, rank_main, timeout_s=300) == [True] * 3
