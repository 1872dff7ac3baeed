# SPDX-License-Identifier: Apache-2.0
"""Check mode: right calls tell numbers alone, wrong ones are found by these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.comm import core_of
from commrt.errors import MismatchError, RevokedError, TimeoutError_
from commrt.local import run
from commrt.vocabulary.operations import COLLECTIVES, operation

F = np.float32


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")


def counts_of(comm: Any, number: int) -> list[int]:
    """Return uneven lengths, with zeros."""
    return [(rank * 2 + number) % 3 for rank in range(comm.size)]


def pairs_of(comm: Any, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what this rank sends to each rank, and receives from each."""
    there, rank = range(comm.size), comm.rank
    sent = tuple((rank * 2 + peer + number) % 4 for peer in there)
    return sent, tuple((peer * 2 + rank + number) % 4 for peer in there)


def call(comm: Any, coll: str, number: int, **more: Any) -> Any:
    """Make a right call of an operation, of lengths that depend on ``number``."""
    method, spec = getattr(comm, coll), operation(coll)
    size, rank = comm.size, comm.rank
    if spec.x_count == "none":
        return method(**more)
    if coll == "alltoallv":
        sent, received = pairs_of(comm, number)
        x, out = np.ones(sum(sent), F), np.empty(sum(received), F)
        return method(x, out=out, send_counts=sent, recv_counts=received, **more)
    if spec.count_arguments:
        counts = counts_of(comm, number)
        own, total = counts[rank], sum(counts)
        is_cut = coll in ("scatterv", "reduce_scatterv")
        x, out = (
            np.ones(total if is_cut else own, F),
            np.empty(own if is_cut else total, F),
        )
        return method(x, out=out, counts=tuple(counts), **more)
    length = number * size if spec.out_count == "div_size" else number
    if coll == "alltoall":
        length = number * size
    x = np.ones(length, F)
    outs = {"times_size": number * size, "div_size": number}
    return method(x, out=np.empty(outs.get(spec.out_count, length), F), **more)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_right_calls_tell_numbers_alone(coll: str, size: int) -> None:
    """Also where one rank's call is looked at in Python and the others' are not."""

    def rank_main(comm: Any) -> list[int]:
        core = core_of(comm)
        assert core.checker is not None
        channel, told = core.checker.channel, []
        for at, number in enumerate((4, 4, 1, 1, 0, 0, 7, 4)):
            before = channel.next_seq
            in_python = at % 3 == comm.rank
            more: dict[str, Any] = {"timeout_s": 300.0} if in_python else {}
            if not core.num_plans:
                more = {}  # the first call goes through Python on all ranks
            if at >= 5:
                more["name"] = f"w{at}" + "\ud800" * (at == 6)
            call(comm, coll, number, **more)
            told.append(channel.next_seq - before)
        return told

    assert run(size, rank_main, timeout_s=300) == [[1] * 8] * size


def ones(comm: Any, **more: Any) -> Any:
    return comm.allreduce(np.ones(6, F), **more)


OTHERS: list[tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("operation", "operation", ones, lambda c: c.alltoall(np.ones(6 * c.size, F))),
    ("barrier", "operation", ones, lambda c: c.barrier()),
    ("length", "elements", ones, lambda c: c.allreduce(np.ones(5, F))),
    ("type", "dtype", ones, lambda c: c.allreduce(np.ones(6, np.int32))),
    ("reduction", "op", ones, lambda c: ones(c, op="max")),
    (
        "root",
        "root",
        lambda c: c.bcast(np.ones(3), root=0),
        lambda c: c.bcast(np.ones(3), root=1),
    ),
    ("algorithm", "algorithm", ones, lambda c: ones(c, algorithm="ring")),
    ("name", "name", ones, lambda c: ones(c, name="w")),
    (
        "names",
        "name",
        lambda c: c.allreduce(np.ones(6, F), name="weights of layer 1"),
        lambda c: c.allreduce(np.ones(6, F), name="weights of layer 2"),
    ),
    (
        "counts",
        "(elements, )?counts",
        lambda c: call(c, "allgatherv", 1),
        lambda c: call(c, "allgatherv", 2),
    ),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("field", "usual", "odd"),
    [row[1:] for row in OTHERS],
    ids=[row[0] for row in OTHERS],
)
def test_calls_that_all_ranks_have_made_before_are_compared(
    size: int, field: str, usual: Any, odd: Any
) -> None:
    def rank_main(comm: Any) -> str:
        for _ in range(2):
            usual(comm)
            odd(comm)
        before = core_of(comm).next_seq
        with pytest.raises(MismatchError, match=f"disagree on {field}") as raised:
            (odd if comm.rank == 1 else usual)(comm)
        assert core_of(comm).next_seq == before
        assert ones(comm).tolist() == [float(size)] * 6
        return str(raised.value)

    texts = run(size, rank_main, timeout_s=300)
    assert texts == [texts[0]] * size


