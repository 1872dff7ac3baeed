# SPDX-License-Identifier: Apache-2.0
"""Where one rank of an example raises, the others end at once, and say why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commrt.errors import CommError, RevokedError, UsageError
from commrt.examples import runs
from commrt.examples.endings import ending_together
from commrt.launch.mpiexec import child_environment, run_process, run_ranks
from commrt.local import run

DEADLINE_S = 240.0
LIMIT_S = 3600.0
"""Of calls, far beyond the deadline: nobody waits that long and passes."""
MESSAGE = "tiles of 7 rows make no batch; expected 8"
PROGRAM = f"""
import sys

import numpy as np

from commrt.errors import UsageError
from commrt.examples.field import report
from commrt.layers.process_grid import ProcessGrid


def faulty(comm, settings):
    comm.timeout_s = {LIMIT_S}
    with ProcessGrid(comm, {{"data": 0}}) as grid:
        if comm.rank == 1:
            raise UsageError("{MESSAGE}")
        grid["data"].allreduce(np.ones(3))


report.RUNGS["data"] = faulty
sys.exit(report.main(["data"]))
"""


@pytest.mark.parametrize("of_a_part", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_error_of_one_rank_is_told_to_those_that_wait(
    ranks: int, of_a_part: bool
) -> None:
    def rank_main(comm: Any) -> str:
        comm.timeout_s = LIMIT_S
        waits = comm.split(0) if of_a_part else comm
        try:
            with ending_together(comm):
                if comm.rank == 1:
                    raise UsageError(MESSAGE)
                waits.allreduce(np.ones(3))
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    for rank, said in enumerate(run(ranks, rank_main, timeout_s=DEADLINE_S)):
        kind = UsageError if rank == 1 else RevokedError
        assert said.startswith(f"{kind.__name__}: ")
        assert MESSAGE in said
        assert rank == 1 or "rank 1: UsageError" in said


def test_a_rank_that_raises_nothing_leaves_all_as_it_is() -> None:
    def rank_main(comm: Any) -> float:
        with ending_together(comm):
            pass
        with pytest.raises(ZeroDivisionError), ending_together(None):
            raise ZeroDivisionError
        return float(comm.allreduce(np.ones(1))[0])

    assert run(2, rank_main, timeout_s=DEADLINE_S) == [2.0, 2.0]


def test_an_error_of_each_rank_stays_its_own() -> None:
    def rank_main(comm: Any) -> str:
        try:
            with ending_together(comm):
                raise UsageError(f"{MESSAGE}, says {comm.rank}")
        except UsageError as error:
            return str(error)

    found = run(3, rank_main, timeout_s=DEADLINE_S)
    assert found == [f"{MESSAGE}, says {rank}" for rank in range(3)]


def broken() -> str:
    try:
        with runs.job("commrt"):
            dist.group.WORLD.communicator.timeout_s = LIMIT_S
            if dist.get_rank() == 1:
                raise UsageError(MESSAGE)
            dist.all_reduce(torch.ones(3))
    except (CommError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_job_of_torch_ends_on_all_ranks(torchrun: Any) -> None:
    found = torchrun(3, broken, deadline_s=DEADLINE_S)
    assert all(MESSAGE in said for said in found), found


@pytest.mark.parametrize("launcher", ["commrt.run", "mpiexec"])
def test_the_command_ends_with_the_message_of_one_rank(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout's commrt has no engine
    program = tmp_path / "one_rank_raises.py"
    program.write_text(PROGRAM)
    if launcher == "mpiexec":
        done = run_ranks(sys.executable, 3, [str(program)], timeout_s=DEADLINE_S)
    else:
        words = [sys.executable, "-m", "commrt.run", "-n", "3", str(program)]
        environment = child_environment(sys.executable)
        done = run_process(words, environment, timeout_s=DEADLINE_S)
    assert not done.timed_out, done.describe_failure()
    assert done.returncode != 0
    assert f"rank 1: {MESSAGE}" in done.stderr
