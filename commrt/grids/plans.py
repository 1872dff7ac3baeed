# SPDX-License-Identifier: Apache-2.0
"""Persistent plans of communicators over grids and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.calls.bound_call import Planned
from commrt.grids.halo_arguments import EXCHANGE, REDUCE
from commrt.grids.neighbor_arguments import Counts
from commrt.plans import Plans

__all__ = ["CartPlans", "NeighborPlans"]


class NeighborPlans(Plans):
    """Plans of a communicator that knows who is beside whom."""

    def neighbor_allgather(self, x: Any, *, out: Any = None) -> Planned:
        """Return a call bound to its arrays; see the communicator's method."""
        return self._bind("neighbor_allgather", x, out=out)

    def neighbor_allgatherv(
        self, x: Any, *, recv_counts: Counts, out: Any = None
    ) -> Planned:
        """Return a call bound to its arrays; see the communicator's method."""
        return self._bind("neighbor_allgatherv", x, out=out, recv_counts=recv_counts)

    def neighbor_alltoall(self, x: Any, *, out: Any = None) -> Planned:
        """Return a call bound to its arrays; see the communicator's method."""
        return self._bind("neighbor_alltoall", x, out=out)

    def neighbor_alltoallv(
        self, x: Any, *, send_counts: Counts, recv_counts: Counts, out: Any = None
    ) -> Planned:
        """Return a call bound to its arrays; see the communicator's method."""
        return self._bind(
            "neighbor_alltoallv",
            x,
            out=out,
            send_counts=send_counts,
            recv_counts=recv_counts,
        )


class CartPlans(NeighborPlans):
    """Plans of a communicator over a grid: also of its halos, and among neighbours."""

    def halo_exchange(
        self,
        fields: Any,
        width: Any,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
    ) -> Planned:
        """Return a call that fills the halos of ``fields`` with the neighbours' cells.

            exchange = cart.plan.halo_exchange(u, width=1)
            request = exchange.start()
            ...                        # compute where the halo is not needed
            request.wait()

        A field is this rank's block, with its halo around it. Cells beyond an open end
        of the grid are left alone. Collective: the ranks compare what they pass.

        Args:
            fields: an array of 1 to 8 dimensions with any strides, or several, which
                then move together; they may differ in type and in other dimensions.
            width: cells of the halo on each side: a number; or one per dimension of the
                grid, or a pair (low, high) of them for each.
            axes: the fields' dimension that each dimension of the grid distributes;
                without it the first of the field is the first of the grid, and so on,
                and there must be as many.
            corners: whether the cells that are outside of the block in several
                dimensions are filled, too.
            direct: corners come from the rank that owns them, in one step and up to
                3^n - 1 messages; otherwise dimension by dimension, in 2n messages,
                as it is unless something is said.

        Raises:
            UsageError: an argument is wrong here; nothing was said. In check mode it is
                raised on all ranks.
            MismatchError: the ranks do not agree; on all of them.
        """
        return self._bind(
            EXCHANGE, fields, width, axes=axes, corners=corners, direct=direct
        )

    def halo_reduce(
        self,
        fields: Any,
        width: Any,
        *,
        op: str = "sum",
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
    ) -> Planned:
        """Return a call that combines what halos hold with the cells they stand for.

        The reverse of ``halo_exchange``, with its arguments: each rank's halo goes back
        to the ranks that own these cells, which combine it with theirs by ``op``: sum,
        max, min, or another reduction but avg. Contributions are combined in the same
        order in every run; where the communicator is ``deterministic`` and the order
        matters, in one order: as ``direct``, own cells first, then what comes direction
        by direction. The content of the halo afterwards is undefined.
        """
        return self._bind(
            REDUCE, fields, width, op=op, axes=axes, corners=corners, direct=direct
        )
