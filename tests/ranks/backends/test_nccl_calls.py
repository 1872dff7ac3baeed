# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays by NCCL, end to end, on devices of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, legal_pairs, sample
from fake_nccl import FakeNccl
from nccl_ranks import nccl_here, on_nccl_threads
from staged_cases import run_on_device
from staged_ranks import Rank

from commrt.nccl.abilities import support
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import OPERATIONS
from commrt.vocabulary.reduction_names import reduce_op

SIZES = (1, 2, 3, 5)
DRAWN = 6
MOVED = [spec.name for spec in OPERATIONS if spec.x_count != "none"]
BY_NCCL = [spec.name for spec in OPERATIONS if spec.nccl != "none"]


@pytest.fixture
def nccl() -> Iterator[FakeNccl]:
    with nccl_here() as fake:
        yield fake


def test_an_allreduce_runs_by_nccl_and_is_explained(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> Any:
        x = rank.array(np.full(5, 1.0 + rank.rank, "f4"))
        assert rank.comm.allreduce(x) is x
        value = rank.fetch(x)
        rank.stream.synchronize()
        told = rank.comm.explain("allreduce", 20, device="cuda")
        return value().tolist(), str(told.choice.candidate)

    assert on_nccl_threads(2, main) == [([3.0] * 5, "nccl/native")] * 2
    assert nccl.counter("kernels") == 2
    assert nccl.counter("made") == 2


def _all_right(nccl: FakeNccl, size: int, cases: list[Case], **device: Any) -> None:
    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, None)

    wrong = on_nccl_threads(size, main, **device)
    assert [line for lines in wrong for line in lines] == []


def _is_added(case: Case) -> bool:
    """Whether the pretended NCCL can add it, or it is left to ``staged`` anyway."""
    dtype = dtype_by_name(case.dtype)
    if not dtype.name.startswith("float8"):
        return True
    op = reduce_op(case.op)
    return support("allreduce", dtype, op, 22809).how == "refused"


def _unasked(case: Case) -> Case:
    return replace(case, algorithm=None, params={})


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("version", [22809, 22700], ids=["native", "composed"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", MOVED)
def test_sample_agrees_with_numpy(
    coll: str, size: int, version: int, memory_flags: bool, seed: int
) -> None:
    """What NCCL cannot do runs staged, in the same stream and between the others."""
    cases = [_unasked(each) for each in sample(coll, size, seed, DRAWN)]
    with nccl_here(version) as nccl:
        _all_right(
            *(nccl, size, [each for each in cases if _is_added(each)]),
            seed=seed,
            memory_flags=memory_flags,
        )


@pytest.mark.parametrize(("dtype", "op"), legal_pairs())
def test_every_type_and_reduction(nccl: FakeNccl, dtype: str, op: str) -> None:
    cases = [
        Case("allreduce", 2, None, {}, dtype, op, count=37),
        Case("reduce_scatter", 2, None, {}, dtype, op, count=5),
        Case("reduce_scatterv", 2, None, {}, dtype, op, count=5, spread="ragged"),
    ]
    _all_right(nccl, 2, [each for each in cases if _is_added(each)])
    refused = (
        support("allreduce", dtype_by_name(dtype), reduce_op(op), 22809).how
        == "refused"
    )
    assert (nccl.counter("kernels") == 0) == (refused or not _is_added(cases[0]))


@pytest.mark.parametrize("in_progress", [1, 5])
def test_calls_that_nccl_puts_off_are_in_the_stream_when_they_return(
    nccl: FakeNccl, in_progress: int, seed: int
) -> None:
    nccl.set("in_progress", in_progress)
    cases = [_unasked(each) for each in sample("allgatherv", 3, seed, 4)]
    cases += [Case("allreduce", 3, count=9), Case("alltoall", 3, in_place=True)]
    _all_right(nccl, 3, cases, seed=seed, max_delay_us=50)


def test_a_barrier_in_a_stream(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        rank.comm.barrier(stream=rank.stream)
        rank.comm.barrier(stream=rank.stream, nonblocking=True).synchronize()

    on_nccl_threads(3, main)
    assert nccl.counter("kernels") == 6
