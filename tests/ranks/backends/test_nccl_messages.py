# SPDX-License-Identifier: Apache-2.0
"""Lists of messages by NCCL, which all ranks give in one call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, forget_ranks

from commrt.comm import core_of
from commrt.errors import BackendError, MismatchError, UsageError

LENGTHS = (0, 1, 5, 64)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def values(source: int, number: int, count: int) -> Any:
    return np.arange(count, dtype="f4") + 100 * source + 10 * number


def give(rank: Rank, edges: list[tuple[int, int, int]], how: str) -> list[Any]:
    """Send along edges of (source, dest, elements); return what to compare."""
    own = rank.rank
    sends = [
        (rank.array(values(own, i, n)), dest)
        for i, (source, dest, n) in enumerate(edges)
        if source == own
    ]
    coming = [(i, each) for i, each in enumerate(edges) if each[1] == own]
    recvs = [(rank.array(np.full(n, -1, "f4")), source) for _, (source, _, n) in coming]
    call = {"sends": sends, "recvs": recvs, "backend": "nccl"}
    if how == "blocking":
        result = rank.comm.multi_sendrecv(**call)
    elif how == "nonblocking":
        request = rank.comm.multi_sendrecv(**call, nonblocking=True)
        result = request.wait()
        request.be_quiet()
    else:
        bound: Any = rank.comm.plan.multi_sendrecv(**call)
        assert bound.label == "nccl/messages"
        bound()
        result = bound.start().wait()
    assert all(each is out for each, (out, _) in zip(result, recvs, strict=True))
    return [
        (rank.fetch(out), values(source, i, n))
        for (out, _), (i, (source, _, n)) in zip(recvs, coming, strict=True)
    ]


@pytest.mark.parametrize("how", ["blocking", "nonblocking", "bound"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_drawn_lists_arrive_in_order(size: int, how: str, seed: int) -> None:
    rng = random.Random(f"{size} {how} {seed}")
    lists = [
        [
            (rng.randrange(size), rng.randrange(size), rng.choice(LENGTHS))
            for _ in range(rng.randint(0, 4 * size))
        ]
        for _ in range(4)
    ]

    def main(rank: Rank) -> int:
        rank.comm.barrier(stream=rank.stream)  # so that who has no message has a device
        found = [each for edges in lists for each in give(rank, edges, how)]
        rank.stream.synchronize()
        for value, wanted in found:
            assert value().tolist() == wanted.tolist()
        return len(found)

    with nccl_here():
        compared = on_nccl_threads(size, main, seed=seed)
    assert sum(compared) == sum(len(edges) for edges in lists)


def test_what_nccl_cannot_keep_is_refused_before_anything_is_sent() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        x, out = rank.array(np.ones(4, "f4")), rank.array(np.zeros(4, "f4"))
        short = rank.array(np.zeros(2, "f4"))
        host = np.ones(4, "f4")
        wrong: list[tuple[str, dict[str, Any]]] = [
            (r"sends\[0\] has a tag", {"sends": [(x, 0, 3)], "recvs": [(out, 0)]}),
            (r"recvs\[0\] has a tag", {"sends": [(x, 0)], "recvs": [(out, 0, 1)]}),
            ("in host memory", {"sends": [(host, 0)]}),
            ("different places", {"sends": [(x, 0)], "recvs": [(host + 1, 0)]}),
            ("from itself: both", {"sends": [(x, 0)], "recvs": [(short, 0)]}),
            (
                "reads while it writes",
                {"sends": [(x, 0)], "recvs": [(x, 0)], "in_place": True},
            ),
            ("its device is not known", {}),
        ]
        for said, lists in wrong:
            with pytest.raises(UsageError, match=said):
                comm.multi_sendrecv(**lists, backend="nccl")
        with pytest.raises(UsageError, match="backend='mpi' must be None"):
            comm.multi_sendrecv(sends=[(x, 0)], recvs=[(out, 0)], backend="mpi")
        assert core_of(comm).next_seq == len(wrong)  # each has its place
        comm.multi_sendrecv(sends=[(x, 0)], recvs=[(out, 0)], backend="nccl")
        value = rank.fetch(out)
        rank.stream.synchronize()
        assert value().tolist() == [1.0] * 4

    with nccl_here():
        on_nccl_threads(1, main)


def test_without_nccl_it_says_why() -> None:
    def main(rank: Rank) -> None:
        x, out = rank.array(np.ones(4, "f4")), rank.array(np.zeros(4, "f4"))
        with pytest.raises(BackendError, match="NCCL has no use of a threads device"):
            rank.comm.multi_sendrecv(sends=[(x, 0)], recvs=[(out, 0)], backend="nccl")
        rank.stream.synchronize()

    on_nccl_threads(1, main)


def test_check_mode_names_the_ranks_whose_lengths_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        other = 1 - rank.rank
        x, out = rank.array(np.ones(4, "f4")), rank.array(np.zeros(4 - rank.rank, "f4"))
        said = r"rank 0 sends \[16\] bytes to rank 1, which receives \[12\] from it"
        with pytest.raises(MismatchError, match=said):
            rank.comm.multi_sendrecv(
                sends=[(x, other)], recvs=[(out, other)], backend="nccl"
            )
        rank.stream.synchronize()

    with nccl_here():
        on_nccl_threads(2, main)


def test_it_is_captured_and_launched() -> None:
    def main(rank: Rank) -> None:
        other = 1 - rank.rank
        x, out = rank.array(np.ones(4, "f4")), rank.array(np.zeros(4, "f4"))
        call: Any = rank.comm.plan.multi_sendrecv(
            sends=[(x, other)], recvs=[(out, other)], backend="nccl"
        )
        call()
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle, 2)
        call.start().wait()
        graph = rank.device.end_capture(rank.stream.handle)
        for turn in range(3):
            rank.fill(x, 10.0 * turn + rank.rank)
            rank.device.graph_launch(graph, rank.stream.handle)
            value = rank.fetch(out)
            rank.stream.synchronize()
            assert value().tolist() == [10.0 * turn + other] * 4
        rank.device.graph_destroy(graph)

    with nccl_here():
        on_nccl_threads(2, main)
