# SPDX-License-Identifier: Apache-2.0
"""Persistent plans: planned once, run many times, on arrays that stay."""

from __future__ import annotations

import numpy as np
import pytest

from commrt.comm import Communicator
from commrt.errors import ClosedError, UsageError
from commrt.local import run


def test_a_plan_sees_new_values_at_every_run() -> None:
    def main(comm: Communicator) -> None:
        x = np.zeros(1000, np.float32)
        out = np.empty_like(x)
        step = comm.plan.allreduce(x, out=out, algorithm="local/ring")
        assert step.label.startswith("local/ring")
        for i in range(5):
            x[:] = comm.rank + i
            assert step() is out
            assert (out == 3 * i + 3).all()
            x[:] = 2 * (comm.rank + i)
            request = step.start()
            assert request.wait() is out
            assert (out == 2 * (3 * i + 3)).all()

    run(3, main)


@pytest.mark.parametrize("coll", ["bcast", "reduce", "gather", "scatter"])
def test_rooted_plans_return_what_the_call_returns(coll: str) -> None:
    def main(comm: Communicator) -> None:
        x = np.arange(4.0) + comm.rank
        plan = getattr(comm.plan, coll)(x, root=1)
        planned = plan()
        called = getattr(comm, coll)(np.arange(4.0) + comm.rank, root=1)
        if called is None:
            assert planned is None
        else:
            assert np.array_equal(planned, called)

    run(2, main)


def test_a_plan_without_an_array() -> None:
    def main(comm: Communicator) -> None:
        meet = comm.plan.barrier()
        for _ in range(3):
            assert meet() is None

    run(3, main)


def test_misuse_is_named() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="said when the plan is run"):
            comm.plan.allreduce(np.ones(3), nonblocking=True)
        with pytest.raises(AttributeError, match="did you mean 'allreduce'"):
            comm.plan.allreduc(np.ones(3))
        plan = comm.plan.allreduce(np.ones(3))
        plan()
        comm.barrier()
        comm.free()
        with pytest.raises(ClosedError):
            plan()

    run(2, main)


def test_plans_keep_their_factor() -> None:
    def main(comm: Communicator) -> None:
        x, out = np.ones(1000, np.float32), np.empty(1000, np.float32)
        arguments = {"out": out, "op": "premul_sum"}
        double = comm.plan.allreduce(x, factor=2.0, **arguments)
        triple = comm.plan.allreduce(x, factor=3.0, **arguments)
        for plan, factor in ((double, 2), (triple, 3), (double, 2)):
            assert (plan() == factor * comm.size).all()
        comm.allreduce(x, factor=5.0, **arguments)
        assert (double() == 2 * comm.size).all()

    run(2, main)


@pytest.mark.parametrize("coll", ["allgather", "allgatherv", "reduce_scatter"])
def test_a_plan_whose_arrays_share_a_block_sees_new_values_at_every_run(
    coll: str,
) -> None:
    counts = {"counts": (2, 2, 2)} if coll == "allgatherv" else {}

    def main(comm: Communicator) -> None:
        whole = np.zeros(6)
        mine = whole[2 * comm.rank : 2 * comm.rank + 2]
        x, out = (whole, mine) if coll == "reduce_scatter" else (mine, whole)
        step = getattr(comm.plan, coll)(x, out=out, **counts)
        for i in range(3):
            x[:] = comm.rank + 10 * i
            result = step() if i % 2 else step.start().wait()
            assert result is out
            if coll == "reduce_scatter":
                assert mine.tolist() == [3.0 + 30 * i] * 2
            else:
                assert whole.tolist() == [10.0 * i + r // 2 for r in range(6)]

    run(3, main)
