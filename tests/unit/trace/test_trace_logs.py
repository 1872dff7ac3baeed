# SPDX-License-Identifier: Apache-2.0
"""Logs as files, joined, summed up and drawn; what is wrong with them is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from trace_cases import call, group_of, log_of

from commrt.__main__ import main
from commrt.errors import UsageError
from commrt.trace.job import Job, join, load
from commrt.trace.log import KEYS, Log, size_bin, write_log
from commrt.trace.log_reader import read_log
from commrt.trace.perfetto import events_of
from commrt.trace.summary import rows_by, small_messages, summary_text
from commrt.trace.volumes import MEANING, wire_nbytes

US = 1000


def two_logs() -> list[Log]:
    """Rank 1 comes 40 us late to an allreduce; then rank 0 sends it two messages."""
    logs = []
    for rank, late in ((0, 0), (1, 40)):
        dp = group_of(rank, 2)
        message = "send" if rank == 0 else "recv"
        other = 1 - rank
        logs.append(
            log_of(
                rank,
                2,
                [
                    call(dp, "allreduce", 4096, 0, late * US, 50 * US),
                    call(
                        dp, message, 100, 0, (60 + 5 * rank) * US, 70 * US, peer=other
                    ),
                    call(dp, message, 1 << 20, 1, 80 * US, 90 * US, peer=other),
                    call(dp, "bcast", 8, 1, (100 - late) * US, 110 * US, root=0),
                ],
            )
        )
    return logs


def files_of(logs: list[Log], folder: Path) -> Path:
    for log in logs:
        write_log(log, folder / f"trace-{log.job}-rank{log.rank}.jsonl")
    return folder


def waiting(job: Job, op: str) -> list[int | None]:
    return [event.waiting_ns for event in job.events if event.call.op == op]


# -- files -----------------------------------------------------------------------


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    log = two_logs()[0]
    group = log.operations[0].group
    log.operations.append(call(group, "allreduce", 8, 2, 120 * US, None))
    log.operations.append(
        call(group, "allreduce", 8, 3, 130 * US, 140 * US, failed=True)
    )
    log.operations.append(call(group, "allreduce", 8, 4, 150 * US, None, stream=0))
    log.operations.append(call(group, "bcast", 8, 5, 160 * US, None, stream=0x7F0))
    log.error, log.num_dropped = "TimeoutError_: rank 1", 7
    write_log(log, tmp_path / "one.jsonl")
    read = read_log(tmp_path / "one.jsonl")
    assert read == log
    assert [one.on_device for one in read.operations[-3:]] == [False, True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["one.jsonl"]


def test_a_log_without_operations(tmp_path: Path) -> None:
    write_log(log_of(0, 1, []), tmp_path / "one.jsonl")
    assert read_log(tmp_path / "one.jsonl") == log_of(0, 1, [])
    assert "nothing was called" in summary_text(join([log_of(0, 1, [])]))
    assert list(events_of(join([log_of(0, 1, [])])))


@pytest.mark.parametrize("cut", [1, 3, 8, 20, 150])
def test_a_file_that_ends_early_is_read_as_far_as_it_goes(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "one.jsonl"
    log = two_logs()[0]
    write_log(log, path)
    path.write_bytes(path.read_bytes()[:-cut])
    found = read_log(path)
    assert found.is_complete == (cut == 1)
    assert found.operations == log.operations[: len(found.operations)]
    notes = join([found]).notes
    assert any("ends early" in note for note in notes) == (not found.is_complete)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its first line is ''"),
        ("{}\n", "its first line is '{}'"),
        ('{"format": "commrt-trace/2"}\n', "no log of commrt-trace/1"),
        ('{"format": "commrt-trace/1", "job": "x"}\n', "missing"),
        ('{"format": "commrt-trace/1", "odd": 1}\n', "odd"),
    ],
)
def test_a_file_that_is_no_log(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_log(path)


def test_a_file_with_a_broken_line_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    write_log(two_logs()[0], path)
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:3]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match="line 5: not JSON"):
        read_log(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_log(path)


# -- joined ----------------------------------------------------------------------


def test_waiting_lasts_until_the_last_rank_that_is_needed_has_called() -> None:
    job = join(two_logs())
    assert job.notes == []
    assert waiting(job, "allreduce") == [40 * US, 0]
    assert waiting(job, "bcast") == [0, 40 * US]  # rank 1 came first, the root last
    assert waiting(job, "send") == [5 * US, 0]
    assert waiting(job, "recv") == [0, 0]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("reduce", [0, 0, 7]),
        ("gather", [0, 0, 7]),
        ("scatter", [9, 8, 0]),
        ("scan", [0, 0, 0]),
        ("exscan", [0, 0, 0]),
        ("alltoall", [9, 8, 7]),
    ],
)
def test_who_is_needed_by_whom(op: str, expected: list[int]) -> None:
    # Rank 2 calls at 11 and is the root; rank 1 at 12, rank 0 at 11.
    starts = {0: 2, 1: 3, 2: 11}
    if op in ("reduce", "gather", "alltoall"):
        starts = {0: 9, 1: 10, 2: 11} if op == "alltoall" else {0: 18, 1: 12, 2: 11}
        expected = [2, 1, 0] if op == "alltoall" else expected
    logs = [
        log_of(rank, 3, [call(group_of(rank, 3), op, 12, 0, at, 40, root=2)])
        for rank, at in starts.items()
    ]
    assert waiting(join(logs), op) == expected


def test_waiting_is_not_known_without_the_others_logs() -> None:
    late = two_logs()[1]
    late.num_dropped = 3
    job = join([late])
    assert waiting(job, "allreduce") == [None]
    assert waiting(job, "recv") == [None, None]
    assert "1 of 2 ranks have no log (0)" in job.notes[0]
    assert "rank 1: 3 older calls did not fit" in job.notes[1]
    text = summary_text(job)
    assert "1 of 2 ranks" in text
    assert "note: 1 of 2 ranks have no log" in text


def test_what_has_not_ended_has_no_waiting() -> None:
    logs = [
        log_of(0, 2, [call(group_of(0, 2), "barrier", 0, 0, 10, None)]),
        log_of(1, 2, []),
    ]
    assert waiting(join(logs), "barrier") == [None]
    assert '"state": "its end was not seen"' in json.dumps([*events_of(join(logs))])


def test_ranks_that_called_different_operations_are_told() -> None:
    logs = two_logs()
    last = logs[1].operations[-1]
    logs[1].operations[-1] = call(last.group, "barrier", 0, 1, 60 * US, 110 * US)
    job = join(logs)
    assert "ranks called different operations as number 1" in job.notes[0]
    assert waiting(job, "barrier") == [None]
    assert waiting(job, "allreduce") == [40 * US, 0]


def test_two_logs_of_one_rank_are_refused() -> None:
    with pytest.raises(UsageError, match="two logs of rank 0"):
        join([two_logs()[0], two_logs()[0]])


@pytest.mark.parametrize("offset", [0, 10**9, -(10**12)])
def test_clocks_of_two_machines_are_set_by_what_both_called(offset: int) -> None:
    logs = []
    for rank, boot, shift in ((0, "one", 0), (1, "two", offset)):
        calls = [
            call(group_of(rank, 2), "allreduce", 8, k, at + shift, end + shift)
            for k, (at, end) in enumerate(
                [(100, 190), (300, 412)] if rank == 0 else [(180, 200), (310, 410)]
            )
        ]
        logs.append(log_of(rank, 2, calls, boot))
    job = join(logs)
    # Rank 0 left the first at 190, after rank 1 had come; rank 1 left the second at
    # 410, after rank 0 had come at 300: so it lies between -100 and 10 of the truth.
    assert job.clock_error_ns == {"host-two": 55}
    moved = [event.start_ns for event in job.events if event.rank == 1]
    assert moved == [180 - 45, 310 - 45]
    assert "the clock of host-two is set by common operations, to 0 us" in summary_text(
        job
    )


def test_a_clock_without_common_operations_is_set_by_the_time_of_day() -> None:
    logs = [
        log_of(0, 2, [call(group_of(0, 2, "a"), "barrier", 0, 0, 5, 6)], "one"),
        log_of(1, 2, [call(group_of(1, 2, "b"), "barrier", 0, 0, 5, 6)], "two"),
    ]
    logs[1].wall_offset_ns += 1000
    job = join(logs)
    assert job.clock_error_ns == {"host-two": -1}
    assert [event.start_ns for event in job.events] == [5, 1005]
    assert "set by its time of day" in summary_text(job)


# -- sums and pictures -----------------------------------------------------------


def test_rows_are_means_over_ranks_and_messages_count_where_they_are_sent() -> None:
    rows = {row.key: row for row in rows_by(join(two_logs()), ("dimension", "op"))}
    assert set(rows) == {("dp", op) for op in ("allreduce", "send", "recv", "bcast")}
    allreduce, send = rows["dp", "allreduce"], rows["dp", "send"]
    assert (allreduce.calls, allreduce.nbytes, allreduce.wire_nbytes) == (1, 4096, 4096)
    assert allreduce.seconds == pytest.approx(30e-6)
    assert allreduce.waiting_s == pytest.approx(20e-6)
    assert allreduce.transfer_s == pytest.approx(10e-6)
    assert (send.calls, send.nbytes) == (1, ((1 << 20) + 100) / 2)
    assert rows["dp", "recv"].nbytes == 0
    found = small_messages(join(two_logs()))
    assert (found.messages, found.small, found.median_nbytes) == (2, 1, 100)
    assert found.share_of_operations == pytest.approx(2 / 6)


def test_a_table_by_anything() -> None:
    for name in KEYS:
        text = summary_text(join(two_logs()), [name])
        assert "4 KiB" in text
    assert "train.py:12" in summary_text(join(two_logs()))


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B - 4 B"),
        (3, "1 B - 4 B"),
        (4, "4 B - 16 B"),
        (1023, "256 B - 1 KiB"),
        (1 << 20, "1 MiB - 4 MiB"),
        (5 << 30, "4 GiB - 16 GiB"),
    ],
)
def test_bins_are_powers_of_four(nbytes: int, expected: str) -> None:
    assert size_bin(nbytes) == expected


def test_wire_bytes() -> None:
    assert wire_nbytes("allreduce", 100, 4) == 150
    assert wire_nbytes("allgather", 100, 4) == 75
    assert wire_nbytes("alltoallv", 100, 4) == 75
    assert wire_nbytes("send", 100, 4) == wire_nbytes("bcast", 100, 4) == 100
    assert {wire_nbytes(op, 100, 1) for op in MEANING} == {0}


def test_perfetto_has_a_track_per_group_and_arrows_between_ranks() -> None:
    events = list(events_of(join(two_logs())))
    slices = [one for one in events if one["ph"] == "X" and one["name"] != "waiting"]
    assert len(slices) == 8
    assert {one["pid"] for one in slices} == {0, 1}
    late = [one for one in events if one["name"] == "waiting"]
    assert [(one["pid"], one["dur"]) for one in late] == [(0, 40), (0, 5), (1, 40)]
    starts = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = {one["id"]: one for one in events if one["ph"] == "f"}
    assert len(starts) == 4
    assert starts.keys() == ends.keys()
    for at, start in starts.items():
        assert (start["pid"], ends[at]["pid"]) in ((0, 1), (1, 0))
        assert start["ts"] <= ends[at]["ts"]
    # The last one's call ends the other's wait: the allreduce's arrow is from rank 1.
    assert [one["pid"] for one in starts.values() if one["name"] == "allreduce"] == [1]
    for one in (*starts.values(), *ends.values()):
        assert any(
            each["pid"] == one["pid"]
            and each["tid"] == one["tid"]
            and each["ts"] <= one["ts"] <= each["ts"] + each["dur"]
            for each in slices
        )


def test_operations_that_overlap_have_tracks_of_their_own() -> None:
    dp = group_of(0, 1)
    calls = [
        call(dp, "allreduce", 8, 0, 0, 100),
        call(dp, "allreduce", 8, 1, 10, 50),
        call(dp, "allreduce", 8, 2, 60, 70),
        call(dp, "allreduce", 8, 3, 100, 110),
    ]
    events = list(events_of(join([log_of(0, 1, calls)])))
    assert [one["tid"] for one in events if one["ph"] == "X"] == [1, 2, 2, 1]
    names = [one["args"]["name"] for one in events if one["name"] == "thread_name"]
    assert names == ["dp", "dp +1"]


def test_perfetto_has_a_track_per_stream() -> None:
    dp, tp = group_of(0, 1), group_of(0, 1, "tp")
    calls = [
        call(dp, "allreduce", 8, 0, 0, 10),
        call(dp, "allreduce", 8, 1, 20, None, stream=0),
        call(dp, "allreduce", 8, 2, 30, None, stream=0x7F0),
        call(tp, "allreduce", 8, 0, 40, None, stream=0x7F0),
        call(dp, "allreduce", 8, 3, 50, None, stream=0x7F0),
        call(dp, "allreduce", 8, 4, 60, None, stream=2),
    ]
    log = log_of(0, 1, calls)
    events = list(events_of(join([log])))
    slices = [one for one in events if one["ph"] == "X"]
    assert [one["tid"] for one in slices] == [1, 2, 3, 4, 3, 5]
    names = [one["args"]["name"] for one in events if one["name"] == "thread_name"]
    assert names == [
        "dp",
        "dp, default stream",
        "dp, stream 0x7f0",
        "tp, stream 0x7f0",
        "dp, default stream of its thread",
    ]
    assert [one["args"].get("stream") for one in slices][:3] == [
        *(None, "default stream", "stream 0x7f0")
    ]
    by_stream = log.volume(by=["stream"])
    assert {of: found.calls for (of,), found in by_stream.items()} == {
        "": 1,
        "default stream": 1,
        "stream 0x7f0": 3,
        "default stream of its thread": 1,
    }


# -- commands --------------------------------------------------------------------


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(files_of(two_logs(), tmp_path))
    assert main(["trace", "summarize", folder]) == 0
    said = capsys.readouterr().out
    assert "job job1: 2 of 2 ranks, 6 operations" in said
    assert main(["trace", "summarize", "--by", "op,dtype", folder]) == 0
    assert "float32" in capsys.readouterr().out
    for name in ("one.json.gz", "one.json"):
        assert main(["trace", "perfetto", "--out", str(tmp_path / name), folder]) == 0
    packed = gzip.decompress((tmp_path / "one.json.gz").read_bytes())
    assert json.loads(packed) == json.loads((tmp_path / "one.json").read_text())
    assert main(["trace", "plot", "--out", str(tmp_path / "one.svg"), folder]) == 0
    drawn = ElementTree.fromstring((tmp_path / "one.svg").read_text())
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert "dp allreduce" in texts
    assert "4 KiB - 16 KiB allreduce" in texts


def test_commands_say_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        assert main(["trace", *argv]) == 2
        return capsys.readouterr().err

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no such file or folder" in said("summarize", str(tmp_path / "no"))
    assert f"COMMRT_TRACE={empty}" in said("plot", str(empty))
    files_of(two_logs(), tmp_path)
    other = two_logs()[0]
    other.job = "job2"
    files_of([other], tmp_path)
    assert "logs of 2 jobs: job1 (2 ranks), job2 (1 ranks)" in said(
        "perfetto", str(tmp_path)
    )
    assert "no log of job 'job3'" in said("summarize", "--job", "job3", str(tmp_path))
    assert "--by size: expected of op, " in said(
        "summarize", "--by", "size", str(tmp_path)
    )
    assert main(["trace", "summarize", "--job", "job2", str(tmp_path)]) == 0
    assert (
        main(["trace", "plot", "--job", "job1", "--out", "/no/x.svg", str(tmp_path)])
        == 1
    )
    with pytest.raises(UsageError, match="by='sizes'"):
        two_logs()[0].volume(by=("sizes",))


def test_files_may_be_named_one_by_one(tmp_path: Path) -> None:
    files_of(two_logs(), tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert len(load([*paths, tmp_path]).logs) == 2
    assert len(load(paths[:1]).logs) == 1
