# SPDX-License-Identifier: Apache-2.0
"""Command lines of the benchmarks."""

from __future__ import annotations

import sys

import pytest

from commrt.bench import options
from commrt.bench.algorithm import resolve
from commrt.bench.cli import main
from commrt.bench.launch import make_job
from commrt.errors import UsageError
from commrt.launch.detect import LaunchInfo
from commrt.vocabulary.operations import COLLECTIVES


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
        args = options.parse([name, "-W", "8"])
        assert (args.window, args.message_size) == (8, "4194304")


WRONG = [
    ("allgather --in-place", "allgather has no in-place form"),
    ("latency --ranks 1", "needs at least 2 ranks"),
    ("bw --format nccl", "blocking collectives only"),
    ("allreduce --nonblocking --format nccl", "blocking collectives only"),
    ("allreduce -m x", "-m x: write bytes"),
    ("allreduce -k 1", "-k 1: allreduce has no root"),
    ("bcast -k 5", "-k 5: not a rank; the root is one of 0..1"),
    ("bcast -k 3 --ranks 4,2", "-k 3: not a rank; the root is one of 0..1"),
    ("bcast -k -1", "argument -k/--root-rank: '-1' is not a whole number from 0 on"),
    ("bcast -t 3", "-t 3: test() calls belong to --nonblocking"),
    ("bcast -i 0", "'0' is not a whole number from 1 on"),
    ("bcast -x -1", "'-1' is not a whole number from 0 on"),
    ("bw -W 0", "argument -W/--window: '0' is not a whole number"),
    ("bcast --budget-s nan", "'nan': must be a number of seconds above 0"),
    ("bcast --timeout-s -1", "'-1': must be a number of seconds above 0"),
    ("bcast --ranks two", "--ranks 'two': write numbers, as in 2,4"),
    ("bcast --ranks 0", "at least one rank is needed"),
    ("bcast -T float33", "unknown dtype 'float33'; did you mean 'float32'"),
    ("bcast --iteratons 3", "unknown argument '--iteratons'; did you mean '--iterat"),
    ("bcast 3", "unknown argument '3'"),
    ("latency --algorithm shm/ring", "unknown argument '--algorithm'"),
    ("bcats", "invalid choice: 'bcats'"),
    ("", "required: BENCHMARK"),
    ("allreduce --algorithm shm/rng", "no allreduce algorithm 'rng'; did you mean"),
    ("allreduce --algorithm shn/ring", "unknown backend 'shn'; did you mean 'shm'"),
    ("allreduce --algorithm rng", "has no algorithm 'rng'; did you mean 'ring'"),
    ("allreduce --algorithm ring{chnk=1}", "'chnk'; did you mean 'chunk'"),
    ("allreduce --algorithm a/b/c", "'a/b/c' is not a candidate: write BACKEND"),
    ("allreduce --algorithm mpi/ring", "mpi does not run ring on 2 ranks here; shm/"),
    ("allreduce --algorithm shm/ring --ranks 1", "1 rank here; local/ring does"),
    ("allreduce --algorithm native --ranks 1", "no backend runs it on 1 rank here"),
    ("compare --op allreduc", "did you mean 'allreduce'"),
    ("latency -f", "unknown argument '-f'"),
    ("barrier --format nccl", "and no barrier"),
    ("compare --load /no/such/file", "/no/such/file"),
    (
        "compare --out /dev/null/x",
        "/dev/null/x cannot be written: Not a directory",
    ),
    ("compare --launches 0", "'0' is not a whole number from 1 on"),
    ("compare --sizes 3:1", "1 <= MIN <= MAX"),
    ("submit --op nothing", "unknown operation 'nothing'"),
    ("sparse --densities 2", "write numbers in 0..1"),
    ("spmm --nodes 0", "'0' is not a whole number from 1 on"),
    ("spmm --widths 0", "a size is at least 1 byte"),
    ("compress --op bcast", "invalid choice: 'bcast'"),
    ("compress --sizes 0", "a size is at least 1 byte"),
    ("import --pairs 0", "'0' is not a whole number from 1 on"),
]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commrt.bench.launch._run", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("commrt.bench.worker.run", lambda *_: pytest.fail("started"))


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_usage_is_one_line_that_says_what_to_do(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("commrt.bench: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def _as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bcast -k 5", "-k 5: not a rank; the root is one of 0..3"),
        ("bcast --foo", "unknown argument '--foo'"),
        ("bcast --ranks 2", "--ranks 2: Open MPI's launcher (OMPI_COMM_WORLD_SIZE)"),
        ("latency --ranks 2,4", "started 4, and inside a launcher those are used"),
        ("allreduce --algorithm ring", "write one of shm/ring, mpi/ring"),
        ("allreduce --algorithm shm/rng", "did you mean 'ring'"),
        ("compare", "run it outside mpiexec"),
        ("import", "run it outside mpiexec"),
    ],
)
def test_inside_a_launcher_one_rank_says_what_is_wrong(
    line: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _as_rank(monkeypatch, 0, 4)
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    _as_rank(monkeypatch, 3, 4)
    assert main(line.split()) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("line", ["bcast", "bcast --ranks 4"])
def test_inside_a_launcher_its_ranks_are_used(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr("commrt.bench.worker.run", ran.append)
    _as_rank(monkeypatch, 3, 4)
    assert main(line.split()) == 0
    assert [job["spec"]["name"] for job in ran] == ["bcast"]


SINGLE, MPI = LaunchInfo("single", 0, 1, "x"), LaunchInfo("mpi", 0, 4, "x")
TORCHRUN = LaunchInfo("torchrun", 0, 4, "x")
BY_MPI = {"COMMRT_NODES": "2", "COMMRT_CARRIER": "mpi"}


@pytest.mark.parametrize(
    ("text", "ranks", "launch", "environ", "expected"),
    [
        ("ring", 2, SINGLE, {}, "shm/ring"),
        ("ring", 1, SINGLE, {}, "local/ring"),
        ("ring{chunk=64}", 4, SINGLE, BY_MPI, "mpi/ring{chunk=64}"),
        ("ring", 4, SINGLE, {**BY_MPI, "COMMRT_CARRIER": "tcp"}, "tcp/ring"),
        ("ring", 4, SINGLE, {"COMMRT_NODES": "4"}, "shm/ring"),
        ("native", 2, SINGLE, {}, "mpi/native"),
        ("native", 4, MPI, {}, "mpi/native"),
        ("native", 4, TORCHRUN, {"COMMRT_NODES": "2"}, "gloo/native"),
        ("ring", 4, TORCHRUN, {}, "shm/ring"),
        ("ring", 4, TORCHRUN, {"COMMRT_NODES": "2"}, "tcp/ring"),
        ("mpi/ring", 4, MPI, {}, "mpi/ring"),
        ("shm/ring", 4, MPI, {}, "shm/ring"),
    ],
)
def test_a_bare_algorithm_is_enough_where_one_backend_runs_it(
    text: str,
    ranks: int,
    launch: LaunchInfo,
    environ: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(resolve(text, "allreduce", ranks, launch)) == expected


def test_a_bare_algorithm_is_not_enough_where_init_chooses_the_carrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_NODES", "2")
    with pytest.raises(UsageError, match="write one of mpi/ring, tcp/ring"):
        resolve("ring", "allreduce", 4, SINGLE)


@pytest.mark.parametrize("line", ["bcast -T", "compare --dtype", "submit --dtype"])
def test_bfloat16_without_ml_dtypes_says_what_to_install(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main([*line.split(), "bfloat16"]) == 2
    assert "pip install ml_dtypes" in capsys.readouterr().err


def test_jobs_refuse_unknown_settings() -> None:
    with pytest.raises(UsageError, match="frehs"):
        make_job("bcast", [8], frehs=True)
