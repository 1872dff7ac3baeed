# SPDX-License-Identifier: Apache-2.0
"""COMMRT_DEBUG=check: the same MismatchError everywhere, and nothing was sent."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from cases import run_cases, sample

from commrt.comm import core_of
from commrt.errors import (
    BufferError_,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.local import run
from commrt.vocabulary.operations import COLLECTIVES

F = np.float32


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")


def disagreement(size: int, odd_one: int, usual: Any, odd: Any) -> str:
    """Return the text that every rank raised, once all of them raised the same."""

    def rank_main(comm: Any) -> str:
        call = odd if comm.rank == odd_one else usual
        before = core_of(comm).next_seq
        with pytest.raises(MismatchError) as raised:
            call(comm)
        assert core_of(comm).next_seq == before
        # Nothing was sent: the communicator is as good as new.
        assert comm.allreduce(np.ones(4, F)).tolist() == [comm.size] * 4
        return str(raised.value)

    texts = run(size, rank_main, timeout_s=300)
    assert texts == [texts[0]] * size
    return texts[0]


def ones(comm: Any, **arguments: Any) -> Any:
    return comm.allreduce(np.ones(6, F), **arguments)


DISAGREEMENTS: list[
    tuple[str, Callable[[Any], Any], Callable[[Any], Any], list[str]]
] = [
    (
        "operation",
        ones,
        lambda c: c.alltoall(np.ones(6 * c.size, F)),
        ["operation", "operation=alltoall"],
    ),
    (
        "barrier",
        ones,
        lambda c: c.barrier(),
        ["operation", "operation=barrier"],
    ),
    (
        "count",
        ones,
        lambda c: c.allreduce(np.ones(5, F)),
        ["elements", "elements=5", "elements=6"],
    ),
    (
        "dtype",
        ones,
        lambda c: c.allreduce(np.ones(6, np.int32)),
        ["dtype", "dtype=int32", "dtype=float32"],
    ),
    ("reduction", ones, lambda c: ones(c, op="max"), ["op", "op=max", "op=sum"]),
    (
        "root",
        lambda c: c.bcast(np.ones(3), root=0),
        lambda c: c.bcast(np.ones(3), root=1),
        ["root", "root=0", "root=1"],
    ),
    (
        "algorithm",
        lambda c: ones(c, algorithm="ring"),
        lambda c: ones(c, algorithm="direct"),
        ["algorithm", "ring", "direct"],
    ),
    (
        "parameters",
        ones,
        lambda c: ones(c, params={"chunk": 64}),
        ["algorithm", "chunk"],
    ),
    (
        "name",
        lambda c: ones(c, name="layer 1"),
        lambda c: ones(c, name="layer 2"),
        ["name", "name=layer 1", "name=layer 2"],
    ),
    (
        "long name",
        lambda c: ones(c, name="é" * 500),
        lambda c: ones(c, name="é" * 499 + "e"),
        ["name", "name=éééééééé..."],
    ),
    (
        "nonblocking",
        lambda c: ones(c, nonblocking=True),
        lambda c: c.allreduce(np.ones(7, F), nonblocking=True),
        ["elements", "elements=7"],
    ),
]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [row[1:] for row in DISAGREEMENTS],
    ids=[row[0] for row in DISAGREEMENTS],
)
def test_every_rank_raises_the_same(
    size: int, usual: Any, odd: Any, said: list[str]
) -> None:
    text = disagreement(size, size - 1, usual, odd)
    field, *values = said
    assert f"the ranks disagree on {field}" in text
    assert "nothing was sent" in text
    for value in values:
        assert value in text
    assert re.search(rf"ranks? {size - 1}: .*test_check_mode\.py:\d+\)", text)


def test_swapped_order_is_told_by_names() -> None:
    def rank_main(comm: Any) -> str:
        order = ["weights", "bias"] if comm.rank else ["bias", "weights"]
        with pytest.raises(MismatchError) as raised:
            comm.allreduce(np.ones(4, F), name=order[0])
        return str(raised.value)

    texts = run(2, rank_main)
    assert texts[0] == texts[1]
    assert texts[0].startswith("allreduce #0 on local: the ranks disagree on name")


def test_a_skipped_operation_is_found_at_the_next() -> None:
    def rank_main(comm: Any) -> str:
        # Rank 0 forgets the sum, so its maximum meets rank 1's sum.
        op = "max" if comm.rank == 0 else "sum"
        with pytest.raises(MismatchError, match="disagree on op") as raised:
            comm.allreduce(np.ones(4, F), op=op)
        return str(raised.value)

    texts = run(2, rank_main)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("coll", COLLECTIVES)
def test_right_calls_pass(coll: str, seed: int) -> None:
    cases = sample(coll, 3, seed, 6)
    wrong = run(3, lambda comm: run_cases(comm, cases), timeout_s=300)
    assert wrong == [[], [], []]


def test_sequence_numbers_are_those_of_the_operations() -> None:
    def rank_main(comm: Any) -> int:
        for _ in range(5):
            ones(comm)
        return core_of(comm).next_seq

    assert run(2, rank_main) == [5, 5]


MISTAKES: list[tuple[str, Callable[[Any], Any], type[UsageError], str]] = [
    ("reduction", lambda c: ones(c, op="summ"), UsageError, "unknown reduction"),
    ("root", lambda c: c.bcast(np.ones(3), root=3), UsageError, "root=3 is not a rank"),
    (
        "length",
        lambda c: c.reduce_scatter(np.ones(4)),
        UsageError,
        "not a multiple of the 3 ranks",
    ),
    ("type", lambda c: c.allreduce(np.ones(3, object)), BufferError_, "dtype object"),
    ("algorithm", lambda c: ones(c, algorithm="rings"), UsageError, "asks for 'rings'"),
    ("limit", lambda c: ones(c, timeout_s=-1), UsageError, "timeout_s=-1"),
    ("compression", lambda c: ones(c, compress="int9"), UsageError, "int9"),
    ("plan", lambda c: c.plan.bcast(np.ones(3), root=-1), UsageError, "root=-1"),
    ("grid", lambda c: c.cart((2,)), UsageError, "have 2 places, expected 3"),
    ("colour", lambda c: c.split("red"), UsageError, "color='red'"),
    ("edges", lambda c: c.graph([7], []), UsageError, "sources=7 is not a rank"),
    ("long", lambda c: ones(c, algorithm='"\\' * 400), UsageError, "asks for"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [m[1:] for m in MISTAKES],
    ids=[m[0] for m in MISTAKES],
)
def test_a_mistake_of_one_rank_is_every_ranks_error(
    call: Callable[[Any], Any], error: type[UsageError], message: str
) -> None:
    def rank_main(comm: Any) -> list[str]:
        with pytest.raises(error, match=message) as raised:
            (call if comm.rank == 1 else ones)(comm)
        assert core_of(comm).next_seq == 0
        assert ones(comm).tolist() == [3.0] * 6
        return [type(raised.value).__name__, str(raised.value)]

    told = run(3, rank_main, timeout_s=300)
    assert told == [told[0]] * 3
    assert "rank 1" in told[0][1]
    assert "nothing was sent" in told[0][1]


@pytest.mark.parametrize("letter", ["д", "訓", "🙂", '"', "\n", "\udcff"])
def test_programs_whose_names_are_of_any_letters(letter: str) -> None:
    source = "def wrong(comm, x): comm.allreduce(x, algorithm='rings' * 99)"
    name = f"/somewhere/{letter * 60}_train.py"
    program: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, name, "exec"), program)

    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"_train\.py:1; check mode"):
            program["wrong"](comm, np.ones(3)) if comm.rank == 1 else ones(comm)
        assert ones(comm).tolist() == [2.0] * 6

    run(2, rank_main, timeout_s=300)


def test_a_mistake_that_nobody_hears_of_yet_stays_that_ranks_error() -> None:
    def rank_main(comm: Any) -> float:
        comm.timeout_s = 0.05 if comm.rank == 0 else 30
        if comm.rank == 0:
            with pytest.raises(UsageError, match=r"^bcast: root=9 is not a rank"):
                comm.bcast(np.ones(3), root=9)
        core_of(comm).world.meet(range(2), "later")
        comm.timeout_s = 300
        if comm.rank == 1:
            with pytest.raises(UsageError, match="rank 0: bcast: root=9"):
                ones(comm)
        return float(ones(comm)[0])

    assert run(2, rank_main, timeout_s=300) == [2.0, 2.0]


def test_another_k_is_named() -> None:
    def rank_main(comm: Any) -> str:
        with pytest.raises(MismatchError) as raised:
            comm.topk_allreduce(np.ones(9), 3 + comm.rank)
        return str(raised.value)

    first, second = run(2, rank_main)
    assert first == second
    agrees_not = "the ranks disagree on k; nothing was sent; let all ranks make the "
    assert agrees_not + "same call:\n  rank 0: k=3 " in first


def test_a_missing_rank_is_named_and_the_communicator_given_up() -> None:
    def rank_main(comm: Any) -> str:
        ones(comm)
        if comm.rank == 1:
            core_of(comm).world.meet(range(3), "over")
            return ""
        with pytest.raises(TimeoutError_) as raised:
            ones(comm, timeout_s=0.1)
        with pytest.raises(RevokedError, match="check mode waited in vain before"):
            ones(comm)
        core_of(comm).world.meet(range(3), "over")
        return str(raised.value)

    texts = run(3, rank_main, timeout_s=300)
    assert texts[0].startswith(
        "allreduce #1 on local, rank 0: not complete within 0.1 s"
    )
    assert "rank 1 on this node has not started it" in texts[0]
    assert "nothing of it was sent" in texts[2]


def test_derived_communicators_are_checked_too() -> None:
    def rank_main(comm: Any) -> str:
        with comm.dup(name="copy") as copy:
            with pytest.raises(MismatchError) as raised:
                copy.allreduce(np.ones(2 + copy.rank, F))
            return str(raised.value)

    assert run(2, rank_main)[1].startswith("allreduce #0 on copy: the ranks disagree")


def test_one_rank_is_not_checked() -> None:
    assert run(1, lambda comm: float(ones(comm)[0])) == [1.0]


def test_factors_may_differ() -> None:
    def rank_main(comm: Any) -> list[float]:
        x = np.ones(3, F)
        return comm.allreduce(x, op="premul_sum", factor=1.0 + comm.rank).tolist()

    assert run(3, rank_main, timeout_s=300) == [[6.0] * 3] * 3


def test_two_threads_at_once_on_one_communicator_are_told_so() -> None:
    """Their calls have no common order, however equal they are."""
    second_came = threading.Event()

    def first_call(comm: Any) -> None:
        """All ranks were asked for it before: it may still be right."""
        with suppress(RevokedError):
            assert ones(comm).tolist() == [3] * 6

    def rank_main(comm: Any) -> str:
        said = ""
        if comm.rank == 0:
            checker = core_of(comm).checker
            assert checker is not None
            before = checker.channel.next_seq
            thread = threading.Thread(target=first_call, args=(comm,))
            thread.start()
            while checker.channel.next_seq == before:
                assert thread.is_alive()
            with pytest.raises(UsageError) as raised:
                ones(comm)
            said = str(raised.value)
            second_came.set()
            thread.join(300)
        else:
            assert second_came.wait(300)
            first_call(comm)
        with pytest.raises(RevokedError, match="two threads called at once"):
            ones(comm)
        return said

    said = run(3, rank_main, timeout_s=300)[0]
    assert said.startswith("allreduce #0 on local, rank 0: another thread")
    assert "by comm.dup()" in said


def test_threads_with_communicators_of_their_own_are_compared() -> None:
    def rank_main(comm: Any) -> list[float]:
        mine = [comm.dup() for _ in range(3)]
        sums: list[float] = []

        def work(index: int) -> None:
            for _ in range(20):
                sums.append(float(mine[index].allreduce(np.full(5, index))[4]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for each in mine:
            each.free()
        return sorted(sums)

    expected = [float(2 * index) for index in range(3) for _ in range(20)]
    assert run(2, rank_main, timeout_s=300) == [expected] * 2
