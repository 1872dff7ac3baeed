# SPDX-License-Identifier: Apache-2.0
"""torch's tensors as buffers: all types, outputs in torch, wrong ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commrt.arrays.host import empty_like_array, view
from commrt.comm import core_of
from commrt.errors import BufferError_
from commrt.local import run
from commrt.vocabulary.dtypes import DTYPES

SIZE = 3
NAMES = [dtype.name for dtype in DTYPES]


@pytest.mark.parametrize("name", NAMES)
def test_every_type_is_seen_where_it_lies(name: str) -> None:
    x = torch.zeros((2, 3), dtype=getattr(torch, name))
    seen = view(x, "x")
    assert (seen.address, seen.count) == (x.data_ptr(), 6)
    assert seen.dtype.name == name
    made = empty_like_array(seen, (4,))
    assert (made.dtype, tuple(made.shape)) == (x.dtype, (4,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros((2, 3)).t(), r"x is not contiguous .*: pass x\.contiguous"),
        (torch.zeros(8)[::2], "not contiguous"),
        (torch.zeros(3).to_sparse(), "dense tensors of"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "not contiguous"),
        (
            torch.zeros(3, device="meta"),
            r"x is a tensor without data \(Tensor on meta\)",
        ),
        (torch.zeros(3, dtype=torch.float8_e5m2fnuz), "of float8_e5m2fnuz .* cannot"),
    ],
)
def test_tensors_that_cannot_be_used_in_place_are_refused(
    wrong: Any, message: str
) -> None:
    with pytest.raises(BufferError_, match=message):
        view(wrong, "x")


def small(rank: int, name: str) -> Any:
    """Return values whose sums every type can hold."""
    values = torch.tensor([[0, 1, 1], [rank == 0, rank == 2, 0]])
    return values.to(getattr(torch, name))


@pytest.mark.parametrize("name", NAMES)
def test_results_are_tensors_of_the_same_type(name: str) -> None:
    def rank_main(comm: Any) -> list[Any]:
        x = small(comm.rank, name)
        out = torch.empty_like(x)
        assert comm.allreduce(x, out=out) is out
        gathered = comm.allgather(x, nonblocking=True).wait()
        part = comm.reduce_scatter(torch.cat([x, x, x]))
        assert comm.allreduce(x, nonblocking=True).wait() is x
        return [out, x, gathered, part]

    xs = [small(rank, name) for rank in range(SIZE)]
    total = sum(x.to(torch.complex128) for x in xs)
    if name == "bool":
        total = total != 0  # the sum of truths is "or"
    dtype = getattr(torch, name)
    for out, x, gathered, part in run(SIZE, rank_main, timeout_s=300):
        for result in (out, x, part):
            assert result.dtype == dtype
            assert (
                result.to(torch.complex128).tolist()
                == total.to(torch.complex128).tolist()
            )
        assert (gathered.dtype, tuple(gathered.shape)) == (dtype, (SIZE, 2, 3))
        # Bytes: torch compares no 8-bit floats.
        parts = zip(gathered, xs, strict=True)
        assert all(torch.equal(*(a.view(torch.uint8) for a in ab)) for ab in parts)


def test_tensors_and_numpy_arrays_meet() -> None:
    def rank_main(comm: Any) -> list[float]:
        x = torch.full((5,), 1.0 + comm.rank, dtype=torch.float32)
        array = x.numpy() if comm.rank == 1 else x
        total = comm.allreduce(array)
        assert total is array
        return x.tolist()

    assert run(SIZE, rank_main, timeout_s=300) == [[6.0] * 5] * SIZE


def test_a_gradient_is_averaged_in_place() -> None:
    def rank_main(comm: Any) -> float:
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        (weight * (1 + comm.rank)).sum().backward()
        request = comm.allreduce(weight.grad, op="avg", nonblocking=True)
        assert request.wait() is weight.grad
        return float(weight.grad[3])

    assert run(SIZE, rank_main, timeout_s=300) == [2.0] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_symmetric_tensors(name: str) -> None:
    dtype = getattr(torch, name)

    def rank_main(comm: Any) -> list[Any]:
        x, out = comm.empty((200, 300), dtype), comm.empty((200, 300), dtype)
        assert (x.dtype, tuple(x.shape), bool(x.any())) == (dtype, (200, 300), False)
        x[:] = int(comm.rank == 1)
        comm.allreduce(x, out=out)
        assert tuple(comm.empty((0, 3), dtype).shape) == (0, 3)
        scalar = comm.empty((), dtype)
        return [out[0, 0].item(), out[-1, -1].item(), tuple(scalar.shape)]

    assert run(SIZE, rank_main, timeout_s=300) == [[1, 1, ()]] * SIZE


def test_blocks_of_different_lengths_are_tensors_too() -> None:
    counts = [2, 0, 4]

    def rank_main(comm: Any) -> list[Any]:
        x = torch.full((counts[comm.rank] // 2, 2), float(comm.rank))
        joined = comm.allgatherv(x, counts=torch.tensor(counts))
        own = comm.scatterv(joined, counts=counts)
        sent = torch.arange(3.0) + 10 * comm.rank
        got = comm.alltoallv(sent, send_counts=[1, 1, 1], nonblocking=True).wait()
        found = (joined, own, got)
        assert all(isinstance(one, torch.Tensor) for one in found)
        return [one.tolist() for one in found]

    joined = [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    own = [joined[:1], [], joined[1:]]
    for rank, found in enumerate(run(SIZE, rank_main)):
        assert found == [joined, own[rank], [rank + 10.0 * i for i in range(SIZE)]]


def test_tensors_go_into_buckets() -> None:
    names = ["float32", "bfloat16", "float16", "int64"]

    def rank_main(comm: Any) -> list[bool]:
        tensors = [
            torch.full((count,), comm.rank + 1, dtype=getattr(torch, name))
            for name in names
            for count in (0, 1, 77)
        ]
        begin = core_of(comm).next_seq
        with comm.fused():
            requests = [comm.allreduce(each, nonblocking=True) for each in tensors]
        results = [request.wait() for request in requests]
        assert core_of(comm).next_seq == begin + len(names)
        return [
            result is tensor and bool((tensor == 6).all())
            for result, tensor in zip(results, tensors, strict=True)
        ]

    assert run(SIZE, rank_main) == [[True] * 12] * SIZE


def test_tensors_without_dimensions_stay_so() -> None:
    def rank_main(comm: Any) -> Any:
        loss = torch.tensor(comm.rank + 1.0)
        assert comm.allreduce(loss, torch.distributed.ReduceOp.SUM) is loss
        every = comm.allgather(torch.tensor(comm.rank))
        largest = comm.allreduce(loss.clone(), op=torch.maximum, nonblocking=True)
        mean = comm.allreduce(loss.item(), op="avg")
        return tuple(loss.shape), every.tolist(), largest.wait().item(), mean

    total = SIZE * (SIZE + 1) / 2
    ranks = list(range(SIZE))
    assert run(SIZE, rank_main, timeout_s=300) == [((), ranks, total, total)] * SIZE


def test_objects_may_have_tensors() -> None:
    def rank_main(comm: Any) -> Any:
        mine = {"rank": comm.rank, "weights": torch.full((40_000,), float(comm.rank))}
        every = comm.allgather_object(mine)
        sent = comm.send_object(mine, (comm.rank + 1) % SIZE, nonblocking=True)
        before = comm.recv_object()
        sent.wait()
        return [int(each["weights"].sum()) // 40_000 for each in (*every, before)]

    found = run(SIZE, rank_main, timeout_s=300)
    assert found == [[0, 1, 2, (rank - 1) % SIZE] for rank in range(SIZE)]
