# SPDX-License-Identifier: Apache-2.0
"""A selection table sends rows by one backend, and sums of gradients by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 300.0
TABLE = """
schema: commrt-tune/1
machine:
  fingerprint: {fingerprint}
  cpu: {{model: none, sockets: 1, cores: 1}}
software: {{commrt: 0.1.0, python: 3.11.7}}
defaults: {{unmatched: model, tie: keep_simpler, tie_margin: 0.04}}
rules:
- op: alltoall
  match: {{bytes: [0, null]}}
  use: {rows}
- op: alltoallv
  match: {{bytes: [0, null]}}
  use: {rows}
- op: allreduce
  match: {{bytes: [0, null]}}
  use: {sums}
"""
SHM, RING = "{backend: shm, alg: pairwise}", "{backend: shm, alg: ring}"
MPI = "{backend: mpi, alg: native}"


def trained() -> list[Any]:
    """Return losses of a few steps, and what sent each operation."""
    import torch

    import commrt
    from commrt.examples import dlrm
    from commrt.examples.tumours import NUM_DENSE, TABLES
    from commrt.layers.embeddings import (
        RowwiseAdagrad,
        ShardedEmbeddingBags,
        broadcast_parameters,
    )
    from commrt.layers.process_grid import ProcessGrid

    with ProcessGrid(commrt.init(), {"data": 0}) as grid:
        torch.manual_seed(1)
        bags = ShardedEmbeddingBags(TABLES, grid=grid, dtype=torch.float64)
        shape = TABLES, NUM_DENSE, dlrm.BOTTOM, dlrm.TOP, torch.float64
        network = dlrm.Network(bags, *shape)
        broadcast_parameters(network, grid)
        with commrt.trace.record() as recording:
            rows = RowwiseAdagrad(bags.parameters(), lr=0.05)
            losses = dlrm.trained(network, rows, grid, 5)
        log = recording.log()
    found = {
        name: sorted(
            {f"{c.backend}/{c.algorithm}" for c in log.operations if c.op == name}
        )
        for name in ("alltoall", "alltoallv", "allreduce")
    }
    return [losses, found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_of_a_step_take_different_backends(
    mpirun: Any, tmp_path: Path, ranks: int
) -> None:
    from commrt.select.fingerprint import Cpu, Machine

    fingerprint = Machine(Cpu("none", 1, 1)).fingerprint
    every = []
    for rows, sums in ((SHM, RING), (MPI, RING), (SHM, MPI), (MPI, MPI)):
        path = tmp_path / "table.yaml"
        text = TABLE.format(fingerprint=fingerprint, rows=rows, sums=sums)
        path.write_text(text)
        env = {"COMMRT_TABLE": str(path), "COMMRT_TABLE_ANY_MACHINE": "1"}
        for losses, found in mpirun(ranks, trained, env=env, deadline_s=DEADLINE_S):
            expected = ["mpi/native" if rows == MPI else "shm/pairwise"]
            assert found["alltoall"] == found["alltoallv"] == expected
            assert found["allreduce"] == ["mpi/native" if sums == MPI else "shm/ring"]
            every.append(losses)
    for losses in every[1:]:
        assert losses == pytest.approx(every[0], rel=1e-12)
    assert every[0][-1] < every[0][0]
