# SPDX-License-Identifier: Apache-2.0
"""Processes that ranks of mpiexec start are no ranks; the job goes on and ends."""

from __future__ import annotations

import sys
from typing import Any

import child_ranks
import pytest
from child_ranks import ALONE, family, nested

from commrt.launch.mpiexec import launch_command

ENV = {"COMMRT_TIMEOUT_S": "240"}
PROGRAM = child_ranks.__file__


def check_alone(said: list[Any], why: str) -> None:
    """See that a child was a world of one, and was told why."""
    assert said[:3] == ALONE, said
    assert len(said) == 4, said
    assert why in said[3]
    assert "COMMRT_LAUNCH=single" in said[3]


@pytest.mark.parametrize("parents", [[0], [0, 1, 2]])
@pytest.mark.parametrize("how", ["program", "inheriting", "shell", "spawn"])
def test_a_child_after_init_is_a_world_of_one(
    mpirun: Any, how: str, parents: list[int]
) -> None:
    got = mpirun(*(3, family), env=ENV, first="", after=how, mpi=True, parents=parents)
    for rank, (said, sums) in enumerate(got):
        assert sums == [3.0, 3.0]
        assert len(said) == (rank in parents)
        for one in said:
            check_alone(one, f"rank {rank} of ")


@pytest.mark.parametrize("how", ["program", "inheriting", "forkserver", "fork"])
def test_a_child_before_init_is_a_world_of_one(mpirun: Any, how: str) -> None:
    got = mpirun(
        *(2, family), env=ENV, first=how, after="program", mpi=True, parents=[0]
    )
    (before, after), sums = got[0]
    assert sums == [2.0, 2.0]
    check_alone(before, "rank 0 of ")
    check_alone(after, "rank 0 of ")
    assert got[1] == [[], [2.0, 2.0]]


def test_a_child_before_anybody_used_mpi_is_told_to_say_what_it_is(
    mpirun: Any,
) -> None:
    got = mpirun(
        2, family, env=ENV, first="inheriting", after="", mpi=False, parents=[1]
    )
    (text,) = got[1][0][0]
    assert "COMMRT_LAUNCH=single for this process" in text
    assert "COMMRT_LAUNCH=mpi if it is" in text
    assert [sums for _, sums in got] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("inner", ["mpiexec", "commrt.run"])
def test_a_job_within_a_rank_has_ranks(mpirun: Any, inner: str, init: bool) -> None:
    command = [sys.executable, "-m", "commrt.run", "-n", "3", PROGRAM]
    if inner == "mpiexec":
        command, _ = launch_command(
            sys.executable, 3, [PROGRAM], launcher=mpirun.launcher
        )
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    got = mpirun(2, nested, env={**ENV, **allowed}, command=command, init=init)
    assert got[0] == [[[rank, 3, 3.0] for rank in range(3)], 2.0 if init else 0.0]


def test_ranks_that_a_shell_starts_are_ranks(mpirun: Any) -> None:
    script = f'"{sys.executable}" "{PROGRAM}"; test $? = 0'
    starts = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    for command in (["bash", "-c", script], [sys.executable, "-c", starts]):
        words = command if command[0] == "bash" else [*command, "bash", "-c", script]
        if command[0] != "bash" and mpirun.flavour != "openmpi":
            continue  # Python closes the pipe to MPICH's launcher: no rank can run
        text = ["-c", f"import os; os.execvp({words[0]!r}, {words!r})"]
        done = mpirun.program(2, text, env=ENV)
        assert done.ok, done.describe_failure()
        found = sorted(done.stdout.replace("][", "]\n[").splitlines())
        assert found == ["[0, 2, 2.0]", "[1, 2, 2.0]"], done
