# SPDX-License-Identifier: Apache-2.0
"""The analyser of dumps: which operation ranks did not call alike, and who is missing.

The dumps are written by the test, so each fault has exactly one right answer.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from dump_cases import call, dump_of, message, seen, write_dumps

from commrt.__main__ import main
from commrt.errors import UsageError
from commrt.trace.divergence import Verdict, compare, verdict_lines
from commrt.trace.dump_reader import find_dumps, read_dump

SIZES = (2, 3, 5)
Capture = pytest.CaptureFixture[str]


def verdict_of(folder: Path, dumps: list[dict[str, Any]]) -> Verdict:
    return compare([read_dump(path) for path in write_dumps(folder, dumps)])


def same_calls(count: int) -> list[dict[str, Any]]:
    names = ("allreduce", "bcast", "barrier", "allgather")
    return [
        call(names[seq % 4], seq, root=0 if seq % 4 == 1 else -1)
        for seq in range(count)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_called_the_same_do_not_diverge(tmp_path: Path, size: int) -> None:
    dumps = [dump_of(rank, size, same_calls(7)) for rank in range(size)]
    found = verdict_of(tmp_path, dumps)
    assert (found.divergences, found.absent, found.waiting) == ([], {}, [])
    assert "all ranks have called the same" in "\n".join(verdict_lines(found))


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_called_less_is_missing(tmp_path: Path, size: int) -> None:
    lazy = size - 1
    dumps = [
        dump_of(rank, size, same_calls(4 if rank == lazy else 5))
        for rank in range(size)
    ]
    (one,) = verdict_of(tmp_path, dumps).divergences
    assert (one.group, one.seq, one.unknown) == ("world", 4, [])
    assert one.calls == {"allreduce of 8 float32, op sum": [*range(lazy)]}
    assert [*one.missing] == [lazy]
    assert one.missing[lazy].startswith("its last call was allgather #3, 5.0 s before")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("profiling_name", "commrt:allgather", "allgather of 8 float32, op sum"),
        ("input_sizes", [[9]], "allreduce of 9 float32, op sum"),
        ("input_dtypes", ["int32"], "allreduce of 8 int32, op sum"),
        ("reduction", "max", "allreduce of 8 float32, op max"),
        ("root", 1, "allreduce of 8 float32, op sum, root 1"),
    ],
)
def test_each_field_that_differs_is_a_divergence(
    tmp_path: Path, field: str, value: Any, words: str
) -> None:
    other = [*same_calls(4), {**call("allreduce", 4), field: value}]
    dumps = [dump_of(0, 3, same_calls(6)), dump_of(1, 3, other)]
    dumps.append(dump_of(2, 3, same_calls(6)))
    (one,) = verdict_of(tmp_path, dumps).divergences
    assert (one.seq, one.missing) == (4, {})
    assert one.calls == {"allreduce of 8 float32, op sum": [0, 2], words: [1]}


def test_lengths_that_may_differ_are_not_compared(tmp_path: Path) -> None:
    dumps = [
        dump_of(rank, 3, [call("gatherv", 0, count=rank), call("scatter", 1, count=9)])
        for rank in range(3)
    ]
    assert verdict_of(tmp_path, dumps).divergences == []


def test_operations_that_one_ring_has_lost_are_not_compared(tmp_path: Path) -> None:
    dumps = [
        dump_of(0, 2, [call("bcast", 0, root=1), *same_calls(9)[1:]]),
        dump_of(1, 2, same_calls(9)[5:]),
    ]
    assert verdict_of(tmp_path, dumps).divergences == []


def test_a_dead_rank_is_told_by_what_others_have_seen(tmp_path: Path) -> None:
    states = [seen(1, "waiting", 5, "allreduce"), seen(2, "dead", 4, "allgather")]
    dumps = [dump_of(rank, 3, same_calls(5), states) for rank in range(2)]
    found = verdict_of(tmp_path, dumps)
    (one,) = found.divergences
    assert found.absent == {2: "dead, as rank 0 has seen it"}
    assert one.seq == 4
    assert one.missing == {
        2: "no dump; dead, as rank 0 has seen it; its last call was allgather #3, "
        "2.5 s before"
    }


def test_a_rank_that_nobody_knows_of_is_no_culprit(tmp_path: Path) -> None:
    dumps = [dump_of(0, 3, same_calls(5)), dump_of(1, 3, same_calls(4))]
    (one,) = verdict_of(tmp_path, dumps).divergences
    assert ([*one.missing], one.unknown) == ([1], [2])


def test_the_first_of_two_groups_is_the_one_that_was_called_first(
    tmp_path: Path,
) -> None:
    def rank(number: int) -> dict[str, Any]:
        other = {"process_group": ["part (3)", ""], "pg_id": 3}
        mine = [*same_calls(2 + number)]
        part = [call("allreduce", seq, after_ms=1, **other) for seq in range(number)]
        one = dump_of(number, 2, [*mine, *part])
        group = {"name": "part", "desc": "", "ranks": "[0, 1]", "rank": number}
        one["pg_config"]["part (3)"] = group
        return one

    found = verdict_of(tmp_path, [rank(0), rank(1)]).divergences
    assert [(one.group, one.seq) for one in found] == [("part", 0), ("world", 2)]
    lines = verdict_lines(verdict_of(tmp_path, [rank(0), rank(1)]))
    assert "first divergence: operation #0 on part" in lines
    assert "then: operation #2 on world" in lines


def test_equal_names_of_disjoint_groups_are_two_groups(tmp_path: Path) -> None:
    dumps = [dump_of(rank, 4, same_calls(3 + rank // 2)) for rank in range(4)]
    for rank, one in enumerate(dumps):
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        one["pg_config"]["world (0)"].update(ranks=ranks, rank=rank % 2)
    assert verdict_of(tmp_path, dumps).divergences == []


def test_operations_and_messages_under_way_are_told(tmp_path: Path) -> None:
    begun = call("allreduce", 2, state="started")
    dumps = [
        dump_of(0, 2, [*same_calls(2), begun, message("recv", 0, 1, state="started")]),
        dump_of(1, 2, [*same_calls(2), begun, message("send", 0, 0)]),
    ]
    assert verdict_of(tmp_path, dumps).waiting == [
        "allreduce of 8 float32, op sum (#2 on world) is not complete on ranks 0, 1",
        "recv of 8 bytes from rank 1, tag 5, on world is not complete on rank 0",
    ]


def test_the_first_fault_says_why_there_is_a_dump(tmp_path: Path) -> None:
    events = [{"reason": "mismatch", "message": "differ", "time_ns": 1}]
    dumps = [dump_of(0, 2, []), dump_of(1, 2, [], events=events, reason="signal")]
    reasons = verdict_of(tmp_path, dumps).reasons
    assert (reasons[0][0], reasons[1]) == ("timeout", ("mismatch", "differ"))


def test_two_dumps_of_one_rank_and_two_jobs_are_refused(tmp_path: Path) -> None:
    (path,) = write_dumps(tmp_path, [dump_of(0, 2, [])])
    one = read_dump(path)
    with pytest.raises(UsageError, match="two dumps of rank 0 of job ab12"):
        compare([one, one])
    (path,) = write_dumps(tmp_path, [dump_of(1, 2, [], job="cd34")])
    with pytest.raises(UsageError, match="2 jobs: ab12, cd34; name one of them with"):
        compare([one, read_dump(path)])
    assert compare([one, read_dump(path)], "cd34").job == "cd34"
    with pytest.raises(UsageError, match="no dump of job 'x'; there are ab12, cd34"):
        compare([one, read_dump(path)], "x")


def test_the_command_prints_lines_or_json(tmp_path: Path, capsys: Capture) -> None:
    dumps = [dump_of(0, 2, same_calls(5)), dump_of(1, 2, same_calls(3))]
    write_dumps(tmp_path, dumps)
    assert main(["analyze", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "job ab12: 2 dumps of 2 ranks"
    assert said[1:3] == [
        "first divergence: operation #3 on world",
        "  allgather of 8 float32: rank 0",
    ]
    assert said[3].startswith("  missing: rank 1; its last call was barrier #2")
    assert main(["analyze", "--json", str(tmp_path)]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [one["seq"] for one in whole["divergences"]] == [3]
    assert whole["divergences"][0]["calls"] == [
        {"call": "allgather of 8 float32", "ranks": [0]}
    ]


def test_files_for_torchs_analyser_have_its_words(tmp_path: Path) -> None:
    entries = [
        call("allgather", 0, count=12),
        call("reduce_scatter", 1, count=12, duration_ms=1.5),
        message("send", 0, 1, count=9),
        call("allreduce", 2, state="started"),
        call("an operation", 3),
    ]
    dumps = [dump_of(rank, 2, entries) for rank in range(2)]
    write_dumps(tmp_path, dumps)
    out = tmp_path / "flight"
    assert main(["analyze", "--flight", str(out), str(tmp_path)]) == 0
    assert sorted(one.name for one in out.iterdir()) == ["rank_0", "rank_1"]
    whole = pickle.loads((out / "rank_0").read_bytes())
    assert whole["version"] == "2.10"
    said = [
        (one["profiling_name"], one["input_sizes"], one["output_sizes"], one["state"])
        for one in whole["entries"]
    ]
    assert said == [
        ("gloo:all_gather", [[6]], [[12]], "completed"),
        ("gloo:reduce_scatter", [[12]], [[6]], "completed"),
        ("gloo:send 0->1", [[9]], [[9]], "completed"),
        ("gloo:all_reduce", [[8]], [[8]], "started"),
    ]
    assert [one["collective_seq_id"] for one in whole["entries"]] == [1, 2, 1, 3]
    assert [one["duration_ms"] for one in whole["entries"]] == [0, 1.5, 0, 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ('{"format": "commrt-flight/1", "version"', "not JSON"),
        ("[]", "expected a mapping with the format commrt-flight/1"),
        ('{"format": "commrt-trace/1"}', "expected a mapping with the format"),
        ('{"format": "commrt-flight/1"}', "'version' is missing"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_dumps_are_named(
    tmp_path: Path, capsys: Capture, text: str, why: str
) -> None:
    path = tmp_path / "dump-x-rank0.json"
    path.write_text(text)
    assert main(["analyze", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(path) in said
    assert why in said


def test_a_cut_dump_is_left_out_and_named(tmp_path: Path, capsys: Capture) -> None:
    first, second, third = write_dumps(
        tmp_path, [dump_of(rank, 3, same_calls(2)) for rank in range(3)]
    )
    expected = verdict_lines(compare([*map(read_dump, (first, third))], None))
    second.write_text(second.read_text()[:100])
    assert main(["analyze", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [*expected]
    assert f"left out: {second}" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": 10**12}, r"\$\.size: expected a whole number from 1"),
        ({"rank": 2}, r"\$\.rank: expected a whole number from 0 to 1"),
        ({"entries": [call("allreduce", -1)]}, "collective_seq_id: expected a whole"),
        ({"entries": [call("nonsense", 0)]}, "profiling_name: expected an operation"),
        ({"entries": [call("send", 0)]}, "is_p2p: expected true for messages only"),
        ({"entries": [call("bcast", 0, root=7)]}, "root: expected a whole number"),
        ({"entries": [call("bcast", 0, process_group=["x", ""])]}, "the key of a gr"),
        ({"rank_states": [seen(0, "asleep", 0)]}, "state: expected one of writing,"),
        ({"pg_config": {"world (0)": {}}}, "'name' is missing"),
    ],
)
def test_each_field_is_checked(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    (path,) = write_dumps(tmp_path, [{**dump_of(0, 2, []), **change, "rank": 0}])
    if "rank" in change:
        path.write_text(path.read_text().replace('"rank": 0', '"rank": 2', 1))
    with pytest.raises(UsageError, match=why):
        read_dump(path)


def test_files_that_are_none_do_not_hang(tmp_path: Path) -> None:
    fifo = tmp_path / "dump-x-rank1.json"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_dump(fifo)
    with pytest.raises(UsageError, match=r"no dump-JOB-rankN\.json"):
        find_dumps([_empty(tmp_path)])
    with pytest.raises(UsageError, match="cannot open the dump"):
        read_dump(tmp_path / "absent.json")


def _empty(folder: Path) -> Path:
    inside = folder / "empty"
    inside.mkdir()
    return inside
