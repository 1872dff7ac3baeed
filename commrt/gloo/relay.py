# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks of other nodes by gloo, where there is no MPI.

The engine hands messages to a relay in C++ (native/engine/relay.hpp) and looks there
for incoming ones. They go over a gloo group that is made from the store in which the
ranks have met. A thread that calls or waits gives gloo the messages to send
(native/engine/relay_carrier.hpp). Two threads for each rank of another node do the
rest: one receives, and one waits until gloo no longer needs the memory of sent
messages. They wait without the GIL, and nothing in the engine waits for them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.tcp.questions import ask_peers

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["GlooRelay", "close_relays"]

_FRAMES = 0
"""gloo's tag."""
_AHEAD = 8
"""Receives of frames that are posted at once: gloo's sender waits for a receive."""
_FOREVER = timedelta(days=365)
_GRACE_S = 5.0
"""Seconds that the end waits for sent messages to leave, and for peers' last frames."""


_MADE: list[GlooRelay] = []
"""Relays of this process's worlds; closed ones stay in the list."""


def close_relays() -> None:
    """Close all relays of this process, at its end."""
    for relay in _MADE:
        relay.close()


class GlooRelay:
    """One rank's messages to other nodes.

    Args:
        group: torch's ProcessGroupGloo of all ranks of the job.
        rank: this process's rank in the job.
        size: ranks of the job.
        peers: ranks of other nodes.
        liveness: is told which peers are lost, and which leave.
    """

    is_staged = True
    """Messages are copied into frames, and out of them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        peers: Sequence[int],
        liveness: _native.Liveness,
    ) -> None:
        import torch

        self._group: dist.ProcessGroup | None = group
        self.native = _native.Relay(rank, size)
        self.native.watch(liveness, list(peers))
        self._landing: dict[Any, dict[int, tuple[Any, Any]]] = {p: {} for p in peers}
        self._carrier = _native.RelayCarrier(
            self.native,
            group.send,
            group.recv,
            torch.frombuffer,
            torch.uint8,
            self._landing,
        )
        self.at_end: list[Callable[[], None]] = []
        """Functions to call once nothing comes from any peer any more."""
        self._owner = os.getpid()
        # The garbage collector may call part() wherever a thread has it.
        self._lock = threading.RLock()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(work, peer),
                name=f"commrt-{what}-{peer}",
                daemon=True,
            )
            for peer in peers
            for what, work in (("to", self._attend), ("from", self._receive))
        ]
        self._num_running = len(self._threads)
        self._is_parting = False
        _MADE.append(self)
        for thread in self._threads:
            thread.start()

    def ask(
        self, abouts: Mapping[int, int], tag: int
    ) -> dict[int, tuple[Any, ...] | None]:
        """Return what each peer says that a rank does (``ask_peers``)."""
        return ask_peers(self.native, abouts, tag, self._carrier.give_all)

    def ask_for_dumps(self) -> None:
        """Ask ranks of other nodes to write their last operations; wait for none."""
        self.native.ask_for_dumps()
        self._carrier.give_all()

    def has_ended(self, peer: int) -> bool:
        """Return whether nothing comes from this peer any more."""
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
        self._carrier.give_all()
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            # Their group must not end before them.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._end_groups()
            return
        self._end()

    def part(self) -> None:
        """Tell the peers that it was all, and wait for nobody. Idempotent.

        Once they have answered, the threads end, and with them the connections.
        """
        with self._lock:
            if not self._threads or os.getpid() != self._owner:
                return
            self._is_parting = True
        self.native.leave()
        self._carrier.give_all()
        self._end_if_parted()

    def _run(self, work: Callable[[int], None], peer: int) -> None:
        try:
            work(peer)
        finally:
            with self._lock:
                self._num_running -= 1
            self._end_if_parted()

    def _end_if_parted(self) -> None:
        with self._lock:
            if self._num_running or not self._is_parting or not self._threads:
                return
            self._threads = []
        self._end()
        _MADE.remove(self)

    def _end(self) -> None:
        """Let go of the connections, which no thread uses any more."""
        self._carrier.forget()
        self._end_groups()
        self._group = None

    def _end_groups(self) -> None:
        ends, self.at_end = self.at_end, []
        for end in ends:
            end()

    def _attend(self, peer: int) -> None:
        """Wait for what gloo has been given, and give it what nobody else does."""
        carrier = self._carrier
        try:
            while (works := carrier.attend(peer)) is not None:
                for work in works:
                    work.wait(_FOREVER)
                    carrier.left(peer)
                carrier.give(peer)
        except RuntimeError as error:
            carrier.lose(peer, str(error))

    def _receive(self, peer: int) -> None:
        """Receive frames and payloads from a peer, in order."""
        import torch

        group = self._group
        assert group is not None
        coming: deque[tuple[Any, Any]] = deque()
        free = [
            torch.empty(self.native.frame_nbytes, dtype=torch.uint8)
            for _ in range(_AHEAD)
        ]
        try:
            while True:
                # Half of them at once: who was woken by a frame wants the GIL, too.
                if len(free) >= _AHEAD // 2:
                    for frame in free:
                        coming.append((group.recv([frame], peer, _FRAMES), frame))
                    free.clear()
                work, frame = coming.popleft()
                work.wait(_FOREVER)
                then = self.native.arrived(peer, frame.data_ptr(), frame.numel())
                if then > 0:
                    payload, _ = self._landing[peer].pop(then)
                    payload.wait(_FOREVER)
                    self.native.landed(peer, then)
                self._carrier.give(peer)  # answers
                if then < 0:
                    return
                free.append(frame)
        except RuntimeError as error:
            self._carrier.lose(peer, str(error))
