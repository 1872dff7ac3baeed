# SPDX-License-Identifier: Apache-2.0
"""Neighbour collectives on grids and graphs of ranks as threads."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from neighbor_cases import check_all, draw_graph, draw_grid, grid_edges
from started_operations import num_started, past_refusals

import commrt
from commrt.errors import (
    BufferError_,
    CommError,
    MismatchError,
    UsageError,
)
from commrt.local import run

SIZES = range(1, 13)


@pytest.mark.parametrize("size", SIZES)
def test_every_block_arrives_on_a_grid(size: int, seed: int) -> None:
    rng = random.Random(f"grid {size} {seed}")
    dims, periodic = draw_grid(rng, size)
    edges = grid_edges(dims, periodic)

    def rank_main(comm: Any) -> int:
        cart = comm.cart(dims, periodic)
        return check_all(cart, edges, [2 * len(dims)] * size, seed)

    assert min(run(size, rank_main, timeout_s=300)) > 0


@pytest.mark.parametrize("extent", [1, 2, 3])
@pytest.mark.parametrize("periodic", [False, True])
def test_small_rings_keep_directions_apart(extent: int, periodic: bool) -> None:
    edges = grid_edges((extent,), (periodic,))

    def rank_main(comm: Any) -> int:
        cart = comm.cart((extent,), periodic)
        return check_all(cart, edges, [2] * extent, 3)

    run(extent, rank_main, timeout_s=300)


@pytest.mark.parametrize("size", SIZES)
def test_every_block_arrives_on_a_graph(size: int, seed: int) -> None:
    rng = random.Random(f"graph {size} {seed}")
    sources, destinations, edges = draw_graph(rng, size)

    def rank_main(comm: Any) -> int:
        graph = comm.graph(sources[comm.rank], destinations[comm.rank])
        assert isinstance(graph, commrt.GraphCommunicator)
        assert graph.sources == tuple(sources[comm.rank])
        assert graph.destinations == tuple(destinations[comm.rank])
        return check_all(graph, edges, list(map(len, destinations)), seed)

    assert min(run(size, rank_main, timeout_s=300)) > 0


def test_outputs_are_allocated_with_zeros_where_nobody_is() -> None:
    def rank_main(comm: Any) -> list[Any]:
        cart = comm.cart((3,))
        x = np.full((2, 2), comm.rank + 1)
        gathered = cart.neighbor_allgather(x)
        assert gathered.shape == (2, 2, 2)
        swapped = cart.neighbor_alltoall(x)
        assert swapped.shape == (2, 2)
        return [gathered[:, 0, 0].tolist(), swapped[:, 0].tolist()]

    assert run(3, rank_main, timeout_s=300) == [
        [[0, 2], [0, 2]],
        [[1, 3], [1, 3]],
        [[2, 0], [2, 0]],
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.neighbor_alltoall(np.zeros(3)), UsageError, "multiple of the 2"),
        (lambda c: c.neighbor_allgather({}), BufferError_, "x is a dict"),
        (
            lambda c: c.neighbor_allgather(np.zeros(2), out=np.zeros(3)),
            UsageError,
            "out has 3 elements, expected 4",
        ),
        (
            lambda c: c.neighbor_allgather(np.zeros(2), out=np.zeros(4, "f")),
            BufferError_,
            "out has dtype float32",
        ),
        (
            lambda c: c.neighbor_alltoallv(
                np.zeros(2), send_counts=[1], recv_counts=[1, 1]
            ),
            UsageError,
            r"send_counts=\[1\] must be 2 numbers",
        ),
        (
            lambda c: c.neighbor_alltoallv(
                np.zeros(3), send_counts=[1, 1], recv_counts=[1, 1]
            ),
            UsageError,
            "x has 3 elements, expected 2, the sum of send_counts",
        ),
        (
            lambda c: c.neighbor_allgatherv(np.zeros(3), recv_counts=[1, -1]),
            UsageError,
            r"recv_counts=\[1, -1\] must be",
        ),
        (
            lambda c: c.neighbor_allgather(np.zeros(2), nonblocking=1),
            UsageError,
            "nonblocking=1",
        ),
        (lambda c: c.graph([5], []), UsageError, "sources=5 is not a rank"),
        (lambda c: c.graph(3, []), UsageError, "sources=3 must be a sequence"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    call: Any, error: type[Exception], message: str
) -> None:
    def rank_main(comm: Any) -> list[float]:
        cart = comm.cart((2,), periodic=True)
        if comm.rank == 1:
            with pytest.raises(error, match=message):
                call(cart)
        assert num_started(cart) == 0
        x = np.array([1.0 + comm.rank])
        found = past_refusals(lambda: cart.neighbor_allgather(x))[:, 0]
        return list(found)

    assert run(2, rank_main, timeout_s=300) == [[2.0, 2.0], [1.0, 1.0]]


def test_overlap_is_refused() -> None:
    def rank_main(comm: Any) -> None:
        whole = np.zeros(6)
        with pytest.raises(UsageError, match="out overlaps x"):
            comm.cart((1,)).neighbor_alltoall(whole[:4], out=whole[2:])

    run(1, rank_main)


def test_edges_that_one_end_does_not_know_are_an_error_on_all_ranks() -> None:
    def rank_main(comm: Any) -> str:
        with pytest.raises(MismatchError, match="names rank 2 1 times") as raised:
            comm.graph([], [2] if comm.rank == 0 else [])
        assert comm.allreduce(np.ones(1))[0] == 3
        return str(raised.value)

    assert len(set(run(3, rank_main, timeout_s=300))) == 1


def test_lengths_that_differ_are_a_mismatch() -> None:
    def rank_main(comm: Any) -> str:
        cart = comm.cart((2,))
        x = np.zeros(4 + comm.rank)
        with pytest.raises(commrt.errors.CommError) as raised:
            cart.neighbor_allgather(x)
        return type(raised.value).__name__

    assert "MismatchError" in run(2, rank_main, timeout_s=300)


MOST = 262144 // 8
"""Elements of the longest message."""


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([0, 4], [0, 0]),
        ([0, 0], [0, 4]),
        ([4, 0], [0, 0]),
        ([0, 0], [4, 0]),
        ([3, 1], [2, 2]),
        ([4, 0], [0, 4]),
        ([0, MOST], [0, 0]),
        ([0, 2 * MOST], [0, MOST]),
        ([0, MOST], [0, 2 * MOST]),
        ([MOST, 5], [MOST + 5, 0]),
        ([0, MOST + 1], [0, MOST]),
    ],
)
def test_lengths_that_one_side_alone_states_are_never_taken_by_later_calls(
    sent: list[int], expected: list[int]
) -> None:
    """Also where one of them is 0, or a message is as long as is expected so far."""

    def rank_main(comm: Any) -> list[str]:
        cart = comm.cart((2,), periodic=True)
        # What goes to the one before comes from behind.
        sends, receives = (sent, [0, 0]) if comm.rank == 0 else ([0, 0], expected[::-1])
        x = np.full(sum(sends), 77.0)
        later = np.full(max(sent + expected), 1.0)
        calls = [
            partial(
                cart.neighbor_alltoallv, x, send_counts=sends, recv_counts=receives
            ),
            *[partial(cart.allreduce, later)] * 3,
            partial(cart.bcast, later),
        ]
        found = []
        for call in calls:
            try:
                call()
                found.append("")
            except CommError as error:
                found.append(type(error).__name__)
        return found

    first, second = run(2, rank_main, timeout_s=300)
    assert second == ["MismatchError"] * 5
    assert first[0] in ("", "MismatchError")
    assert first[1:] == ["MismatchError"] * 4


def test_a_graph_whose_edge_carries_nothing_on_one_side() -> None:
    def rank_main(comm: Any) -> str:
        here = comm.rank
        graph = comm.graph([0] if here else [], [] if here else [1])
        found = ""
        try:
            graph.neighbor_alltoallv(
                np.full(4 * (1 - here), 77.0),
                send_counts=[] if here else [4],
                recv_counts=[0] if here else [],
            )
        except CommError as error:
            found = type(error).__name__
        with pytest.raises(MismatchError):
            graph.allreduce(np.ones(4))
        return found

    assert run(2, rank_main, timeout_s=300)[1] == "MismatchError"


@pytest.mark.parametrize("count", [0, 1, MOST, 2 * MOST + 1])
def test_empty_and_long_blocks_arrive_beside_each_other(count: int) -> None:
    def rank_main(comm: Any) -> bool:
        cart = comm.cart((2,), periodic=True)
        x = np.arange(count + 3.0) + 1000 * comm.rank
        for _ in range(3):
            got = cart.neighbor_alltoallv(
                x, send_counts=[count, 3], recv_counts=[3, count]
            )
        other = np.arange(count + 3.0) + 1000 * (1 - comm.rank)
        right = np.array_equal(got, np.concatenate([other[count:], other[:count]]))
        return right and float(cart.allreduce(np.ones(1))[0]) == 2.0

    assert run(2, rank_main, timeout_s=300) == [True, True]


def test_ranks_between_which_every_block_is_empty() -> None:
    """Their plans have messages and no boxes, which a sanitizer once had to say."""

    def rank_main(comm: Any) -> tuple[int, ...]:
        cart = comm.cart((3,), (True,))
        none, nothing = np.zeros(0, np.int16), [0, 0]
        gathered = cart.neighbor_allgatherv(none, recv_counts=nothing)
        swapped = cart.neighbor_alltoallv(
            none, send_counts=nothing, recv_counts=nothing
        )
        full = cart.neighbor_allgather(np.full(2, comm.rank))
        return gathered.size, swapped.size, *full[:, 0].tolist()

    assert run(3, rank_main, timeout_s=300) == [
        (0, 0, 2, 1),
        (0, 0, 0, 2),
        (0, 0, 1, 0),
    ]


def test_check_mode_compares_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        cart = comm.cart((3,))
        x = np.zeros(4, np.int64 if comm.rank == 1 else np.float64)
        with pytest.raises(MismatchError, match="disagree on dtype") as raised:
            cart.neighbor_allgather(x)
        assert num_started(cart) == 0
        other = cart.neighbor_allgather if comm.rank else cart.allreduce
        with pytest.raises(MismatchError, match="disagree on operation"):
            other(np.zeros(4))
        return str(raised.value)

    assert len(set(run(3, rank_main, timeout_s=300))) == 1


def test_check_mode_compares_counts_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        cart = comm.cart((3,))
        assert cart.neighbor_allgather(np.ones(2)).sum() in (2, 4)
        before = num_started(cart)
        x = np.zeros(4 + (comm.rank == 1))
        with pytest.raises(MismatchError, match="sends 32 bytes to rank 1") as raised:
            cart.neighbor_allgather(x)
        assert num_started(cart) == before
        other = cart.neighbor_alltoall if comm.rank else cart.neighbor_allgather
        with pytest.raises(MismatchError, match="disagree on operation"):
            other(x[:4])
        return str(raised.value)

    assert len(set(run(3, rank_main, timeout_s=300))) == 1
