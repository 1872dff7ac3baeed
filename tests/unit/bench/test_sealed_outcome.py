# SPDX-License-Identifier: Apache-2.0
"""Sealed predictions beside measurements."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench.sealed.cells import Cell
from commrt.bench.sealed.judging import judged, report
from commrt.bench.sealed.predicting import OPENMPI, SIMULATOR, TWO_NUMBERS

CELLS = [
    Cell("star-3", "bcast", 8192),
    Cell("star-3", "allreduce", 8192),
    Cell("loop-4", "bcast", 65_536),
]


def row(simulator: str, two: str, rule: str, **us: float) -> dict[str, Any]:
    winners = {SIMULATOR: simulator, TWO_NUMBERS: two, OPENMPI: rule}
    doubled = {name: 2 * one for name, one in us.items()}
    return {"us": {SIMULATOR: us, TWO_NUMBERS: doubled}, "winners": winners}


PREDICTIONS = {
    CELLS[0].key: row("a", "b", "a", a=100, b=120),
    CELLS[1].key: row("a", "a", "b", a=90, b=200),
    CELLS[2].key: row("b", "a", "a", a=60, b=50),
}
TIMES = {
    # The best one, by the median.
    CELLS[0].key: {"a": [90, 100, 400], "b": [119, 120, 121]},
    # 2 % above the best one, which is no difference.
    CELLS[1].key: {"a": [102, 102, 102], "b": [100, 100, 100]},
    # A quarter above it.
    CELLS[2].key: {"a": [40, 40, 40], "b": [50, 50, 50]},
}


def test_a_winner_is_right_where_nothing_is_quicker() -> None:
    found = judged(CELLS, PREDICTIONS, TIMES, SIMULATOR)
    assert [one.is_right for one in found] == [True, True, False]
    assert [one.regret for one in found] == pytest.approx([0, 0.02, 0.25])
    assert [one.error for one in found] == pytest.approx([0, 90 / 102 - 1, 0])
    assert [one.best for one in found] == ["a", "b", "a"]


def test_rules_predict_no_times() -> None:
    found = judged(CELLS, PREDICTIONS, TIMES, OPENMPI)
    assert [one.error for one in found] == [None] * 3
    assert [one.winner for one in found] == ["a", "b", "a"]


def test_a_report_has_all_figures() -> None:
    lines = list(report(CELLS, PREDICTIONS, TIMES))
    assert (
        "| all 3 cells | right | mean regret where wrong | of all | error of time |"
        in lines
    )
    assert f"| {SIMULATOR} | 66.7% | 25.0% | 9.0% | 0.0% |" in lines
    assert f"| {TWO_NUMBERS} | 66.7% | 20.0% | 7.3% | 100.0% |" in lines
    assert f"| {OPENMPI} | 100.0% | none | 0.0% |  |" in lines
    assert "| star-3 | 2 | 100.0% | none | 1.0% | 5.9% |" in lines
    assert "| loop-4 | 1 | 0.0% | 25.0% | 25.0% | 0.0% |" in lines
    (worst,) = [line for line in lines if line.startswith("| loop-4 bcast")]
    assert worst == "| loop-4 bcast 65536 | b | 25% | +0% | a |"
    (sums,) = [line for line in lines if line.startswith(f"{SIMULATOR}:")]
    assert "6 times of all candidates" in sums
