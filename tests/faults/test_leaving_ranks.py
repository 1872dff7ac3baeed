# SPDX-License-Identifier: Apache-2.0
"""A rank that has sent its messages and left by itself ends no receive of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_ranks import RunRanks

import commrt
from commrt.comm import core_of
from commrt.errors import RevokedError, TimeoutError_


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def receives_from_anyone(how: str) -> list[float | str]:
    """Rank 1 sends and leaves; rank 2 sends once rank 0 has waited without rank 1."""
    comm = commrt.init()
    out = np.empty(2)
    if comm.rank == 1:
        comm.send([1.0, 0.5], 0)
        return []
    if comm.rank == 2:
        comm.recv(out, source=0, tag=5)
        comm.send([2.0, 0.5], 0)
        return []
    while not core_of(comm).who_died(1):
        core_of(comm).world.engine.step()
    found: list[float | str] = [float(comm.recv(out)[0])]
    request = comm.recv(out, nonblocking=True)
    with pytest.raises(TimeoutError_):
        request.wait(timeout_s=0.2)
    comm.send(np.zeros(2), 2, tag=5)
    found.append(float(request.wait()[0]))
    with pytest.raises(RevokedError) as raised:
        comm.probe() if how == "probe" else comm.recv(out)
    return [*found, str(raised.value)]


@pytest.mark.parametrize("how", ["recv", "probe"])
def test_the_others_messages_arrive_and_then_nobody_is_left(
    ranks: RunRanks, how: str
) -> None:
    first, *others = ranks(3, receives_from_anyone, how=how)
    assert first[:2] == [1.0, 2.0]
    assert "all other ranks have left; no message with tag 0 is here" in first[2]
    assert others == [[], []]
