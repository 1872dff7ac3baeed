# SPDX-License-Identifier: Apache-2.0
"""Ranks of commrt.hvd agree on what runs, whatever order they submit it in."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest
import torch
from hvd_cases import calls_of, drawn, drawn_of_all, on_ranks, raised_by
from recorded import logs_of

import commrt.hvd as hvd
import commrt.trace
from commrt.comm import Communicator
from commrt.errors import (
    MismatchError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.hvd.current import current
from commrt.local import run

FAR_S = 240.0


def shuffled(count: int, seed: int) -> list[int]:
    order = [*range(count)]
    random.Random(seed).shuffle(order)
    return order


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("fusion_nbytes", [0, 24, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_any_order_of_submission_goes(size: int, fusion_nbytes: int) -> None:
    """Each step has another order, and waits come in a third one."""

    def main() -> None:
        rank = hvd.rank()
        for step in range(4):
            handles = {}
            for name in shuffled(20, 31 * rank + step):
                x = drawn(rank + name, 1 + name % 4)
                handles[name] = hvd.allreduce_async(x, name=f"x{name}", op=hvd.Sum)
            for name in shuffled(20, 57 * rank + step):
                right = sum(drawn(r + name, 1 + name % 4) for r in range(size))
                assert torch.equal(hvd.synchronize(handles[name]), right)

    on_ranks(size, main, fusion_nbytes=fusion_nbytes)


def test_operations_of_all_kinds_are_submitted_in_any_order() -> None:
    def main() -> None:
        rank = hvd.rank()
        x = drawn(rank, 6)
        everything = drawn_of_all(3, 6)
        starts = {
            "sum": lambda: hvd.allreduce_async(x, name="sum", op=hvd.Sum),
            "max": lambda: hvd.allreduce_async(x, name="max", op=hvd.Max),
            "all": lambda: hvd.allgather_async(x, "all"),
            "root": lambda: hvd.broadcast_async(x, 1, "root"),
            "rows": lambda: hvd.alltoall_async(x, name="rows"),
            "part": lambda: hvd.reducescatter_async(x, "part", hvd.Sum),
        }
        names = [*starts]
        random.Random(rank).shuffle(names)
        handles = {name: starts[name]() for name in names}
        random.Random(rank + 9).shuffle(names)
        found = {name: hvd.synchronize(handles[name]) for name in names}
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(found["sum"], everything.sum(0))
        assert torch.equal(found["max"], everything.amax(0))
        assert torch.equal(found["all"], everything.view(-1))
        assert torch.equal(found["root"], everything[1])
        assert torch.equal(found["rows"][0], everything[:, own].reshape(-1))
        assert torch.equal(found["part"], everything.sum(0)[own])

    on_ranks(3, main)


def test_more_unnamed_operations_than_keys_are_in_flight() -> None:
    def main() -> None:
        rank = hvd.rank()
        handles = [
            hvd.allreduce_async(torch.tensor([100.0 * n + rank]), op=hvd.Sum)
            for n in range(150)
        ]
        for n, handle in reversed([*enumerate(handles)]):
            assert hvd.synchronize(handle).item() == 200 * n + 1

    on_ranks(2, main)


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_names_beyond_the_capacity_are_forgotten(capacity: int) -> None:
    def main() -> None:
        rank = hvd.rank()
        for step in range(4):
            names = [f"{step % 2}.{n}" for n in shuffled(12, rank + step)]
            handles = {
                name: hvd.allreduce_async(torch.ones(2), name=name, op=hvd.Sum)
                for name in names
            }
            for name in sorted(names):
                assert hvd.synchronize(handles[name]).tolist() == [2, 2]

    on_ranks(2, main, cache_capacity=capacity)


MISMATCHES: dict[str, tuple[Any, Any, str]] = {
    "shape": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x"),
        lambda: hvd.allreduce_async(torch.ones(3), name="x"),
        r"shape: \(2,\) on ranks 0, 2; \(3,\) on rank 1",
    ),
    "type": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x"),
        lambda: hvd.allreduce_async(torch.ones(2).double(), name="x"),
        "type: float32 on ranks 0, 2; float64 on rank 1",
    ),
    "op": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Max),
        lambda: hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Min),
        "op: max on ranks 0, 2; min on rank 1",
    ),
    "factor": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x"),
        lambda: hvd.allreduce_async(torch.ones(2), name="x", prescale_factor=0.5),
        "factors: none on ranks 0, 2; 0.5 before, 1.0 after on rank 1",
    ),
    "near factor": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x", prescale_factor=1234567),
        lambda: hvd.allreduce_async(torch.ones(2), name="x", prescale_factor=1234568),
        r"factors: 1234567\.0 before.* on ranks 0, 2; 1234568\.0 before",
    ),
    "root": (
        lambda: hvd.broadcast_async(torch.ones(2), 0, "x"),
        lambda: hvd.broadcast_async(torch.ones(2), 1, "x"),
        "root_rank: 0 on ranks 0, 2; 1 on rank 1",
    ),
    "operation": (
        lambda: hvd.allgather_async(torch.ones(2), "x"),
        lambda: hvd.allreduce_async(torch.ones(2), name="x"),
        "operation: allgather on ranks 0, 2; allreduce on rank 1",
    ),
    "columns": (
        lambda: hvd.allgather_async(torch.ones(2, 3), "x"),
        lambda: hvd.allgather_async(torch.ones(2, 4), "x"),
        r"shape beyond the rows: \(3,\) on ranks 0, 2; \(4,\) on rank 1",
    ),
    "group": (
        lambda: hvd.grouped_allreduce_async([torch.ones(2)], name="x"),
        lambda: hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="x"),
        "tensors: 1 on ranks 0, 2; 2 on rank 1",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_mismatch_is_raised_on_all_ranks(what: str, is_known: bool) -> None:
    """Also where the name was used rightly before; and the set goes on."""
    usual, other, match = MISMATCHES[what]

    def main() -> None:
        rank = hvd.rank()
        if is_known:
            hvd.synchronize(usual())
        handle = (other if rank == 1 else usual)()
        with pytest.raises(MismatchError, match=f"(?s)x: the ranks.*{match}"):
            hvd.synchronize(handle)
        with pytest.raises(MismatchError):
            hvd.synchronize(handle)
        assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 3

    on_ranks(3, main)


REFUSALS: dict[str, tuple[Any, Any, str]] = {
    "rows do not divide": (
        lambda: hvd.alltoall_async(torch.ones(2), name="x"),
        lambda: hvd.alltoall_async(torch.ones(3), name="x"),
        "3 rows, which 2 ranks",
    ),
    "splits": (
        lambda: hvd.alltoall_async(torch.ones(2), [1, 1], "x"),
        lambda: hvd.alltoall_async(torch.ones(2), [1, 2], "x"),
        r"splits=\[1, 2\] must be 2 whole numbers",
    ),
    "no rows": (
        lambda: hvd.allgather_async(torch.ones(2), "x"),
        lambda: hvd.allgather_async(torch.tensor(1.0), "x"),
        "has no dimension",
    ),
    "type": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x"),
        lambda: hvd.allreduce_async(torch.ones(2).bool(), name="x"),
        "has elements of torch.bool",
    ),
    "root": (
        lambda: hvd.broadcast_async(torch.ones(2), 0, "x"),
        lambda: hvd.broadcast_async(torch.ones(2), 2, "x"),
        r"root_rank=2 must be one of the ranks \[0, 1\]",
    ),
    "unnamed": (
        lambda: hvd.allreduce_async(torch.ones(2)),
        lambda: hvd.allreduce_async([1.0]),  # type: ignore[arg-type]
        "is no torch tensor",
    ),
    "factor": (
        lambda: hvd.allreduce_async(torch.ones(2)),
        lambda: hvd.allreduce_async(torch.ones(2), postscale_factor=float("nan")),
        "postscale_factor=nan must be a number",
    ),
    "list": (
        lambda: hvd.grouped_allreduce_async_([torch.ones(2)]),
        lambda: hvd.grouped_allreduce_async_([]),
        "no tensors in the list",
    ),
    "sparse": (
        lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), None),
        lambda: hvd.sparse_allreduce_async(torch.ones(1), None),
        "is no sparse COO tensor",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_call_that_one_rank_refuses_fails_on_the_others(what: str) -> None:
    usual, other, match = REFUSALS[what]

    def main() -> None:
        if hvd.rank() == 1:
            with pytest.raises(UsageError, match=match):
                other()
        else:
            handle = usual()
            with pytest.raises(RefusedError, match=f"rank 1 refused.*{match}"):
                hvd.synchronize(handle)
        assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 2

    on_ranks(2, main)


BLOCKING: dict[str, tuple[Any, Any, str]] = {
    "op": (
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.allreduce(torch.ones(2), op=1),  # type: ignore[arg-type]
        "op=1 must be",
    ),
    "compression": (
        lambda: hvd.reducescatter(torch.ones(2), compression=hvd.Compression.fp16),
        lambda: hvd.reducescatter(1, compression=hvd.Compression.fp16),  # type: ignore[arg-type]
        "'int' object has no attribute",
    ),
    "list": (
        lambda: hvd.grouped_allgather([torch.ones(2)]),
        lambda: hvd.grouped_allgather(None),  # type: ignore[arg-type]
        "not iterable",
    ),
    "pickle of the root": (
        lambda: hvd.broadcast_object(None, 1),
        lambda: hvd.broadcast_object(lambda: None, 1),
        "cannot be pickled",
    ),
    "pickle": (
        lambda: hvd.allgather_object(None),
        lambda: hvd.allgather_object(lambda: None),
        "cannot be pickled",
    ),
    "state": (
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)]), 1),
        lambda: hvd.broadcast_optimizer_state(None, 1),
        "no attribute 'state_dict'",
    ),
}


@pytest.mark.parametrize("what", BLOCKING)
def test_what_a_rank_refuses_before_it_calls_fails_on_the_others(what: str) -> None:
    """And later calls without names meet each other."""
    usual, other, match = BLOCKING[what]

    def main() -> None:
        rank = hvd.rank()
        if rank == 1:
            error = raised_by(other)
            assert error is not None
            assert not isinstance(error, RefusedError)
        else:
            error = raised_by(usual)
            assert isinstance(error, RefusedError)
            assert "rank 1 refused" in str(error)
        assert match in str(error)
        assert hvd.allreduce(drawn(rank, 2), op=hvd.Sum).tolist() == (
            drawn_of_all(2, 2).sum(0).tolist()
        )
        assert hvd.reducescatter(torch.ones(2), op=hvd.Sum).tolist() == [2]
        assert hvd.allgather_object(rank) == [0, 1]
        assert hvd.broadcast_object(rank, 1) == 1

    on_ranks(2, main, limit_s=240)


def test_what_was_waited_for_is_let_go() -> None:
    """Its set keeps no tensors, whatever else is under way."""

    def main() -> None:
        handles = [
            hvd.allreduce_async(torch.ones(1 << 12), name=f"x{n}") for n in range(4)
        ]
        for handle in reversed(handles):
            hvd.synchronize(handle)
        assert current().set_of(0).under_way == []

    on_ranks(2, main, fusion_nbytes=1 << 10)


def test_a_name_is_taken_until_its_operation_was_waited_for() -> None:
    def main() -> None:
        first = hvd.allreduce_async(torch.ones(2), name="x")
        with pytest.raises(UsageError, match="x: an operation of this name is not"):
            hvd.allreduce_async(torch.ones(2), name="x")
        hvd.synchronize(first)
        second = hvd.allreduce_async(torch.ones(2), name="x")
        while not hvd.poll(second):
            pass
        hvd.allreduce(torch.ones(2), name="x")

    on_ranks(2, main)


def test_repeated_steps_negotiate_in_one_allreduce() -> None:
    """Of 8 bytes for the flags, and 8 for each 64 names."""
    names = [f"x{n}" for n in range(100)]

    def main(comm: Communicator) -> None:
        hvd.init(comm, fusion_nbytes=1 << 20)
        order = shuffled(100, comm.rank)
        for step in range(3):
            if step == 2:
                comm.barrier()
            handles = [hvd.allreduce_async(torch.ones(3), name=names[n]) for n in order]
            for handle in handles:
                hvd.synchronize(handle)
        comm.barrier()
        hvd.shutdown()

    with commrt.trace.record() as recording:
        run(3, main)
    for log in logs_of(recording):
        rounds = calls_of(log, of_rounds=True)
        assert [(call.op, call.nbytes) for call in rounds] == [("allreduce", 24)]
        transfers = calls_of(log, of_rounds=False)
        assert [(call.op, call.nbytes) for call in transfers] == [("allreduce", 1200)]


def test_a_stalled_operation_is_told_with_the_ranks_it_lacks() -> None:
    told = threading.Event()

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "x (allreduce): not submitted by ranks 1, 2" in record.getMessage():
                told.set()

    handler = Telling()
    logging.getLogger("commrt.hvd").addHandler(handler)

    def main() -> None:
        if hvd.rank() > 0:
            # These two look after another one, which rank 0 has not submitted.
            handle = hvd.allreduce_async(torch.ones(2), name="y")
            while not told.is_set():
                hvd.poll(handle)
            hvd.allreduce(torch.ones(2), name="x")
            hvd.synchronize(handle)
            return
        hvd.allreduce(torch.ones(2), name="x")
        hvd.allreduce(torch.ones(2), name="y")

    try:
        on_ranks(3, main, limit_s=FAR_S, stall_warning_s=0.05)
    finally:
        logging.getLogger("commrt.hvd").removeHandler(handler)
    assert told.is_set()


def test_what_no_rank_can_complete_fails_on_all_before_the_deadline() -> None:
    def main() -> str:
        x = hvd.allreduce_async(torch.ones(2), name=f"x{hvd.rank()}")
        error = raised_by(lambda: hvd.synchronize(x))
        assert isinstance(error, TimeoutError_)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        return str(error)

    first, second = on_ranks(2, main, limit_s=0.5)
    assert "x0 (allreduce): not submitted by rank 1" in first
    assert "x1 (allreduce): not submitted by rank 0" in second


def test_a_rank_that_does_not_come_is_named_at_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()

    def main() -> None:
        if hvd.rank() == 1:
            over.wait(FAR_S)
            return
        try:
            with pytest.raises(TimeoutError_, match="Rank 1 did not come to negot"):
                hvd.allreduce(torch.ones(2), name="x")
            with pytest.raises(hvd.HorovodInternalError, match="has failed"):
                hvd.allreduce(torch.ones(2), name="x")
        finally:
            over.set()

    with caplog.at_level(logging.WARNING, "commrt.hvd"):
        on_ranks(2, main, limit_s=0.5, stall_warning_s=0.1)
    assert "x: waited for 0.1 s. Rank 1 did not come to negotiate." in caplog.text


def test_shutdown_ends_what_others_wait_for() -> None:
    def main() -> None:
        handle = hvd.allreduce_async(torch.ones(2), name=f"x{hvd.rank()}")
        if hvd.rank() == 0:
            hvd.shutdown()
            with pytest.raises(UsageError, match=r"call hvd\.init\(\) first"):
                hvd.rank()
        with pytest.raises(TimeoutError_, match=r"rank 0 has called hvd\.shutdown"):
            hvd.synchronize(handle)

    on_ranks(2, main)


def test_threads_of_a_rank_wait_while_another_one_submits() -> None:
    """They wait in different orders, so some wait for the one that drives."""

    def main() -> None:
        rank = hvd.rank()
        names = shuffled(16, rank)
        handles: dict[int, hvd.Handle] = {}
        there = {name: threading.Event() for name in names}
        errors: list[BaseException] = []

        def wait_for(order: list[int]) -> None:
            try:
                for name in order:
                    assert there[name].wait(FAR_S)
                    assert hvd.synchronize(handles[name]).item() == 2 * name + 1
            except BaseException as error:  # noqa: BLE001 - raised by the rank
                errors.append(error)

        threads = [
            threading.Thread(target=wait_for, args=(shuffled(16, 9 * rank + n),))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for name in names:
            x = torch.tensor([float(name + rank)])
            handles[name] = hvd.allreduce_async(x, name=f"{name}", op=hvd.Sum)
            there[name].set()
        for thread in threads:
            thread.join(FAR_S)
        if errors:
            raise errors[0]

    on_ranks(2, main, limit_s=FAR_S)
