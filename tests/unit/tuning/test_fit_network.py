# SPDX-License-Identifier: Apache-2.0
"""Networks that are fitted to measured times: ``commrt-tune fit``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from commrt.errors import UsageError
from commrt.select.facts import Candidate
from commrt.sim.network_files import load_network
from commrt.tuning import fit_network
from commrt.tuning.cli import main
from commrt.tuning.fit_network import Cell, Fitted, cells_of, fit, simulated_us
from commrt.tuning.samples import Group

TRUTH = {
    "gbytes_per_s": 1.25,
    "latency_us": 12.0,
    "send_overhead_us": 2.5,
    "receive_overhead_us": 1.5,
    "reduce_us_per_byte": 2e-4,
}


def cells(
    truth: dict[str, float],
    nodes: tuple[int, ...] = (0, 1, 2, 3),
    backend: str = "mpi",
) -> list[Cell]:
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
                cell = Cell(op, Candidate(backend, name), nodes, nbytes, 1.0)
                found.append(cell._replace(us=simulated_us(cell, truth, kept)))
    return found


def test_a_fit_gives_the_times_again() -> None:
    found = fit(cells(TRUTH))
    assert max(found.errors) < 0.06
    assert max(found.held_out) < 0.06
    assert found.values["gbytes_per_s"] == pytest.approx(1.25, rel=0.05)
    one_way = "latency_us", "send_overhead_us", "receive_overhead_us"
    assert sum(found.values[key] for key in one_way) == pytest.approx(16.0, rel=0.1)


def test_connections_of_ones_own_carry_fragments_in_order(tmp_path: Path) -> None:
    """A pipeline of fragments is quicker than whole messages, with equal numbers."""
    known = cells(TRUTH, backend="tcp")
    whole = {
        (each.op, each.candidate.algorithm, each.nbytes): each.us
        for each in cells(TRUTH)
    }
    (tree,) = [
        each
        for each in known
        if each.candidate.algorithm == "binomial" and each.nbytes == 1 << 23
    ]
    assert tree.us < 0.9 * whole["bcast", "binomial", 1 << 23]
    found = fit(known)
    assert max(found.held_out) < 0.1
    path = tmp_path / "network.yaml"
    path.write_text(found.text(4, "raw.json"))
    costs = load_network(str(path)).costs
    assert costs.in_order
    assert costs.queued_nbytes == 40_000
    assert not Fitted({**TRUTH}, (0.0,), (0.0,)).fixed


def test_ranks_of_one_node_have_costs_of_their_own() -> None:
    truth = {**TRUTH, "local_latency_us": 0.5, "local_gbytes_per_s": 8.0}
    found = fit(cells(truth, (0, 0, 1, 1)))
    assert {*truth} == {*found.values}
    assert max(found.held_out) < 0.12


def test_the_file_is_a_network_for_the_simulator(tmp_path: Path) -> None:
    found = fit(cells(TRUTH))
    file = tmp_path / "net.yaml"
    file.write_text(found.text(16, "raw: #2.json"))
    described = load_network(str(file))
    assert described.network.num_hosts == 16
    assert described.network.name == "star of 16 hosts, fitted to raw: #2.json"
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
    asked = ["fit", str(raw), "--out", str(out)]
    assert main([*asked, "--hosts", "4"]) == 0
    assert "schedules of shm" in capsys.readouterr().out
    assert load_network(str(out)).network.num_hosts == 4
    for wrong, message in (
        (["--hosts", "1"], "--hosts 1"),
        (["--hosts", "0"], "--hosts 0"),
        (["--backend", "nccl"], "schedules of shm"),
    ):
        assert main([*asked, *wrong]) == 2
        assert message in capsys.readouterr().err


class Recorded:
    """A recording of launches on one node, near and far, and on several nodes."""

    orders: ClassVar = {"allreduce": [], "allgatherv": []}

    def groups(self) -> list[Group]:
        near, far = Group(2, 1, 2, "near"), Group(2, 1, 2, "far")
        return [near, far, Group(4, 2, 2, "network"), Group(3, 3, 1, "network")]


def test_a_fit_takes_times_of_one_backend_between_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def curves(recording: Any, group: Group, op: str) -> dict[Candidate, Any]:
        def seen(*sizes: int) -> Any:
            return SimpleNamespace(
                estimates={size: SimpleNamespace(us=1.0) for size in sizes}
            )

        return {
            Candidate("mpi", "native"): seen(8, 64, 512),
            Candidate("mpi", "ring"): seen(8),
            Candidate("gloo", "ring"): seen(8, 64),
        }

    monkeypatch.setattr(fit_network, "curves_of", curves)
    recording: Any = Recorded()
    chosen = cells_of(recording)
    assert {cell.candidate for cell in chosen} == {Candidate("gloo", "ring")}
    assert {cell.nodes for cell in chosen} == {(0, 0, 1, 1), (0, 1, 2)}
    assert {cell.op for cell in chosen} == {"allreduce"}
    assert {str(cell.candidate) for cell in cells_of(recording, "mpi")} == {"mpi/ring"}
    with pytest.raises(UsageError, match="schedules of gloo, mpi"):
        cells_of(recording, "nccl")
