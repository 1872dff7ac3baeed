# SPDX-License-Identifier: Apache-2.0
"""Steps of mixed backends are measured beside steps of one, of equal results."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from commrt.bench import mixed
from commrt.errors import UsageError

DEADLINE_S = 300.0
NAMES = ["dlrm-small", "experts-256"]


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = mixed.measure(NAMES, 2, least_s=1e-3)
    dist.destroy_process_group()
    assert all(median(us) > 0 for row in rows for us in row["us"].values())
    text = mixed._text(rows)
    assert "dlrm-small, where commrt chose:" in text
    took = [line.split()[1] for row in rows for line in row["took"]]
    backends = sorted({name.split("/")[0] for name in took})
    operations = [{line.split(":")[0] for line in row["took"]} for row in rows]
    assert all("allreduce" in each for each in operations)
    return [[row["workload"] for row in rows], [*rows[0]["us"]], backends]


def refused_alone() -> str:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    with pytest.raises(UsageError, match="start two at least") as caught:
        mixed.measure(NAMES, 2)
    dist.destroy_process_group()
    return str(caught.value)


def test_each_backend_of_a_node_makes_the_steps(torchrun: Any) -> None:
    found = torchrun(2, measured, deadline_s=DEADLINE_S)
    names, ways, backends = found[0]
    assert found == [found[0]] * 2
    assert names == NAMES
    assert ways == ["mixed", "gloo", "shm"]
    assert "shm" in backends


def test_each_backend_between_nodes_makes_the_steps(torchrun: Any) -> None:
    found = torchrun(
        *(3, measured),
        env={"COMMRT_NODES": "1,1,1"},
        deadline_s=DEADLINE_S,
    )
    _, ways, backends = found[0]
    assert ways == ["mixed", "tcp", "gloo"]
    assert "tcp" in backends


def test_mixed_steps_need_two_ranks(torchrun: Any) -> None:
    (said,) = torchrun(1, refused_alone, deadline_s=DEADLINE_S)
    assert "one rank sends nothing" in said
