# SPDX-License-Identifier: Apache-2.0
"""Files of others: what is no regular file, too long, too deep or too large is refused.

Each command says so in one line, at once, and takes no memory for it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_cases import call, group_of, log_of
from tuning_recordings import record

from commrt.__main__ import main as commrt_main
from commrt.bench.cli import main as bench_main
from commrt.errors import CommError, UsageError
from commrt.files.plain_json import Field, MalformedError, parsed
from commrt.files.read import Kind, lines_of, read_text
from commrt.files.visible import visible, visible_lines
from commrt.trace.job import join, load
from commrt.trace.log import write_log
from commrt.trace.perfetto import events_of
from commrt.trace.summary import summary_text
from commrt.tuning.cli import main as tune_main
from commrt.tuning.recording_reader import parse_recording

SMALL = Kind("small file", "something small", 1000, UsageError, most_line_nbytes=100)
HEAD = {
    "format": "commrt-trace/1",
    "job": "J",
    "rank": 0,
    "size": 2,
    "host": "h",
    "boot": "b",
    "pid": 1,
    "wall_offset_ns": 0,
    "num_dropped": 0,
    "error": "",
}


def bomb(path: Path, nbytes: int) -> Path:
    """Write blanks, packed a thousandfold."""
    packer = zlib.compressobj(wbits=31)
    blanks = b" " * (1 << 20)
    with path.open("wb") as file:
        for _ in range(nbytes >> 20):
            file.write(packer.compress(blanks))
        file.write(packer.flush())
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def deep(path: Path) -> Path:
    path.write_text("[" * 100_000)
    return path


def zero(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


REFUSED: dict[str, Callable[[Path], Path]] = {
    "fifo": fifo,
    "deep": deep,
    "zero": zero,
    "bomb": lambda path: bomb(path, 80 << 20),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(
    ("main", "argv", "name"),
    [
        (tune_main, ["compare", "{0}", "{0}"], "raw.json"),
        (tune_main, ["merge", "{0}", "{0}", "--out", "{1}"], "raw.json"),
        (tune_main, ["merge", "{0}", "{0}", "--out", "{1}"], "table.yaml"),
        (tune_main, ["report", "--raw", "{0}", "--out", "{1}"], "raw.json"),
        (tune_main, ["report", "{0}", "--out", "{1}"], "table.yaml"),
        (tune_main, ["lint", "--table", "{0}"], "table.yaml"),
        (tune_main, ["show", "--table", "{0}"], "table.yaml"),
        (tune_main, ["explain", "bcast", "8", "--table", "{0}"], "table.yaml"),
        (tune_main, ["export", "{0}", "--to", "nccl"], "table.yaml"),
        (commrt_main, ["trace", "summarize", "{0}"], "trace-J-rank0.jsonl"),
        (commrt_main, ["trace", "plot", "--out", "{1}", "{0}"], "trace-J-rank0.jsonl"),
        (commrt_main, ["trace", "perfetto", "--out", "{1}", "{0}"], "t.jsonl"),
        (bench_main, ["compare", "--load", "{0}"], "raw.json"),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, list) else "",
)
def test_each_command_refuses(
    kind: str,
    main: Callable[[list[str]], int],
    argv: list[str],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed = kind == "bomb" and name.endswith(".json")
    path = REFUSED[kind](tmp_path / (name + ".gz" if packed else name))
    status = main([each.format(path, tmp_path / "out") for each in argv])
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert path.name in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_packed_file_may_not_be_cut_or_go_on(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(b"text", mtime=0)
    path.write_bytes(packed)
    assert read_text(path, SMALL) == "text"
    for raw, why in (
        (packed[:-9], "cut short"),
        (b"", "cut short"),
        (packed + packed, "more follows"),
        (packed + b"x", "more follows"),
        (b"x" * 50, "not gzipped"),
        (packed[:-4] + b"\0\0\0\0", "not gzipped"),
        (gzip.compress(b"\xff"), "not UTF-8"),
        (gzip.compress(b"x" * 1001), "larger than any small file"),
    ):
        path.write_bytes(raw)
        with pytest.raises(UsageError, match=why):
            read_text(path, SMALL)
    path.write_bytes(gzip.compress(b"x" * 1000))
    assert len(read_text(path, SMALL)) == 1000


def test_lines_have_limits(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("a\n" * 500)
    assert [*lines_of(path, SMALL)] == ["a"] * 500
    path.write_text("a\n" * 501)
    with pytest.raises(UsageError, match="larger than any small file"):
        [*lines_of(path, SMALL)]
    path.write_text("a\n" + "b" * 101)
    with pytest.raises(UsageError, match="line 2 is longer than 100 bytes"):
        [*lines_of(path, SMALL)]


def test_a_name_with_an_escape_is_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\\x1b\[31m") as raised:
        read_text(tmp_path / "\x1b[31m", SMALL)
    assert "\x1b" not in str(raised.value)


def test_controls_are_shown_and_other_text_stays() -> None:
    assert visible("a\x1b[31m\x07\n\x9b\u202e\ud800ü\t") == (
        "a\\x1b[31m\\x07\\x0a\\x9b\\u202e\\ud800ü\\x09"
    )
    assert visible_lines("a\n\tb\r\x1b") == "a\n\tb\\x0d\\x1b"


# -- fields ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read", "said"),
    [
        ("1e11", Field.integer, r"\$: expected a whole number from 0 on, found 1000"),
        ("-1", Field.integer, "found -1"),
        ("true", Field.integer, "found True"),
        ('"1"', Field.integer, "found '1'"),
        ("99999999999999999999", Field.integer, "whole number"),
        ("NaN", Field.any_integer, "NaN is no number of JSON"),
        ("Infinity", Field.any_integer, "Infinity is no number"),
        ("1e999", lambda one: one.number(above=0, most=1), "found inf"),
        ("0", lambda one: one.number(above=0, most=1), "a number above 0, up to 1"),
        ("9" * 5000, Field.integer, "not JSON"),
        ('"\\u001b[2J"', Field.integer, r"\\x1b"),
        ("1", Field.text, "expected text"),
        ("0", Field.flag, "true or false"),
        ("{}", lambda one: [*one.items()], "expected a list"),
        ("[]", lambda one: one.fields(["a"]), "expected a mapping"),
        ("{}", lambda one: one.fields(["a"]), "'a' is missing"),
        ('{"b": 1}', lambda one: one.fields(["a"]), "'b' is unknown"),
        ("[" * 100_000, Field.integer, "nested too deeply"),
        ("[0, 1", Field.integer, "not JSON"),
        ("[0, -1]", Field.integers, r"\$\[1\]: expected"),
    ],
)
def test_a_field_says_where_and_why(
    text: str, read: Callable[[Field], Any], said: str
) -> None:
    with pytest.raises(MalformedError, match=said) as raised:
        read(parsed(text))
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


# -- logs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        *({"size": value} for value in (10**11, 0, -1, 1.5, "2", None, True, 10**400)),
        *({"rank": value} for value in (2, -1, "0", None)),
        *({"pid": -1}, {"wall_offset_ns": 1e300}, {"host": 5}, {"odd": 1}),
    ],
    ids=str,
)
def test_a_head_out_of_range_is_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "trace-J-rank0.jsonl"
    path.write_text(json.dumps({**HEAD, **changed}) + "\n")
    with pytest.raises(UsageError, match=f"{path}.*line 1.*{next(iter(changed))}"):
        load([path])


def test_a_job_of_very_many_ranks_is_looked_at_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace-J-rank0.jsonl"
    path.write_text(json.dumps({**HEAD, "size": 1 << 24}) + "\n")
    job = load([path])
    assert "16777215 of 16777216 ranks have no log (1, 2, 3" in job.notes[0]


def test_calls_that_repeat_a_number_are_joined_once() -> None:
    """Many of them would each have all the others as peers."""
    group = group_of(0, 2)
    calls = [call(group, "allreduce", 8, 0, at, at + 5) for at in range(20_000)]
    other = [call(group_of(1, 2), "allreduce", 8, 0, 3, 9)]
    job = join([log_of(0, 2, calls), log_of(1, 2, other)])
    assert [len(event.peers) for event in job.events[:3]] == [1, 0, 0]
    assert len(job.events[-1].peers) == 1


def test_very_many_calls_at_once_have_tracks_at_once() -> None:
    calls = [call(group_of(0, 1), "bcast", 8, n, n, 10**6) for n in range(20_000)]
    drawn = [*events_of(join([log_of(0, 1, calls)]))]
    assert len({one["tid"] for one in drawn if one["ph"] == "X"}) == 20_000


def test_escapes_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(0, 1, [call(group_of(0, 1, "\x1b[31mdp"), "bcast", 8, 0, 1, 2)])
    log.error = "\x1b]0;PWN\x07"
    write_log(log, tmp_path / "trace-J-rank0.jsonl")
    assert commrt_main(["trace", "summarize", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[31mdp" in said
    assert "rank 0 failed: \\x1b]0;PWN\\x07" in said
    assert "\x1b" not in said
    svg = tmp_path / "x.svg"
    assert commrt_main(["trace", "plot", "--out", str(svg), str(tmp_path)]) == 0
    assert "\x1b" not in svg.read_text() + capsys.readouterr().err
    assert "\x1b" in summary_text(load([tmp_path]))  # as the log has it


# -- recordings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("samples", {"us": [0.0]}, r"\$\.samples\[0\]\.us\[0\]: expected a number"),
        ("samples", {"us": ["1"]}, r"us\[0\]"),
        ("samples", {"us": 1}, "us: expected a list"),
        ("samples", {"op": "\ud800"}, "op: expected text that UTF-8 can write"),
        ("samples", {"nbytes": 0}, "nbytes: expected a whole number from 1 on"),
        ("samples", {"nbytes": 10**30}, "nbytes"),
        ("samples", {"launch": 77}, "launch: expected the index of a launch"),
        ("samples", {"candidate": "x"}, "'x' is not a candidate"),
        ("samples", {"odd": 1}, "'odd' is unknown"),
        ("launches", {"index": 1}, "launch 1 only once"),
        ("launches", {"device": "moon"}, "device: expected one of host, cuda"),
        ("launches", {"facts": {}}, "facts: 'size' is missing"),
    ],
)
def test_a_recording_says_where_and_why(
    section: str, change: dict[str, Any], said: str
) -> None:
    plain = json.loads(record(seed=1).to_json())
    plain[section][0] |= change
    with pytest.raises(MalformedError, match=said):
        parse_recording(json.dumps(plain))


def test_a_recording_of_more_than_anybody_measures_is_refused() -> None:
    plain = json.loads(record(seed=1, launches=1).to_json())
    one = plain["samples"][0]
    plain["samples"] = [{**one, "nbytes": size} for size in range(1, 1002)]
    with pytest.raises(MalformedError, match="1001 sizes of 'allreduce'"):
        parse_recording(json.dumps(plain))
    plain["samples"] = [{**one, "candidate": f"shm/ring{{k={k}}}"} for k in range(1001)]
    with pytest.raises(MalformedError, match="1001 candidates of 'allreduce'"):
        parse_recording(json.dumps(plain))


def test_errors_of_each_kind_are_those_of_commrt(tmp_path: Path) -> None:
    for error in (UsageError, CommError):
        kind = Kind("thing", "a thing", 10, error)
        with pytest.raises(error, match="cannot open the thing"):
            read_text(tmp_path / "absent", kind)
        with pytest.raises(error, match="is not a regular file"):
            read_text(tmp_path, kind)
