# SPDX-License-Identifier: Apache-2.0
"""torch's default group of a communicator that the program has."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch.distributed.tensor import DTensor, Replicate, Shard

import commrt
import commrt.torch
from commrt.errors import RevokedError, UsageError


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def sums(group: Any = None) -> float:
    x = torch.full((3,), 2.0 ** dist.get_rank())
    dist.all_reduce(x, group=group)
    return float(x[2])


def makes_groups() -> dict[str, Any]:
    """The order of ranks is turned round, then some of them go on."""
    world = commrt.init(deterministic=True)
    turned = world.split(0, -world.rank)
    assert turned is not None
    commrt.torch.init_process_group(turned, timeout=timedelta(seconds=777))
    group: Any = dist.group.WORLD
    found: dict[str, Any] = {
        "rank": dist.get_rank(),
        "turned": turned.rank,
        "size": dist.get_world_size(),
        "sum": sums(),
        "limit": group.communicator.timeout_s,
        "is deterministic": group.communicator.deterministic,
    }
    low = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        found["of two"] = sums(low)
    left = world.split(int(world.rank == 0))
    assert left is not None
    hook = sys.excepthook
    for _ in range(3):  # groups of before end with it
        commrt.torch.init_process_group(left)
    found["hooks"] = _depth(hook), _depth(sys.excepthook)
    found["left"] = [dist.get_world_size(), sums()]
    parts = dist.init_device_mesh("cpu", (left.size,))
    found["mesh"] = sums(parts.get_group())
    dist.destroy_process_group()
    found["world"] = float(world.allreduce(np.ones(1))[0])
    return found


def _depth(hook: Any) -> int:
    """Return how many of torch's hooks stand one before the other."""
    depth = 0
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        depth += 1
        cells = {
            name: cell.cell_contents
            for name, cell in zip(
                hook.__code__.co_freevars, hook.__closure__, strict=True
            )
        }
        hook = cells["old_hook"]
    return depth


@pytest.mark.parametrize("size", [2, 3])
def test_the_group_has_the_ranks_of_the_communicator(
    ranks: RunRanks, size: int
) -> None:
    for rank, said in enumerate(ranks(size, makes_groups)):
        assert said["rank"] == said["turned"] == size - 1 - rank
        assert (said["size"], said["sum"]) == (size, 2.0**size - 1)
        assert (said["limit"], said["is deterministic"]) == (777.0, True)
        assert said.get("of two") == (3.0 if said["rank"] < 2 else None)
        assert said["hooks"] == [1, 1]
        others = size - 1 if rank else 1
        assert said["left"] == [others, 2.0**others - 1]
        assert said["mesh"] == 2.0**others - 1
        assert said["world"] == size


def ends_with_it() -> list[str]:
    """Rank 0 waits in a group of two, and the communicator is ended by rank 2."""
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    said = []
    if comm.rank == 2:
        comm.revoke("step 17 hangs")

    def sums_of_two() -> None:
        pair = dist.new_group([0, 1])  # rank 2 is not asked
        if comm.rank == 1:
            raise RevokedError("it leaves")
        dist.all_reduce(torch.ones(1), group=None if comm.rank == 2 else pair)

    with pytest.raises(RevokedError) as raised:
        sums_of_two()
    said.append(str(raised.value))
    with pytest.raises(RevokedError):
        comm.allreduce(np.ones(1))
    comm = comm.shrink()
    commrt.torch.init_process_group(comm)
    return [*said, str(sums())]


def test_groups_end_with_the_communicator(ranks: RunRanks) -> None:
    found = ranks(3, ends_with_it)
    assert "shrink()" in found[0][0] or "step 17 hangs" in found[0][0]
    assert [said[-1] for said in found] == ["7.0"] * 3


def is_refused() -> list[str]:
    comm = commrt.init()
    said = []
    for wrong in (None, dist, 3):
        with pytest.raises(UsageError) as raised:
            commrt.torch.init_process_group(wrong)  # type: ignore[arg-type]
        said.append(str(raised.value))
    dist.init_process_group("commrt")
    with pytest.raises(UsageError) as raised:
        commrt.torch.init_process_group(comm)
    said.append(str(raised.value))
    dist.destroy_process_group()
    commrt.torch.init_process_group(comm)
    return [*said, str(sums())]


def test_a_group_that_was_made_otherwise_stays(ranks: RunRanks) -> None:
    for said in ranks(2, is_refused):
        assert "comm=None must be a communicator" in said[0]
        assert "default group already" in said[3]
        assert said[4] == "3.0"


RAISES = """
import numpy as np
import commrt, commrt.torch
comm = commrt.init()
commrt.torch.init_process_group(comm)
if comm.rank == 1:
    raise ArithmeticError("the words of the program")
comm.allreduce(np.ones(1))
"""


def test_the_traceback_of_a_program_is_shown(ranks: RunRanks, tmp_path: Path) -> None:
    """torch keeps what hooks write, and commrt's hook ends the job."""
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    done = ranks.program(2, [str(program)])
    assert not done.ok
    assert "ArithmeticError: the words of the program" in done.stderr
    assert "line 7, in <module>" in done.stderr


def sums_by_meshes() -> list[float]:
    """Sums over a row of a mesh that looks like the last one; ranks trade places."""
    world = commrt.init()
    found = []
    for turn in range(3):
        turned = world.split(0, (world.rank + turn) % world.size)
        assert turned is not None
        commrt.torch.init_process_group(turned)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        x = torch.full((3, 3), 2.0**turned.rank, requires_grad=True)
        parts = DTensor.from_local(x, mesh, (Replicate(), Shard(0)), run_check=False)
        total = parts.sum().redistribute(mesh, (Replicate(), Replicate())).to_local()
        found.append(float(total) / 9)
        assert turned.rank // 2 == mesh.get_coordinate()[0]
    return found


def test_a_mesh_of_other_ranks_has_groups_of_its_own(ranks: RunRanks) -> None:
    rows = [3.0, 12.0]
    for rank, found in enumerate(ranks(4, sums_by_meshes)):
        places = [sorted(range(4), key=lambda r, t=t: (r + t) % 4) for t in range(3)]
        assert found == [rows[each.index(rank) // 2] for each in places]
