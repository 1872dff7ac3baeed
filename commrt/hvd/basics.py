# SPDX-License-Identifier: Apache-2.0
"""Start, end, and who this process is among the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commrt.comm import Communicator
from commrt.errors import CommError, UsageError, shown
from commrt.hvd.current import begin, current, end, session_or_none
from commrt.hvd.process_sets import ProcessSet, add_process_set
from commrt.runtime import init as init_commrt

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init(
    comm: Communicator | MPI.Intracomm | None = None,
    process_sets: Sequence[ProcessSet] | None = None,
    *,
    fusion_nbytes: int | None = None,
    stall_warning_s: float = 60.0,
    cache_capacity: int = 1024,
) -> None:
    """Begin; collective over all ranks. A second call does nothing.

    Args:
        comm: the ranks: a communicator of commrt, or of mpi4py. None: those that the
            launcher has started, as ``commrt.init()`` finds them.
        process_sets: sets to add.
        fusion_nbytes: bytes at which small tensors are sent together, as
            HOROVOD_FUSION_THRESHOLD. None: as the table of the machine or a
            measurement finds best; 0: each tensor is sent by itself.
        stall_warning_s: seconds after which a warning names operations that wait for
            other ranks, as HOROVOD_STALL_CHECK_TIME_SECONDS.
        cache_capacity: names whose signatures are kept between steps, as
            HOROVOD_CACHE_CAPACITY.

    Raises UsageError for arguments that do not fit, and MismatchError for those that
    differ. It is raised on all ranks: RefusedError where a rank's own arguments fit. A
    ``comm`` that does not fit is an error of the rank that passes it alone.
    """
    if session_or_none() is not None:
        return
    if isinstance(comm, list | tuple):
        raise UsageError(
            f"hvd.init: comm={shown(comm)} is a list of ranks: call hvd.init() on all "
            f"ranks, and hvd.add_process_set(ranks)"
        )
    if not isinstance(comm, Communicator):
        comm = init_commrt(comm)
    session = begin(
        comm,
        fusion_nbytes=fusion_nbytes,
        stall_warning_s=stall_warning_s,
        cache_capacity=cache_capacity,
    )
    given = process_sets or ()
    number = len(given) if isinstance(given, Sequence) else None
    try:
        session.check_equal("numbers of process_sets", number)
        if number is None:
            raise UsageError(
                f"hvd.init: process_sets={shown(given)} must be a list of sets"
            )
        for each in given:
            add_process_set(each)
    except CommError:
        end()
        raise


def shutdown() -> None:
    """End, also of operations that other ranks have not submitted; idempotent."""
    end()


def is_initialized() -> bool:
    """Return whether ``init`` was called, and ``shutdown`` was not."""
    return session_or_none() is not None


def rank() -> int:
    """Return this process's number among all."""
    return current().comm.rank


def size() -> int:
    """Return the number of processes."""
    return current().comm.size


def _place() -> tuple[int, int]:
    """Return this process's node, and its place there."""
    comm = current().comm
    for node, ranks in enumerate(comm.nodes):
        if comm.rank in ranks:
            return node, sorted(ranks).index(comm.rank)
    raise AssertionError("a rank is on one of the nodes")


def local_rank() -> int:
    """Return this process's number among those of its node."""
    return _place()[1]


def local_size() -> int:
    """Return the number of processes of this node."""
    return len(current().comm.nodes[_place()[0]])


def _nodes_as_long() -> list[int]:
    """Return the nodes that have a process with this one's local rank."""
    _, local = _place()
    return [n for n, ranks in enumerate(current().comm.nodes) if len(ranks) > local]


def cross_rank() -> int:
    """Return this process's number among those with its local rank, on all nodes."""
    return _nodes_as_long().index(_place()[0])


def cross_size() -> int:
    """Return the number of processes with this one's local rank, on all nodes."""
    return len(_nodes_as_long())


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return len({len(ranks) for ranks in current().comm.nodes}) == 1
