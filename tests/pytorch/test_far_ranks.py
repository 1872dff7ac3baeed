# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of ranks on other nodes that gloo connects: states, dumps, damage.

Nodes are pretended.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks_elsewhere import check_asked_dumps, one_is_stopped
from store_ranks import StoreRanks

import commrt
from commrt.bootstrap.base import poll_until
from commrt.comm import core_of
from commrt.errors import CommError, IntegrityError

DEADLINE_S = 280.0


@pytest.fixture
def ranks(tmp_path: Path) -> StoreRanks:
    return StoreRanks(tmp_path)


# -- the table of a deadline -----------------------------------------------------------


def test_a_stopped_rank_of_another_node_is_named_so(ranks: StoreRanks) -> None:
    env = {"COMMRT_NODES": "1,2"}
    found = ranks(3, one_is_stopped, env=env, deadline_s=DEADLINE_S)
    assert found == [["stopped", True], ["stopped", True], []]


# -- dumps -----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["1,2", "2,1", "1"])
def test_all_ranks_write_when_one_raises(
    ranks: StoreRanks, tmp_path: Path, nodes: str
) -> None:
    folder = tmp_path / "dumps"
    env = {"COMMRT_NODES": nodes, "COMMRT_DUMP": str(folder)}
    program = tmp_path / "program.py"
    program.write_text(ONE_COMPUTES)
    done = ranks.program(3, [str(program), str(folder)], env=env)
    assert done.ok, done.describe_failure()
    check_asked_dumps(folder)


ONE_COMPUTES = """
import os, sys
from pathlib import Path
import numpy as np
import commrt
from commrt.bootstrap.base import poll_until
from commrt.comm import core_of
from commrt.errors import TimeoutError_

comm = commrt.init()
comm.barrier()
if comm.rank != comm.size - 1:
    try:
        comm.allreduce(np.ones(5), timeout_s=1)
    except TimeoutError_:
        pass
there = lambda: len([*Path(sys.argv[1]).glob("*.json")]) == comm.size
assert poll_until(there, 140)
core_of(comm).world.meet(range(comm.size), "written")
os._exit(0)
"""


# -- damage ----------------------------------------------------------------------------


def finder_leaves() -> list[str]:
    """Return the error of a rank's next call; the one that found damage has left."""
    comm = commrt.init()
    comm.barrier()
    x = np.full(3000, 1.0)
    error: CommError | None = None
    try:
        comm.reduce(x, root=0, algorithm="direct")
    except IntegrityError as found:
        error = found
    if comm.rank != 0:
        world = core_of(comm).world
        assert world.liveness is not None
        assert poll_until(lambda: bool(world.liveness.gone(0)), DEADLINE_S / 2)
        try:
            comm.allreduce(x.copy())
        except CommError as later:
            error = later
    return [type(error).__name__, str("checksum does not fit" in str(error))]


@pytest.mark.parametrize("nodes", ["1", "1,2"])
def test_damage_is_told_by_a_rank_that_leaves_at_once(
    ranks: StoreRanks, nodes: str
) -> None:
    env = {
        "COMMRT_NODES": nodes,
        "COMMRT_CHECKSUM": "1",
        "COMMRT_CHAOS": "7:corrupt@rank=1,op=reduce",
    }
    found = ranks(3, finder_leaves, env=env, deadline_s=DEADLINE_S)
    assert found == [["IntegrityError", "True"]] * 3
