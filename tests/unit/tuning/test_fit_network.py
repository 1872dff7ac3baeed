# SPDX-License-Identifier: Apache-2.0
"""Networks that are fitted to measured times: ``commrt-tune fit``."""

from __future__ import annotations

from pathlib import Path

import pytest

from commrt.errors import UsageError
from commrt.select.facts import Candidate
from commrt.sim.network_files import load_network
from commrt.tuning import fit_network
from commrt.tuning.cli import main
from commrt.tuning.fit_network import Cell, fit, simulated_us

TRUTH = {
    "gbytes_per_s": 1.25,
    "latency_us": 12.0,
    "send_overhead_us": 2.5,
    "receive_overhead_us": 1.5,
    "reduce_us_per_byte": 2e-4,
}


def cells(truth: dict[str, float], nodes: tuple[int, ...] = (0, 1, 2, 3)) -> list[Cell]:
    """Return times that a network with these numbers takes, on as many ranks."""
    kept = fit_network._Kept()
    found = []
    for op, names in (
        ("allreduce", ("ring", "recursive_doubling", "halving_doubling")),
        ("bcast", ("binomial", "direct")),
        ("alltoall", ("pairwise",)),
    ):
        for name in names:
            for nbytes in (8, 1 << 12, 1 << 16, 1 << 20, 1 << 23):
                cell = Cell(op, Candidate("mpi", name), nodes, nbytes, 1.0)
                found.append(cell._replace(us=simulated_us(cell, truth, kept)))
    return found


def test_a_fit_gives_the_times_again() -> None:
    found = fit(cells(TRUTH))
    assert max(found.errors) < 0.06
    assert max(found.held_out) < 0.06
    assert found.values["gbytes_per_s"] == pytest.approx(1.25, rel=0.05)
    one_way = "latency_us", "send_overhead_us", "receive_overhead_us"
    assert sum(found.values[key] for key in one_way) == pytest.approx(16.0, rel=0.1)


def test_ranks_of_one_node_have_costs_of_their_own() -> None:
    truth = {**TRUTH, "local_latency_us": 0.5, "local_gbytes_per_s": 8.0}
    found = fit(cells(truth, (0, 0, 1, 1)))
    assert {*truth} == {*found.values}
    assert max(found.held_out) < 0.12


def test_the_file_is_a_network_for_the_simulator(tmp_path: Path) -> None:
    found = fit(cells(TRUTH))
    file = tmp_path / "net.yaml"
    file.write_text(found.text(16, "raw.json"))
    described = load_network(str(file))
    assert described.network.num_hosts == 16
    rate = described.network.links.shared_rate[0] / 1000
    assert rate == pytest.approx(found.values["gbytes_per_s"], rel=1e-3)
    given = described.costs.send_overhead_us
    assert given == pytest.approx(found.values["send_overhead_us"], rel=1e-3)


def test_too_few_times_are_refused() -> None:
    with pytest.raises(UsageError, match="9 measured times"):
        fit(cells(TRUTH)[:9])


def test_a_recording_becomes_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = Path(__file__).parents[3] / "docs/data/tuning-1.json.gz"
    out = tmp_path / "net.yaml"
    assert main(["fit", str(raw), "--hosts", "4", "--out", str(out)]) == 0
    assert "cells that were left out" in capsys.readouterr().out
    assert load_network(str(out)).network.num_hosts == 4
    assert main(["fit", str(raw), "--hosts", "1", "--out", str(out)]) == 2
