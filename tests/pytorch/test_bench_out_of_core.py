# SPDX-License-Identifier: Apache-2.0
"""The benchmark of out-of-core training compares equal work under one budget."""

from __future__ import annotations

import pytest
import torch

from commrt.bench import out_of_core
from commrt.errors import UsageError


def rows(part: float, kind: str = "mlp") -> dict[str, out_of_core.Row]:
    threads = torch.get_num_threads()
    found = out_of_core.measure(
        *(kind, 4, 8, 2), part=part, bytes_per_s=1e8, latency_s=1e-5, turns=2
    )
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_all_ways_are_timed_within_the_budget(kind: str) -> None:
    found = rows(0.9, kind)
    assert [*found] == [*out_of_core.WAYS]
    whole = found["in core"].near_nbytes
    assert set(found["swap"].modes) == {"swap"}
    assert set(found["recompute"].modes) == {"recompute"}
    for way, row in found.items():
        assert row.ms is not None
        assert len(row.ms) == 2
        assert len(row.predicted_ms) == 2
        assert min(row.predicted_ms) > 0
        assert way == "in core" or 0 < row.near_nbytes <= 0.9 * whole


def test_a_way_that_has_no_room_is_said_to_have_none() -> None:
    found = rows(0.9)
    text = out_of_core._text({**found, "swap": out_of_core.Row(None, [], 0, ())})
    lines = text.splitlines()
    assert lines[3].split(None, 2) == ["swap", "-", "the budget is too small"]
    assert lines[2].startswith("mixed")
    assert lines[2].split()[2] == "1.000"


def test_a_budget_that_no_plan_fits_is_refused() -> None:
    with pytest.raises(UsageError, match="needs alone"):
        rows(0.01)


@pytest.mark.parametrize("wrong", [["--budget", "0"], ["--turns", "0"]])
def test_wrong_numbers_of_steps_out_of_core_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        out_of_core.main(wrong)
