# SPDX-License-Identifier: Apache-2.0
"""Ranks of simulated devices whose calls have work for the host: a thread more each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from staged_ranks import Rank, SimRanks, forget_ranks, kept_ranks

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray

KINDS = ("sparse", "compression")
ENOUGH = {"first_nbytes": 1 << 20}
"""So that nothing is allocated while others wait for their streams."""


def do_jobs(rank: Rank) -> None:
    """Do the host's part of calls until the caller is done."""
    jobs = core_of(rank.comm).devices.host_jobs
    engine = core_of(rank.comm).world.engine
    while not rank.device.flag_load(rank.stop):
        if not jobs.step() and not engine.step():
            rank.device.pause()


class HostWorkRanks(SimRanks):
    """Callers, threads that make progress, and threads that do the host's part."""

    def __init__(
        self,
        size: int,
        seed: int,
        queues: int = 8,
        *,
        bug: str | None = None,
        **how: Any,
    ) -> None:
        how.setdefault("staging", ENOUGH)
        # The ranks meet for it, which no simulated thread can wait for.
        made = kept_ranks(size)
        channels = [core_of(comm).devices.host_jobs._channel for comm in made.comms]
        if any(each is not None and each.failure for each in channels):
            forget_ranks()
            made = kept_ranks(size)
        if any(core_of(comm).devices.host_jobs._channel is None for comm in made.comms):
            for kind in KINDS:
                made.each(
                    lambda comm, k=kind: core_of(comm).devices.host_jobs.channel(k)
                )
        super().__init__(size, seed, queues, **how)
        for rank in self.ranks:
            jobs = core_of(rank.comm).devices.host_jobs
            jobs._feed.jobs.clear()
            jobs.is_driven = True
            work = jobs.work(rank.device)
            if bug is not None:
                work.plant(bug)

    def threads_of(self, rank: Rank) -> dict[str, Callable[[], Any]]:
        """One more than others have."""
        return {
            **super().threads_of(rank),
            f"host {rank.rank}": lambda: do_jobs(rank),
        }

    def close(self) -> None:
        """Give everything back, but for the communicators that jobs go over."""
        for rank in self.ranks:
            _native.drop_ended(
                core_of(rank.comm).world.engine
            )  # as the next call would
            DeviceArray(rank.device, 1).free()  # and with it what others left to free
        kept = [core_of(rank.comm).devices.host_jobs for rank in self.ranks]
        channels = [jobs._channel for jobs in kept]
        for jobs in kept:
            jobs._channel = None
        super().close()
        for jobs, channel in zip(kept, channels, strict=True):
            jobs._channel = channel
