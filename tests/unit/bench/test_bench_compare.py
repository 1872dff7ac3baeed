# SPDX-License-Identifier: Apache-2.0
"""Comparison: order of launches, pairs within a class, tables, recorded data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commrt.bench import compare, figure
from commrt.bench.aggregate import aggregate, geometric_mean, markdown
from commrt.bench.cli import main
from commrt.bench.launch import PeerSpec, parse_peer
from commrt.errors import UsageError


def _launch(peer: str, *rows: tuple[int, float, str], **more: Any) -> dict[str, Any]:
    return {
        "peer": peer,
        "coll": "allreduce",
        "ranks": 2,
        "round": 0,
        "in_place": False,
        "library": f"library of {peer}",
        "rows": [
            {"nbytes": nbytes, "median_us": us, "link_class": name, "valid": True}
            for nbytes, us, name in rows
        ],
        **more,
    }


RECORDED = [
    _launch("commrt", (8, 1.0, "near"), (1024, 10.0, "near")),
    _launch("mpi4py", (8, 2.0, "near"), (1024, 40.0, "near")),
    _launch("mpi4py", (8, 3.0, "far"), (1024, 80.0, "near")),
    _launch("commrt", (8, 2.0, "far"), (1024, 10.0, "mixed")),
    _launch("commrt", (8, 0.5, "near"), (1024, 20.0, "near")),
    _launch("mpi4py", (8, 2.0, "near"), (1024, 40.0, "far")),
]


def test_ratios_pair_launches_of_the_same_class_only() -> None:
    near, far = aggregate(RECORDED)
    assert (near.link_class, far.link_class) == ("near", "far")
    # Pairs at 8 B, near: (1, 2) and (0.5, 2).
    cell = near.cells[8, "mpi4py"]
    assert (cell.num_pairs, cell.ratio) == (2, pytest.approx((0.5 + 0.25) / 2))
    # 1 KiB, near: commrt's mixed row does not count: (10, 40) and (20, 80).
    assert near.cells[1024, "mpi4py"].ratio == pytest.approx(0.25)
    assert near.num_mixed == 1
    assert far.cells[8, "mpi4py"].ratio == pytest.approx(2 / 3)
    # Far, 1 KiB: a time, but nothing to pair it with.
    assert far.cells[1024, "mpi4py"].ratio is None


def test_medians_are_over_launches() -> None:
    (group,) = aggregate([_launch("commrt", (8, us, "near")) for us in (3.0, 1.0, 2.0)])
    cell = group.cells[8, "commrt"]
    assert (cell.median_us, cell.low_us, cell.high_us) == (2.0, 1.0, 3.0)
    assert (cell.num_launches, cell.ratio) == (3, None)


def test_geometric_mean_is_over_sizes() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    near = aggregate(RECORDED)[0]
    assert near.mean_ratio("mpi4py") == pytest.approx((0.375 * 0.25) ** 0.5)
    assert near.mean_ratio("absent") is None


def test_wrong_results_are_counted_not_compared() -> None:
    wrong = _launch("mpi4py")
    wrong["rows"] = [{"nbytes": 8, "valid": False, "link_class": "near"}]
    (group,) = aggregate([_launch("commrt", (8, 1.0, "near")), wrong])
    assert group.num_wrong == 1
    assert group.peers() == ["commrt"]
    assert "1 rows with a wrong result" in markdown(group)


@pytest.mark.parametrize("rows", [[(8, 1.0, "mixed")], [(8, 1.0, "mixed")] * 3])
def test_where_the_links_never_kept_their_state_it_is_said(rows: Any) -> None:
    (group,) = aggregate([_launch("commrt", *rows)])
    assert group.num_mixed == len(rows)
    text = markdown(group)
    assert text.startswith("### allreduce, 2 ranks\n\nNo figures. The links changed")
    assert f"all {len(rows)} rows" in text
    assert "run it again" in text


def test_markdown_table() -> None:
    lines = markdown(aggregate(RECORDED)[0]).splitlines()
    assert lines[0] == "### allreduce, 2 ranks, near links"
    assert lines[2] == "| bytes | commrt, µs | mpi4py, µs | commrt / mpi4py |"
    assert lines[3] == "|---:|---:|---:|---:|"
    assert lines[4] == "| 8 | 0.75 (0.50 to 1.00) | 2.00 (2.00 to 2.00) | 0.38 |"
    assert lines[5].startswith("| 1 Ki | ")
    assert lines[6] == "| geometric mean |  |  | **0.31** |"
    assert "1 rows during which the links changed" in lines[8]


def test_launches_alternate_and_nobody_is_always_first() -> None:
    peers = [PeerSpec(name, "mpi4py", "python") for name in "abc"]
    order = list(compare.alternate(["bcast"], [2], peers, 3))
    names = [peer.name for _, _, _, peer in order]
    assert names == [*"abc", *"bca", *"cab"]
    assert [index for _, _, index, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_report_and_load_of_recorded_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"coll": "allreduce", "ranks": 2, "round": 1, "peer": "gloo"}
    data = {
        "schema": compare.SCHEMA,
        "command": ["python", "-m", "commrt.bench", "compare"],
        "machine": {"cpu": "A CPU", "cpus_available": [0, 1]},
        "fresh": True,
        "in_place": False,
        "dtype": "float32",
        "launches": RECORDED,
        "failures": [
            {**failure, "error": "mpiexec x\nended with status 1: no such module\nx"}
        ],
    }
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(data))
    assert main(["compare", "--load", str(path)]) == 0
    text = capsys.readouterr().out
    assert "A CPU, 2 CPUs available, float32, inputs rewritten between calls." in text
    assert "- mpi4py: library of mpi4py" in text
    assert "### allreduce, 2 ranks, far links" in text
    assert "gloo, launch 2: ended with status 1: no such module" in text


def test_a_wrong_result_is_named_and_the_status_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no row is left for a table."""

    def wrong(peer: Any, ranks: int, job: Any, **options: Any) -> dict[str, Any]:
        row = {"nbytes": 8, "valid": False, "link_class": "near", "error": "wrong"}
        about = {"library": "x", "elapsed_s": 1.0, "ranks": ranks}
        return {"peer": peer.name, **about, "rows": [row]}

    monkeypatch.setattr(compare, "launch", wrong)
    monkeypatch.setattr(compare, "torch_is_installed", lambda: False)
    out = tmp_path / "raw.json"
    assert main(["compare", "--launches", "2", "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert text.count("Wrong result: allreduce, 2 ranks, commrt, 8 bytes") == 1
    assert text.count("Wrong result: allreduce, 2 ranks, mpi4py, 8 bytes") == 1
    assert len(compare.load(str(out))["launches"]) == 4


def test_the_figure_refuses_other_files_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figure.main([str(tmp_path / "absent.json"), "x.svg"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("commrt.bench.figure: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", "{}", "not json"])
def test_load_refuses_other_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "raw.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"raw\.json"):
        compare.load(str(path))


def test_peers_by_name_and_by_interpreter() -> None:
    assert parse_peer("gloo").kind == "gloo"
    assert parse_peer("mpich=sh") == PeerSpec("mpich", "mpi4py", "sh")
    assert parse_peer("ours=commrt:sh") == PeerSpec("ours", "commrt", "sh")
    assert parse_peer("gloo=sh").kind == "gloo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("glo", "did you mean 'gloo'"),
        ("a=/no/such/python", "not a program"),
        ("a=mpi4p:sh", "did you mean 'mpi4py'"),
    ],
)
def test_bad_peers(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_peer(text)


def test_peer_names_are_unique() -> None:
    with pytest.raises(UsageError, match="'mpi4py' is used twice"):
        compare.choose_peers(["mpi4py=sh"])
