# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tensor-parallel layers measures each way, of equal results."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import tensor3d
from commrt.errors import UsageError

DEADLINE_S = 300.0
"""gloo's messages are slow where other programs have the cores."""


def measured(grid: Any, pairs: int) -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    if dist.get_world_size() > 1 and grid is None:
        with pytest.raises(UsageError, match="9 features cannot be cut"):
            tensor3d.measure([(8, 12, 9)])
    rows = tensor3d.measure(
        [(8, 12, 20), (3, 7, 10)], grid=grid, pairs=pairs, blocks=2, least_s=1e-3
    )
    text = tensor3d._text(rows)
    dist.destroy_process_group()
    found = [[row["shape"], sorted(row["us"])] for row in rows]
    positive = all(us > 0 for row in rows for each in row["us"].values() for us in each)
    return [found, positive, len(text.splitlines())]


@pytest.mark.parametrize(
    ("ranks", "grid", "ways"),
    [
        (1, None, ["commrt", "torch"]),
        (2, None, ["commrt", "torch on commrt", "torch on gloo"]),
        (2, {"z": 2, "x": 1}, ["commrt", "without overlap"]),
    ],
)
def test_each_way_is_measured(
    torchrun: Any, ranks: int, grid: Any, ways: list[str]
) -> None:
    expected = [[shape, ways] for shape in ("8x12x20", "3x7x10")]
    got = torchrun(ranks, measured, grid=grid, pairs=2, deadline_s=DEADLINE_S)
    assert got == [[expected, True, 3]] * ranks


def test_shapes_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        tensor3d.main(["--shape", "8x0x3"])
    assert "8x0x3: expected three numbers" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        tensor3d.main(["--grid", "z"])
    assert "z: expected axes and ranks" in capsys.readouterr().err
