# SPDX-License-Identifier: Apache-2.0
"""Text formats of the benchmarks, to the character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commrt.bench import formats
from commrt.bench.launch import make_job


def _row(nbytes: int, *samples: float, **more: Any) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "nbytes": nbytes,
        "elements": nbytes // 4,
        "calls": 10,
        "samples_us": list(samples),
        "median_us": ordered[len(ordered) // 2],
        "valid": True,
        **more,
    }


ROWS = [_row(4, 1.0, 1.236, 9.0), _row(1048576, 480.0, 512.5, 700.25)]


def test_osu_blocking_layout() -> None:
    assert formats.osu_text(ROWS, coll="allreduce") == (
        "\n"
        "# OSU MPI Allreduce Latency Test v7.4\n"
        "# Datatype: MPI_FLOAT.\n"
        "# Size       Avg Latency(us)\n"
        "4                       1.24\n"
        "1048576               512.50\n"
    )


def test_osu_full_layout_with_validation() -> None:
    text = formats.osu_text(
        ROWS[:1], coll="alltoall", dtype="int8", full=True, validation=True
    )
    assert text == (
        "\n"
        "# OSU MPI All-to-All Personalized Exchange Latency Test v7.4\n"
        "# Datatype: MPI_CHAR.\n"
        "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)"
        "  Iterations        Validation\n"
        "4                       1.24              1.00              9.00"
        "          30              Pass\n"
    )


def test_osu_barrier_has_neither_size_nor_datatype() -> None:
    assert formats.osu_text([_row(0, 0.5)], coll="barrier").splitlines() == [
        "",
        "# OSU MPI Barrier Latency Test v7.4",
        "# Avg Latency(us)",
        "             0.50",
    ]
    row = _row(0, 20.0, overall_us=20.0, compute_us=12.5, test_us=0.5, pure_us=11.0)
    row["overlap_percent"] = 25.0
    text = formats.osu_text([row], coll="barrier", mode="nonblocking")
    assert text == (
        "\n"
        "# OSU MPI Non-blocking Barrier Latency Test v7.4\n"
        "# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait\n"
        "\n"
        "# Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)\n"
        "        20.00             12.00             11.00             25.00\n"
    )


def test_osu_wrong_result_is_shown_as_fail_and_nan() -> None:
    row = {"nbytes": 4, "valid": False, "error": "wrong"}
    line = formats.osu_text([row], coll="bcast", validation=True).splitlines()[-1]
    assert line == "4                        nan              Fail"


def test_osu_nonblocking_layout() -> None:
    row = _row(
        8,
        20.0,
        overall_us=20.0,
        compute_us=12.5,
        test_us=0.5,
        init_us=1.0,
        wait_us=6.0,
        pure_us=11.0,
        pure_min_us=10.0,
        pure_max_us=12.0,
        overlap_percent=27.27,
    )
    assert formats.osu_text([row], coll="alltoall", mode="nonblocking") == (
        "\n"
        "# OSU MPI Non-blocking All-to-All Latency Test v7.4\n"
        "# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait\n"
        "\n"
        "# Datatype: MPI_FLOAT.\n"
        "# Size           Overall(us)       Compute(us)    Pure Comm.(us)"
        "        Overlap(%)\n"
        "8                      20.00             12.00             11.00"
        "             27.27\n"
    )
    full = formats.osu_text([row], coll="bcast", mode="nonblocking", full=True)
    assert full.splitlines()[-1].split() == [
        *("8", "20.00", "12.00", "1.00", "0.50", "6.00"),
        *("11.00", "10.00", "12.00", "27.27"),
    ]


@pytest.mark.parametrize(
    ("mode", "title", "column"),
    [
        ("latency", "OSU MPI Latency Test", "Avg Latency(us)"),
        ("bw", "OSU MPI Bandwidth Test", "Bandwidth (MB/s)"),
        ("bibw", "OSU MPI Bi-Directional Bandwidth Test", "Bandwidth (MB/s)"),
    ],
)
def test_osu_point_to_point_layout(mode: str, title: str, column: str) -> None:
    lines = formats.osu_text(
        [_row(4, 2.0, MBps=1234.5)], coll="allreduce", mode=mode, full=True
    ).splitlines()
    assert lines[1] == f"# {title} v7.4"
    assert lines[3] == "# Size    " + column.rjust(18)
    value = 2.0 if mode == "latency" else 1234.5
    assert lines[4] == f"4         {value:18.2f}"


def test_nccl_layout() -> None:
    text = formats.nccl_text(
        ROWS, ROWS[:1], coll="allreduce", ranks=4, library="commrt 0"
    )
    lines = text.splitlines()
    assert lines[1] == "# Collective test starting: allreduce_perf"
    assert lines[5] == (
        "#       size         count      type   redop    root     time   algbw   busbw"
        "  #wrong     time   algbw   busbw  #wrong "
    )
    assert lines[6] == (
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"
        "             (us)  (GB/s)  (GB/s)         "
    )
    assert lines[4].index("out-of-place") == lines[6].index("(us)") + 4
    assert lines[7] == (
        "           4             1     float     sum      -1     1.24    0.00    0.00"
        "       0     1.24    0.00    0.00       0"
    )
    assert lines[8] == (
        "     1048576        262144     float     sum      -1   512.50    2.05    3.07"
        "       0      N/A     N/A     N/A     N/A"
    )
    assert "# Out of bounds values : 0 OK" in lines


def test_nccl_sizes_are_those_of_all_ranks_where_each_has_a_part() -> None:
    line = formats.nccl_text([_row(4096, 4.0)], [], coll="allgather", ranks=4)
    assert line.splitlines()[7].split()[:8] == [
        *("16384", "1024", "float", "none", "-1"),
        *("4.00", "4.10", "3.07"),
    ]
    scattered = formats.nccl_text([_row(4096, 4.0)], [], coll="reduce_scatter", ranks=4)
    assert scattered.splitlines()[7].split()[:2] == ["4096", "256"]


def test_nccl_counts_wrong_results() -> None:
    wrong = [{"nbytes": 4, "valid": False}]
    text = formats.nccl_text(wrong, [], coll="bcast", ranks=2, root=1)
    assert "# Out of bounds values : 1 FAILED" in text
    assert (
        text.splitlines()[7].split()[3:]
        == ["none", "1", *["N/A"] * 3, "1"] + ["N/A"] * 4
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.004, "   0.00"),
        (1234.5, "1234.50"),
        (12345.6, "12345.6"),
        (1234567.0, "1234567"),
        (123456789.0, "1.2e+08"),
    ],
)
def test_times_shrink_to_fit(value: float, text: str) -> None:
    assert formats.fit_float(value, 7) == text


@pytest.mark.parametrize(
    ("coll", "factor"),
    [("allreduce", 1.5), ("allgather", 0.75), ("alltoall", 0.75), ("bcast", 1.0)],
)
def test_bus_factor(coll: str, factor: float) -> None:
    assert formats.bus_factor(coll, 4) == factor


def test_json_holds_samples_command_and_link_state() -> None:
    row = _row(4, 1.0, 2.0, link_class="near", link_ns=[80.0, 81.0])
    result = {"ranks": 2, "library": "x", "table_digest": "abc", "rows": [row]}
    job = make_job("allreduce", [4], fresh=True)
    data = json.loads(
        formats.json_text(result, command=["a", "b"], machine={"cpu": "c"}, job=job)
    )
    assert data["schema"] == "commrt-bench/1"
    assert data["rows"][0]["samples_us"] == [1.0, 2.0]
    assert data["rows"][0]["link_class"] == "near"
    assert (data["command"], data["machine"]["cpu"]) == (["a", "b"], "c")
    assert (data["job"]["coll"], data["job"]["fresh"]) == ("allreduce", True)
    assert data["table_digest"] == "abc"


def test_submit_shows_the_interval_and_a_wrong_result() -> None:
    row = _row(8, 1.0, 2.0, 3.0, low_us=1.0, high_us=3.0)
    line = "8              2.00 us  [1.00, 3.00]  p99 3.00 us"
    assert formats.submit_line(row) == line
    wrong = {"nbytes": 8, "valid": False, "error": "differs; not timed"}
    assert formats.submit_line(wrong) == "8          wrong: differs; not timed"
