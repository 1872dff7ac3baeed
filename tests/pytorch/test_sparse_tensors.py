# SPDX-License-Identifier: Apache-2.0
"""Sparse operations on torch's tensors: COO in, tensors out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commrt.errors import UsageError
from commrt.local import run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_coo_tensors_are_summed(dtype: torch.dtype) -> None:
    def rank_main(comm: Any) -> bool:
        x = torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [comm.rank, 2]]),
            torch.tensor([1, 2]).to(dtype),
            (2, 5),
            check_invariants=True,
        )
        with pytest.raises(UsageError, match=r"pass x\.coalesce"):
            comm.sparse_allreduce(x)
        x = x.coalesce()
        want = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 4, 0, 0]]).to(dtype)
        sparse = comm.sparse_allreduce(x, result="sparse")
        dense = comm.sparse_allreduce(x, result="dense")
        assert sparse.indices.tolist() == [0, 1, 7]
        assert torch.equal(sparse.to_dense(), want)
        return torch.equal(dense, want)

    assert run(2, rank_main, timeout_s=300) == [True, True]


def test_topk_takes_and_gives_tensors() -> None:
    def rank_main(comm: Any) -> list[float]:
        residual = torch.zeros(6)
        top = comm.topk_allreduce(torch.arange(6.0), 2, residual=residual)
        assert residual.tolist() == [0, 1, 2, 3, 0, 0]
        values: list[float] = top.to_dense().tolist()
        return values

    assert run(2, rank_main, timeout_s=300) == [[0, 0, 0, 0, 8, 10]] * 2


def test_sums_of_nothing_are_tensors() -> None:
    def rank_main(comm: Any) -> tuple[int, int]:
        nothing = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64), [], (5,), check_invariants=True
        )
        total = comm.sparse_allreduce(nothing.coalesce(), result="sparse")
        return total.values.numel(), total.indices.numel()

    assert run(2, rank_main, timeout_s=300) == [(0, 0)] * 2
