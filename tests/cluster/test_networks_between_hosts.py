# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts know their network, and follow a table that was made on it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from cluster_commands import ClusterCommands

from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.network import Network
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump

RING = "ring"
PROGRAM = """\
import dataclasses, json, os, sys
import numpy as np
import commrt
from commrt.comm import core_of
if sys.argv[1]:
    os.environ["COMMRT_TABLE"] = sys.argv[1]
    os.environ["COMMRT_TABLE_ANY_MACHINE"] = "1"
comm = commrt.init()
x = np.full(1001, 1.0)
comm.allreduce(x)
assert (x == comm.size).all()
found = comm.explain("allreduce", 1 << 10)
if not sys.argv[1]:
    assert found.facts.network is None
    core_of(comm).find_network()
    found = comm.explain("allreduce", 1 << 10)
network = dataclasses.asdict(comm.split(0).explain("allreduce", 8).facts.network)
assert network == dataclasses.asdict(found.facts.network)
line = json.dumps([network, found.choice.source, found.choice.candidate.algorithm])
os.write(1, line.encode() + b"\\n")
"""


def seen_by(
    cluster: ClusterCommands, folder: Path, table: str = ""
) -> tuple[Network, str, str]:
    """Return the network of all ranks, who chose an algorithm, and which."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = cluster(
        "run --hosts 2 --rate 100mbit --launcher mpiexec",
        *(sys.executable, str(program), table),
    )
    assert done.ok, done.describe_failure()
    said = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["]
    assert said == [said[0]] * 2
    network, source, algorithm = said[0]
    return Network(**network), source, algorithm


def test_a_table_holds_on_its_own_network(
    cluster: ClusterCommands, tmp_path: Path
) -> None:
    network, source, _ = seen_by(cluster, tmp_path)
    assert network.library.startswith("Open MPI ")
    assert 0.04 < network.gbps < 0.25  # a bucket of 256 KiB passes at once
    assert source == "model"
    for seen, expected in (
        (network, ("table", RING)),
        (replace(network, gbps=40 * network.gbps), ("model", None)),
        (replace(network, library="another 1"), ("model", None)),
    ):
        # Whoever carries messages, a rule of either backend holds.
        rule = Rule("allreduce", Match(0, None, network=seen), Candidate("mpi", RING))
        path = tmp_path / "table.yaml"
        path.write_text(dump(Table(this_machine(), (rule,))))
        _, source, algorithm = seen_by(cluster, tmp_path, str(path))
        assert source == expected[0]
        assert expected[1] in (None, algorithm)
