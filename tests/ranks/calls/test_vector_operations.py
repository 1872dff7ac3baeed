# SPDX-License-Identifier: Apache-2.0
"""Vector operations beyond what the table-driven tests call: shapes, forms, caching."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt import algorithms
from commrt.comm import core_of
from commrt.local import run
from commrt.vocabulary.operations import OPERATIONS

VECTOR = [spec.name for spec in OPERATIONS if spec.count_arguments]


def ranges(counts: list[int]) -> list[Any]:
    """Return each rank's block: numbers that no other block has."""
    edges = np.cumsum([0, *counts])
    return [np.arange(a, b) for a, b in pairwise(edges)]


counts_of = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(0, 4000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(counts=counts_of, chunk=st.sampled_from([64, 4096, 131072]), data=st.data())
def test_any_counts_of_known_blocks(counts: list[int], chunk: int, data: Any) -> None:
    size = len(counts)
    root = data.draw(st.integers(0, size - 1))
    names = {
        coll: data.draw(st.sampled_from(algorithms.names(coll, size)))
        for coll in VECTOR
        if coll != "alltoallv"
    }
    blocks = ranges(counts)
    whole = np.concatenate(blocks)

    def rank_main(comm: Any) -> list[bool]:
        mine = blocks[comm.rank]

        def call(coll: str, x: Any, **more: Any) -> Any:
            way = {"algorithm": names[coll], "params": {"chunk": chunk}}
            return getattr(comm, coll)(x, counts=counts, **way, **more)

        gathered = call("gatherv", mine, root=root)
        sent = whole if comm.rank == root else None
        return [
            np.array_equal(call("allgatherv", mine), whole),
            (gathered is None) == (comm.rank != root),
            gathered is None or np.array_equal(gathered, whole),
            np.array_equal(
                call("scatterv", sent, root=root, out=np.empty_like(mine)), mine
            ),
            np.array_equal(call("reduce_scatterv", whole), mine * size),
        ]

    assert run(size, rank_main, timeout_s=300) == [[True] * 5] * size


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 8), seed=st.integers(0, 2**32), data=st.data())
def test_any_counts_between_pairs(size: int, seed: int, data: Any) -> None:
    # Pairs whose messages are cut into very different numbers of fragments.
    rng = np.random.default_rng(seed)
    most = rng.choice([0, 1, 5, 700, 20_000], (size, size))
    counts = rng.integers(0, most + 1)
    name = data.draw(st.sampled_from(algorithms.names("alltoallv", size)))
    chunk = data.draw(st.sampled_from([64, 1000, 131072]))
    told = data.draw(st.booleans())
    blocks = [ranges((counts[rank] + 0).tolist()) for rank in range(size)]

    def rank_main(comm: Any) -> bool:
        x = np.concatenate([b + 10**6 * comm.rank for b in blocks[comm.rank]])
        want = np.concatenate(
            [blocks[peer][comm.rank] + 10**6 * peer for peer in range(size)]
        )
        got = comm.alltoallv(
            x,
            send_counts=counts[comm.rank],
            recv_counts=counts[:, comm.rank] if told else None,
            algorithm=name,
            params={"chunk": chunk},
        )
        return bool(np.array_equal(got, want))

    assert run(size, rank_main, timeout_s=300) == [True] * size


def test_rows_stay_rows() -> None:
    def rank_main(comm: Any) -> list[tuple[int, ...]]:
        rows = np.ones((comm.rank + 1, 4), np.float32)
        counts = [4, 8, 12]
        whole = np.ones((6, 4), np.float32)
        odd = np.ones((1, 4), np.float32)
        gathered = comm.gatherv(rows, counts=counts, root=1)
        return [
            comm.allgatherv(rows, counts=counts).shape,
            () if gathered is None else gathered.shape,
            comm.reduce_scatterv(whole, counts=counts).shape,
            comm.scatterv(whole, counts=counts).shape,
            comm.alltoallv(odd, send_counts=[4, 0, 0] if comm.rank else [0, 4, 0]).shape
            if comm.rank < 2
            else comm.alltoallv(odd, send_counts=[0, 0, 4]).shape,
            # Blocks that are no whole rows.
            comm.reduce_scatterv(whole, counts=[1, 2, 21]).shape,
        ]

    own = [(1, 4), (2, 4), (3, 4)]
    ends = [(1,), (2,), (21,)]
    for rank, shapes in enumerate(run(3, rank_main, timeout_s=300)):
        gathered = (6, 4) if rank == 1 else ()
        assert shapes == [(6, 4), gathered, own[rank], own[rank], (1, 4), ends[rank]]


