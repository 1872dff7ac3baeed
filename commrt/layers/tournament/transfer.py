# SPDX-License-Identifier: Apache-2.0
"""Candidates on their way from trainers to others, rank to rank of the same place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.layers.tournament.candidate import Candidate, Sizes

__all__ = ["Transfer"]


class Transfer:
    """Candidates that travel: room for one that comes, then the messages.

    The constructor makes room, and is local. So ranks can tell each other of a lack of
    memory before a message goes.

    Args:
        comm: all ranks, trainer by trainer.
        mine: this rank's, which must stay as it is until the end.
        sources: for each trainer whose candidate it gets; its own: none.
        sizes: bytes of each rank's candidate.
        device: where tensors that come from devices go; None: there are none.

    A message goes for the structure, for tensors on the host and for tensors on a
    device, where there are any: together the bytes of the candidate, to each trainer
    that gets it.
    """

    def __init__(
        self,
        comm: Communicator,
        mine: Candidate,
        sources: Sequence[int],
        sizes: Sequence[Sizes],
        device: torch.device | None,
    ) -> None:
        width = comm.size // len(sources)
        trainer, place = divmod(comm.rank, width)
        targets = [
            each * width + place
            for each, source in enumerate(sources)
            if source == trainer != each
        ]
        self._comm = comm
        self._batches: list[tuple[list[tuple[Any, int]], list[tuple[Any, int]]]] = []
        self._requests: list[Any] = []
        self._structure: Any = np.empty(0, np.uint8)
        self._buffers: dict[str, torch.Tensor] = {}
        source = sources[trainer] * width + place
        coming = Sizes(0, 0, 0) if source == comm.rank else sizes[source]
        sends: list[tuple[Any, int]] = []
        recvs: list[tuple[Any, int]] = []
        if mine.structure:
            leaving = np.frombuffer(mine.structure, np.uint8)
            sends += [(leaving, rank) for rank in targets]
        if coming.structure:
            self._structure = np.empty(coming.structure, np.uint8)
            recvs.append((self._structure, source))
        for kind in ("cpu", None if device is None else device.type):
            if kind is None:
                continue
            number = coming.host if kind == "cpu" else coming.device
            if kind in mine.buffers:
                sends += [(mine.buffers[kind], rank) for rank in targets]
            if number:
                on = torch.device("cpu") if kind == "cpu" else device
                buffer = torch.empty(number, dtype=torch.uint8, device=on)
                self._buffers[kind] = buffer
                recvs.append((buffer, source))
            if sends or recvs:
                self._batches.append((sends, recvs))
            sends, recvs = [], []

    def start(self) -> None:
        """Start the messages; collective over ranks that send or get a candidate."""
        for sends, recvs in self._batches:
            self._requests.append(
                self._comm.multi_sendrecv(sends=sends, recvs=recvs, nonblocking=True)
            )

    def wait(self) -> Candidate:
        """Return the candidate that has come; an empty one where none comes."""
        for request in self._requests:
            request.wait()
        return Candidate(self._structure.tobytes(), self._buffers)
