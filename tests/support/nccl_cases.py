# SPDX-License-Identifier: Apache-2.0
"""Buffers and references for operations over the pretended NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from commrt.vocabulary.dtypes import ReduceOp

__all__ = ["Arrays", "inputs", "reference", "reference_counted", "starts"]

Arrays = list[NDArray[np.generic]]

_FILL = 99


def inputs(
    rng: np.random.Generator, lengths: Sequence[int], dtype: str = "float32"
) -> Arrays:
    """Return an array per rank; small integers, whose sums are exact in every type."""
    return [rng.integers(1, 5, n).astype(dtype) for n in lengths]


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each block begins."""
    return [0, *accumulate(counts)][:-1]


def _reduced(xs: Arrays, op: ReduceOp) -> NDArray[np.generic]:
    whole = np.stack(xs)
    if op == ReduceOp.SUM:
        return whole.sum(0, dtype=whole.dtype)
    if op == ReduceOp.PROD:
        return whole.prod(0, dtype=whole.dtype)
    if op == ReduceOp.MIN:
        return whole.min(0)
    if op == ReduceOp.MAX:
        return whole.max(0)
    assert op == ReduceOp.AVG
    if whole.dtype.kind in "iu":
        exact = whole.sum(0, dtype=whole.dtype).astype(object)
        toward_zero = [abs(int(n)) // len(xs) * (1 if n >= 0 else -1) for n in exact]
        return np.array(toward_zero, whole.dtype)
    return (whole / len(xs)).sum(0).astype(whole.dtype)


def reference(coll: str, xs: Arrays, root: int, op: ReduceOp | None) -> Arrays:
    """Return what each rank's output must be; of length 0 where it has none."""
    size = len(xs)
    none = xs[0][:0]
    if coll in ("allreduce", "reduce", "reduce_scatter"):
        assert op is not None
        total = _reduced(xs, op)
        if coll == "allreduce":
            return [total] * size
        if coll == "reduce":
            return [total if rank == root else none for rank in range(size)]
        return list(np.split(total, size))
    if coll == "bcast":
        return [xs[root]] * size
    whole = np.concatenate(xs)
    if coll == "allgather":
        return [whole] * size
    if coll == "gather":
        return [whole if rank == root else none for rank in range(size)]
    if coll == "scatter":
        return list(np.split(xs[root], size))
    assert coll == "alltoall"
    return [
        np.concatenate([np.split(x, size)[rank] for x in xs]) for rank in range(size)
    ]


def reference_counted(
    coll: str, xs: Arrays, counts: Sequence[Sequence[int]], root: int, op: ReduceOp
) -> Arrays:
    """The same with each rank's counts, in an alltoallv of what it sends."""
    size = len(xs)
    if coll == "alltoallv":
        return [
            np.concatenate(
                [
                    x[starts(sent)[rank] :][: sent[rank]]
                    for x, sent in zip(xs, counts, strict=True)
                ]
            )
            for rank in range(size)
        ]
    whole = np.concatenate(xs)
    if coll == "allgatherv":
        return [whole] * size
    if coll == "gatherv":
        return [whole if rank == root else whole[:0] for rank in range(size)]
    source = _reduced(xs, op) if coll == "reduce_scatterv" else xs[root]
    return [source[at:][:n] for at, n in zip(starts(counts[0]), counts[0], strict=True)]
