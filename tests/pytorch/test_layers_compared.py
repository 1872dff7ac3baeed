# SPDX-License-Identifier: Apache-2.0
"""The table that sets commrt's layers beside DTensor's says what both do."""

from __future__ import annotations

import re
from typing import Any

from doc_blocks import ROOT
from dtensor_cases import CASES, by_commrt, by_dtensor

from commrt.layers.process_grid import ProcessGrid

PAGE = ROOT / "docs/explanation/layers-compared.md"
ROW = re.compile(r"^\| (`\w+`[^|]*) \| (\w+) \| ([^|]+) \| ([^|]+) \|$", re.M)
DEADLINE_S = 300.0


def compared() -> list[list[str]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("commrt")
    everyone: Any = dist.group.WORLD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with ProcessGrid(everyone.communicator, {"part": 0}) as grid:
        found = [
            [name, where, by_dtensor(name, where, mesh), by_commrt(name, where, grid)]
            for name, where in CASES
        ]
    dist.destroy_process_group()
    return found


def test_the_table_of_the_page_is_what_torch_and_commrt_do(torchrun: Any) -> None:
    found, other = torchrun(2, compared, deadline_s=DEADLINE_S)
    assert found == other
    said = [list(row) for row in ROW.findall(PAGE.read_text())]
    assert said == found, "\n".join(f"| {' | '.join(row)} |" for row in found)
