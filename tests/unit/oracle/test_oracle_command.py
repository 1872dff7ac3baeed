# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt oracle``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from commrt.__main__ import main
from commrt.oracle import AlphaBeta, Layer, LayerTable, Oracle
from commrt.oracle.costs import MeasuredCosts
from commrt.oracle.files import save_costs, save_table
from commrt.oracle.plot import plotted

TABLE = LayerTable(
    "small",
    (
        Layer(
            *("conv", 192, 1024, 450, 1e-4, 2e-4, 1e-6),
            channels=3,
            filters=16,
            extent=(8, 8),
            halo_rows=(1.0, 1.0),
        ),
        Layer("last", 1024, 10, 10_250, 1e-5, 2e-5, 1e-5, channels=1024, filters=10),
    ),
)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Return the file of a small network."""
    save_table(TABLE, tmp_path / "small.yaml")
    return str(tmp_path / "small.yaml")


def test_it_projects_and_recommends(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    words = ["oracle", "project", table, "--ranks", "2,4", "--batch", "16"]
    words += ["--samples", "1000", "--latency", "30us", "--rate", "12.5GB/s"]
    assert main([*words, "--explain", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("projected: small, 2 layers, 10,700 weights\n")
    assert "ring formulas, alpha 30 us, 12.5 GB/s (projected)" in said
    assert "4 ranks, 16 samples a step, projected:" in said
    assert "recommended: " in said
    assert "samples and filters" not in said
    rows = json.loads(out.read_text())
    assert all(row["projected"] for row in rows)
    oracle = Oracle(TABLE, AlphaBeta(30e-6, 8e-11), 1000)
    expected = {one.name for ranks in (2, 4) for one in oracle.rank(ranks, batch=16)}
    names = {f"{r['strategy']} {'x'.join(map(str, r['ways'].values()))}" for r in rows}
    assert names == expected
    data = next(r for r in rows if r["strategy"] == "data" and r["ranks"] == 4)
    one = oracle.project("data", 4, batch=16)
    assert data["epoch_s"] == pytest.approx(one.epoch_s)
    assert data["memory_nbytes"] == one.memory_nbytes


def test_batches_may_grow_with_ranks(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["oracle", "project", table, "--ranks", "2,8", "--batch-per-rank", "4"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2 ranks, 8 samples a step" in said
    assert "8 ranks, 32 samples a step" in said
    assert "commrt's model of near ranks (projected)" in said


def test_simulated_costs_are_called_simulated(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["oracle", "project", table, "--ranks", "4", "--batch", "16"]
    assert main([*words, "--topology", "star:hosts=4,rate=10gbit,latency=5us"]) == 0
    assert "(simulated)" in capsys.readouterr().out


def test_measured_costs_and_tables_are_taken(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {("allreduce", 2, 1): ((8, 1e-6), (1 << 20, 1e-3))}
    save_costs(MeasuredCosts(points, "by hand"), tmp_path / "costs.yaml")
    words = ["oracle", "project", table, "--ranks", "2", "--batch", "16"]
    words += ["--strategies", "data"]
    assert main([*words, "--measured", str(tmp_path / "costs.yaml")]) == 0
    assert "costs of communication: by hand" in capsys.readouterr().out
    shipped = Path(__file__).parents[3] / "tables" / "amd-epyc-2-cores.yaml"
    assert main([*words, "--table", str(shipped)]) == 0
    assert "measured by commrt-tune" in capsys.readouterr().out


def test_what_does_not_fit_is_marked_or_refused(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["oracle", "project", table, "--ranks", "4", "--batch", "16"]
    assert main([*words, "--memory", "200KB"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main([*words, "--memory", "1KB"]) == 2
    assert "no strategy on 4 ranks fits into 1,000 bytes" in capsys.readouterr().err
    # Of several numbers of ranks, others go on.
    words[4] = "3,4"
    assert main([*words, "--memory", "1KB"]) == 1
    assert capsys.readouterr().out.count("fits into 1,000 bytes") == 2


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--ranks", "0"], "expected numbers above 0"),
        (["--ranks", "9999999"], "expected at most 1,048,576"),
        (["--rate", "1"], "expected a number and a unit"),
        (["--rate", "1GB/s", "--topology", "abci"], "costs have one source"),
        (["--latency", "1us"], "expected --rate beside them"),
        (["--rate", "1GB/s", "--contention", "data"], "expected as data=2"),
        (["--memory", "much"], "length 'much'"),
        (["--strategies", "dta"], "unknown strategy 'dta'"),
        (["--flops-per-s", "1e9"], "no layer has flops"),
        (["--plot", "x.txt"], "expected a name that ends in .svg"),
    ],
)
def test_wrong_options_are_refused(
    table: str, more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["oracle", "project", table, "--ranks", "2", "--batch", "4", *more]) == 2
    )
    assert problem in capsys.readouterr().err


def test_strategies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["oracle", "strategies"]) == 0
    assert "data+filter   samples and filters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("maker", "problem"),
    [
        ("model", "expected path.py:function"),
        ("no_such_module_here:f", "cannot import"),
        ("math:nothing", "has no function nothing"),
        ("os:getcwd", "expected model, example"),
    ],
)
def test_makers_that_make_nothing_are_refused(
    maker: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.yaml")
    assert main(["oracle", "profile", maker, "--out", out]) == 2
    assert problem in capsys.readouterr().err


# -- pictures --------------------------------------------------------------------------


def test_lines_have_the_best_grid_for_each_number_of_ranks() -> None:
    oracle = Oracle(TABLE, AlphaBeta(1e-6, 1e-10), 100)
    every = [one for ranks in (8, 2, 4) for one in oracle.rank(ranks, batch=16)]
    lines = plotted(every)
    assert [one.ranks for one in lines["data"]] == [2, 4, 8]
    for one in lines["data+spatial"]:
        same = [
            x.epoch_s
            for x in every
            if (x.strategy, x.ranks) == (one.strategy, one.ranks)
        ]
        assert one.epoch_s == min(same)


def test_without_matplotlib_the_picture_says_how_to_get_it(
    table: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["oracle", "project", table, "--ranks", "2", "--batch", "16"]
    assert main([*words, "--plot", str(tmp_path / "x.svg")]) == 2
    assert "pip install 'commrt[report]'" in capsys.readouterr().err


class _Recorder:
    """A figure of matplotlib, as the picture uses it."""

    made: ClassVar[list[_Recorder]] = []

    def __init__(self, **kwargs: Any) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name == "savefig":
                args[0].write(b"<svg/>")
            return self

        return self if name in ("spines",) else call

    def __getitem__(self, key: Any) -> Any:
        return self


def test_the_picture_has_a_line_for_each_strategy(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("matplotlib.figure")
    fake.Figure = _Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", fake)
    words = ["oracle", "project", table, "--ranks", "2,4", "--batch", "16"]
    out = tmp_path / "x.svg"
    assert main([*words, "--plot", str(out), "--memory", "200KB"]) == 0
    calls = _Recorder.made[-1].calls
    labels = {kw["label"] for name, _, kw in calls if name == "plot" and "label" in kw}
    assert {"data", "spatial", "filter", "zero3", "tensor3d"} <= labels
    hollow = [args for name, args, kw in calls if kw.get("linestyle") == "none"]
    assert any(len(args[0]) for args in hollow), "what does not fit is hollow"
    title = next(args[0] for name, args, _ in calls if name == "set_title")
    assert "projected" in title
    assert out.read_text() == "<svg/>"
