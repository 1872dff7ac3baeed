# SPDX-License-Identifier: Apache-2.0
"""The benchmark of layers on batches measures each way, of equal gradients."""

from __future__ import annotations

from typing import Any

from commrt.bench import batches

DEADLINE_S = 300.0
"""gloo's messages are slow where other programs have the cores."""


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = batches.measure([*batches.WORKLOADS], blocks=2, least_s=1e-3)
    dist.destroy_process_group()
    positive = all(us > 0 for row in rows for each in row["us"].values() for us in each)
    return [[row["workload"] for row in rows], sorted(rows[0]["us"]), positive]


def test_each_workload_is_measured_in_three_ways(torchrun: Any) -> None:
    ways = ["DTensor on commrt", "DTensor on gloo", "commrt"]
    expected = [[*batches.WORKLOADS], ways, True]
    assert torchrun(2, measured, deadline_s=DEADLINE_S) == [expected] * 2
