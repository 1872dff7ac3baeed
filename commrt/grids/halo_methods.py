# SPDX-License-Identifier: Apache-2.0
"""Halo exchange without a plan at hand: the methods of a communicator over a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.boxes.compared import boxes_for
from commrt.boxes.strided import address_table
from commrt.grids.halo_calls import (
    EXCHANGE,
    REDUCE,
    Halo,
    agreed_halo_plan,
    common_facts,
    device_boxes,
    make_halo,
    sent_nbytes,
)
from commrt.grids.neighbors import NeighborCalls
from commrt.group.agreed_plans import agreed_plan
from commrt.vocabulary.checks import check_timeout

__all__ = ["HaloCalls"]


class HaloCalls(NeighborCalls):
    """The halo operations of a communicator over a grid; their plans are kept."""

    def halo_exchange(
        self,
        fields: Any,
        width: Any,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Fill the halos of ``fields`` with the neighbours' cells; return ``fields``.

        As ``plan.halo_exchange``, with its arguments. Calls whose arrays are laid out
        like those of an earlier call use its plan. Of host arrays the ranks see that by
        a reduction of 8 bytes, and a nonblocking call waits for it, too; of arrays on
        devices they compare what they passed on the way.
        """
        how = nonblocking, timeout_s, stream
        return self._halo(EXCHANGE, None, fields, width, axes, corners, direct, *how)

    def halo_reduce(
        self,
        fields: Any,
        width: Any,
        *,
        op: str = "sum",
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Combine what halos hold with the cells they stand for; return ``fields``.

        As ``plan.halo_reduce``, with its arguments; plans are kept as those of
        ``halo_exchange``.
        """
        how = nonblocking, timeout_s, stream
        return self._halo(REDUCE, op, fields, width, axes, corners, direct, *how)

    def _sent_to_neighbors(
        self, what: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> int:
        """Return the bytes that a call with these arguments sends to other ranks."""
        if what not in (EXCHANGE, REDUCE):
            return super()._sent_to_neighbors(what, args, more)
        whole: Any = self  # a CartCommunicator
        return sent_nbytes(whole, what, *args, **more)

    def _halo(
        self,
        what: str,
        op: str | None,
        fields: Any,
        width: Any,
        axes: Any,
        corners: Any,
        direct: Any,
        nonblocking: Any,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        whole: Any = self  # a CartCommunicator
        limit = self.timeout_s if timeout_s is None else check_timeout(what, timeout_s)

        def run(halo: Halo) -> Any:
            arrays = halo.arrays
            places = [
                (each.shape, each.layout.strides, each.dtype.name) for each in arrays
            ]
            mine = halo.shape, halo.reduction, places, id(halo.on) if halo.on else None

            def compared() -> Any:
                return agreed_plan(
                    whole, what, mine, limit, lambda: agreed_halo_plan(whole, halo)
                )

            if halo.on is not None:
                boxes, agrees = boxes_for(
                    whole,
                    what,
                    mine,
                    lambda: common_facts(whole, halo),
                    compare=compared,
                    make=lambda: device_boxes(whole, halo),
                )
                return boxes.run(
                    *(arrays, fields, what, bool(nonblocking), limit, stream),
                    agrees=agrees,
                )
            plan = compared()
            table = address_table(arrays)
            owners = (table, *(array.owner for array in arrays))
            address = table.ctypes.data
            return self.run_plan(
                plan, address, 0, owners, None, fields, what, bool(nonblocking), limit
            )

        given = fields, width, axes, corners, direct, op
        return make_halo(whole, what, *given, run, nonblocking, stream)
