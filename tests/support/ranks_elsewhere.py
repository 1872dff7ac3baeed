# SPDX-License-Identifier: Apache-2.0
"""Programs and checks of ranks that learn of ranks on other nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import TimeoutError_
from commrt.trace.divergence import compare
from commrt.trace.dump_reader import find_dumps, read_dump

__all__ = ["check_asked_dumps", "one_is_stopped"]


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
    counter = comm.create_group(range(last))
    counter.barrier()
    if comm.rank == 0:
        os.kill(numbers[last], signal.SIGCONT)
    raised.value.request.wait()  # type: ignore[attr-defined]
    line = f"rank {last}: stopped" in str(raised.value)
    return [raised.value.ranks[last].state, line]


def check_asked_dumps(folder: Path) -> None:
    """Check the dumps of three ranks, of which the last one computed meanwhile."""
    dumps = [read_dump(path) for path in find_dumps([folder])]
    assert [one.rank for one in dumps] == [0, 1, 2]
    assert dumps[2].reason == "asked"
    assert "of the job asked for it" in dumps[2].message
    found = compare(dumps)
    (one,) = found.divergences
    assert (one.seq, [*one.missing], [*found.absent]) == (1, [2], [])
