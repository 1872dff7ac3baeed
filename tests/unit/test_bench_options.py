# SPDX-License-Identifier: Apache-2.0
"""Command lines of the benchmarks."""

from __future__ import annotations

import pytest

from commrt.bench import options
from commrt.bench.cli import main
from commrt.bench.launch import make_job
from commrt.errors import UsageError
from commrt.operations import COLLECTIVES


def test_osu_range() -> None:
    assert options.osu_range("16", 4) == [4, 8, 16]
    assert options.osu_range("1:5", 4) == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8:64", [8, 16, 32, 64]), ("8:128:4", [8, 32, 128]), ("1000,8", [1000, 8])],
)
def test_size_list(text: str, sizes: list[int]) -> None:
    assert options.size_list(text) == sizes


@pytest.mark.parametrize("text", ["", "a", "8:4", "0:8", "8:64:1", "1:2:3:4", "8,0"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="sizes"):
        options.size_list(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [("mpi_float", "float32"), ("MPI_CHAR", "int8"), ("bfloat16", "bfloat16")],
)
def test_dtypes_by_osu_name_and_by_own(text: str, name: str) -> None:
    assert options.parse(["bcast", "-T", text]).dtype == name


def test_every_operation_and_osu_option() -> None:
    for coll in COLLECTIVES:
        line = f"{coll} -m 4:64 -i 5 -x 1 -f -c -T float32 -d cpu --fresh --ranks 2,4"
        args = options.parse([*line.split(), "--nonblocking", "-t", "3", "-k", "1"])
        assert (args.benchmark, args.ranks, args.num_test_calls) == (coll, [2, 4], 3)
    for name in options.POINT_TO_POINT:
        assert options.parse([name, "-W", "8"]).window == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allgather --in-place", "allgather has no in-place form"),
        ("latency --ranks 1", "needs at least 2 ranks"),
        ("bw --format nccl", "blocking collectives only"),
        ("allreduce --nonblocking --format nccl", "blocking collectives only"),
        ("allreduce -m x", "-m x: write bytes"),
        ("compare --op allreduc", "did you mean 'allreduce'"),
        ("compare --load /no/such/file", "/no/such/file"),
        ("submit --op nothing", "unknown operation 'nothing'"),
    ],
)
def test_wrong_usage_says_what_to_do(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_wrong_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["bcast", "-T", "float33"])
    assert "float33" in capsys.readouterr().err


def test_jobs_refuse_unknown_settings() -> None:
    with pytest.raises(UsageError, match="frehs"):
        make_job("bcast", [8], frehs=True)
