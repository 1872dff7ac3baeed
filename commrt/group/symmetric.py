# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory that all ranks of a node have mapped: ``comm.empty``."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from commrt.errors import CommError, UsageError
from commrt.group.group import Group
from commrt.job.memory_limit import check_fits
from commrt.job.symmetric import SymmetricHeap, as_array, parse_request

__all__ = ["SymmetricMemory"]


class SymmetricMemory:
    """The symmetric memory of one group.

    Args:
        group: the ranks.
        grown: called when peers can reach memory that they could not reach before.
    """

    def __init__(self, group: Group, grown: Callable[[], None]) -> None:
        self._group = group
        self._grown = grown
        self.heap: SymmetricHeap | None = None
        """Memory of the arrays; None before the first."""

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Return a zero-filled array that every rank of this node has mapped.

        Collectives of this communicator use such arrays in place, as ``x`` and as
        ``out``, whole or in contiguous parts; from 32 KiB on that saves copies. Ranks
        may mix them with ordinary arrays as they like. Elsewhere they are arrays like
        any other.

        Collective over the ranks of a node, in the order of all their calls; they must
        ask for the same number of bytes. Dropping the array is local, and its memory is
        given out again by a later ``empty`` once every rank has dropped its own. It
        stays valid after ``free()``.

        Args:
            shape: number of elements, or several.
            dtype: numpy's dtype or name; or a ``torch.dtype``, for a tensor.

        Raises:
            UsageError: shape or dtype are wrong; it was raised once all ranks called.
            RefusedError: shape or dtype are wrong on another rank of the node.
            MismatchError: ranks of a node asked for different numbers of bytes; on all
                of them.
            BackendError: there is no memory, or an earlier ``empty`` ended on some
                ranks only; on all ranks of the node.
            TimeoutError_: a rank did not come within the communicator's ``timeout_s``.
        """
        group = self._group
        group.check_usable()
        try:
            sizes, plain, torch_dtype = parse_request(shape, dtype)
        except UsageError as error:
            self._refuse(error)
            raise
        nbytes = math.prod(sizes) * plain.itemsize
        if group.arena is None:
            check_fits(nbytes)
            memory = np.zeros(nbytes, np.uint8)
        else:
            with group.making():
                memory = self._opened().take(nbytes, group.timeout_s)
        return as_array(memory, sizes, plain, torch_dtype)

    def close(self) -> None:
        """Let go of the memory; arrays that are still used keep their part of it."""
        if self.heap is not None:
            self.heap.close()
            self.heap = None

    def _refuse(self, error: UsageError) -> None:
        """Let the other ranks of this node know that this rank's call was refused."""
        if self._group.arena is None:
            return
        with suppress(CommError), self._group.making():  # this rank raises its own
            self._opened().refuse(str(error), self._group.timeout_s)

    def _opened(self) -> SymmetricHeap:
        if self.heap is None:
            group, world = self._group, self._group.world
            called = sorted(group.node_members)
            on_node = [group.world_ranks[rank] for rank in called]
            key = f"comm{group.identity}/heap/{world.node_of(world.rank)}"
            self.heap = SymmetricHeap(
                world.bootstrap,
                on_node,
                called,
                group.name,
                key,
                world.share_memory,
                self._attach,
            )
        return self.heap

    def _attach(self, arena: Any) -> None:
        self._group.attach_segment(arena.address, arena.region_nbytes)
        self._grown()
