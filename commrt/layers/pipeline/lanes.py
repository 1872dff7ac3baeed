# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbours of a pipeline, which are counted.

A step that fails leaves messages behind: sent ones that nobody has asked for, and
receives that nobody sends to. Both ends tell each other their counts then, and clear
them away, so that the next step meets none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.layers.pipeline.agreement import Numbers
from commrt.request import Request, wait_all

__all__ = ["Alarm", "Incoming", "Links", "Outgoing"]

Tensor: TypeAlias = torch.Tensor

_SHAPES, _FORWARD, _BACK, _ALARM, _SIZES = range(5)
"""Tags."""


class Outgoing:
    """Messages of one kind to a neighbour. All are bytes, so that any fits any."""

    def __init__(self, comm: Communicator, peer: int, tag: int) -> None:
        self._comm, self._peer, self._tag = comm, peer, tag
        self.count = 0
        self.requests: list[Request] = []

    def send(self, x: Any) -> Request:
        """Start to send an array of bytes, which must stay as it is."""
        started: Any = self._comm.send(x, self._peer, self._tag, nonblocking=True)
        request: Request = started
        self.count += 1
        self.requests = [*_unfinished(self.requests), request]
        return request

    def fill_up(self, num_posted: int) -> None:
        """Send empty messages to receives that wait for more than have been sent."""
        while self.count < num_posted:
            self.send(np.empty(0, np.uint8))

    def clear(self) -> None:
        """Forget what has been sent, and has left."""
        self.requests, self.count = [], 0


class Incoming:
    """Messages of one kind from a neighbour, in their order."""

    def __init__(self, comm: Communicator, peer: int, tag: int) -> None:
        self._comm, self._peer, self._tag = comm, peer, tag
        self.count = 0
        self.requests: list[Request] = []

    def post(self, out: Any) -> Any:
        """Start to receive into an array; return the request."""
        request = self._comm.recv(out, self._peer, self._tag, nonblocking=True)
        self.count += 1
        self.requests = [*_unfinished(self.requests), request]
        return request

    def take_rest(self, num_sent: int, device: torch.device) -> None:
        """Receive what has been sent and not been asked for; wait for its length."""
        while self.count < num_sent:
            found = self._comm.probe(self._peer, self._tag)
            assert found is not None  # it waits for a message
            out = torch.empty(found.nbytes, dtype=torch.uint8, device=device)
            self.post(out).wait()

    def clear(self) -> None:
        """Forget what has been received."""
        self.requests, self.count = [], 0


def _unfinished(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that are under way: others would keep their arrays."""
    found = []
    for request in requests:
        if request.done:
            request.wait()
        else:
            found.append(request)
    return found


class Alarm:
    """A message of whichever rank has an error, during one step."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._request: Any = None
        if comm.size > 1:
            out = np.empty(1, np.int64)
            self._request = comm.recv(out, tag=_ALARM, nonblocking=True)

    @property
    def requests(self) -> list[Request]:
        """The receive, to wait for beside others."""
        return [] if self._request is None else [self._request]

    @property
    def has_come(self) -> bool:
        """True once a rank has raised it."""
        return self._request is not None and bool(self._request.test())

    def taken(self) -> set[int]:
        """Return the rank whose alarm has been taken, if one has; ends the receive."""
        if self._request is None or self._request.source < 0:
            return set()
        self._request.wait()
        return {self._request.source}

    def raise_it(self) -> list[Request]:
        """Tell all other ranks; return the requests."""
        comm = self._comm
        word = np.zeros(1, np.int64)
        return [
            comm.send(word, rank, _ALARM, nonblocking=True)  # type: ignore[misc]
            for rank in range(comm.size)
            if rank != comm.rank
        ]

    def take_from(self, rank: int) -> None:
        """Receive the alarm of a rank that has raised it."""
        self._comm.recv(np.empty(1, np.int64), rank, _ALARM)


class Links:
    """All that a rank of a pipeline exchanges with its neighbours.

    Args:
        comm: all ranks, also those of other replicas.
        ranks: those of this pipeline, stage by stage.
        stage: this rank's.
        device: where tensors are.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], stage: int, device: torch.device
    ) -> None:
        self.comm, self.device = comm, device
        self._first, self._last = ranks[0], ranks[-1]
        self._before = ranks[stage - 1] if stage else None
        self._behind = ranks[stage + 1] if stage + 1 < len(ranks) else None
        none, before, behind = -1, self._before, self._behind
        before_rank = none if before is None else before
        behind_rank = none if behind is None else behind
        self.shapes_in = Incoming(comm, before_rank, _SHAPES)
        self.values_in = Incoming(comm, before_rank, _FORWARD)
        self.gradients_in = Incoming(comm, behind_rank, _BACK)
        self.shapes_out = Outgoing(comm, behind_rank, _SHAPES)
        self.values_out = Outgoing(comm, behind_rank, _FORWARD)
        self.gradients_out = Outgoing(comm, before_rank, _BACK)

    @property
    def is_first(self) -> bool:
        """True on the rank that has the micro-batches."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """True on the rank that has the targets."""
        return self._behind is None

    def sizes(self, own: Numbers | None, count: int) -> Numbers:
        """Return the first rank's numbers on the last one; to be called on both.

        Bytes: a message of 8 for each.
        """
        if self.is_first and not self.is_last:
            assert own is not None
            self.comm.send(own, self._last, _SIZES)
        elif self.is_last and not self.is_first:
            own = np.empty(count, np.int64)
            self.comm.recv(own, self._first, _SIZES)
        return np.empty(0, np.int64) if own is None else own

    @property
    def counts(self) -> list[int]:
        """Messages of this step: of three kinds sent, then of three kinds awaited."""
        return [each.count for each in self._lanes]

    def clear_away(self, every: Numbers) -> None:
        """End what a failed step has left behind; ``every`` has all ranks' counts.

        All ranks of the pipeline call it. It waits until messages have left and come.
        """
        sent, posted = every[:, :3], every[:, 3:]
        behind, before = self._behind, self._before
        for kind, going in enumerate(self._outgoing):
            peer = before if going is self.gradients_out else behind
            if peer is not None:
                going.fill_up(int(posted[peer, kind]))
        for kind, coming in enumerate(self._incoming):
            peer = behind if coming is self.gradients_in else before
            if peer is not None:
                coming.take_rest(int(sent[peer, kind]), self.device)
        self.finish()

    def finish(self) -> None:
        """Wait for all messages of the step, and forget them."""
        for lane in self._lanes:
            wait_all(lane.requests)
            lane.clear()

    def unsent(self) -> list[Request]:
        """Return the requests of messages that have not left yet."""
        return [
            request for lane in self._outgoing for request in _unfinished(lane.requests)
        ]

    @property
    def _lanes(self) -> tuple[Outgoing | Incoming, ...]:
        return (*self._outgoing, *self._incoming)

    @property
    def _outgoing(self) -> tuple[Outgoing, ...]:
        return self.shapes_out, self.values_out, self.gradients_out

    @property
    def _incoming(self) -> tuple[Incoming, ...]:
        """In the order of the neighbours' ``_outgoing``."""
        return self.shapes_in, self.values_in, self.gradients_in
