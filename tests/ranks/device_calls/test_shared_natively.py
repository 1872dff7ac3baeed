# SPDX-License-Identifier: Apache-2.0
"""What work on devices shares with Python's objects, it lets go of without Python.

The last one to let go may be who makes progress: that thread must not wait for
Python's lock, and at the end of a process, when Python is gone, it would abort it. So
work has no reference of Python's, which only who has that lock may take back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, on_threads

from commrt import _native, nccl
from commrt.comm import core_of
from commrt.nccl.orders import order_of


@contextmanager
def no_reference_to(*objects: object) -> Iterator[None]:
    """Check that nothing has a reference to them at the end that had none before."""
    before = [sys.getrefcount(each) for each in objects]
    yield
    assert [sys.getrefcount(each) for each in objects] == before


def test_of_memory_of_peers() -> None:
    half = 1 << 12

    def main(rank: Rank) -> None:
        device = rank.device
        flags = _native.peer_exchange_flags_nbytes(1)
        memory = device.alloc(flags + 2 * half)
        exchange = _native.make_peer_exchange(device, 0, [memory], half)
        with no_reference_to(exchange):
            work = _native.PeerWork(core_of(rank.comm), exchange)
        work.close()
        while not work.has_run():
            pass
        work.end()
        device.free(memory)

    on_threads(1, main)


@pytest.mark.parametrize("engine", ["nccl", "mpi"])
def test_of_the_order_of_a_devices_work(engine: str) -> None:
    def main(rank: Rank) -> None:
        comm, device = rank.comm, rank.device
        order = order_of(device)
        if engine == "mpi":
            with no_reference_to(order):
                work = _native.MpiWork(core_of(comm), device, order, False)
            return work.close()
        library = nccl.library()
        with no_reference_to(library.native):
            made = nccl.NcclComm.create(
                core_of(comm).world.bootstrap, taken=library, device=device
            ).hand_over()
        with no_reference_to(order, made):
            work = _native.NcclWork(core_of(comm), order, made)
        return work.close()

    with nccl_here():
        on_nccl_threads(1, main)
