# SPDX-License-Identifier: Apache-2.0
"""Buffers for test cases, some of them in symmetric memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class HeapMemory:
    """Gives out pieces of symmetric and of ordinary memory, drawn at random.

    One call of ``comm.empty`` per object: the pieces of one rank need not lie where
    those of another do, nor be as long.
    """

    def __init__(self, comm: Any, nbytes: int, seed: str) -> None:
        self._raw = comm.empty(nbytes, "uint8")
        self._random = random.Random(f"{seed}/{comm.rank}")
        self._at = 0
        self.share = 0.7
        """Of the pieces that are symmetric."""

    def __call__(self, nbytes: int) -> Array:
        """Return ``nbytes`` that nothing else uses until some more calls later."""
        if self._random.random() >= self.share:
            return np.empty(nbytes, np.uint8)
        # Elements are aligned; lines of the cache are not, on purpose.
        start = -(-self._at // 16) * 16
        if start + nbytes > self._raw.size:
            start = 0
        self._at = start + nbytes
        return self._raw[start : start + nbytes]
