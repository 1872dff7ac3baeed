# SPDX-License-Identifier: Apache-2.0
"""Peers, roots and reductions by position, as other libraries' users write them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from started_operations import past_refusals

from commrt import trace
from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.local import run
from commrt.vocabulary.operations import OPERATIONS, OTHERS, operation

ROOTED = [spec.name for spec in OPERATIONS if spec.has_root]
REDUCING = [spec.name for spec in OPERATIONS if spec.reduces]


def arguments(name: str, size: int, rank: int) -> tuple[Any, dict[str, Any]]:
    """Return an array and the counts of a call."""
    spec = operation(name)
    blocks = 1 if spec.out_count == "times_size" else size
    x = np.arange(2 * blocks, dtype=float) + rank
    return x, {each: [2] * size for each in spec.count_arguments}


@pytest.mark.parametrize("again", [False, True], ids=["first", "known to the engine"])
@pytest.mark.parametrize("name", ROOTED)
def test_a_root_by_position(name: str, again: bool) -> None:
    def main(comm: Any) -> Any:
        call = getattr(comm, name)
        x, counts = arguments(name, comm.size, comm.rank)
        wanted = call(x.copy(), root=1, **counts)
        for _ in range(3 if again else 1):
            found = call(x.copy(), 1, **counts)
        return np.array_equal(found, wanted) if wanted is not None else found is None

    assert run(3, main) == [True] * 3


@pytest.mark.parametrize("name", REDUCING)
def test_a_reduction_by_position(name: str) -> None:
    def main(comm: Any) -> bool:
        call = getattr(comm, name)
        x, counts = arguments(name, comm.size, comm.rank)
        out = {} if operation(name).in_place else counts
        wanted = call(x.copy(), op="max", **out)
        same = []
        for op in ("max", "MAX", np.maximum, max):
            for _ in range(2):
                found = call(x.copy(), op, **out)
                same.append(wanted is None or np.array_equal(found, wanted))
        return all(same)

    assert run(3, main) == [True] * 3


def test_a_reduction_and_a_root_in_either_order() -> None:
    def main(comm: Any) -> list[Any]:
        x = np.full(1, comm.rank + 1.0)
        ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            (("max", 2), {}),
            ((2, "max"), {}),
            ((2,), {"op": "max"}),
            (("max",), {"root": 2}),
        ]
        found = []
        for args, more in ways * 2:
            got = comm.reduce(x.copy(), *args, **more)
            found.append(None if got is None else got.item())
        return found

    assert run(3, main) == [[None] * 8, [None] * 8, [3.0] * 8]


def test_peers_and_tags_by_position() -> None:
    def main(comm: Any) -> list[float]:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x, out, got = np.full(1, float(comm.rank)), np.empty(1), np.empty(1)
        found = []
        for _ in range(2):
            sent = comm.send(x, right, 3, nonblocking=True)
            comm.recv(out, left, 3)
            sent.wait()
            comm.sendrecv(x, right, got, left)
            found += [out.item(), got.item()]
        plans = comm.plan.send(x, right), comm.plan.recv(out, left)
        sent, came = plans[0].start(), plans[1].start()
        sent.wait(), came.wait()
        comm.plan.bcast(x, 0)()
        return [*found, out.item(), x.item()]

    assert run(3, main) == [[(r - 1) % 3] * 5 + [0.0] for r in range(3)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.bcast(np.ones(1), 0, 1), r"bcast\(\) takes x, root by position"),
        (lambda c: c.bcast(np.ones(1), 0, root=0), r"bcast\(\) got root twice"),
        (lambda c: c.allreduce(np.ones(1), "sum", op="max"), r"got op twice"),
        (lambda c: c.reduce(np.ones(1), 0, 1), r"reduction op=1"),
        (lambda c: c.reduce(np.ones(1), "sum", "max"), "root='max' is not a rank"),
        (lambda c: c.allreduce(np.ones(1), 0), "unknown reduction op=0"),
        (lambda c: c.allgather(np.ones(1), 0), r"allgather\(\) takes x by position"),
        (lambda c: c.barrier(0), r"barrier\(\) takes nothing by position"),
        (lambda c: c.bcast(np.ones(1), True), "root=True is not a rank"),
        (lambda c: c.bcast(np.ones(1), 7), "root=7 is not a rank"),
        (lambda c: c.send(np.ones(1), 9), "dest=9 is not a rank"),
        (lambda c: c.send(np.ones(1), 0, dest=0), "dest"),
        (lambda c: c.send(np.ones(1), 0, 1, 2), "positional"),
        (lambda c: c.recv(np.ones(1), 0, -1), "tag=-1"),
        (lambda c: c.sendrecv(np.ones(1), 0, np.ones(1), 0, 0), "positional"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    call: Any, message: str
) -> None:
    def main(comm: Any) -> None:
        comm.bcast(np.ones(1), 0)
        comm.reduce(np.ones(1), 0)
        if comm.rank == 1:
            with pytest.raises((TypeError, CommError), match=message):
                call(comm)
        total = past_refusals(lambda: comm.allreduce(np.ones(1)))
        assert total.item() == 2

    run(2, main)


@pytest.mark.parametrize("row", [row for row in OTHERS if row.positional])
def test_the_table_says_what_the_methods_take(row: Any) -> None:
    parameters = inspect.signature(getattr(Communicator, row.name)).parameters.values()
    by_position = [
        each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    assert by_position == ["self", *row.positional]


def test_a_log_has_the_root_and_the_peer() -> None:
    """Whether they stand behind the array or have a name."""

    def main(comm: Any) -> None:
        for root in (1, 0, 1):
            comm.bcast(np.ones(2), root)
            comm.bcast(np.ones(2), root=root)
        for tag in (4, 5):
            if comm.rank == 0:
                comm.send(np.ones(2), 1, tag)
            else:
                comm.recv(np.empty(2), 0, tag)

    with trace.record() as recording:
        run(2, main)
    first, second = (
        [(each.op, each.root, each.peer, each.tag) for each in log.operations]
        for log in sorted(recording.logs(), key=lambda log: log.rank)
    )
    roots = [("bcast", root, -1) for root in (1, 1, 0, 0, 1, 1)]
    assert [each[:3] for each in first[:6]] == roots
    assert [each[:3] for each in second[:6]] == roots
    assert first[6:] == [("send", -1, 1, 4), ("send", -1, 1, 5)]
    assert second[6:] == [("recv", -1, 0, 4), ("recv", -1, 0, 5)]


def test_a_log_has_the_bytes_of_numbers_and_lists() -> None:
    def main(comm: Any) -> None:
        for x in (3, [1.0, 2.0], np.float32(1)):
            comm.allreduce(x)
        if comm.rank == 0:
            comm.send([1, 2, 3], 1)
        else:
            comm.recv(np.empty(4, int))

    with trace.record() as recording:
        run(2, main)
    first, second = sorted(recording.logs(), key=lambda log: log.rank)
    sent = [(each.op, each.nbytes, each.dtype) for each in first.operations]
    assert sent[:3] == [
        ("allreduce", 8, "int64"),
        ("allreduce", 16, "float64"),
        ("allreduce", 4, "float32"),
    ]
    assert sent[3] == ("send", 24, "int64")
    assert second.operations[3].op == "recv"
