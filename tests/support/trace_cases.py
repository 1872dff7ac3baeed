# SPDX-License-Identifier: Apache-2.0
"""For tests of logs: logs that nobody had to communicate for."""

from __future__ import annotations

from commrt.trace.log import Log, LoggedGroup, Operation, Place

HERE = Place("/home/me/train.py", 12, "step")


def group_of(rank: int, size: int, name: str = "dp") -> LoggedGroup:
    """Return what a rank's log says of a group of all ranks."""
    return LoggedGroup(
        *(f"torch/{name}", "torch", name, f"mesh_{name}", name),
        *(tuple(range(size)), rank),
    )


def call(
    group: LoggedGroup,
    op: str,
    nbytes: int,
    seq: int,
    start_ns: int,
    end_ns: int | None,
    *,
    peer: int = -1,
    root: int = -1,
    failed: bool = False,
    stream: int | None = None,
    site: Place = HERE,
) -> Operation:
    """Return an operation of float32."""
    return Operation(
        *(group, op, nbytes, nbytes, "float32", 4, "shm", "ring", peer, 0, root),
        *(stream, seq, start_ns, end_ns, failed, site),
    )


def log_of(rank: int, size: int, operations: list[Operation], boot: str = "one") -> Log:
    """Return a rank's log."""
    return Log(
        *("job1", rank, size, f"host-{boot}", boot, 100 + rank, 10**15),
        operations=operations,
    )
