# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of ranks on other nodes that gloo connects: states, dumps, damage.

Nodes are pretended.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_ranks import StoreRanks

import commrt
from commrt.bootstrap.base import poll_until
from commrt.comm import core_of
from commrt.errors import CommError, IntegrityError, TimeoutError_
from commrt.trace.divergence import compare
from commrt.trace.dump_reader import find_dumps, read_dump

DEADLINE_S = 280.0


@pytest.fixture
def ranks(tmp_path: Path) -> StoreRanks:
    return StoreRanks(tmp_path)


# -- the table of a deadline -----------------------------------------------------------


def one_is_stopped() -> list[Any]:
    """Return what each rank knows of the last one, which another of its node tells."""
    comm = commrt.init()
    last = comm.size - 1
    numbers = comm.allgather_object(os.getpid())
    if comm.rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.allreduce(np.ones(5))
        return []
    with pytest.raises(TimeoutError_) as raised:
        comm.allreduce(np.ones(5), timeout_s=2)
    found = raised.value.ranks[last].state
    counter = comm.create_group(range(last))
    counter.barrier()
    if comm.rank == 0:
        os.kill(numbers[last], signal.SIGCONT)
    raised.value.request.wait()  # type: ignore[attr-defined]
    line = f"rank {last}: stopped" in str(raised.value)
    return [found, line]


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
    dumps = [read_dump(path) for path in find_dumps([folder])]
    assert [one.rank for one in dumps] == [0, 1, 2]
    assert dumps[2].reason == "asked"
    assert "of the job asked for it" in dumps[2].message
    found = compare(dumps)
    (one,) = found.divergences
    assert (one.seq, [*one.missing], [*found.absent]) == (1, [2], [])


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
