# SPDX-License-Identifier: Apache-2.0
"""The benchmark of compression: its model, and that it checks what it times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from commrt.bench import compression
from commrt.bench.cli import main
from commrt.local import run
from commrt.vocabulary.wire_formats import WIRE_FORMATS

NAMES = [one.name for one in WIRE_FORMATS]


def test_break_even_is_what_is_saved_over_what_the_kernels_take() -> None:
    rates = {"compress": "int8", "encode": 10.0, "sum": 5.0, "decode": 10.0}
    # Of 8 bytes for an element each way 6 are saved; 4 of it take 0.1 + 0.2 + 0.1.
    assert compression.break_even_gb_per_s(rates) == pytest.approx(1.5 / 0.4)
    # Two ranks: half of the vector, but all of it decoded.
    two = compression.break_even_gb_per_s(rates, 2)
    assert two == pytest.approx(0.75 / 0.25)
    half = {**rates, "compress": "float16"}
    assert compression.break_even_gb_per_s(half) == pytest.approx(1.0 / 0.4)


def test_rates_are_of_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compress", "--kernels", "--sizes", "4096", "--format", "json"]
    assert main(line) == 0
    rates = json.loads(capsys.readouterr().out)
    assert [rate["compress"] for rate in rates] == NAMES
    for rate in rates:
        kinds = ("copy", "encode", "sum", "decode", "settle")
        assert all(rate[kind] > 0 for kind in kinds)
    assert main(line[:-2]) == 0
    assert "Break-even" in capsys.readouterr().out


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("op", ["allreduce", "alltoall"])
def test_every_format_is_measured_and_checked(op: str, residual: bool) -> None:
    job = {"op": op, "sizes": [4096, 40000], "iterations": 2, "residual": residual}

    def rank_main(comm: object) -> object:
        return compression.measure_on(comm, job)

    found = run(3, rank_main)[0]
    assert [row["compress"] for row in found["rows"]] == NAMES * 2
    assert all(row["valid"] for row in found["rows"])
    assert all(len(row["samples_us"]) == 2 for row in found["rows"])
    text = compression.describe(job, found)
    assert "WRONG" not in text
    assert op in text


def test_a_wrong_result_is_seen() -> None:
    right = compression.is_near

    def rank_main(comm: object) -> list[bool]:
        x = np.ones(10, np.float32)
        total = np.full(10, 2, np.float32)
        off = total.copy()
        off[3] += 0.1 * (comm.rank == 1)  # type: ignore[attr-defined]
        return [
            right(comm, "allreduce", "int8", x, total, each) for each in (total, off)
        ]

    assert run(2, rank_main) == [[True, False]] * 2
