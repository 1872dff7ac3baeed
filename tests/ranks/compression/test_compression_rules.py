# SPDX-License-Identifier: Apache-2.0
"""Compression by a rule: what is compressed, what is not, and what explain says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.errors import RefusedError, UsageError
from commrt.local import run

Array = np.ndarray[Any, Any]

F = np.float32


def drawn(rank: int, count: int = 900) -> Array:
    return np.random.default_rng(rank).standard_normal(count).astype(F)


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "COMMRT_ALGORITHM", "allreduce:local/direct{compress=int8,shots=2}"
    )


@pytest.mark.usefixtures("by_rule")
def test_a_rule_compresses_what_can_be() -> None:
    def rank_main(comm: Any) -> None:
        x = drawn(comm.rank)
        want = comm.allreduce(x.copy(), compress="int8")
        exact = comm.allreduce(x.copy(), compress="none")
        for _ in range(2):  # the second time nothing has been remembered wrongly
            assert np.array_equal(comm.allreduce(x.copy()), want)
            whole = np.arange(900) + comm.rank
            assert np.array_equal(comm.allreduce(whole), 2 * np.arange(900) + 1)
            top = comm.allreduce(x.copy(), op="max")
            assert not np.array_equal(top, want)
        assert np.array_equal(comm.plan.allreduce(x.copy())(), want)
        assert not np.array_equal(exact, want)

    run(2, rank_main)


@pytest.mark.usefixtures("by_rule")
def test_explain_says_what_a_rule_compresses() -> None:
    def rank_main(comm: Any) -> None:
        said = str(comm.explain("allreduce", 4096))
        assert "local/direct{compress=int8,shots=2}" in said
        assert "compressed: int8 by alltoall and allgather, so not exact" in said
        said = str(comm.explain("allreduce", 4096, dtype="int32"))
        assert "not compressed, as x has dtype int32" in said
        said = str(comm.explain("allreduce", 4096, op="max"))
        assert "not compressed, as op='max'" in said
        assert "compress" not in str(comm.explain("alltoall", 4096))

    run(2, rank_main)


@pytest.mark.usefixtures("by_rule")
def test_deterministic_leaves_a_rules_compression_out() -> None:
    def rank_main(comm: Any) -> None:
        with comm.dup(deterministic=True) as strict:
            x = np.full(300, 1 / 3, F)
            assert np.array_equal(strict.allreduce(x.copy()), x + x)
            said = str(strict.explain("allreduce", 1200))
            assert "not compressed, as deterministic=True" in said
            comm.barrier()

    run(2, rank_main)


def test_nobody_compresses_unasked() -> None:
    def rank_main(comm: Any) -> None:
        for coll in ("allreduce", "alltoall"):
            for nbytes in (8, 1 << 16, 1 << 26):
                for candidate in comm.candidates(coll, nbytes):
                    assert "compress" not in candidate.params

    run(2, rank_main)


def test_a_call_may_ask_as_a_rule_does() -> None:
    def rank_main(comm: Any) -> None:
        x = drawn(comm.rank)
        want = comm.allreduce(x.copy(), compress="bfloat16")
        asked = comm.allreduce(x.copy(), params={"compress": "bfloat16"})
        assert np.array_equal(asked, want)
        named = comm.allreduce(x.copy(), algorithm="local/ring{compress=bfloat16}")
        assert np.array_equal(named, want)
        with pytest.raises(UsageError, match="unknown compress='int9'"):
            comm.allreduce(x, params={"compress": "int9"})

    run(2, rank_main)


def test_the_label_of_a_plan_says_how_it_compresses() -> None:
    def rank_main(comm: Any) -> None:
        call = comm.plan.allreduce(np.ones(6, F), compress="int8")
        assert call.operation == "allreduce"
        assert call.label == "compressed{compress=int8}"
        assert "allreduce by compressed{compress=int8}" in repr(call)

    run(1, rank_main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"out": np.empty(3, F)},
        {"timeout_s": -1},
        {"op": "summ"},
        {"algorithm": "rung"},
        {"compress": "zip"},
        {"residual": np.zeros(7, F)},
        {"nonblocking": 7},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.usefixtures("by_rule")
def test_a_refused_call_takes_the_place_of_one_that_a_rule_compresses(
    wrong: dict[str, Any],
) -> None:
    def rank_main(comm: Any) -> list[Any]:
        found: list[Any] = []
        for _ in range(2):
            x = np.ones(900, F)
            expected = UsageError if comm.rank == 1 else RefusedError
            with pytest.raises(expected):
                comm.allreduce(x, **(wrong if comm.rank == 1 else {}))
            found.append(float(comm.bcast(np.full(2, comm.rank + 5.0), 0)[0]))
            found.append(float(comm.allreduce(np.ones(900, F))[0]))
            found.append(float(comm.allreduce(np.ones(900, F), op="max")[0]))
        return found

    assert run(3, rank_main, timeout_s=240) == [[5.0, 3.0, 1.0] * 2] * 3
