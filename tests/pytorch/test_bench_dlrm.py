# SPDX-License-Identifier: Apache-2.0
"""The benchmark of recommendation models measures each way, of equal parameters."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import dlrm
from commrt.errors import UsageError

DEADLINE_S = 300.0


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    (row,) = dlrm.measure(["small"], blocks=2, least_s=1e-3)
    dist.destroy_process_group()
    positive = all(us > 0 for each in row["us"].values() for us in each)
    return [row["workload"], [*row["us"]], positive]


def refused_alone() -> str:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    with pytest.raises(UsageError, match="start two at least") as caught:
        dlrm.measure(["small"], 2)
    dist.destroy_process_group()
    return str(caught.value)


def test_a_recommendation_model_is_measured_in_four_ways(torchrun: Any) -> None:
    expected = ["small", ["commrt", "gloo", "torch on commrt", "alone"], True]
    assert torchrun(3, measured, deadline_s=DEADLINE_S) == [expected] * 3


def test_a_recommendation_model_needs_two_ranks(torchrun: Any) -> None:
    (said,) = torchrun(1, refused_alone, deadline_s=DEADLINE_S)
    assert "one rank sends nothing" in said