def test_counts_of_any_kind_mean_the_same() -> None:
    counts = [2, 0, 3]

    def rank_main(comm: Any) -> list[list[int]]:
        x = np.full(counts[comm.rank], comm.rank)
        kinds = (
            counts,
            tuple(counts),
            np.array(counts),
            np.array(counts, np.int32),
            np.array(counts, np.uint8),
            [np.int64(one) for one in counts],
            range(0),
        )
        found = []
        for kind in kinds[:-1]:
            for _ in range(3):  # a new plan, then hits
                out = np.full(5, -1)
                assert comm.allgatherv(x, counts=kind, out=out) is out
                found.append(out.tolist())
        return found

    assert run(3, rank_main, timeout_s=300) == [[[0, 0, 2, 2, 2]] * 18] * 3


def test_a_list_that_has_changed_is_another_call() -> None:
    def rank_main(comm: Any) -> list[list[int]]:
        counts, found = [1, 2], []
        array = np.array([1, 2])
        for first in (1, 2, 0, 1):
            counts[:] = first, 3 - first
            array[:] = counts
            x = np.full(counts[comm.rank], comm.rank)
            for given_counts in (counts, array, tuple(counts), counts):
                out = np.full(3, -1)
                comm.allgatherv(x, counts=given_counts, out=out)
                found.append(out.tolist())
        return found

    rows = [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    want = [row for row in rows for _ in range(4)]
    assert run(2, rank_main, timeout_s=300) == [want] * 2


def test_equal_lengths_with_other_counts_are_another_plan() -> None:
    # Of the same lengths on rank 0; only the other ranks' counts differ.
    def rank_main(comm: Any) -> list[list[int]]:
        found = []
        for counts in ((2, 1, 3), (2, 3, 1), (2, 1, 3)) * 3:
            x = np.full(counts[comm.rank], comm.rank)
            out = np.full(6, -1)
            found.append(comm.allgatherv(x, counts=counts, out=out).tolist())
        return found

    one, other = [0, 0, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2]
    assert run(3, rank_main, timeout_s=300) == [[one, other, one] * 3] * 3


def test_calls_alike_share_one_plan() -> None:
    def rank_main(comm: Any) -> int:
        x = np.ones(comm.rank + 1)
        out = np.empty(3)
        for _ in range(5):
            comm.allgatherv(x, counts=[1, 2], out=out)
            comm.allgatherv(x, counts=(1, 2), out=out)
        return comm.stats().plans

    assert run(2, rank_main, timeout_s=300) == [1, 1]


def test_an_alltoallv_in_place() -> None:
    counts = np.array([[1, 5, 0], [5, 2, 3], [0, 3, 4]])

    def rank_main(comm: Any) -> list[bool]:
        own = tuple(counts[comm.rank].tolist())
        found = []
        for _ in range(3):
            x = np.concatenate(
                [np.full(n, 10 * comm.rank + peer) for peer, n in enumerate(own)]
            )
            same = comm.alltoallv(x, send_counts=own, recv_counts=own, out=x)
            want = np.concatenate(
                [np.full(n, 10 * peer + comm.rank) for peer, n in enumerate(own)]
            )
            found.append(same is x and np.array_equal(x, want))
        return found

    assert run(3, rank_main, timeout_s=300) == [[True] * 3] * 3


def test_requests_of_many_calls_end_in_any_order() -> None:
    def rank_main(comm: Any) -> bool:
        rng = np.random.default_rng(1)
        requests, wanted = [], []
        for turn in range(60):
            counts = rng.integers(0, 400, comm.size).tolist()
            x = np.full(counts[comm.rank], turn * 10 + comm.rank)
            requests.append(comm.allgatherv(x, counts=counts, nonblocking=True))
            wanted.append(
                np.repeat(turn * 10 + np.arange(comm.size), counts),
            )
        order = np.random.default_rng(comm.rank).permutation(len(requests))
        return all(np.array_equal(requests[i].wait(), wanted[i]) for i in order)

    assert run(4, rank_main, timeout_s=300) == [True] * 4


def test_an_exchange_of_counts_is_an_operation_of_its_own() -> None:
    def rank_main(comm: Any) -> list[int]:
        sent = [comm.rank + 1] * comm.size
        x = np.full(sum(sent), comm.rank)
        before = core_of(comm).next_seq
        got = comm.alltoallv(x, send_counts=sent)
        exchanged = core_of(comm).next_seq - before
        comm.alltoallv(x, send_counts=sent, recv_counts=[1, 2], out=got)
        return [exchanged, core_of(comm).next_seq - before, *got.tolist()]

    assert run(2, rank_main, timeout_s=300) == [[2, 3, 0, 1, 1]] * 2
