# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun started (or that share any torch Store): keys in the store.

Rank r writes its blob under ``key/r`` and polls with ``check``, which does not
block, until everybody's is there. The last reader deletes the keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from commrt.bootstrap.base import Keys, poll_until, timed_out
from commrt.errors import BackendError

__all__ = ["StoreBootstrap", "torchrun_store"]


class StoreBootstrap:
    """Exchanges blobs through a ``torch.distributed.Store`` of any kind."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Local. Every rank must make the same number of bootstraps on a store."""
        self.rank = rank
        self.size = size
        self._store = store
        self.idle: Callable[[], object] | None = None
        self._keys = Keys(rank, size)
        # Each rank counts its bootstraps in the store itself: a second one on the
        # same store must not meet keys that the first one is still deleting.
        generation = store.add(f"commrt/generation/{rank}", 1)
        self._prefix = f"commrt/{generation}"

    def exchange(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        base = f"{self._prefix}/{self._keys.unique(members, key)}"
        names = {member: f"{base}/{member}" for member in members}
        self._store.set(names[self.rank], bytes(blob))
        everybody = list(names.values())

        def met() -> bool:
            return bool(self._store.check(everybody))

        if not poll_until(met, timeout_s, self.idle):
            missing = [r for r in members if not self._store.check([names[r]])]
            if missing:
                raise timed_out(self.rank, members, key, missing, timeout_s)
        blobs = [bytes(self._store.get(name)) for name in everybody]
        readers = f"{base}/readers"
        if self._store.add(readers, 1) == len(members):
            for name in (*everybody, readers):
                self._store.delete_key(name)
        return blobs

    def close(self) -> None:
        """Let go of the store; its server ends with the process that hosts it."""
        self._store = None


def torchrun_store(
    rank: int,
    size: int,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Connect to the store that torchrun's variables name.

    torchrun's agent hosts the store for its workers (TORCHELASTIC_USE_AGENT_STORE);
    under other launchers that set the same variables rank 0 hosts it.
    """
    environ = os.environ if environ is None else environ
    try:
        from torch.distributed import PrefixStore, TCPStore
    except ImportError as error:
        raise BackendError(
            "torchrun's variables are set, but torch cannot be imported: "
            "pip install 'commrt[torch]', or set COMMRT_LAUNCH=mpi or single"
        ) from error
    agent_hosts = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        store = TCPStore(
            host,
            port,
            size,
            is_master=rank == 0 and not agent_hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise BackendError(
            f"rank {rank} of {size}: no torch store at {host}:{port} "
            f"(MASTER_ADDR:MASTER_PORT) within {timeout_s:g} s: {error}"
        ) from error
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"commrt/attempt_{attempt}", store)
