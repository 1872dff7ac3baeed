# SPDX-License-Identifier: Apache-2.0
"""Comparisons between hosts, without hosts: placements, bounds, ways, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commrt.bench.cluster.__main__ import SCHEMA, main
from commrt.bench.cluster.placements import bound_us, parse_placement
from commrt.bench.cluster.table import cells, report
from commrt.errors import UsageError

MBIT = 1_000_000


@pytest.mark.parametrize(
    ("text", "ranks", "nodes"),
    [
        ("4x1", (1, 1, 1, 1), (0, 1, 2, 3)),
        ("2x2", (2, 2), (0, 0, 1, 1)),
        ("2,1,1", (2, 1, 1), (0, 0, 1, 2)),
        ("3x3", (3, 3, 3), (0, 0, 0, 1, 1, 1, 2, 2, 2)),
    ],
)
def test_placements_are_read(
    text: str, ranks: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    found = parse_placement(text)
    assert (found.ranks, found.nodes) == (ranks, nodes)
    assert found.size == len(nodes)


@pytest.mark.parametrize(
    "text", ["", "4", "1x4", "0x1", "2x0", "2,0", "129x1", "2x2,1"]
)
def test_a_placement_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected hosts x ranks of each, as 4x1"):
        parse_placement(text)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="2x513: more than 1024 ranks"):
        parse_placement("2x513")


@pytest.mark.parametrize(
    ("coll", "placement", "carried"),
    [
        ("allreduce", "4x1", 1.5),
        ("allreduce", "2x2", 1.0),
        ("allgather", "4x1", 3.0),
        ("allgather", "2,1,1", 3.0),
        ("reduce_scatter", "2x2", 0.5),
        ("reduce_scatter", "2,1,1", 0.75),
        ("bcast", "4x1", 1.0),
        ("reduce", "2,1,1", 1.0),
        ("gather", "2,1,1", 2.0),
        ("scatter", "4x1", 3.0),
        ("alltoall", "2x2", 4.0),
        ("alltoallv", "2,1,1", 4.0),
        ("send_recv", "2,1,1", 2.0),
    ],
)
def test_a_bound_is_what_the_busiest_link_carries(
    coll: str, placement: str, carried: float
) -> None:
    found = bound_us(coll, 1_000_000, parse_placement(placement), 500 * MBIT)
    assert found == pytest.approx(carried * 16_000)


def test_there_is_no_bound_for_other_operations() -> None:
    for coll in ("barrier", "scan", "exscan"):
        assert bound_us(coll, 8, parse_placement("2x1"), MBIT) is None


def launched(
    peer: str, medians: Sequence[float], *, nbytes: int = 8 << 20, valid: bool = True
) -> list[dict[str, Any]]:
    row = {"nbytes": nbytes, "valid": valid, "cores_idle": 0.25}
    return [
        {
            "placement": "2x1",
            "coll": "allreduce",
            "peer": peer,
            "library": f"the library of {peer}",
            "rows": [{**row, "median_us": median}],
        }
        for median in medians
    ]


def recorded(launches: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": ["python", "-m", "commrt.bench.cluster"],
        "rate": "500mbit",
        "bits_per_s": 500 * MBIT,
        "launches": launches,
        "failures": [],
    }


def test_ratios_are_medians_over_launches_that_followed_each_other() -> None:
    data = recorded(
        [
            *launched("commrt", [200_000, 300_000, 400_000]),
            *launched("mpich", [100_000, 300_000, 200_000]),
            *launched("gloo", [400_000, 600_000, 800_000]),
            *launched("own:ring", [160_000]),
        ]
    )
    assert len(cells(data)["2x1", "allreduce", 8 << 20]["commrt"]) == 3
    text = report(data)
    assert "| 2x1 | mpich | 2.00 | 2.00 | 1 of 1 |" in text
    assert "| 2x1 | gloo | 0.50 | 0.50 | 0 of 1 |" in text
    assert "| 2x1 | the best of them | 2.00 |" in text
    assert "| 2x1 | its own best schedule | 1.25 |" in text
    # 8 MiB at 500 Mbit/s take 134.2 ms.
    assert "| 2x1 | allreduce | 8388608 | commrt | 2.24 |" in text
    assert "25%" in text
    assert "cores were busy" not in text


def test_wrong_results_and_failures_are_told_and_not_timed() -> None:
    data = recorded(
        [*launched("commrt", [5.0], nbytes=8), *launched("gloo", [1], valid=False)]
    )
    failure = {"placement": "2x1", "coll": "bcast", "peer": "mpich"}
    data["failures"] = [{**failure, "error": "mpich: failed\nno such host\n"}]
    text = report(data)
    assert "Wrong result: gloo, 2x1 allreduce 8388608" in text
    assert "Failed: 2x1, bcast, mpich: no such host" in text
    assert "| 2x1 | gloo |" not in text


def test_a_file_of_raw_data_is_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recorded([*launched("commrt", [3.0]), *launched("gloo", [2.0])])
    file = tmp_path / "raw.json"
    file.write_text(json.dumps(data))
    assert main(["--load", str(file)]) == 0
    assert capsys.readouterr().out == report(data)
    file.write_text(json.dumps({"schema": SCHEMA}))
    assert main(["--load", str(file)]) == 2
    assert "it is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "allreduse"], "allreduse"),
        (["--rate", "fast"], "rate 'fast': expected a number"),
        (["--peer", "nccl"], "--peer nccl: expected one of commrt, mpi4py, gloo"),
        (["--peer", "copy"], "--peer copy: expected one of commrt, mpi4py, gloo"),
        (["--peer", "commrt"], "--peer commrt: the name is taken"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_built(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
