# SPDX-License-Identifier: Apache-2.0
"""What the tuner says: progress, lint, tables for people, the command line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from tuning_recordings import DIRECT, DOUBLING, NEAR, record

from commrt.select.facts import Query
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Evidence, Match, Point, Rule
from commrt.select.schema import Catalog
from commrt.select.table import Table, load_file
from commrt.tuning import cli
from commrt.tuning.lint import lint
from commrt.tuning.progress import Progress
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.run import finish
from commrt.tuning.samples import Failure
from commrt.tuning.show import explain, show
from commrt.tuning.summary import describe_failure, human_nbytes
from commrt.tuning.tuner import Options

KNOWN = Catalog(
    {"mpi": ("native",), "shm": ("direct", "recursive_doubling", "ring", "loop")}
)
OPTIONS = Options(
    ranks=(2,), ops=("allreduce",), budget_s=60, max_nbytes=1 << 16, most_launches=3
)


# -- words -----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere() -> None:
    now = [0.0]
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        now[0] = 0.0
        progress = Progress(60, stream, lambda: now[0])
        for _ in range(31):
            progress.show("allreduce 8 B")
            now[0] += 1.0
        assert progress.left_s == 29
        progress.close()
    assert terminal.getvalue().count("[###") >= 20
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert plain.getvalue().count("\n") == 4
    assert "50 s left: allreduce 8 B" in plain.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (1024, "1K"),
        (3334, "3.26K"),
        (32 << 20, "32M"),
        (None, "inf"),
    ],
)
def test_byte_counts_for_people(nbytes: int | None, text: str) -> None:
    assert human_nbytes(nbytes) == text


Series = list[tuple[int, float]]


def _rule(op: str, series: Series, lo: int = 0, hi: int | None = None) -> Rule:
    points = tuple(Point(n, us, (us, us), 9, 3) for n, us in series)
    match = Match(lo, hi, ranks=4, nodes=1, ppn=4, link_class="near")
    return Rule(
        op, match, DIRECT, Evidence("win" if points else "extrapolated", points)
    )


def _lint(*rules: Rule) -> list[str]:
    return [one.kind for one in lint(Table(this_machine(), rules, name="t.yaml"))]


SUM = {"reduce": [(8, 2.0)], "bcast": [(8, 3.0)]}


@pytest.mark.parametrize(
    ("series", "kinds"),
    [
        ({"allreduce": [(8, 9.0)], **SUM}, ["guideline"]),
        ({"allreduce": [(8, 5.2)], **SUM}, []),
        ({"allreduce": [(8, 9.0)], "reduce": [(8, 2.0)]}, []),
        ({"allreduce": [(16, 9.0)], **SUM}, []),
        ({"reduce_scatter": [(64, 4.0)], "allreduce": [(64, 3.0)]}, ["guideline"]),
        (
            {"allgather": [(16, 9.0)], "gather": [(16, 1.0)], "bcast": [(64, 2.0)]},
            ["guideline"],
        ),
        ({"allgather": [(16, 9.0)], "gather": [(16, 1.0)], "bcast": [(16, 2.0)]}, []),
        ({"bcast": [(8, 5.0), (32, 3.0)]}, ["not-monotone"]),
        ({"bcast": [(8, 5.0), (32, 4.9)]}, []),
    ],
)
def test_lint_finds_what_cannot_be_best(
    series: dict[str, Series], kinds: list[str]
) -> None:
    assert _lint(*(_rule(op, points) for op, points in series.items())) == kinds


def test_lint_interpolates_between_measured_sizes() -> None:
    reduce, bcast = _rule("reduce", [(8, 1.0), (24, 3.0)]), _rule("bcast", [(16, 1.0)])
    assert _lint(_rule("allreduce", [(16, 3.2)]), reduce, bcast) == []
    assert _lint(_rule("allreduce", [(16, 3.4)]), reduce, bcast) == ["guideline"]


def test_lint_counts_what_was_not_measured() -> None:
    assert _lint(_rule("bcast", [(8, 1.0)], hi=64), _rule("bcast", [], lo=64)) == [
        "extrapolated"
    ]
    assert _lint(Rule("bcast", Match(0, None), DIRECT)) == ["no-evidence"]


def test_show_and_explain_print_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    finish(record(seed=4), OPTIONS, out=path)
    table = load_file(path, KNOWN)
    text = show(table)
    assert "allreduce (ranks=2, nodes=1, ppn=2, link_class=near, device=host)" in text
    assert "inf)" in text
    told = explain(table, Query("allreduce", 8, op="sum"), NEAR)
    assert "near links" in told
    assert str(DOUBLING) in told or str(DIRECT) in told
    none = explain(table, Query("bcast", 8), NEAR)
    assert "no rule for 2 ranks" in none
    assert "The table covers allreduce." in none


# -- the command line ------------------------------------------------------------------


def _main(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    status = cli.main([str(part) for part in argv])
    out, err = capsys.readouterr()
    return status, out + err


def test_show_explain_and_lint_read_the_named_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commrt.tuning.measure.catalog", lambda: KNOWN)
    path = tmp_path / "t.yaml"
    finish(record(seed=4), OPTIONS, out=path)
    assert _main(capsys, "show", "--table", path)[0] == 0
    status, text = _main(capsys, "explain", "allreduce", "1M", "--table", path)
    assert (status, "shm/ring{store=stream}" in text) == (0, True)
    assert _main(capsys, "lint", "--table", path) == (0, "nothing found\n")
    path.write_text("schema: other\n")
    status, text = _main(capsys, "lint", "--table", path)
    assert status == 1
    assert "is missing" in text


def test_compare_reads_two_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json.gz"
    record(seed=1).save(first)
    record(seed=2).save(second)
    assert load_recording(second).samples == record(seed=2).samples
    assert cli.main(["compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "allreduce, 2 ranks, near links" in printed
    assert "of the range" in printed


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"software": 1}'])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert cli.main(["compare", str(path), str(path)]) == 1
    assert "is no recording" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path / "none"), str(path)]) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--ops", "allredce"],
        ["run", "--ranks", "2,x"],
        ["run", "--budget", "nan"],
        ["run", "--max-bytes", "1T"],
        ["run", "--dtype", "float31"],
        ["run", "--launches", "0"],
        [],
    ],
)
def test_bad_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2


def test_inside_mpiexec_other_ranks_cannot_be_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    status, text = _main(capsys, "run", "--ranks", "2")
    assert status == 2
    assert "leave --ranks and --mpiexec out" in text


def test_the_options_of_the_command_line_are_frozen() -> None:
    run = cli.make_parser()._subparsers._group_actions[0].choices["run"]  # type: ignore
    options = {text for action in run._actions for text in action.option_strings}
    assert options == {
        *("-h", "--help", "--ranks", "--budget", "--launches", "--ops", "--max-bytes"),
        *("-d", "--device"),
        *("--out", "--raw", "--dtype", "--seed", "--mpiexec", "--hang"),
    }


@pytest.mark.parametrize("option", ["--out", "--raw"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: Any) -> Any:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("commrt.tuning.run.choose_launcher", start)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x", tmp_path):
        status, text = _main(capsys, "run", option, path)
        assert (status, text.count("\n")) == (2, 1)
        assert text.startswith(f"commrt-tune: {option} {path} cannot be written")
    same = tmp_path / "same"
    assert _main(capsys, "run", "--out", same, "--raw", same)[0] == 2
    assert not same.exists()


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", "no reason is written down"),
        ("\n", "no reason is written down"),
        ("it hung:\nfor long", "it hung"),
    ],
)
def test_a_failure_is_described_by_its_first_line(reason: str, said: str) -> None:
    text = describe_failure(Failure(2, "bcast", 8, DIRECT, reason))
    assert text == f"{DIRECT} for bcast with 2 ranks: {said} at 8"
