# SPDX-License-Identifier: Apache-2.0
"""The command line, its pictures, and the critical path in words."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.critical_path import critical_path, describe, shares
from commrt.sim.link_series import link_series
from commrt.sim.network_files import load_network
from commrt.sim.simulate import Simulated, simulate

LOOP = "loop:switches=4,hosts=4"


def run_of(name: str, text: str = LOOP, costs: Costs | None = None) -> Simulated:
    network = load_network(text).network
    schedule = algorithms.schedule("allreduce", name, network.num_hosts)
    return simulate(schedule, network, 160_000, costs=costs)


costs_of_runs = st.builds(
    Costs,
    send_overhead_us=st.sampled_from([0.0, 0.7]),
    receive_overhead_us=st.sampled_from([0.0, 2.0]),
    reduce_us_per_byte=st.sampled_from([0.0, 0.0003]),
    copy_us_per_byte=st.sampled_from([0.0, 0.0001]),
    eager_nbytes=st.sampled_from([None, 0, 10_000]),
    handshake=st.booleans(),
)


@given(
    st.sampled_from(["ring", "direct", "halving_doubling", "double_tree"]),
    st.sampled_from([LOOP, "star:hosts=7", "fat_tree:down=3x3,up=1x1"]),
    costs_of_runs,
)
@settings(max_examples=60)
def test_the_critical_path_reaches_from_start_to_end(
    name: str, text: str, costs: Costs
) -> None:
    """Legs follow one another, and their shares make up the whole time."""
    run = run_of(name, text, costs)
    legs = critical_path(run)
    assert legs[-1].end_us == pytest.approx(run.time_us)
    for before, after in pairwise(legs):
        assert after.start_us >= before.end_us - 1e-9 * run.time_us
    part = shares(run, legs)
    parts = (part.latency_us, part.bytes_us, part.sharing_us, part.work_us)
    assert min(parts) >= 0
    assert sum(parts) + part.waiting_us == pytest.approx(run.time_us)
    if costs.eager_nbytes is None:
        assert part.waiting_us <= 1e-6 * run.time_us


def test_the_critical_path_names_the_link_that_flows_share() -> None:
    run = run_of("halving_doubling")
    lines = describe(run, critical_path(run))
    assert "(simulated)" in lines[0]
    assert len(lines) == 1 + 8
    shared = [line for line in lines if "shares link sw" in line]
    assert len(shared) == 4
    assert all(re.search(r"with 3 other flows$", line) for line in shared)
    assert "alone on its way" in lines[1]
    long = run_of("ring")
    told = describe(long, critical_path(long), most=6)
    assert "... 24 more ..." in told


@pytest.mark.parametrize("name", ["ring", "direct", "halving_doubling"])
def test_loads_over_time_add_up_to_the_bytes_of_each_link(name: str) -> None:
    run = run_of(name)
    series = link_series(run, 50)
    moved = series.sum(axis=1) * run.network.links.shared_rate * run.time_us / 50
    assert moved == pytest.approx(run.links.nbytes, rel=1e-9)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_comparison_says_that_it_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    status, out, _ = call(
        capsys,
        *("run", "ring", "halving_doubling", "--topology", "star:hosts=16"),
        *("--ranks", "16", "--bytes", "64KiB,1MiB", "--json", str(path)),
    )
    assert status == 0
    assert out.startswith("simulated: allreduce, 16 ranks")
    assert "fastest, simulated: halving_doubling (64KiB)" in out
    rows = json.loads(path.read_text())
    assert [row["algorithm"] for row in rows] == ["ring"] * 2 + ["halving_doubling"] * 2
    assert all(row["simulated"] for row in rows)


def test_pictures_are_whole_files_that_name_no_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gantt, heat = tmp_path / "gantt.svg", tmp_path / "heat.svg"
    page = tmp_path / "run.html"
    status, out, _ = call(
        capsys,
        *("run", "halving_doubling", "--topology", LOOP, "--ranks", "16", "--explain"),
        *("--gantt", str(gantt), "--heat", str(heat), "--animation", str(page)),
    )
    assert status == 0
    assert "shares link sw" in out
    run = simulate(
        algorithms.schedule("allreduce", "halving_doubling", 16),
        *(load_network(LOOP).network, 1 << 20),
    )
    svg = "{http://www.w3.org/2000/svg}"
    bars = ElementTree.parse(gantt).getroot().iter(f"{svg}rect")
    hints = [bar.findtext(f"{svg}title") or "" for bar in bars]
    assert sum("→" in hint and "KiB" in hint for hint in hints) == 2 * len(
        run.messages.send
    )
    lines = [*ElementTree.parse(heat).getroot().iter(f"{svg}line")]
    assert len(lines) == len(run.network.links)
    text = page.read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert len(data["links"]) == len(run.network.links)
    assert len(data["frames"]) == len(data["times"])
    for made in (text, gantt.read_text(), heat.read_text()):
        assert "imulated" in made
        assert not re.search(r"(src|href)=|url\(|@import", made)


@pytest.mark.parametrize(
    "text", ["torus:dims=3x4", "mesh:dims=2x2x3", "fat_tree:down=4x3,up=1x2",
             "full:hosts=12", "dragonfly:groups=3,routers=2,hosts=2,global_ports=1"]
)  # fmt: skip
def test_every_kind_of_network_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    heat, page = tmp_path / "heat.svg", tmp_path / "run.html"
    arguments = ("run", "ring", "--topology", text, "--ranks", "12", "--bytes", "48KB")
    status, _, _ = call(
        capsys, *arguments, "--heat", str(heat), "--animation", str(page)
    )
    assert status == 0
    root = ElementTree.parse(heat).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for line in root.iter("{http://www.w3.org/2000/svg}line"):
        assert 0 <= float(line.get("x1", -1)) <= width
        assert 0 <= float(line.get("y1", -1)) <= height


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (("run", "rong", "--topology", "star:hosts=4", "--ranks", "4"), 2, "rong"),
        (("run", "ring", "--topology", "star:hosts=4", "--ranks", "5"), 2, "5 ranks"),
        (("run", "ring", "--topology", "star:hosts=4", "--ranks", "0"), 2, "expected"),
        (("run", "ring", "--topology", "star:hosts=4", "--ranks", "4", "--params",
          "k=2"), 2, "none of ring has k"),
        (("run", "ring", "direct", "--topology", "star:hosts=4", "--ranks", "4",
          "--explain"), 2, "expected one of each"),
        (("run", "ring", "--topology", "star:hosts=4", "--ranks", "4", "--bytes",
          "10"), 2, "expected a multiple of 4"),
        (("run", "ring", "--topology", "star:hosts=300", "--ranks", "300", "--gantt",
          "x.svg", "--bytes", "12KB"), 2, "nobody could read it"),
        (("export", "--topology", "star:hosts=5000", "--out", "x.xml"), 2, "smaller"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    problem: str,
) -> None:
    found, _, err = call(capsys, *arguments)
    assert found == status
    assert problem in err
    assert err.startswith("commrt-sim: ")
    assert err.count("\n") == 1


WRONG = '''
import commrt


@commrt.algorithm("allreduce", "not_a_sum_of_all")
def not_a_sum_of_all(b):
    """Copy what is there already."""
    b.copy(b.out[:], b.inp[:])
'''


def test_a_wrong_algorithm_is_not_simulated_unless_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    named = ("run", f"{path}:not_a_sum_of_all", "--topology", "star:hosts=2")
    status, _, err = call(capsys, *named, "--ranks", "2")
    assert status == 1
    assert "the schedule is wrong" in err
    listed = ("run", "not_a_sum_of_all", *named[2:], "--ranks", "2", "--unverified")
    assert call(capsys, *listed)[0] == 0


def test_two_levels_know_which_ranks_share_a_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("run", "two_level", "--topology", "dgx_h100_pod", "--ranks", "16")
    status, out, _ = call(capsys, *arguments)
    assert status == 0
    assert "two_level" in out


def test_networks_and_presets_are_listed_with_their_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = call(capsys, "networks")
    assert status == 0
    for name in ("abci", "dgx_h100_pod", "ethernet", "loop", "dragonfly"):
        assert name in out
    assert "RA-11333-001" in out


def test_the_study_of_loop_networks_says_what_is_known_and_what_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = call(capsys, "study", "dln", "--quick")
    assert status == 0
    for word in (
        "known",
        "chosen here",
        "published",
        "all simulated",
        "where it loses",
    ):
        assert word in out
