# SPDX-License-Identifier: Apache-2.0
"""Every operation on device memory against numpy, on devices of threads."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case, legal_pairs, sample
from staged_cases import run_on_device
from staged_ranks import Rank, on_threads

from commrt.vocabulary.operations import OPERATIONS

SIZES = (1, 2, 3, 4, 5)
DRAWN = 8


def _all_right(size: int, cases: list[Case], piece: int | None, **device: Any) -> None:
    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, piece)

    wrong = on_threads(size, main, **device)
    assert [line for lines in wrong for line in lines] == []


WITH_ARRAYS = [spec.name for spec in OPERATIONS if spec.x_count != "none"]


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", WITH_ARRAYS)
def test_sample_agrees_with_numpy(
    coll: str, size: int, memory_flags: bool, seed: int
) -> None:
    cases = sample(coll, size, seed, DRAWN)
    _all_right(size, cases, 256, seed=seed, memory_flags=memory_flags)


@pytest.mark.parametrize(("dtype", "op"), legal_pairs())
def test_every_type_and_reduction(dtype: str, op: str) -> None:
    cases = [
        Case("allreduce", 2, "direct", {}, dtype, op, count=37),
        Case("reduce_scatter", 2, "ring", {}, dtype, op, count=5),
    ]
    _all_right(2, cases, 64)
