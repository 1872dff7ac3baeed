# SPDX-License-Identifier: Apache-2.0
"""Persistent messages and sparse sums: bound once, run on what the arrays hold then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.comm import Communicator
from commrt.errors import ClosedError, MismatchError, TruncationError, UsageError
from commrt.local import run


@pytest.mark.parametrize("count", [0, 1, 5, 30_000])
def test_a_bound_sendrecv_sends_what_the_array_holds(count: int) -> None:
    def main(comm: Communicator) -> None:
        size, me = comm.size, comm.rank
        x, out = np.zeros(count), np.zeros(count)
        turn = comm.plan.sendrecv(
            x,
            dest=(me + 1) % size,
            out=out,
            source=(me - 1) % size,
            sendtag=3,
            recvtag=3,
        )
        for i in range(4):
            x[:] = 10 * i + me
            if i % 2:
                assert turn() is out
            else:
                request = turn.start()
                assert request.wait() is out
            assert (out == 10 * i + (me - 1) % size).all()

    run(3, main, timeout_s=300)


@pytest.mark.parametrize("count", [1, 5, 30_000])
def test_bound_sends_and_receives_meet_each_other_and_plain_ones(count: int) -> None:
    def main(comm: Communicator) -> None:
        x, out = np.zeros(count, np.int32), np.zeros(count + 1, np.int32)
        if comm.rank == 0:
            send = comm.plan.send(x, dest=1, tag=7)
            for i in range(3):
                x[:] = i
                assert send() is None
            x[:] = 3
            send.start().wait()
            comm.send(x + 1, dest=1, tag=7)
        else:
            recv = comm.plan.recv(out, source=0, tag=7)
            for i in range(2):
                assert recv() is out
                assert (out[:count] == i).all()
            comm.recv(out, source=0, tag=7)
            assert (out[:count] == 2).all()
            for i in (3, 4):
                request = recv.start()
                assert request.wait() is out
                assert (out[:count] == i).all()
                assert (request.received_nbytes, request.source) == (4 * count, 0)

    run(2, main, timeout_s=300)


def test_bound_messages_are_checked_when_they_are_made() -> None:
    def main(comm: Communicator) -> None:
        x = np.zeros(4)
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        with pytest.raises(UsageError, match="send: dest=2"):
            comm.plan.send(x, dest=2)
        with pytest.raises(UsageError, match="recv: tag=-1"):
            comm.plan.recv(x, source=0, tag=-1)
        with pytest.raises(UsageError, match="recv: out is read-only"):
            comm.plan.recv(frozen, source=0)
        with pytest.raises(UsageError, match="out overlaps x"):
            comm.plan.sendrecv(x, dest=0, out=x[:2], source=0)
        send = comm.plan.send(x, dest=1 - comm.rank)
        assert (send.operation, send.label) == ("send", "messages")
        comm.barrier()
        comm.free()
        with pytest.raises(ClosedError):
            send()

    run(2, main, timeout_s=300)


def test_a_longer_message_than_its_bound_receive() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.zeros(4), dest=1)
        else:
            with pytest.raises(TruncationError):
                comm.plan.recv(np.zeros(3), source=0)()

    run(2, main, timeout_s=300)


@pytest.mark.parametrize("form", ["sparse", "dense", "auto"])
@pytest.mark.parametrize(
    "algorithm", [None, "recursive_doubling", "split", "ring", "two_level_ring"]
)
def test_a_bound_sparse_sum_sees_new_indices_and_values(
    algorithm: str | None, form: str
) -> None:
    def main(comm: Communicator) -> None:
        indices, values = np.array([0, 7], np.int32), np.zeros(2)
        step = comm.plan.sparse_allreduce(
            (indices, values, 40), result=form, algorithm=algorithm
        )
        results = []
        for i in range(4):
            indices[:] = comm.rank, 7 + i
            values[:] = 1, 10 * i + comm.rank
            got = step() if i % 2 else step.start().wait()
            results.append((got, got.to_dense() if form != "dense" else got.copy()))
        for i, (_, whole) in enumerate(results):
            want = np.zeros(40)
            want[: comm.size] = 1
            want[7 + i] += 10 * i * comm.size + sum(range(comm.size))
            assert np.array_equal(whole, want)
        kept = results[0][0]  # each run has a result of its own
        assert kept is not results[1][0]
        assert step.operation == "sparse_allreduce"
        assert step.label == f"sparse/{algorithm or 'by fill'}"

    if form == "auto":  # as the sum is sparse
        form = "sparse"
    run(3, main, timeout_s=300)


def test_a_bound_sparse_sum_fills_its_output_and_checks_indices_at_each_run() -> None:
    def main(comm: Communicator) -> None:
        indices, values, out = np.array([1, 2]), np.ones(2), np.zeros(4)
        step = comm.plan.sparse_allreduce((indices, values, 4), out=out)
        assert step() is out
        assert out.tolist() == [0, comm.size, comm.size, 0]
        indices[:] = 2, 1
        with pytest.raises(UsageError, match="not sorted"):
            step()
        indices[:] = 0, 3
        assert step.start().wait() is out
        assert out.tolist() == [comm.size, 0, 0, comm.size]
        with pytest.raises(UsageError, match="unknown algorithm='rign'"):
            comm.plan.sparse_allreduce((indices, values, 4), algorithm="rign")
        with pytest.raises(UsageError, match="k=5 must be"):
            comm.plan.topk_allreduce(np.zeros(4), 5)

    run(2, main, timeout_s=300)


def test_a_bound_topk_goes_on_with_its_residual() -> None:
    def main(comm: Communicator) -> None:
        def of(turn: int) -> Any:
            return np.arange(20) * (comm.rank + 1) * (-1) ** turn + turn

        x, residual = np.zeros(20, np.int64), np.zeros(20, np.int64)
        step = comm.plan.topk_allreduce(x, 3, residual=residual)
        plain = np.zeros(20, np.int64)
        for turn in range(4):
            x[:] = of(turn)
            got = step() if turn % 2 else step.start().wait()
            want = comm.topk_allreduce(of(turn), 3, residual=plain)
            assert np.array_equal(got.to_dense(), want.to_dense())
            assert np.array_equal(residual, plain)

    run(3, main, timeout_s=300)


def test_in_check_mode_a_wrong_argument_is_every_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(comm: Communicator) -> str:
        indices = np.array([1, 2] if comm.rank else [2, 1])
        with pytest.raises((UsageError, MismatchError)) as raised:
            comm.plan.sparse_allreduce((indices, np.ones(2), 4))
        step = comm.plan.sparse_allreduce((np.array([1, 2]), np.ones(2), 4))
        step()
        return str(raised.value)

    texts = run(2, main, timeout_s=300)
    assert len({*texts}) == 1
    assert "not sorted" in texts[0]


def test_all_plans_are_listed() -> None:
    def main(comm: Communicator) -> None:
        cart = comm.cart((0,))
        missing = {*dir(comm.plan)} - {*dir(comm)}
        missing |= {*dir(cart.plan)} - {*dir(cart)}
        assert not {name for name in missing if not name.startswith("_")}
        for name in ("send", "recv", "sendrecv", "multi_sendrecv", "redistribute"):
            assert name in dir(comm.plan)
        for name in ("sparse_allreduce", "topk_allreduce", "allgatherv", "barrier"):
            assert name in dir(comm.plan)

    run(2, main, timeout_s=300)
