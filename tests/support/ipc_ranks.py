# SPDX-License-Identifier: Apache-2.0
"""Ranks with devices without hardware, which share their devices' memory.

    with ipc_here():
        on_ipc_threads(2, lambda rank: rank.comm.allreduce(x, backend="ipc"))
    # nobody has anything open, and every block is free

Each rank's device stands for what one process sees of one GPU. On simulated devices
(``IpcSimRanks``) the ranks connect before the simulation begins: a thread that waits
for another one outside of it would stop it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from staged_ranks import Rank, SimRanks, attach_anew, forget_ranks, kept_ranks

from commrt.backends.ipc import attached as ipc_calls
from commrt.backends.ipc import sharing
from commrt.comm import Communicator, core_of
from commrt.devices import ThreadDevice
from commrt.errors import CommError, OrderingError
from commrt.local import run

__all__ = ["IpcSimRanks", "ipc_here", "on_ipc_threads", "prepare", "verdict"]

T = TypeVar("T")
HALF_NBYTES = 1 << 12
DEADLINE_S = 300.0
PRETENDED = {"simulated", "threads"}


@contextlib.contextmanager
def ipc_here(*, is_clean: bool = True) -> Iterator[None]:
    """Let devices without hardware share memory; at the end nothing may be left."""
    gc.collect()  # a communicator that an earlier test dropped ends as it is collected
    sharing.ENDING.clear()
    ipc_calls.KINDS |= PRETENDED
    try:
        yield
        if is_clean:
            sharing.end_all(DEADLINE_S)
            assert sharing.sweep() == 0
    finally:
        ipc_calls.KINDS -= PRETENDED
        sharing._SHARED.clear()
        sharing.ENDING.clear()


def prepare(comm: Communicator, device: Any) -> None:
    """Let the ranks connect, as a first call does."""
    core_of(comm).devices.agree(device, "first", 20.0)
    ipc = core_of(comm).attached["ipc"]
    assert ipc.prepare(device, 0), ipc.facts.why


def on_ipc_threads(
    size: int,
    function: Callable[[Rank], T],
    *,
    half_nbytes: int = 1 << 22,
    survives: bool = True,
    **device: Any,
) -> list[T]:
    """Run a function on ranks with devices of threads, all of one number.

    Devices go once all ranks have left each other's memory; ``survives`` is False where
    a communicator is broken on the way.
    """

    def main(comm: Communicator) -> T:
        drawn = {**device, "seed": device.get("seed", 0) + comm.rank}
        with ThreadDevice(**drawn) as gpu:
            rank = Rank(comm, gpu)
            core_of(comm).attached["ipc"].half_nbytes = half_nbytes
            rank.begin()
            with rank.stream:
                result = function(rank)
            if survives:
                rank.stream.synchronize()
                comm.free()
                rank.end()
            while survives and sharing.sweep(gpu):
                os.sched_yield()
            return result

    return run(size, main)


class IpcSimRanks(SimRanks):
    """Ranks on one simulated GPU that share its memory, with communicators each."""

    def __init__(
        self,
        size: int,
        seed: int,
        queues: int = 8,
        *,
        bug: str | None = None,
        communicators: int = 1,
        first_value: int = 0,
        half_nbytes: int = HALF_NBYTES,
        staging: dict[str, int] | None = None,
        **switches: Any,
    ) -> None:
        super().__init__(size, seed, queues, staging=staging, **switches)
        for device in self.devices:
            device.load_kernels(b"")
        made = kept_ranks(size)
        self.groups = [[comm] for comm in made.comms]
        for _ in range(1, communicators):
            split = made.each(lambda comm: comm.dup())
            for group, comm in zip(self.groups, split, strict=True):
                group.append(comm)

        def join(comm: Communicator) -> None:
            rank = comm.rank
            for each in self.groups[rank]:
                ipc = attach_anew(each, "ipc")
                ipc.half_nbytes, ipc.first_value = half_nbytes, first_value
                core_of(each).devices.forget_choices()
                prepare(each, self.devices[rank])
                if bug is not None:
                    ipc.runner(self.devices[rank]).plant(bug)

        made.each(join)

    def close(self) -> None:
        """Give everything back, and see that nothing is left and nothing was wrong."""
        for group in self.groups:
            for comm in group:
                core_of(comm).attached["ipc"].close()
                for _, stager in core_of(comm).devices._stagers.values():
                    stager.close()
                core_of(comm).devices._stagers.clear()
                attach_anew(comm, "ipc")
        sharing.end_all(DEADLINE_S)  # all have left, but memory ends step by step
        assert sharing.sweep() == 0
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
    """What is found: "", or any of "race", "deadlock", "wrong" and "error"."""
    found = set()
    with ipc_here(is_clean=False):
        ranks = IpcSimRanks(size, seed, queues, bug=bug, **options)
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
        if found:
            forget_ranks()
    return " and ".join(sorted(found))
