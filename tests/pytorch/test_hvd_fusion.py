# SPDX-License-Identifier: Apache-2.0
"""Small tensors of commrt.hvd share collectives, and send the bytes of the formula."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hvd_cases import calls_of, on_ranks
from torch import nn

import commrt.hvd as hvd
import commrt.trace
from commrt.comm import Communicator
from commrt.hvd.transfers import rows_of
from commrt.local import run


def logs_of_a_step(
    size: int, step: Callable[[], Any], *, warm: int = 1, **options: Any
) -> list[Any]:
    """Return the logs of a step, after some others, between two barriers."""

    def main(comm: Communicator) -> None:
        hvd.init(comm, **options)
        for _ in range(warm):
            step()
        comm.barrier()
        step()
        comm.barrier()
        hvd.shutdown()

    with commrt.trace.record() as recording:
        run(size, main)
    return list(recording.logs())


def sent(log: Any) -> list[tuple[str, int]]:
    return [(call.op, call.nbytes) for call in calls_of(log, of_rounds=False)]


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("fusion_nbytes", [0, 1, 40, 256, 1 << 20])
@pytest.mark.parametrize("lengths", [[4] * 40, [1, 300, 7, 7, 0, 120, 3] * 4])
def test_small_tensors_share_at_most_so_many_collectives(
    lengths: list[int], fusion_nbytes: int, warm: int, size: int
) -> None:
    """ceil(bytes / fusion_nbytes) for each type, whatever order they come in."""

    def step() -> None:
        order = [*range(len(lengths))]
        random.Random(hvd.rank()).shuffle(order)
        handles = [
            hvd.allreduce_async(
                torch.ones(lengths[n], dtype=(torch.float32, torch.int64)[n % 2]),
                name=f"x{n}",
                op=hvd.Sum,
            )
            for n in order
        ]
        for handle in handles:
            assert (hvd.synchronize(handle) == size).all()

    logs = logs_of_a_step(size, step, warm=warm, fusion_nbytes=fusion_nbytes)
    nbytes = {
        dtype: sum(length * e for length in lengths[first::2])
        for first, (dtype, e) in enumerate((("float32", 4), ("int64", 8)))
    }
    for log in logs:
        calls = calls_of(log, of_rounds=False)
        for dtype, total in nbytes.items():
            of_type = [call.nbytes for call in calls if call.dtype == dtype]
            assert sum(of_type) == total
            if fusion_nbytes:
                longest = max(lengths) * (4 if dtype == "float32" else 8)
                assert max(of_type) < fusion_nbytes + longest
                assert len(of_type) <= -(-total // fusion_nbytes)
            else:
                first = list(nbytes).index(dtype)
                assert len(of_type) == sum(n > 0 for n in lengths[first::2])


def test_buckets_go_while_more_is_submitted() -> None:
    """A rank need not wait: news of a bucket's length start a round."""

    def main() -> None:
        handles = []
        for n in range(16):
            handles.append(hvd.allreduce_async(torch.ones(16), name=f"{n}"))
        while not all([hvd.poll(each) for each in handles[:8]]):
            pass
        assert all(hvd.synchronize(each).sum() == 16 for each in handles)

    on_ranks(2, main, fusion_nbytes=256)


def test_each_operation_sends_its_formula() -> None:
    """n elements of e bytes: as docs/reference/horovod.md lists them."""
    size, e = 3, 8

    def step() -> None:
        rank = hvd.rank()
        x = torch.ones(7, 2, dtype=torch.float64)
        hvd.allreduce(x, name="a")
        hvd.broadcast(x, 1, "b")
        hvd.allgather(x[: rank + 1], "c")
        hvd.alltoall(x[:6], [1, 2, 3], "d")
        hvd.reducescatter(x, "e")
        hvd.allreduce(x, name="f", compression=hvd.Compression.fp16)

    for rank, log in enumerate(logs_of_a_step(size, step, fusion_nbytes=64)):
        counted = dict.fromkeys(("allreduce", "bcast", "allgatherv"), 0)
        for op, nbytes in sent(log):
            counted[op] = counted.get(op, 0) + nbytes
        assert counted == {
            "allreduce": 14 * e + 14 * 2,
            "bcast": 14 * e,
            "allgatherv": (1 + 2 + 3) * 2 * e,
            "alltoallv": 6 * 2 * e,
            "reduce_scatterv": 14 * e,
        }, rank
        rounds = calls_of(log, of_rounds=True)
        assert {call.op for call in rounds} == {"allreduce"}
        assert {call.nbytes for call in rounds} == {16}
        assert len(rounds) == 6


def test_news_cost_two_gathers_once() -> None:
    def step() -> None:
        hvd.allreduce(torch.ones(3), name="x")

    for log in logs_of_a_step(3, step, warm=0):
        rounds = [call.op for call in calls_of(log, of_rounds=True)]
        assert rounds == ["allreduce", "allgather", "allgatherv"]


def test_adasum_sends_each_element_twice() -> None:
    def step() -> None:
        hvd.grouped_allreduce([torch.ones(6), torch.ones(5)], op=hvd.Adasum)

    for rank, log in enumerate(logs_of_a_step(4, step)):
        own = rows_of(11, 4)[rank]
        assert sent(log) == [
            ("alltoallv", 44),
            ("allreduce", 24 * 2 * 2),
            ("allreduce", 24 * 2),
            ("allgatherv", 44),
        ], own


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fusion_nbytes", [0, 500, 1 << 20])
def test_an_optimizer_sends_its_gradients(fusion_nbytes: int, size: int) -> None:
    """In at most ceil(bytes / fusion_nbytes) allreduces, and one round at least."""
    widths = [5, 20, 11, 3]
    nbytes = sum(4 * (a + 1) * b for a, b in itertools.pairwise(widths))
    models: dict[int, Any] = {}

    def step() -> None:
        rank = hvd.rank()
        if rank not in models:
            layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
            model = nn.Sequential(*layers)
            hvd.broadcast_parameters(model.state_dict())
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
            )
            models[rank] = model, optimizer
        model, optimizer = models[rank]
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    for log in logs_of_a_step(size, step, fusion_nbytes=fusion_nbytes):
        calls = sent(log)
        assert {op for op, _ in calls} == {"allreduce"}
        assert sum(n for _, n in calls) == nbytes
        most = -(-nbytes // fusion_nbytes) if fusion_nbytes else 6
        assert len(calls) <= most
        if fusion_nbytes > nbytes:
            rounds = calls_of(log, of_rounds=True)
            assert [(call.op, call.nbytes) for call in rounds] == [("allreduce", 16)]
