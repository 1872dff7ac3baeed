# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet in a store of torch, as under torchrun, and that nobody ends.

torchrun itself ends all ranks when one fails. Here the others go on. ``hosts``: this
launcher hosts the store, as torchrun's agent does; else rank 0 does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from mpi_ranks import KILL_GRACE_S
from run_ranks import RunRanks

from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["StoreRanks"]


@dataclass(frozen=True)
class StoreRanks(RunRanks):
    """Runs functions and programs on such ranks."""

    hosts: bool = True

    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
    ) -> Completed:
        """Run ``python *argv`` on ranks, and return how that ended."""
        words = [__file__, str(nranks), str(int(self.hosts)), *argv]
        return run_process(
            [sys.executable, *words],
            {**child_environment(sys.executable), **(env or {})},
            timeout_s=deadline_s + KILL_GRACE_S,
        )


def main() -> None:
    """Start the ranks, and wait for all of them."""
    nranks, hosts = int(sys.argv[1]), sys.argv[2] == "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if hosts:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = store.port
    names = {
        "WORLD_SIZE": str(nranks),
        "LOCAL_WORLD_SIZE": str(nranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(hosts),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[3:]],
            env={**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(nranks)
    ]
    failed = [rank.wait() for rank in ranks]
    sys.exit(max(failed))  # that of a rank that a signal has ended is negative


if __name__ == "__main__":
    main()
