# SPDX-License-Identifier: Apache-2.0
"""Calls that differ, without check mode: all ranks raise the same MismatchError."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi
from relay_ranks import RelayRanks

import commrt
from commrt.comm import core_of
from commrt.errors import CommError, MismatchError, RefusedError, UsageError
from commrt.local import LocalRanks, run

F = np.float32
MAX = commrt.reduction(np.maximum)
AT, CALLS = 5, 90
"""The call that differs, and calls in all; who only sends is at most 65 ahead."""


def kinds() -> dict[str, Callable[[Any, int, bool, dict[str, Any]], Any]]:
    """Return calls that one rank makes otherwise; its messages have equal lengths."""

    def order(comm: Any, turn: int, wrong: bool, how: dict[str, Any]) -> Any:
        swapped = turn % 2 ^ (wrong or (turn == AT + 1 and comm.rank == comm.size - 1))
        return comm.allreduce(np.ones(2, F), op="max" if swapped else "sum", **how)

    return {
        "reduction": lambda comm, _, wrong, how: comm.allreduce(
            np.ones(2, F), op="max" if wrong else "sum", **how
        ),
        "type": lambda comm, _, wrong, how: comm.allreduce(
            np.ones(2, np.int32 if wrong else F), **how
        ),
        "root of a bcast": lambda comm, _, wrong, how: comm.bcast(
            np.ones(2, F), root=1 if wrong else 0, **how
        ),
        "root of a gather": lambda comm, _, wrong, how: comm.gather(
            np.ones(2, F), root=1 if wrong else 0, **how
        ),
        "every root its own": lambda comm, turn, _, how: comm.bcast(
            np.ones(2, F), root=comm.rank if turn == AT else 0, **how
        ),
        "operation": lambda comm, _, wrong, how: (
            comm.scan(np.ones(2, F), **how)
            if wrong
            else comm.allreduce(np.ones(2, F), **how)
        ),
        "order": order,
    }


@pytest.mark.parametrize("nonblocking", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", kinds())
def test_all_ranks_raise_the_same(kind: str, size: int, nonblocking: bool) -> None:
    how = {"nonblocking": True} if nonblocking else {}

    def rank_main(comm: Any) -> tuple[int, str, str]:
        for turn in range(CALLS):
            wrong = turn == AT and comm.rank == comm.size - 1
            try:
                done = kinds()[kind](comm, turn, wrong, how)
                if nonblocking:
                    done.wait()
            except MismatchError as error:
                with pytest.raises(MismatchError) as later:
                    comm.barrier()
                return turn, str(error), str(later.value)
        return CALLS, "", ""

    found = run(size, rank_main, timeout_s=300)
    assert len({text for _, *texts in found for text in texts}) == 1, found
    assert all(AT <= turn <= AT + 65 for turn, *_ in found), found
    assert "made another call" in found[0][1]


PLACES: dict[str, Callable[[list[list[int]]], LocalRanks]] = {
    "relay": RelayRanks,
    "MPI": lambda nodes: FakeMpi().ranks(nodes),
}
NODES = [[[0], [1]], [[0, 1], [2]], [[0], [1, 2], [3, 4]]]


@pytest.mark.parametrize("carrier", PLACES)
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("kind", kinds())
def test_ranks_of_other_nodes_raise_it_too(
    kind: str, nodes: list[list[int]], carrier: str
) -> None:
    with PLACES[carrier](nodes) as ranks:

        def rank_main(comm: Any) -> str:
            comm.timeout_s = 250
            try:
                for turn in range(CALLS):
                    wrong = turn == AT and comm.rank == comm.size - 1
                    kinds()[kind](comm, turn, wrong, {})
                comm.barrier()  # who only sends waits in no other call
            except MismatchError as error:
                return str(error)
            return ""

        texts = ranks.each(rank_main)
        # Ranks of two nodes may find it at the same time.
        assert 1 <= len(set(texts)) <= len(nodes), texts
        assert all("made another call" in text or LENGTHS in text for text in texts)


LENGTHS = "the ranks called with different arguments"
"""Of a message that belongs to another call, whose length differs."""


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_calls_of_late_ranks_of_other_nodes_are_no_others(
    nodes: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks are so late with their calls that others tell them of theirs."""
    monkeypatch.setenv("COMMRT_CHAOS", f"{seed}:delay=0.2@chance=0.02")

    def rank_main(comm: Any) -> None:
        draw, requests = random.Random(f"{seed} late"), []
        for turn in range(60):
            root, x = draw.randrange(comm.size), np.full(draw.choice([0, 1, 900]), 1.0)
            name = draw.choice(["bcast", "gather", "reduce", "allreduce", "scan"])
            op = {"op": draw.choice(["sum", "max"])} if "re" in name else {}
            how = {} if name in ("allreduce", "scan") else {"root": root}
            requests.append(getattr(comm, name)(x, **op, **how, nonblocking=True))
            if draw.random() < 0.7:
                commrt.wait_all(requests)
            if turn % 20 == 0:
                comm.allreduce(x, op=MAX)
        commrt.wait_all(requests)
        comm.barrier()

    with RelayRanks(nodes) as ranks:
        ranks.each(rank_main)


def test_messages_that_wait_raise_it_too() -> None:
    def rank_main(comm: Any) -> str:
        if comm.rank == 2:
            with pytest.raises(MismatchError) as raised:
                comm.recv(np.empty(1), source=0)
        else:
            with pytest.raises(MismatchError) as raised:
                comm.barrier() if comm.rank else comm.allreduce(np.ones(1))
        return str(raised.value)

    assert len(set(run(3, rank_main, timeout_s=300))) == 1


def test_shrink_makes_a_communicator_that_works() -> None:
    def rank_main(comm: Any) -> float:
        with pytest.raises(MismatchError):
            comm.allreduce(np.ones(2, F), op=("sum", "max")[comm.rank == 1])
        assert core_of(comm).calls_differ
        return float(comm.shrink().allreduce(np.ones(1))[0])

    assert run(3, rank_main, timeout_s=300) == [3.0] * 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_right_calls_are_never_taken_for_wrong_ones(size: int, seed: int) -> None:
    """Roots and ranks that refuse are drawn; ranks run ahead of each other."""

    def rank_main(comm: Any) -> list[str]:
        draw = random.Random(f"{seed} {size}")
        waits = random.Random(f"{seed} {size} {comm.rank}")
        requests, wrong = [], []
        for turn in range(400):
            name = draw.choice(["bcast", "allreduce", "gather", "reduce", "barrier"])
            root, count = draw.randrange(size), draw.choice([0, 1, 3, 700])
            nonblocking, refuser = draw.random() < 0.4, draw.randrange(20 * size)
            how: dict[str, Any] = {"nonblocking": True} if nonblocking else {}
            if name in ("bcast", "gather", "reduce"):
                how["root"] = root
            x = () if name == "barrier" else (np.full(count, float(turn)),)
            if comm.rank == refuser and x:
                how["out"] = np.empty(count + 1, np.int8)
            try:
                done = getattr(comm, name)(*x, **how)
                if nonblocking:
                    requests.append(done)
            except (RefusedError, UsageError):
                pass
            except CommError as error:
                wrong.append(f"{turn} {name}: {error!r}")
            while requests and (len(requests) > 3 or waits.random() < 0.2):
                try:
                    requests.pop(0).wait()
                except RefusedError:
                    pass
                except CommError as error:
                    wrong.append(f"{turn} wait: {error!r}")
        for request in requests:
            with suppress(RefusedError):
                request.wait()
        return wrong

    assert run(size, rank_main, timeout_s=300) == [[]] * size
