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
    assert "dlrm-small, mixed:" in text
    # Who was asked alone has carried what it can, also in communicators of grids.
    carried = {
        way: {
            line.split()[1].split("/")[0]
            for row in rows
            for line in row["took"][way]
            if line.startswith("alltoallv:")
        }
        for way in rows[0]["us"]
    }
    return [[row["workload"] for row in rows], {w: [*b] for w, b in carried.items()}]


def refused_alone() -> str:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    with pytest.raises(UsageError, match="start two at least") as caught:
        mixed.measure(NAMES, 2)
    dist.destroy_process_group()
    return str(caught.value)


def test_each_backend_of_a_node_makes_the_steps(torchrun: Any) -> None:
    found = torchrun(2, measured, deadline_s=DEADLINE_S)
    names, carried = found[0]
    assert found == [found[0]] * 2
    assert names == NAMES
    assert carried == {"mixed": ["shm"], "shm": ["shm"]}


def test_each_backend_between_nodes_makes_the_steps(torchrun: Any) -> None:
    found = torchrun(
        *(3, measured),
        env={"COMMRT_NODES": "1,1,1"},
        deadline_s=DEADLINE_S,
    )
    _, carried = found[0]
    assert [*carried] == ["mixed", "tcp", "gloo"]
    assert carried["tcp"] == ["tcp"]
    assert carried["gloo"] == ["gloo"]


def test_mixed_steps_need_two_ranks(torchrun: Any) -> None:
    (said,) = torchrun(1, refused_alone, deadline_s=DEADLINE_S)
    assert "one rank sends nothing" in said
