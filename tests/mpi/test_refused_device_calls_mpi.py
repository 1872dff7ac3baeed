# SPDX-License-Identifier: Apache-2.0
"""A call on a device that one rank refuses, with ranks on other nodes.

The driver is ``cuda_on_host``, and NCCL the pretended one for processes.
"""

from __future__ import annotations

from pathlib import Path

import cuda_on_host
import pytest
from mpi_ranks import MpiRun
from nccl_of_processes import NcclOfProcesses
from refused_by_nccl import check_refused, refused_by_nccl

DEADLINE_S = 300.0


@pytest.mark.parametrize("algorithm", ["nccl/native", "staged/ring", "staged/native"])
@pytest.mark.parametrize("nodes", ["1,1,1", "2,1"])
@pytest.mark.parametrize("refuses", [0, 2])
@pytest.mark.full(sample=3)
def test_ranks_of_other_nodes_hear_of_it(
    mpirun: MpiRun, tmp_path: Path, nodes: str, refuses: int, algorithm: str
) -> None:
    nccl = NcclOfProcesses(tmp_path)
    said = mpirun(
        *(3, refused_by_nccl),
        env={
            **cuda_on_host.environment(),
            **nccl.environment,
            "COMMRT_NODES": nodes,
            "COMMRT_TIMEOUT_S": str(DEADLINE_S),  # nobody waits for it
        },
        deadline_s=DEADLINE_S,
        refuses=refuses,
        algorithm=algorithm,
    )
    check_refused(dict(enumerate(said)), refuses)
    assert nccl.complaints() == []
