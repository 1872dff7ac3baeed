# SPDX-License-Identifier: Apache-2.0
"""Groups that are reconfigured, as torch's own tests make them.

``test_c10d_fault_tolerance.py`` of torch names the methods below.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from process_groups import LIMIT

from commrt.bootstrap.directory import DirectoryStore
from commrt.launch.detect import detect

__all__ = ["Changing", "changing", "own_store"]


class Changing:
    """This rank's side of a group that can be reconfigured."""

    def __init__(self, store: Any, rank: int, size: int, group: Any = None) -> None:
        self.store, self.rank, self.size, self._group = store, rank, size, group

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group or dist.group.WORLD

    @property
    def backend(self) -> Any:
        """The backend of the CPU."""
        return dist.get_backend_impl(self.group, torch.device("cpu"))

    def handle(self) -> str:
        """Return this rank's handle."""
        return dist._get_reconfigure_handle(self._group)

    def handles(self, key: str, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the handles of these ranks of the job; all of them call it."""
        self.store.set(f"{key}_{self.rank}", self.handle())
        some = range(self.size) if ranks is None else ranks
        return [self.store.get(f"{key}_{rank}").decode() for rank in some]

    def meet(self, key: str, ranks: Iterable[int] | None = None) -> None:
        """Wait until these ranks of the job are here."""
        self.store.set(f"{key}_{self.rank}", "1")
        for rank in range(self.size) if ranks is None else ranks:
            self.store.get(f"{key}_{rank}")

    def reconfigure(self, uuid: int, handles: Any, timeout: Any = LIMIT) -> None:
        """Reconfigure the group, and wait for that."""
        dist._reconfigure(uuid, handles, self._group, timeout=timeout).wait()

    def connect(self, key: str, uuid: int) -> list[str]:
        """Connect all ranks of the job; return their handles."""
        self.reconfigure(uuid, self.handles(f"{key}_init"))
        assert (self.group.rank(), self.group.size()) == (self.rank, self.size)
        return self.handles(f"{key}_post")

    def is_right(self) -> bool:
        """Return whether collectives have the right results on the ranks there are."""
        group, rank, size = self.group, self.group.rank(), self.group.size()
        x = torch.full((4,), rank + 1.0)
        group.allreduce([x]).wait()
        said: list[Any] = [torch.zeros(3, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(said, torch.full((3,), rank), group=self._group)
        root = torch.full((5,), float(rank == size - 1))
        dist.broadcast(root, group_src=size - 1, group=self._group)
        return (
            x.tolist() == [sum(range(1, size + 1))] * 4
            and [each.tolist() for each in said] == [[r] * 3 for r in range(size)]
            and root.tolist() == [1.0] * 5
        )


@contextmanager
def changing(name: str, **options: Any) -> Iterator[Changing]:
    """Give a default group that is not connected so far, and ends with the context."""
    launch = detect()
    rank, size = launch.rank, launch.size
    store = dist.PrefixStore(name, own_store())
    limit = options.pop("timeout", LIMIT)
    options = {"enable_reconfigure": True, **options}
    if not options["enable_reconfigure"]:  # torch 2.13 does not know it
        del options["enable_reconfigure"]
    dist.init_process_group(
        "commrt", store=store, rank=rank, world_size=size, timeout=limit, **options
    )
    try:
        yield Changing(store, rank, size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def own_store() -> Any:
    """Return a store of all ranks of the job, which no rank hosts."""
    folder = os.environ.get("COMMRT_MEETING")
    if folder:  # of commrt.run
        return DirectoryStore(folder, detect().size).for_torch("tests")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))
