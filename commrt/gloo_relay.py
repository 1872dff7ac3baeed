# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks of other nodes by gloo, where there is no MPI.

The engine hands messages to a native relay (engine/relay.hpp) and looks there for what
has come. Here two threads for each rank of another node carry what the relay gives
them: one sends, one receives, over a gloo group that is made from the store in which
the ranks have met. The threads wait without the GIL, and nothing in the engine waits
for them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from commrt import _native
from commrt.bootstrap.base import poll_until
from commrt.errors import BackendError

__all__ = ["GlooRelay"]

_FRAMES, _PAYLOADS = 0, 1
"""gloo's tags."""
_AHEAD = 4
"""Receives of frames that are posted at once: gloo's sender waits for a receive."""
_FOREVER = timedelta(days=365)
_ANSWER_S = 1.0
_GRACE_S = 5.0
"""How long the end waits for what has been sent, and for peers' last frames."""


class GlooRelay:
    """One rank's messages to other nodes.

    Args:
        store: a torch Store in which nobody else writes; the same on all ranks.
        rank: this process's rank in the job.
        size: ranks of the job.
        peers: ranks of other nodes.
        timeout_s: within which the ranks must find each other.
    """

    def __init__(
        self, store: Any, rank: int, size: int, peers: Sequence[int], timeout_s: float
    ) -> None:
        """Collective over all ranks of the job."""
        self._rank = rank
        self._group = _gloo_group(store, rank, size, timeout_s)
        self.native = _native.Relay(rank, size)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._landing: dict[int, deque[tuple[Any, Any]]] = {p: deque() for p in peers}
        self._threads = [
            threading.Thread(
                target=work, args=(peer,), name=f"commrt-{what}-{peer}", daemon=True
            )
            for peer in peers
            for what, work in (("to", self._send), ("from", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def started(self, peers: Sequence[int], tag: int) -> dict[int, int | None]:
        """Return how many operations of a communicator each peer has started.

        None where it has not answered within a second: its threads answer, whatever
        its program does. -1 where it knows no such communicator, or has ended.
        """
        native = self.native
        asked = {peer: native.ask(peer, tag) for peer in peers}
        told: dict[int, int | None] = {}

        def heard() -> bool:
            for peer, question in asked.items():
                if told.get(peer) is None:
                    told[peer] = native.answer(question)
            return None not in told.values()

        poll_until(heard, _ANSWER_S)
        return told

    def has_ended(self, peer: int) -> bool:
        """Whether nothing comes from this peer any more."""
        return bool(self.native.failure_of(peer))

    def close(self) -> None:
        """Send what there is, and tell the peers that it was all. Idempotent.

        A peer answers that at once, whatever its program does, and the threads here
        end: those that outlive the interpreter would end the process with an error.
        """
        with self._lock:
            threads, self._threads = self._threads, []
        if not threads or os.getpid() != self._owner:
            return
        self.native.leave()
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            # Their group must not end before them.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _send(self, peer: int) -> None:
        """Send frames and payloads to a peer, in order."""
        import torch

        frame = torch.empty(self.native.frame_nbytes, dtype=torch.uint8)
        try:
            while todo := self.native.next(peer, frame.data_ptr()):
                nbytes, payload, payload_nbytes, landing, landing_nbytes, ends = todo
                if landing:
                    # Posted before the peer hears that it may send.
                    self._begin_to_land(peer, landing, landing_nbytes)
                works = []
                if payload:
                    memory = _tensor(payload, payload_nbytes)
                    works.append(self._group.send([memory], peer, _PAYLOADS))
                works.append(self._group.send([frame[:nbytes]], peer, _FRAMES))
                for work in works:
                    work.wait(_FOREVER)
                self.native.sent(peer)
                if ends:
                    return
        except RuntimeError as error:
            self._lose(peer, error)

    def _begin_to_land(self, peer: int, address: int, nbytes: int) -> None:
        memory = _tensor(address, nbytes)
        work = self._group.recv([memory], peer, _PAYLOADS)
        self._landing[peer].append((work, memory))

    def _receive(self, peer: int) -> None:
        """Receive frames and payloads from a peer, in order."""
        import torch

        coming: deque[tuple[Any, Any]] = deque()
        try:
            for _ in range(_AHEAD):
                frame = torch.empty(self.native.frame_nbytes, dtype=torch.uint8)
                coming.append((self._group.recv([frame], peer, _FRAMES), frame))
            while True:
                work, frame = coming.popleft()
                work.wait(_FOREVER)
                then = self.native.arrived(peer, frame.data_ptr(), frame.numel())
                if then == 2:
                    return
                if then == 1:
                    payload, _ = self._landing[peer].popleft()
                    payload.wait(_FOREVER)
                    self.native.landed(peer)
                coming.append((self._group.recv([frame], peer, _FRAMES), frame))
        except RuntimeError as error:
            self._lose(peer, error)

    def _lose(self, peer: int, error: Exception) -> None:
        first = str(error).splitlines()[0]
        self.native.lost(
            peer,
            f"rank {peer} of the job, on another node, has ended, or the network to it "
            f"has failed (gloo: {first})",
        )


def _gloo_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    try:
        from torch.distributed import ProcessGroupGloo
    except ImportError as error:
        raise BackendError(
            "the ranks lie on several nodes without MPI, and this build of torch has "
            "no gloo, which would carry their messages: start the ranks with mpiexec "
            "and commrt[mpi], or take a torch with gloo"
        ) from error
    try:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise BackendError(
            f"rank {rank} of {size}: gloo does not connect the ranks, which lie on "
            f"several nodes: {error}; GLOO_SOCKET_IFNAME names the network interface "
            f"to use"
        ) from error


def _tensor(address: int, nbytes: int) -> Any:
    """Return a tensor of bytes that lie at ``address``."""
    import torch

    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
