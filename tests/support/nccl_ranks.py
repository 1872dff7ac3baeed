# SPDX-License-Identifier: Apache-2.0
"""Ranks with devices without hardware, and a pretended NCCL in their streams.

    with nccl_here() as fake:
        on_nccl_threads(2, lambda rank: rank.comm.allreduce(x))
    # nothing wrong was called, and every communicator was ended

On simulated devices (``NcclSimRanks``) the ranks meet before the simulation begins: a
thread that waits for another one outside of it would stop it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fake_nccl import FakeNccl
from staged_ranks import Rank, SimRanks, attach_anew, kept_ranks, on_threads

from commrt.comm import Communicator, core_of
from commrt.nccl import libnccl
from commrt.nccl.orders import end_all

__all__ = ["NcclSimRanks", "nccl_here", "on_nccl_threads", "prepare"]

T = TypeVar("T")


@contextlib.contextmanager
def nccl_here(
    version: int = 22809, *, is_clean: bool = True, grace_s: float = 5.0
) -> Iterator[FakeNccl]:
    """Let this process have the pretended NCCL, for devices without hardware.

    With ``is_clean`` no call may be wrong, and nothing may be left in a stream. What
    has not ended ``grace_s`` after it is aborted.
    """
    fake = FakeNccl(version)
    before = list(libnccl._found)
    libnccl._found[:] = [fake.serve_devices()]
    try:
        yield fake
    finally:
        libnccl._found[:] = before
        end_all(grace_s)
    if is_clean:
        fake.check()


def prepare(comm: Communicator, device: Any) -> None:
    """Let the ranks meet, as a first call does."""
    core_of(comm).devices.agree(device, "first", 20.0)
    nccl = core_of(comm).attached["nccl"]
    assert nccl.prepare(device, 0), nccl.facts.why


def on_nccl_threads(size: int, function: Callable[[Rank], T], **device: Any) -> list[T]:
    """Run a function on ranks with devices of threads."""
    return on_threads(size, function, **device)


class NcclSimRanks(SimRanks):
    """Ranks on one simulated GPU, with NCCL, and so many communicators each."""

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
        for number in range(1, communicators):
            split = made.each(lambda comm: comm.dup())
            for group, comm in zip(self.groups, split, strict=True):
                group.append(comm)
            assert number == len(self.groups[0]) - 1

        def join(comm: Communicator) -> None:
            rank = comm.rank
            for each in self.groups[rank]:
                nccl = attach_anew(each, "nccl")
                nccl.first_value = first_value
                core_of(each).devices.forget_choices()
                prepare(each, self.devices[rank])
                if bug is not None:
                    nccl.runner(self.devices[rank]).plant(bug)

        made.each(join)

    def close(self) -> None:
        """Give everything back, and see that nothing is left and nothing was wrong."""
        for group in self.groups:
            for comm in group:
                core_of(comm).attached["nccl"].close()
                for _, stager in core_of(comm).devices._stagers.values():
                    stager.close()
                core_of(comm).devices._stagers.clear()
        end_all(5.0)
        super().close()
        for group in self.groups:
            for comm in group[1:]:
                comm.free()
