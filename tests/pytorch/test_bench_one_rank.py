# SPDX-License-Identifier: Apache-2.0
"""The benchmark of layers on one rank measures each way, of equal gradients."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import one_rank
from commrt.errors import UsageError

DEADLINE_S = 300.0
QUICK = ["small-convolution", "linear"]


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = one_rank.measure(QUICK, blocks=2, least_s=1e-3)
    dist.destroy_process_group()
    positive = all(us > 0 for row in rows for each in row["us"].values() for us in each)
    return [[row["workload"] for row in rows], sorted(rows[0]["us"]), positive]


def refused() -> str:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    with pytest.raises(UsageError, match="start one") as caught:
        one_rank.measure(QUICK, 2)
    dist.destroy_process_group()
    return str(caught.value)


def test_one_rank_is_measured_in_three_ways(torchrun: Any) -> None:
    expected = [QUICK, ["layers", "tensors", "torch"], True]
    assert torchrun(1, measured, deadline_s=DEADLINE_S) == [expected]


def test_two_ranks_are_not_one(torchrun: Any) -> None:
    said = torchrun(2, refused, deadline_s=DEADLINE_S)
    assert said == ["one_rank: 2 ranks; start one"] * 2
