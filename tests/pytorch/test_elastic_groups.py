# SPDX-License-Identifier: Apache-2.0
"""Models over groups of torch (DDP, HSDP, tensor parallel) go on after kills."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_torch_training import KINDS, Kind, TorchTraining, Undo
from run_ranks import RunRanks
from torch import nn
from torch.distributed.tensor import DTensor

import commrt
import commrt.torch
from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import RecoveryError

AFTER = 5


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def trains(
    kind: Kind, undo: Undo, dying: list[int], where: str, folder: str
) -> dict[str, Any]:
    """Some ranks die in step 5; the others save what they go on with."""
    torch.set_num_threads(1)
    comm = commrt.init(deterministic=True)
    first, size = comm.rank, comm.size
    training = TorchTraining(kind, undo)
    if first in dying:
        training.dies = (5, where)
    torch.manual_seed(first)
    bits: dict[int, str] = {}
    begins: list[int] = []

    def step(comm: Communicator, number: int) -> None:
        if comm.size < size:
            begins.append(number)
        training.step(comm, number)
        bits[number] = training.bits()

    def changed(comm: Communicator) -> None:
        training.dump(Path(folder) / f"{comm.size}-{comm.rank}")

    try:
        comm = elastic.run(
            *(step, training.build),
            until=12,
            on_change=changed,
            replica_size=training.replica_size,
        )
    except RecoveryError as error:
        return {"left": str(error)}
    last = begins[0]
    return {
        "rank": comm.rank,
        "begin": last,
        "bits": [bits[number] for number in range(last, last + AFTER)],
        "size": comm.size,
    }


def begins_from(kind: Kind, folder: str, begin: int) -> list[str]:
    torch.set_num_threads(1)
    comm = commrt.init(deterministic=True)
    training = TorchTraining(kind)
    training.build(comm)
    training.load(Path(folder) / f"{comm.size}-{comm.rank}")
    bits = []
    for number in range(begin, begin + AFTER):
        training.step(comm, number)
        bits.append(training.bits())
    return bits


CASES = [
    (kind, undo, where, dying)
    for kind in KINDS
    for undo in ("copy", "optimizer")
    for where in ("in the middle", "after the sums")
    for dying in ([1], [0], [2, 3])
    # Parts that no collective joins may be an update apart, which only copies undo.
    if (kind, undo) != ("tensor", "optimizer")
]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(("kind", "undo", "where", "dying"), CASES)
def test_groups_made_anew_give_the_bits_of_a_fresh_world(
    ranks: RunRanks,
    tmp_path: Path,
    kind: Kind,
    undo: Undo,
    where: str,
    dying: list[int],
) -> None:
    given = {"kind": kind, "undo": undo, "dying": dying, "where": where}
    found = ranks.survivors(4, trains, **given, folder=str(tmp_path))
    assert [*found] == [rank for rank in range(4) if rank not in dying]
    went_on = [said for said in found.values() if "left" not in said]
    whole = 4 - len(dying) if kind == "ddp" else 2
    assert len(went_on) == whole
    spare = [said["left"] for said in found.values() if "left" in said]
    assert all("its replica lacks other ranks" in text for text in spare)
    assert {said["size"] for said in went_on} == {whole}
    begins = {said["begin"] for said in went_on}
    assert len(begins) == 1
    assert begins <= {5, 6}
    fresh = ranks(
        whole, begins_from, kind=kind, folder=str(tmp_path), begin=begins.pop()
    )
    by_rank = sorted(went_on, key=lambda said: int(said["rank"]))
    assert [said["bits"] for said in by_rank] == fresh


def rejoins(kind: Kind) -> dict[str, Any]:
    """Two ranks die in step 5; the steps go on until as many have come again."""
    torch.set_num_threads(1)
    comm = commrt.init(deterministic=True)
    training = TorchTraining(kind)
    is_new = comm.rank in comm.joined
    if comm.rank in (2, 3) and not is_new:
        training.dies = (5, "in the middle")
    sizes: list[int] = []

    def step(comm: Communicator, number: int) -> None:
        training.step(comm, number)
        if sizes[-1:] != [comm.size]:
            sizes.append(comm.size)
        is_back = comm.size == 4 and (is_new or len(sizes) > 1)
        if comm.allreduce(np.array([float(is_back)]))[0]:
            raise StopIteration

    with pytest.raises(StopIteration):
        elastic.run(
            *(step, training.build),
            until=sys.maxsize,
            replica_size=training.replica_size,
        )
    whole = [
        each.full_tensor() if isinstance(each, DTensor) else each
        for each in training.model.parameters()
    ]
    return {
        "sizes": sizes,
        "model": [each.detach().numpy().tobytes().hex() for each in whole],
    }


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_come_again_get_their_part_of_the_model(
    tmp_path: Path, kind: Kind
) -> None:
    ranks = RunRanks(tmp_path, ("--restarts", "2"))
    found = ranks(4, rejoins, kind=kind)
    assert found[0]["sizes"][0] == found[0]["sizes"][-1] == 4
    # One of the two may come a step before the other.
    assert all(found[rank]["sizes"] in ([4], [3, 4]) for rank in (2, 3))
    assert [4] in (found[2]["sizes"], found[3]["sizes"])
    assert all(said["model"] == found[0]["model"] for said in found)


def meets_another_model(folder: str) -> str:
    """Rank 2 joins with a wider layer; returns what it is told."""
    torch.set_num_threads(1)
    comm = commrt.init()
    is_new = comm.rank in comm.joined
    if comm.rank == 2 and not is_new:
        os._exit(1)
    joined = Path(folder) / "joined"

    def build(comm: Communicator) -> elastic.State:
        commrt.torch.init_process_group(comm)
        model = nn.Linear(3, 4 if is_new else 2)
        return elastic.State(model=model)

    def step(comm: Communicator, number: int) -> None:
        if comm.allreduce(np.array([float(joined.exists())]))[0]:
            raise StopIteration

    try:
        elastic.run(step, build, until=sys.maxsize)
    except StopIteration:
        return f"{comm.size} ranks trained"
    except RecoveryError as error:
        joined.touch()
        return str(error)
    return "ended"


def test_who_joins_with_another_model_is_told_so(tmp_path: Path) -> None:
    ranks = RunRanks(tmp_path, ("--restarts", "1"))
    found = ranks(3, meets_another_model, folder=str(tmp_path))
    assert found[:2] == ["3 ranks trained"] * 2
    assert "its model is another: model.bias: float32 (2,) (there)" in found[2]
