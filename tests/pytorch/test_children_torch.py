# SPDX-License-Identifier: Apache-2.0
"""Processes that torchrun's ranks start are no ranks; the job goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import child_ranks
import pytest
from child_ranks import ALONE, family, nested
from torch.utils.data import DataLoader
from torch_ranks import TorchRun

import commrt
from commrt.launch.mpiexec import child_environment

ENV = {"COMMRT_TIMEOUT_S": "240"}
JOINS = """
import sys
import commrt.torch, torch.distributed as dist
try:
    dist.init_process_group("commrt")
except commrt.errors.UsageError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize("parents", [[0], [0, 1]])
@pytest.mark.parametrize("how", ["program", "spawn", "shell"])
def test_a_child_after_init_is_a_world_of_one(
    torchrun: TorchRun, how: str, parents: list[int]
) -> None:
    got = torchrun(
        *(2, family), env=ENV, first="", after=how, mpi=False, parents=parents
    )
    for rank, (said, sums) in enumerate(got):
        assert sums == [2.0, 2.0]
        assert len(said) == (rank in parents)
        for one in said:
            assert one[:3] == ALONE, one
            assert f"rank {rank} of torchrun" in one[3]


def test_a_child_before_init_is_told_to_say_what_it_is(torchrun: TorchRun) -> None:
    got = torchrun(
        *(2, family), env=ENV, first="program", after="program", mpi=False, parents=[1]
    )
    (text,), after = got[1][0]
    assert "COMMRT_LAUNCH=torchrun if it is" in text
    assert after[:3] == ALONE
    assert [sums for _, sums in got] == [[2.0, 2.0]] * 2


class Worlds:
    """What each worker of a data loader says of its world."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[Any]:
        return child_ranks.world()


def _first(batch: list[Any]) -> Any:
    return batch[0]


def loaded() -> list[Any]:
    import test_children_torch as here

    comm = commrt.init()
    loader: DataLoader[Any] = DataLoader(
        here.Worlds(),  # type: ignore[arg-type]
        num_workers=2,
        multiprocessing_context="spawn",
        collate_fn=here._first,
    )
    worlds = [*loader]
    comm.barrier()
    return [worlds, comm.size]


def test_workers_of_a_data_loader_are_worlds_of_one(torchrun: TorchRun) -> None:
    for worlds, size in torchrun(2, loaded, env=ENV):
        assert size == 2
        assert [world[:3] for world in worlds] == [ALONE] * 2


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("outer", ["torchrun", "commrt.run"])
def test_a_job_of_torchrun_within_a_rank_has_ranks(
    torchrun: TorchRun, outer: str, init: bool
) -> None:
    folder = Path(os.path.abspath(sys.executable)).parent
    command = [str(folder / "torchrun"), "--standalone", "--nproc-per-node", "3"]
    command.append(child_ranks.__file__)
    if outer == "torchrun":
        found, total = torchrun(2, nested, env=ENV, command=command, init=init)[0]
        assert total == (2.0 if init else 0.0)
    else:
        code = (
            "import child_ranks, json, sys\n"
            f"print(json.dumps(child_ranks.nested(json.loads(sys.argv[1]), {init})))"
        )
        printed = _of_run(code, json.dumps(command))
        found = max(json.loads(line) for line in printed.splitlines())[0]
    assert found == [[rank, 3, 3.0] for rank in range(3)]


def test_a_child_cannot_take_a_ranks_place_in_a_process_group(tmp_path: Path) -> None:
    (tmp_path / "joins.py").write_text(JOINS)
    code = (
        "import commrt, child_ranks, sys\n"
        "comm = commrt.init()\n"
        "print(child_ranks.output_of([sys.executable, sys.argv[1]]))\n"
        "comm.barrier()"
    )
    lines = _of_run(code, str(tmp_path / "joins.py")).splitlines()
    assert len(lines) == 2
    assert all("this process is no rank of the job: rank" in line for line in lines)


def _of_run(code: str, argument: str) -> str:
    """Return what two ranks of commrt.run print."""
    support = str(Path(child_ranks.__file__).parent)
    program = Path(argument).parent if argument.endswith(".py") else None
    folder = program or Path(os.environ["XDG_CONFIG_HOME"])
    (folder / "of_run.py").write_text(code)
    command = [sys.executable, "-m", "commrt.run", "-n", "2", str(folder / "of_run.py")]
    done = subprocess.run(
        [*command, argument],
        env={**child_environment(sys.executable), **ENV, "PYTHONPATH": support},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
