# SPDX-License-Identifier: Apache-2.0
"""Connects ranks by gloo, while any of them may end.

gloo waits for ranks in C++: it notices neither Ctrl-C nor that a rank has ended. So a
thread makes the connections, and this rank looks meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commrt.bootstrap.base import Bootstrap, check_alive, poll_until, with_heed
from commrt.errors import BackendError, TimeoutError_
from commrt.vocabulary.limits import as_timedelta

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["connect_group"]

_GRACE_S = 5.0
"""Seconds that gloo may need to notice that time is up."""
_OPTIONS, _LIMIT, _DEVICES = "_Options", "_timeout", "_devices"
"""torch's names of gloo's options; it has no others for them."""


def connect_group(
    store: Any,
    ranks: Sequence[int],
    bootstrap: Bootstrap,
    timeout_s: float,
    address: str = "",
) -> dist.ProcessGroup:
    """Return torch's ProcessGroupGloo of ``ranks``; collective over them.

    Args:
        store: a torch Store in which nobody else writes; the same on all ranks.
        ranks: ranks of the job, this one among them.
        bootstrap: knows who is gone.
        timeout_s: within which the ranks must find each other.
        address: of this rank; empty: as gloo chooses it.

    Raises BackendError where there is no gloo or no network, and PeerFailedError where
    a rank has ended.
    """
    connecting = _Connecting(store, ranks, bootstrap.rank, timeout_s, address)
    heed = check_alive(bootstrap.gone, "gloo", ranks, lambda _: False)
    is_over = connecting.is_over.is_set
    if not poll_until(is_over, timeout_s + _GRACE_S, with_heed(bootstrap.idle, heed)):
        raise TimeoutError_(
            f"rank {bootstrap.rank}: gloo did not connect ranks {list(ranks)} within "
            f"{timeout_s:g} s"
        )
    if connecting.error is not None:
        if heed is not None:
            heed()
        raise BackendError(
            f"gloo does not connect ranks {list(ranks)} of the job, which lie on "
            f"several nodes: {connecting.error}; GLOO_SOCKET_IFNAME names the network "
            f"interface to use"
        ) from connecting.error
    assert connecting.group is not None
    return connecting.group


class _Connecting:
    """A thread in which gloo connects this rank with others."""

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        address: str,
    ) -> None:
        try:
            from torch.distributed import ProcessGroupGloo
        except ImportError as error:
            raise BackendError(
                "the ranks lie on several nodes without MPI, and this build of torch "
                "has no gloo, which would carry their messages: start the ranks with "
                "mpiexec and commrt[mpi], or take a torch with gloo"
            ) from error
        self.is_over = threading.Event()
        self.group: dist.ProcessGroup | None = None
        self.error: RuntimeError | None = None
        limit = as_timedelta(timeout_s)

        def connect() -> None:
            try:
                how: Any = limit
                if address:
                    how = getattr(ProcessGroupGloo, _OPTIONS)()
                    device = ProcessGroupGloo.create_device(hostname=address)
                    for name, value in ((_LIMIT, limit), (_DEVICES, [device])):
                        setattr(how, name, value)
                self.group = ProcessGroupGloo(store, ranks.index(rank), len(ranks), how)
            except RuntimeError as error:
                self.error = error
            finally:
                self.is_over.set()

        threading.Thread(target=connect, name="commrt-gloo", daemon=True).start()
