# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sharded optimizers measures each way, of equal results."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import sharded_update

DEADLINE_S = 300.0
WAYS = ["commrt", "torch on commrt", "torch on gloo"]


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = sharded_update.measure(9, 3, blocks=2, least_s=1e-3)
    dist.destroy_process_group()
    positive = all(us > 0 for row in rows for each in row["us"].values() for us in each)
    return [[[row["step"], sorted(row["us"])] for row in rows], positive]


def test_torchs_sharded_optimizer_is_beside_ours(torchrun: Any) -> None:
    rows = [[step, WAYS] for step in ("update 3x9", "train 3x9")]
    assert torchrun(2, measured, deadline_s=DEADLINE_S) == [[rows, True]] * 2


def test_widths_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        sharded_update.main(["--width", "0"])
    assert "--width 0: expected a number from 1" in capsys.readouterr().err
