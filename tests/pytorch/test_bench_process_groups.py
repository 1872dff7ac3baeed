# SPDX-License-Identifier: Apache-2.0
"""The benchmark of process groups measures each operation in each way."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import process_groups

DEADLINE_S = 300.0
"""gloo's messages are slow where other programs have the cores."""


def measured(alone: bool) -> list[list[Any]]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = process_groups.measure(
        process_groups.OPERATIONS, alone=alone, sizes=(8, 4096), blocks=2
    )
    text = process_groups._text(rows)
    dist.destroy_process_group()
    found = [[row["op"], row["nbytes"], sorted(row["us"])] for row in rows]
    positive = all(us > 0 for row in rows for each in row["us"].values() for us in each)
    return [found, positive, len(text.splitlines())]


@pytest.mark.parametrize("alone", [False, True])
def test_each_operation_in_each_way(torchrun: Any, alone: bool) -> None:
    expected = []
    for name in process_groups.OPERATIONS:
        beside = ["without torch"] * (name == "all_reduce") if alone else ["gloo"]
        expected += [[name, nbytes, ["commrt", *beside]] for nbytes in (8, 4096)]
    num_lines = 1 + len(expected)
    got = torchrun(2, measured, alone=alone, deadline_s=DEADLINE_S)
    assert got == [[expected, True, num_lines]] * 2


def test_an_operation_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        process_groups.main(["--op", "all_reduce,halo"])
    assert "--op: halo: expected all_reduce, " in capsys.readouterr().err


def test_bytes_that_are_no_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        process_groups.main(["--bytes", "8,2"])
    assert "--bytes: 8,2: a tensor has 4 bytes at least" in capsys.readouterr().err
