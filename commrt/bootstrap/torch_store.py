# SPDX-License-Identifier: Apache-2.0
"""Stores of torch, which one rank or the launcher hosts."""

from __future__ import annotations

from typing import Any

from commrt.errors import BackendError
from commrt.vocabulary.limits import as_timedelta

__all__ = ["tcp_store"]


def tcp_store(
    where: tuple[str, int],
    rank: int,
    size: int,
    hosts: bool,
    timeout_s: float,
    source: str,
) -> Any:
    """Return torch's store at a host and port; it waits for nobody.

    Args:
        where: host and port; port 0 on the rank that hosts it: a free one.
        rank: this rank.
        size: ranks of the job.
        hosts: whether this process hosts it.
        timeout_s: within which it must be reached.
        source: who has said where it is, for messages.

    Raises BackendError where it is not reached.
    """
    from torch.distributed import TCPStore

    host, port = where
    try:
        return TCPStore(
            host,
            port,
            size,
            is_master=hosts,
            timeout=as_timedelta(timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise BackendError(
            f"rank {rank} of {size}: no torch store at {host}:{port} "
            f"({source}) within {timeout_s:g} s: {error}; look whether rank 0 runs, "
            f"and whether this host can reach that port"
        ) from error
