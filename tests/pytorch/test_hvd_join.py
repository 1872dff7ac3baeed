# SPDX-License-Identifier: Apache-2.0
"""Ranks of commrt.hvd join, and the others go on with zeros in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hvd_cases import drawn, on_ranks

import commrt.hvd as hvd
from commrt.comm import Communicator
from commrt.errors import MismatchError
from commrt.hvd.entries import Entry
from commrt.hvd.rank_set import RankSet
from commrt.hvd.signatures import Signature
from commrt.local import run


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_that_joined_add_zeros(size: int, is_known: bool) -> None:
    """Rank r has r batches; the average still divides by all ranks."""

    def main() -> int:
        rank = hvd.rank()
        if is_known:
            hvd.synchronize(hvd.allreduce_async(drawn(rank, 3), name="a"))
        for step in range(rank):
            at_work = range(step + 1, size)
            handles = [
                hvd.allreduce_async(drawn(rank, 3), name="a"),
                hvd.allreduce_async(drawn(rank, 4), name="b", op=hvd.Sum),
                hvd.allreduce_async(drawn(rank, 2, dtype=torch.int64), op=hvd.Sum),
            ]
            found = [hvd.synchronize(each) for each in reversed(handles)]
            mean = sum(drawn(r, 3) for r in at_work) / size
            assert torch.equal(found[2], torch.as_tensor(mean))
            assert torch.equal(found[1], sum(drawn(r, 4) for r in at_work))
            whole = sum(drawn(r, 2, dtype=torch.int64) for r in at_work)
            assert torch.equal(found[0], whole)
        last = hvd.join()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        assert hvd.allgather_object(last) == [last] * size
        return last

    assert on_ranks(size, main) == [size - 1] * size


@pytest.mark.parametrize("last", range(3))
def test_join_returns_the_rank_that_came_last(last: int) -> None:
    def main() -> None:
        for _ in range(3):
            if hvd.rank() == last:
                for _ in range(4):
                    hvd.allreduce(torch.ones(2), name="x")
            assert hvd.join() == last

    on_ranks(3, main)


REFUSED: dict[str, Callable[[], Any]] = {
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 1),
    "alltoall": lambda: hvd.alltoall(torch.ones(3)),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
    "op=max": lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
    "op=prod": lambda: hvd.allreduce(torch.ones(2), op=hvd.Product),
}


@pytest.mark.parametrize("what", REFUSED)
def test_zeros_are_for_sums_alone(what: str) -> None:
    def main() -> None:
        if hvd.rank() == 0:
            hvd.join()
        else:
            with pytest.raises(MismatchError, match=rf"rank 0 called join\(\).*{what}"):
                REFUSED[what]()
            hvd.join()
        REFUSED[what]()

    on_ranks(3, main)


def test_a_barrier_does_not_wait_for_ranks_that_joined() -> None:
    def main() -> None:
        if hvd.rank() > 0:
            hvd.barrier()
        hvd.join()

    on_ranks(3, main)


def test_what_was_submitted_before_join_is_complete() -> None:
    def main() -> None:
        rank = hvd.rank()
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
        if rank == 1:
            hvd.synchronize(handle)
        hvd.join()
        assert hvd.synchronize(handle).tolist() == [3, 3]

    on_ranks(3, main)


def test_uneven_batches_train_as_in_one_process() -> None:
    """Sums of gradients, until no rank has a batch."""
    batches = {0: 2, 1: 4, 2: 1}

    def trained(rank: int | None) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer: Any = torch.optim.SGD([weight], lr=0.01)
        if rank is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        for step in range(max(batches.values()) if rank is None else batches[rank]):
            optimizer.zero_grad()
            for r, count in batches.items():
                if step < count and rank in (None, r):
                    x = drawn(10 * r + step, 3)
                    (weight * x).sum().square().backward()
            optimizer.step()
        if rank is not None:
            hvd.join()
        return weight.detach()

    right = trained(None)
    # Ranks that joined early lack the later steps: those that worked have them all.
    found = on_ranks(3, lambda: trained(hvd.rank()))
    torch.testing.assert_close(found[1], right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("op", [hvd.Max, hvd.Product])
def test_zeros_enter_no_maximum_when_all_ranks_join_at_once(op: hvd.ReduceOp) -> None:
    def main() -> None:
        handles = []
        if hvd.rank() == 0:
            handles = [
                hvd.allreduce_async(-torch.ones(2), name="x", op=op),
                hvd.broadcast_async(torch.ones(2), 1, "root"),
                hvd.allgather_async(torch.ones(2), "rows"),
            ]
        hvd.join()
        for handle in handles:
            with pytest.raises(MismatchError, match=r"ranks 1, 2 called join\(\)"):
                hvd.synchronize(handle)

    on_ranks(3, main)


@pytest.mark.parametrize("count", [3, 4])
def test_what_a_joined_rank_has_left_is_compared(count: int) -> None:
    """Rank 0 joins with an operation that the others submit two rounds later."""

    def main() -> None:
        rank = hvd.rank()
        hvd.allreduce(torch.ones(4), name="a", op=hvd.Max)
        if rank == 0:
            handle = hvd.allreduce_async(-torch.ones(count), name="a", op=hvd.Max)
            hvd.join()
        else:
            for _ in range(2):
                hvd.allreduce(torch.ones(2), name="b")
            left = -2 * torch.ones(4)
            handle = hvd.allreduce_async(left, name="a", op=hvd.Max)
        if count == 4:
            assert hvd.synchronize(handle).tolist() == [-1] * 4
        else:
            with pytest.raises(MismatchError, match=r"shape: \(3,\) on rank 0; \(4,\)"):
                hvd.synchronize(handle)
        if rank > 0:
            hvd.join()

    on_ranks(3, main)


def test_a_joined_rank_does_not_give_up_when_others_come() -> None:
    """It has waited for long, and then a round ends: its patience begins anew."""

    def main(comm: Communicator) -> None:
        options: dict[str, Any] = {"fusion_nbytes": 64, "cache_capacity": 8}
        ranks = RankSet(comm, range(3), name="set", **options)
        entries = [Entry(name, Signature("barrier")) for name in ("x", "y", "z")]
        if comm.rank == 0:
            ranks.joins = True
            ranks.advance(waits=True)
            ranks.give_up("rank 0 has waited for long")
        else:
            # In the second round each of the others waits for something else.
            order = [0, 1, 2] if comm.rank == 1 else [0, 2, 1]
            for step, number in enumerate(order):
                ranks.submit(entries[number])
                while ranks.num_rounds <= step:
                    ranks.advance(waits=True)
            while not ranks.is_settled:
                ranks.advance(waits=True)
            assert [entry.error for entry in entries] == [None] * 3
            ranks.joins = True
        while ranks.joins:
            ranks.advance(waits=True)
        ranks.free()

    run(3, main)
