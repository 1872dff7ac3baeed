# SPDX-License-Identifier: Apache-2.0
"""Calls that name their algorithm: the dispatcher finds their plans, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.calls.host_route import HostRoute
from commrt.comm import core_of
from commrt.errors import MismatchError, UsageError
from commrt.local import run


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operations that went to Python, one entry for each call of a rank."""
    seen: list[str] = []
    plan = HostRoute.plan

    def noted(self: Any, call: Any, bound: Any) -> Any:
        seen.append(call.spec.name)
        return plan(self, call, bound)

    monkeypatch.setattr(HostRoute, "plan", noted)
    return seen


@pytest.mark.parametrize("name", ["direct", "ring{chunk=4096}", "local/ring"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_call_like_one_before_does_not_go_to_python(
    name: str, ranks: int, planned: list[str]
) -> None:
    def main(comm: Any) -> int:
        comm.barrier()
        for turn in range(20):
            x = np.full(100, comm.rank + turn, np.float32)
            comm.allreduce(x, algorithm=name)
            assert (x == sum(range(ranks)) + turn * ranks).all()
        # Another object with the same letters, and another length.
        again = "".join([*name])
        x = np.ones(101, np.float32)
        comm.allreduce(x, algorithm=again)
        assert (x == ranks).all()
        return comm.rank

    run(ranks, main)
    assert planned.count("allreduce") <= 2 * ranks


def test_names_are_told_apart_by_type_reduction_and_root() -> None:
    ranks = 3

    def main(comm: Any) -> None:
        for turn in range(3):
            for name in ("direct", "binomial"):
                for root in range(ranks):
                    x = np.full(7, 10 * root + turn if comm.rank == root else -1)
                    comm.bcast(x, root=root, algorithm=name)
                    assert (x == 10 * root + turn).all()
            for dtype in (np.float32, np.float64, np.int32):
                for op, value in (("sum", 6), ("max", 3), ("prod", 6)):
                    y = np.full(5, comm.rank + 1, dtype)
                    comm.allreduce(y, op=op, algorithm="ring")
                    assert (y == value).all()
            counts = [comm.rank + 1 + turn for _ in range(ranks)]
            got = [one + 1 + turn for one in range(ranks)]
            out = np.empty(sum(got))
            comm.alltoallv(
                np.full(sum(counts), float(comm.rank)),
                send_counts=counts,
                recv_counts=got,
                out=out,
                algorithm="direct",
            )
            assert (out == np.repeat(np.arange(ranks), got)).all()

    run(ranks, main)


def test_more_names_than_the_dispatcher_remembers_all_run_what_they_say() -> None:
    chunks = [4096 * n for n in range(1, 80)]

    def main(comm: Any) -> None:
        x = np.ones(3)
        for _ in range(2):
            for chunk in chunks:
                name = f"ring{{chunk={chunk}}}"
                x[:] = 1
                comm.allreduce(x, algorithm=name)
                assert (x == comm.size).all()

    run(2, main)


def test_a_dropped_family_is_planned_anew(planned: list[str]) -> None:
    def main(comm: Any) -> None:
        x = np.ones(10)
        comm.allreduce(x, algorithm="ring")
        core_of(comm).host.forget()  # as where another table is to hold
        comm.allreduce(x, algorithm="ring")
        comm.allreduce(x, algorithm="ring")
        assert (x == 8).all()

    run(2, main)
    assert planned.count("allreduce") == 4


def test_check_mode_still_compares_named_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(comm: Any) -> None:
        names = ("ring", "direct")
        for _ in range(3):
            comm.allreduce(np.ones(4), algorithm="ring")
        with pytest.raises(MismatchError):
            comm.allreduce(np.ones(4), algorithm=names[comm.rank])

    run(2, main)


def test_wrong_names_are_refused_each_time() -> None:
    def main(comm: Any) -> None:
        for _ in range(2):
            with pytest.raises(UsageError, match="rong"):
                comm.allreduce(np.ones(4), algorithm="rong")

    run(2, main)