def test_a_pair_that_disagrees_is_found_in_calls_made_before() -> None:
    def rank_main(comm: Any) -> str:
        for number in (1, 2, 1, 2):
            call(comm, "alltoallv", number)
        with pytest.raises(MismatchError, match="elements to rank") as raised:
            call(comm, "alltoallv", 2 if comm.rank == 2 else 1)
        call(comm, "alltoallv", 1)
        return str(raised.value)

    texts = run(3, rank_main, timeout_s=300)
    assert texts == [texts[0]] * 3


def test_a_rank_that_never_comes_is_named_by_the_engines_own_comparison() -> None:
    def rank_main(comm: Any) -> str:
        ones(comm)
        if comm.rank == 1:
            core_of(comm).world.meet(range(3), "over")
            return ""
        comm.timeout_s = 0.1
        with pytest.raises(TimeoutError_) as raised:
            ones(comm)
        with pytest.raises(RevokedError, match="check mode waited in vain before"):
            ones(comm)
        comm.timeout_s = 300
        core_of(comm).world.meet(range(3), "over")
        return str(raised.value)

    texts = run(3, rank_main, timeout_s=300)
    said = "allreduce #1 on local, rank 0: not complete within 0.1 s"
    assert texts[0].startswith(said)
    assert "rank 1 on this node has not started it" in texts[0]
    assert "nothing of it was sent" in texts[2]


def test_a_name_costs_no_look_at_the_call() -> None:
    def rank_main(comm: Any) -> None:
        core = core_of(comm)
        ones(comm)
        comm.barrier()

        def never(*_: Any) -> None:
            raise AssertionError

        core._call = never
        for name in ("w", "", "é" * 9, "🙂", None):
            assert ones(comm, name=name).tolist() == [2.0] * 6
            comm.barrier(name=name)

    run(2, rank_main, timeout_s=300)


# -- the numbers themselves --------------------------------------------------------


def check(size: int = 3, seed: int = 5) -> _native.CallCheck:
    def never() -> None:
        raise AssertionError

    return _native.CallCheck(never, size, seed)


USUAL: dict[str, Any] = {
    "coll": 11,
    "dtype": 11,
    "redop": 0,
    "root": 0,
    "count": 5,
    "counts": [1, 2, 0],
    "seq": 8,
    "name": 0,
    "rest": 0,
}


def test_each_fact_of_a_call_changes_its_number() -> None:
    others: dict[str, list[Any]] = {name: [3, 6, 2**31 - 1] for name in USUAL}
    others["counts"] = [[], [1, 2], [2, 1, 0], [1, 2, 0, 0], [1, 2, 2**62]]
    others["dtype"], others["redop"], others["coll"] = [0, 1, 16], [1, 11], [0, 12, 15]
    numbers = {check().fingerprint(**USUAL), check(seed=6).fingerprint(**USUAL)}
    expected = 2
    for name, values in others.items():
        for value in values:
            numbers.add(check().fingerprint(**{**USUAL, name: value}))
            expected += 1
    assert len(numbers) == expected
    assert 0 not in numbers


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_pairs_add_up_to_0_only_where_all_of_them_agree(size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 4, (size, size))

    def total(received: Any) -> int:
        rows = zip(range(size), lengths.tolist(), received.T.tolist(), strict=True)
        return sum(check(size).pairs(*row) for row in rows) % 2**64

    assert total(lengths) == 0
    for _ in range(20):
        other = draw.integers(0, 4, (size, size))
        assert (total(other) == 0) == bool((other == lengths).all())
