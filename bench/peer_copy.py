# SPDX-License-Identifier: Apache-2.0
"""The bound as a peer: every rank copies its input to its result, all at once.

``python -m commrt.bench.peer_copy JOB``. Where the result is longer, each of its parts
gets the input; where it is shorter, the rest of the input is left out. No rank waits
for another. Plain and streaming stores are tried at each size, and the faster ones are
timed. Like every call of the comparison it is made from Python, which is what short
copies cost.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from commrt import _native
from commrt.bench import timing_loop, worker
from commrt.bench.timing_loop import Array, Call
from commrt.bench.worker import CommrtPeer

__all__ = ["CopyPeer", "connect"]

_ROUNDS = 5
_TRIED_NBYTES = 1 << 20
"""Copied in a round of a trial: shorter copies are repeated."""


class CopyPeer(CommrtPeer):
    """Copies in place of collectives; ranks meet over commrt."""

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a call that copies, with the kind of stores that is faster here.

        Without ``out`` there is a result of its own: a copy onto itself is none.
        """
        target = (np.zeros_like(x) if out is None else out).view(np.uint8)
        x.fill(0)
        plain, streaming = (_copies(target, x.view(np.uint8), i) for i in (0, 1))
        took: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_ROUNDS):
            for streams, call in ((False, plain), (True, streaming)):
                took[streams].append(self._took(call, target.nbytes))
        faster = self.agree(float(min(took[True]) < min(took[False])))
        return streaming if faster else plain

    def _took(self, call: Call, nbytes: int) -> float:
        """Return the seconds of the slowest rank, on rank 0."""
        self.barrier()
        start = time.perf_counter()
        for _ in range(max(1, _TRIED_NBYTES // max(1, nbytes))):
            call()
        slowest = timing_loop.worst_over_ranks(self, [time.perf_counter() - start])
        return slowest[0] if slowest else 0.0


def _copies(target: Array, source: Array, store: int) -> Call:
    length = min(target.size, source.size)
    parts = [
        partial(_native.kernels.copy, target[at : at + length], source[:length], store)
        for at in range(0, target.size, max(1, length))
    ]

    def all_parts() -> None:
        for part in parts:
            part()

    return parts[0] if len(parts) == 1 else all_parts


def connect() -> tuple[CopyPeer, dict[str, Any]]:
    """Start commrt; return the peer and what to record about it."""
    peer, about = worker.connect()
    return CopyPeer(peer.comm), {
        **about,
        "library": "a copy of input to result",
    }


if __name__ == "__main__":
    timing_loop.work(sys.argv[1], connect)
