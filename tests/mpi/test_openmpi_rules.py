# SPDX-License-Identifier: Apache-2.0
"""Open MPI reads the rules that ``commrt-tune export`` writes, in the bytes it counts.

It does not say what it read. So one rule's algorithm is replaced by one that it does
not have: calls from that rule's bytes on must fail, and those below must not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from commrt.launch.mpiexec import (
    Completed,
    child_environment,
    find_launcher,
    launch_command,
    run_process,
)
from commrt.select.facts import Candidate
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.tuning.export_openmpi import OPENMPI, export_openmpi

SAME = {
    "allgather": {"dissemination": "bruck"},
    "allreduce": {"halving_doubling": "rabenseifner"},
    "alltoall": {"direct": "linear", "dissemination": "modified_bruck"},
    "barrier": {"dissemination": "bruck"},
    "bcast": {
        "direct": "basic_linear",
        "halving_doubling": "scatter_allgather",
        "ring": "scatter_allgather_ring",
    },
    "gather": {"direct": "basic_linear"},
    "reduce": {"direct": "linear", "halving_doubling": "rabenseifner"},
    "reduce_scatter": {"halving_doubling": "recursive_halving"},
    "scatter": {"direct": "basic_linear"},
}
"""Open MPI's words for ours, where they differ."""
RANKS = 2
FROM = 4096
"""Rule bytes at which the second rule begins."""
NONE = 99
"""An algorithm that Open MPI does not have."""
FIRST = {
    "allgather": "shm/ring",
    "allreduce": "shm/recursive_doubling",
    "alltoall": "shm/pairwise",
    "bcast": "shm/binomial",
    "reduce": "shm/binomial",
    "reduce_scatter": "shm/halving_doubling",
}
PROGRAM = """
import numpy as np
from mpi4py import MPI

comm, n = MPI.COMM_WORLD, MPI.COMM_WORLD.size
comm.Set_errhandler(MPI.ERRORS_RETURN)

def call(op, nbytes):
    one, all_ = np.ones(nbytes, "i1"), np.zeros(nbytes * n, "i1")
    if op == "allgather":
        comm.Allgather(one, all_)
    elif op == "allreduce":
        comm.Allreduce(one, out := np.zeros_like(one))
        assert (out == n).all()
    elif op == "alltoall":
        comm.Alltoall(all_, np.zeros_like(all_))
    elif op == "bcast":
        comm.Bcast(one)
    elif op == "reduce":
        comm.Reduce(one, np.zeros_like(one))
    elif op == "reduce_scatter":
        comm.Reduce_scatter_block(one, np.zeros(nbytes // n, "i1"))

found = []
for op in OPS:
    for nbytes in (FROM - n, FROM):
        try:
            call(op, nbytes)
            found.append("right")
        except MPI.Exception:
            found.append("failed")
print("rank", comm.rank, *found, flush=True)
"""


def rules(ranks: int) -> str:
    """Return the exported file: one choice below FROM, Open MPI's own from there on."""
    given = []
    for op, first in FIRST.items():
        for lo, hi, use in ((0, FROM, first), (FROM, None, "mpi/native")):
            match = Match(lo, hi, ranks=ranks, device="host")
            given.append(Rule(op, match, Candidate.parse(use)))
    return export_openmpi(Table(Machine(Cpu("some", 1, 2)), tuple(given))).text


def poisoned(text: str) -> str:
    """Return the rules with the choice from FROM on replaced by an impossible one."""
    lines = text.splitlines()
    replaced = [
        line.replace(" 0 0 0 ", f" {NONE} 0 0 ", 1) if "mpi/native" in line else line
        for line in lines
    ]
    assert sum(a != b for a, b in zip(lines, replaced, strict=True)) == len(FIRST)
    return "\n".join(replaced) + "\n"


def launch(path: Path) -> Completed:
    program = PROGRAM.replace("OPS", str(list(FIRST))).replace("FROM", str(FROM))
    settings = {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(path),
    }
    command, env = launch_command(sys.executable, RANKS, ["-c", program], env=settings)
    return run_process(command, env, timeout_s=300)


@pytest.mark.parametrize(
    ("ranks", "impossible", "expected"),
    [
        (RANKS, False, ["right", "right"]),
        (RANKS, True, ["right", "failed"]),
        (
            RANKS - 1,
            True,
            ["right", "right"],
        ),  # the stop after the measured ranks holds
    ],
)
def test_openmpi_follows_the_rules(
    mpirun: Any, tmp_path: Path, ranks: int, impossible: bool, expected: list[str]
) -> None:
    if mpirun.flavour != "openmpi":
        pytest.skip("the rules are Open MPI's")
    path = tmp_path / "rules"
    text = rules(ranks)
    path.write_text(poisoned(text) if impossible else text)
    done = launch(path)
    assert done.ok, done.describe_failure()
    for rank in range(RANKS):
        line = " ".join(["rank", str(rank), *(expected * len(FIRST))])
        assert line in done.stdout


def test_the_numbers_are_those_of_this_openmpi(mpirun: Any) -> None:
    if mpirun.flavour != "openmpi":
        pytest.skip("the numbers are Open MPI's")
    info = Path(find_launcher(sys.executable).mpiexec).with_name("ompi_info")
    words = [str(info), "--param", "coll", "tuned", "--level", "9", "--parsable"]
    done = run_process(words, child_environment(sys.executable), timeout_s=300)
    assert done.ok, done.describe_failure()
    for op, ours in OPENMPI.items():
        coll = "reduce_scatter_block" if op == "reduce_scatter" else op
        for name, number in ours.algorithms.items():
            word = SAME[op].get(name, name)
            line = f"coll_tuned_{coll}_algorithm:enumerator:value:{number}:{word}\n"
            assert line in done.stdout, line
