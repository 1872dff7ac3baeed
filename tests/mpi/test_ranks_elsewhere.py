# SPDX-License-Identifier: Apache-2.0
"""A rank learns of ranks on other nodes where MPI carries messages: states, dumps.

Nodes are pretended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_elsewhere import check_asked_dumps, one_is_stopped

import commrt
from commrt.bootstrap.base import poll_until
from commrt.errors import TimeoutError_


def one_computes(folder: str) -> list[Any]:
    """Return what rank 0 knows of the others; the last one calls nothing meanwhile."""
    comm = commrt.init()
    last = comm.size - 1
    comm.barrier()
    if comm.rank == last:
        while not Path(folder, "known").exists():
            pass
    request = comm.allreduce(np.ones(5), nonblocking=True)
    found: list[Any] = []
    if comm.rank == 0:
        states, text = (), ""
        while not states or {one.state for one in states[:last]} != {"waiting"}:
            try:
                request.wait(timeout_s=0.05)
            except TimeoutError_ as error:
                states, text = error.ranks, str(error)
        found = [[one.state, one.last, one.last_seq, one.waits_in] for one in states]
        found.append(text)
        Path(folder, "known").touch()
    request.wait()
    return found


@pytest.mark.parametrize("nodes", ["1,1", "1,2", "2,1", "1"])
def test_the_table_under_mpi_has_what_ranks_of_other_nodes_do(
    mpirun: Any, tmp_path: Path, nodes: str
) -> None:
    size = 2 if nodes == "1,1" else 3
    env = {"COMMRT_NODES": nodes}
    found = mpirun(size, one_computes, env=env, folder=str(tmp_path))
    *states, text = found[0]
    late = size - 1
    assert states[late] == ["computing", "barrier", 0, ""], text
    assert states[:late] == [["waiting", "allreduce", 1, "allreduce"]] * late, text
    assert f"rank {late} on another node has not started it" in text
    assert f"rank {late}: computing; its last collective here was barrier #0" in text
    assert found[1:] == [[]] * late


def test_a_stopped_rank_of_another_node_is_named_under_mpi(mpirun: Any) -> None:
    found = mpirun(3, one_is_stopped, env={"COMMRT_NODES": "1,2"})
    assert found == [["stopped", True], ["stopped", True], []]


@pytest.mark.parametrize("nodes", ["1,2", "2,1", "1"])
def test_all_ranks_under_mpi_write_when_one_raises(
    mpirun: Any, tmp_path: Path, nodes: str
) -> None:
    folder = tmp_path / "dumps"
    env = {"COMMRT_NODES": nodes, "COMMRT_DUMP": str(folder)}
    mpirun(3, one_computes_until_dumped, env=env, folder=str(folder))
    check_asked_dumps(folder)


def one_computes_until_dumped(folder: str) -> None:
    """Have all but the last rank raise; no rank ends before all files are there."""
    comm = commrt.init()
    comm.barrier()
    request = None
    if comm.rank != comm.size - 1:
        with pytest.raises(TimeoutError_) as raised:
            comm.allreduce(np.ones(5), timeout_s=1)
        request = raised.value.request  # type: ignore[attr-defined]
        Path(folder, f"raised-{comm.rank}").touch()
    wanted = [f"raised-{rank}" for rank in range(comm.size - 1)]
    wanted += [f"dump-*-rank{rank}.json" for rank in range(comm.size)]
    assert poll_until(lambda: all([*Path(folder).glob(name)] for name in wanted), 240)
    if request is None:
        comm.allreduce(np.ones(5))
    else:
        request.wait()
