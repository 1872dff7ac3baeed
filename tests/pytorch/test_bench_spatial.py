# SPDX-License-Identifier: Apache-2.0
"""The benchmark of samples that are cut in space trains each network in both ways."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import spatial
from commrt.local import run


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(("name", "scale"), [("resnet-50", 8), ("unet-3d", 4)])
def test_each_network_is_timed_whole_and_cut(name: str, scale: int) -> None:
    def main(comm: Any) -> Any:
        return spatial.measure(comm, [name], turns=2, scale=scale)

    (row,), _ = run(2, main)
    assert (row["workload"], row["ranks"]) == (name, 2)
    assert {way: len(times) for way, times in row["ms"].items()} == {
        "one process": 2,
        "cut": 2,
    }


def test_workloads_that_do_not_exist_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        spatial.main(["--workload", "resnet-50,vgg"])
    assert "vgg: expected" in capsys.readouterr().err
