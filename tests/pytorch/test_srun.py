# SPDX-License-Identifier: Apache-2.0
"""Ranks that Slurm's own srun starts, by a Slurm of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi_ranks import ENVIRONMENTS, MPICH_OVERSUBSCRIBED, ROOT
from private_slurm import PrivateSlurm, private_slurm

from commrt.launch.mpiexec import Completed

GROUPS = """
import json, os, sys
import torch, torch.distributed as dist
said = []
for turn in range(2):
    dist.init_process_group("commrt")
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    said.append([x.tolist(), [os.environ.get(name) for name in names]])
    nodes = dist.group.WORLD.communicator.nodes
    dist.destroy_process_group()
sys.stdout.write(json.dumps([said, len(nodes)]) + "\\n")
"""
RUNTIME = """
import json, sys
import commrt, numpy as np
comm = commrt.init()
total = comm.allreduce(np.full(3, comm.rank + 1.0))
mpi = "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized()
said = [comm.rank, total.tolist(), mpi, comm.mpi is not None]
sys.stdout.write(json.dumps(said) + "\\n")
"""
ALONE = "import commrt; raise SystemExit(commrt.init().size != 1)"


@pytest.fixture(scope="module")
def slurm() -> Iterator[PrivateSlurm]:
    """Return a Slurm of two nodes, or skip."""
    with private_slurm() as started:
        yield started


@pytest.fixture
def program(tmp_path: Path):
    """Return a way to write a program."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def lines(done: Completed) -> list[Any]:
    assert done.ok, done.describe_failure()
    # A library of MPI that does not know srun's ranks says so first.
    said = [each for each in done.stdout.splitlines() if each.startswith("[")]
    return sorted((json.loads(each) for each in said), key=str)


STEPS = [
    ("--nodes=1 --ntasks=2", 2, 2, ""),
    ("--nodes=2 --ntasks=4", 4, 2, ""),
    ("--nodes=2 --ntasks=3", 3, 0, "2,1"),
    ("--nodes=1 --ntasks=1", 1, 1, ""),
]
"""Options, ranks, ranks of each node where that is one number, and COMMRT_NODES."""
PLUGINS = ["none", "pmi2"]
"""How srun starts MPI: not at all, and so that Open MPI does not understand it."""


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(("options", "ranks", "each", "nodes"), STEPS)
@pytest.mark.full(sample=3)
def test_groups_meet_twice(
    slurm: PrivateSlurm,
    program: Any,
    options: str,
    ranks: int,
    each: int,
    nodes: str,
    plugin: str,
) -> None:
    variables = {"COMMRT_NODES": nodes} if nodes else {}
    argv = [f"{options} --mpi={plugin}", sys.executable, program(GROUPS)]
    found = lines(slurm.srun(*argv, **variables))
    total = [ranks * (ranks + 1) / 2] * 3
    assert len(found) == ranks
    for rank, (turns, num_nodes) in enumerate(sorted(found, key=lambda x: x[0][0][1])):
        assert num_nodes == (2 if nodes else 1)
        assert [turn[0] for turn in turns] == [total] * 2
        names = turns[0][1]
        assert turns[1][1] == names
        assert names[:2] == [str(rank), str(ranks)]
        if each:
            assert names[2:] == [str(rank % each), str(each)]
        else:  # Slurm gives the first node one more.
            assert names[2:] == [["0", "2"], ["1", "2"], ["0", "1"]][rank]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("options", ["--nodes=1 --ntasks=2", "--nodes=2 --ntasks=4"])
@pytest.mark.full(sample=1)
def test_init_meets_without_an_mpi_that_knows_srun(
    slurm: PrivateSlurm, program: Any, options: str, plugin: str
) -> None:
    """mpi4py is there, and its MPI has a world of one on each rank."""
    found = lines(
        slurm.srun(f"{options} --mpi={plugin}", sys.executable, program(RUNTIME))
    )
    ranks = int(options[-1])
    total = [ranks * (ranks + 1) / 2] * 3
    assert found == [[rank, total, True, False] for rank in range(ranks)]


def started(slurm: PrivateSlurm, *argv: str, **environ: str) -> Completed:
    """Run a program; once more where MPICH's ranks did not learn their addresses.

    slurmstepd now and then loses one of UCX's; that it does so twice is a failure.
    """
    done = slurm.srun(*argv, **environ)
    if "MPIDI_UCX_comm_addr_exchange" in done.stderr:
        done = slurm.srun(*argv, **environ)
    return done


@pytest.mark.parametrize("options", ["--nodes=1 --ntasks=2", "--nodes=2 --ntasks=4"])
@pytest.mark.full(sample=1)
def test_an_mpi_that_knows_srun_is_used(
    slurm: PrivateSlurm, program: Any, options: str
) -> None:
    there = ROOT / ENVIRONMENTS["mpich"]
    libraries = sorted(there.glob("lib/libmpi.so.*"))
    if not libraries:
        pytest.skip(f"no MPICH in {there}: make test-mpich installs it")
    argv = [f"{options} --mpi=pmi2", sys.executable]
    mpich = {**MPICH_OVERSUBSCRIBED, "MPI4PY_LIBMPI": str(libraries[0])}
    ranks = int(options[-1])
    total = [ranks * (ranks + 1) / 2] * 3
    found = lines(started(slurm, *argv, program(RUNTIME), **mpich))
    assert found == [[rank, total, True, True] for rank in range(ranks)]
    meeting = lines(started(slurm, *argv, program(GROUPS), **mpich))
    assert [turn[0] for turns, _ in meeting for turn in turns] == [total] * 2 * ranks


def test_commrt_launch_leaves_mpi_alone(slurm: PrivateSlurm, program: Any) -> None:
    argv = ["--nodes=1 --ntasks=2", sys.executable, program(RUNTIME)]
    found = lines(slurm.srun(*argv, COMMRT_LAUNCH="slurm"))
    assert found == [[rank, [3.0] * 3, False, False] for rank in range(2)]


def test_a_task_alone_is_a_world_of_one(slurm: PrivateSlurm, program: Any) -> None:
    done = slurm.srun("--ntasks=1", sys.executable, program(ALONE))
    assert done.ok, done.describe_failure()


def test_a_name_that_nobody_knows_is_an_error_at_once(
    slurm: PrivateSlurm, program: Any
) -> None:
    argv = ["--nodes=2 --ntasks=2", sys.executable, program(GROUPS)]
    done = slurm.srun(*argv, MASTER_ADDR="nowhere.invalid")
    assert not done.ok
    assert "rank 0 is on 'nowhere.invalid', and no host of that name" in done.stderr
    assert "set MASTER_ADDR to its address" in done.stderr


def test_a_task_that_fails_ends_the_step(slurm: PrivateSlurm, program: Any) -> None:
    text = GROUPS + "\nif os.environ['RANK'] == '1': raise ValueError('of rank 1')\n"
    done = slurm.srun(
        *("--nodes=1 --ntasks=2 --kill-on-bad-exit=1", sys.executable, program(text))
    )
    assert done.returncode == 1
    assert "ValueError: of rank 1" in done.stderr
