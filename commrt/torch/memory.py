# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory that the ranks of a node share, for programs that ask the group.

FSDP2 asks for its buffers anew in every layer of every step. Symmetric memory is made
by all ranks together, which takes milliseconds; so a group makes one large piece when
it is first asked, and each rank gives out parts of it on its own: where a rank's
tensors lie is its own affair. Tensors that do not fit get ordinary memory. Pages count
when they are touched.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commrt.errors import CommError
from commrt.job.memory_limit import memory_limit_nbytes
from commrt.torch.errors import as_torch_error

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["SharedMemory"]

_MOST_NBYTES = 1 << 30
_SHARE = 8
"""Divisor of the machine's limit: the pieces of all ranks together may take an
eighth."""
_ALIGN_NBYTES = 4096


class SharedMemory:
    """A group's symmetric memory on this rank."""

    def __init__(self, comm: Core) -> None:
        self._comm = comm
        self._whole: torch.Tensor | None = None
        self._free: list[tuple[int, int]] = []  # (begin, end), by address, apart
        # The garbage collector may drop a tensor while this thread is in here.
        self._lock = threading.RLock()

    @property
    def is_of_use(self) -> bool:
        """True if ranks share memory, so that it saves anything."""
        return self._comm.size > 1 and len(self._comm.nodes) == 1

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of ``count`` elements; the first call is collective."""
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(count, dtype=dtype)
        if self._whole is None:
            self._make()
        with self._lock:
            begin = self._take(_round_up(nbytes))
        if begin is None:
            return torch.empty(count, dtype=dtype)
        return self._tensor(begin, nbytes).view(dtype)

    def _make(self) -> None:
        comm = self._comm
        nbytes = min(_MOST_NBYTES, memory_limit_nbytes() // (_SHARE * comm.size))
        nbytes = nbytes // _ALIGN_NBYTES * _ALIGN_NBYTES
        try:
            # Limits of containers may differ.
            agreed = comm.allreduce(torch.tensor([nbytes]), op="min")
            nbytes = int(agreed[0])
            self._whole = comm.empty(nbytes, torch.uint8)
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        self._free = [(0, nbytes)]

    def _tensor(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return a part of the memory that comes back when nobody refers to it."""
        assert self._whole is not None
        part = self._whole.narrow(0, begin, nbytes).numpy()
        loan = _Loan(self, begin, _round_up(nbytes), part)
        return torch.from_numpy(loan.array())

    def _take(self, nbytes: int) -> int | None:
        """Return the begin of the smallest gap that ``nbytes`` fit into."""
        fitting = [gap for gap in self._free if gap[1] - gap[0] >= nbytes]
        if not fitting:
            return None
        begin, end = min(fitting, key=lambda gap: gap[1] - gap[0])
        self._free.remove((begin, end))
        if begin + nbytes < end:
            self._free.append((begin + nbytes, end))
        return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        """Make a part free again, joined with the gaps beside it."""
        end = begin + nbytes
        with self._lock:
            for gap in [gap for gap in self._free if gap[1] == begin or gap[0] == end]:
                self._free.remove(gap)
                begin, end = min(begin, gap[0]), max(end, gap[1])
            self._free.append((begin, end))


class _Loan:
    """The owner of a part, as numpy sees it: it ends when no view is left."""

    def __init__(
        self, memory: SharedMemory, begin: int, nbytes: int, part: Any
    ) -> None:
        self._memory = memory
        self._begin = begin
        self._nbytes = nbytes
        self._part = part
        self.__array_interface__ = part.__array_interface__

    def array(self) -> Any:
        """Return the memory; the array keeps this object alive."""
        return np.asarray(self)

    def __del__(self) -> None:
        self._memory.give_back(self._begin, self._nbytes)


def _round_up(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN_NBYTES) * _ALIGN_NBYTES
