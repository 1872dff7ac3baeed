# SPDX-License-Identifier: Apache-2.0
"""What a run beside other programs says, writes, and leaves as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_recordings import DIRECT, NATIVE, NEAR, TRUTH, record

from commrt.errors import TableError
from commrt.select.facts import Query
from commrt.select.schema import Catalog
from commrt.select.table import load_file
from commrt.tuning.report import report
from commrt.tuning.run import finish
from commrt.tuning.samples import Recording
from commrt.tuning.show import explain, show
from commrt.tuning.tuner import Options

KNOWN = Catalog({"mpi": ("native",), "shm": ("direct", "recursive_doubling", "ring")})
OPTIONS = Options(ranks=(2,), ops=("allreduce", "bcast"), budget_s=60)


def _too_busy() -> Recording:
    """Return a run that decides allreduce, and found no quiet moment for bcast."""
    recording, other = record(seed=4), record(seed=5, op="bcast")
    measured = {8, 32}
    for nbytes in other.planned(2, "bcast") - measured:
        recording.unfinished[2, "bcast", nbytes] = "busy"
    recording.orders |= other.orders
    recording.samples += [one for one in other.samples if one.nbytes in measured]
    return recording


def test_the_summary_says_what_was_too_busy_to_decide(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    recording = _too_busy()
    planned = len(recording.planned(2, "bcast"))
    summary = finish(recording, OPTIONS, out=path)
    assert (
        f"Too busy to decide: bcast, 2 ranks, near links: only 2 of {planned} sizes "
        "could be trusted; the model goes on choosing\n" in summary
    )
    assert "as other programs ran on the ranks' cores, 2 ranks: bcast 64" in summary
    assert {rule.op for rule in load_file(path, KNOWN).rules} == {"allreduce"}


def test_a_short_budget_is_not_called_a_busy_machine(tmp_path: Path) -> None:
    recording = _too_busy()
    recording.unfinished = dict.fromkeys(recording.unfinished, "budget")
    summary = finish(recording, OPTIONS, out=tmp_path / "t.yaml")
    assert "Too short a budget to decide: bcast, 2 ranks, near links" in summary
    assert "Too busy" not in summary


def test_a_run_without_a_quiet_moment_says_so_and_writes_nothing(
    tmp_path: Path,
) -> None:
    recording = Recording(unfinished={(2, "bcast", 8): "busy"})
    with pytest.raises(TableError, match="other programs ran on the ranks' cores"):
        finish(recording, OPTIONS, out=tmp_path / "t.yaml")
    assert list(tmp_path.iterdir()) == []


def test_rules_for_what_was_too_busy_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a quiet run wrote them; but not those of a candidate that now fails."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    finish(record(seed=5, op="bcast", truth={DIRECT: TRUTH[DIRECT]}), OPTIONS, out=None)
    (path,) = tmp_path.rglob("*.yaml")
    before = load_file(path, KNOWN).rules
    assert {rule.use for rule in before} == {DIRECT}
    summary = finish(_too_busy(), OPTIONS, out=None)
    rules = load_file(path, KNOWN).rules
    assert {rule.op for rule in rules} == {"allreduce", "bcast"}
    assert [rule for rule in rules if rule.op == "bcast"] == list(before)
    assert "1 rules for what this run was too busy to decide are kept" in summary
    failing = _too_busy()
    failing.fail(2, {"op": "bcast", "nbytes": 8, "candidate": str(DIRECT)}, "hung")
    finish(failing, OPTIONS, out=None)
    assert {rule.op for rule in load_file(path, KNOWN).rules} == {"allreduce"}


@pytest.mark.parametrize(
    ("launches", "disturbed", "quality"),
    [(3, 0, "good"), (2, 0, "fair"), (3, 3, "fair"), (3, 60, "poor"), (1, 0, "poor")],
)
def test_rules_say_how_far_their_evidence_can_be_trusted(
    tmp_path: Path, launches: int, disturbed: int, quality: str
) -> None:
    """The table, what is printed of it, and its page; all read it from the file."""
    calm = {one: us for one, us in TRUTH.items() if one in (NATIVE, DIRECT)}
    recording = record(seed=4, truth=calm, launches=launches)
    recording.samples = [
        replace(one, us=(one.us[0],) * 15, disturbed=disturbed)
        for one in recording.samples
    ]
    path = tmp_path / "t.yaml"
    finish(recording, OPTIONS, out=path)
    table = load_file(path, KNOWN)
    found = {rule.evidence.quality for rule in table.rules if rule.evidence}
    assert found == {quality}
    point = next(rule.evidence for rule in table.rules if rule.evidence).points[0]
    assert point.disturbed == launches * disturbed
    assert f"({quality} evidence)" in show(table)
    told = explain(table, Query("allreduce", 8, op="sum"), NEAR)
    assert f"by {quality} evidence" in told
    assert (f"{point.disturbed} more disturbed" in told) == bool(disturbed)
    page = report(table, recording, "here")
    assert f"<td>{quality}" in page
    assert ("of the repetitions were disturbed" in page) == bool(disturbed)
