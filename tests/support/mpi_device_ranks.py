# SPDX-License-Identifier: Apache-2.0
"""Ranks with devices without hardware, whose memory a pretended MPI takes.

    with mpi_here() as mpi:
        on_mpi_threads(2, lambda rank: rank.comm.allreduce(x))
    # nothing wrong was called, and nothing is left

On simulated devices (``MpiSimRanks``) the ranks meet before the simulation begins: a
thread that waits for another one outside of it would stop it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fake_device_mpi import FakeDeviceMpi, PretendedComms
from staged_ranks import (
    Rank,
    SimRanks,
    attach_anew,
    forget_ranks,
    kept_ranks,
    on_threads,
)

from commrt import local
from commrt.backends.mpi import attached as mpi_calls
from commrt.backends.mpi import collectives
from commrt.comm import Communicator, core_of
from commrt.core import Core
from commrt.errors import CommError, OrderingError
from commrt.job import world
from commrt.launch.detect import LaunchInfo
from commrt.mpi import library
from commrt.nccl.orders import end_all
from commrt.runtime import open_world

__all__ = ["MpiSimRanks", "join_mpi", "mpi_here", "on_mpi_threads", "verdict"]

PRETENDED = {"simulated", "threads"}
DEADLINE_S = 300.0
on_mpi_threads = on_threads


@contextlib.contextmanager
def mpi_here(*, is_clean: bool = True) -> Iterator[FakeDeviceMpi]:
    """Let ranks that are threads have the library, and devices without hardware too.

    With ``is_clean`` no call may be wrong, and every request must have ended.
    """
    fake = FakeDeviceMpi()
    forget_ranks()
    mpi_calls.KINDS |= PRETENDED
    with (
        mock.patch.object(local, "_connect", _connect),
        mock.patch.object(library, "handle", lambda comm: comm),
        mock.patch.object(collectives, "_constants", return_value=fake.constants),
        mock.patch.object(world, "_threads_may_call_mpi", return_value=True),
        mock.patch.dict(os.environ, {"COMMRT_CUDA_AWARE_MPI": "flags"}),
    ):
        try:
            yield fake
        finally:
            mpi_calls.KINDS -= PRETENDED
            end_all(5.0)
            forget_ranks()
    if is_clean:
        fake.check()


def _connect(threads: Any, rank: int, size: int, timeout_s: float) -> Core:
    """Return the insides of the communicator of a rank that MPI has started."""
    launch = LaunchInfo("single", rank, size, "threads of one process")
    mine = open_world(threads.bootstrap(rank), launch, in_process=True)
    mine.timeout_s = timeout_s
    mine.mpi = mine.mpi_comm = threads
    mine.native_comms = PretendedComms(threads, rank)  # type: ignore[assignment]
    identity = mine.agree_id(range(size), "world")
    return Core(mine, range(size), "local", identity)


def join_mpi(
    groups: list[list[Any]], devices: list[Any], first_value: int, bug: str | None
) -> None:
    """Let the ranks agree before the simulation begins."""

    def join(comm: Communicator) -> None:
        for each in groups[comm.rank]:
            device, mpi = devices[comm.rank], attach_anew(each, "mpi")
            mpi.first_value = first_value
            core_of(each).devices.agree(device, "first", DEADLINE_S)
            assert not mpi.facts.why, mpi.facts.why
            # To make it takes a lock that the simulation does not know of.
            work = mpi.runner(device)
            if bug is not None:
                work.plant(bug)

    kept_ranks(len(groups)).each(join)


class MpiSimRanks(SimRanks):
    """Ranks on one simulated GPU, with MPI, and so many communicators each."""

    def __init__(
        self,
        size: int,
        seed: int,
        queues: int = 8,
        *,
        bug: str | None = None,
        communicators: int = 1,
        first_value: int = 0,
        staging: dict[str, int] | None = None,
        **switches: Any,
    ) -> None:
        super().__init__(size, seed, queues, staging=staging, **switches)
        made = kept_ranks(size)
        self.groups = [[comm] for comm in made.comms]
        for _ in range(1, communicators):
            split = made.each(lambda comm: comm.dup())
            for group, comm in zip(self.groups, split, strict=True):
                group.append(comm)
        join_mpi(self.groups, self.devices, first_value, bug)

    def close(self) -> None:
        """Give everything back, and see that nothing is left and nothing was wrong."""
        for group in self.groups:
            for comm in group:
                core_of(comm).attached["mpi"].close()
                attach_anew(comm, "mpi")
                for _, stager in core_of(comm).devices._stagers.values():
                    stager.close()
                core_of(comm).devices._stagers.clear()
        end_all(DEADLINE_S)
        super().close()
        for group in self.groups:
            for comm in group[1:]:
                comm.free()


def verdict(
    run: Callable[[list[list[Any]], Rank], None],
    size: int,
    seed: int,
    queues: int,
    bug: str | None,
    **options: Any,
) -> str:
    """What is found: "", or any of "race", "deadlock", "wrong", "error" and "mpi"."""
    found = set()
    with mpi_here(is_clean=bug is None) as fake:
        fake.set("needs_current", 1)
        ranks = MpiSimRanks(size, seed, queues, bug=bug, **options)
        try:
            ranks.run(lambda rank: run(ranks.groups, rank))
            if not ranks.world.violations:
                ranks.close()
        except AssertionError:
            if bug is None:
                raise
            found.add("wrong")
        except OrderingError as error:
            found.add(error.status)
        except CommError:
            if bug is None:
                raise
            found.add("error")
        if ranks.world.violations:
            found.add("race")
        if fake.violations():
            found.add("mpi")
    return " and ".join(sorted(found))
