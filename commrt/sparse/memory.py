# SPDX-License-Identifier: Apache-2.0
"""Memory for pieces and outputs, used again once nobody refers to it.

Fresh memory costs a page fault per 4 KiB, as much as merging the entries that a page
holds. A buffer is free again when only the pool refers to it: an output that the caller
dropped is the next output.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

__all__ = ["Pool"]

_LEAST = 1 << 14
_HUGE_NBYTES = 1 << 22
_MOST = 1 << 28
"""Unused bytes beyond this are given back."""
_REFERENCES = 3
"""References to a free buffer during the look: the list's, the loop's and the
count's."""


class Pool:
    """Buffers of the sparse, or the compressed, operations of one communicator."""

    def __init__(self) -> None:
        self._buffers: list[Any] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Any:
        """Return so many bytes, which hold anything."""
        if nbytes < _LEAST:
            return np.empty(nbytes, np.uint8)
        size = _rounded(nbytes)
        with self._lock:
            for buffer in self._buffers:
                if buffer.size == size and sys.getrefcount(buffer) == _REFERENCES:
                    return buffer[:nbytes]
            self._trim(size)
            fresh = np.empty(size, np.uint8)
            self._buffers.append(fresh)
            return fresh[:nbytes]

    def _trim(self, coming: int) -> None:
        """Let the oldest free buffers go where there are too many bytes."""
        total = coming + sum(buffer.size for buffer in self._buffers)
        kept = []
        for buffer in self._buffers:
            if total > _MOST and sys.getrefcount(buffer) == _REFERENCES:
                total -= buffer.size
            else:
                kept.append(buffer)
        # Buffers in use belong to their users: those beyond the bound are forgotten.
        while kept and total > _MOST:
            total -= kept.pop(0).size
        self._buffers = kept


def _rounded(nbytes: int) -> int:
    """Return the next of the sizes that are four, five, six or seven times 2^i.

    From half a huge page on at least what numpy asks for huge pages for: what is not
    touched costs nothing, and small pages cost a look-up for each.
    """
    nbytes = max(nbytes, _HUGE_NBYTES) if nbytes > 1 << 20 else nbytes
    step = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // step) * step
