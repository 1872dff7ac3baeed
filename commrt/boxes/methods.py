# SPDX-License-Identifier: Apache-2.0
"""Redistribution without a plan at hand: the method of a communicator."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from commrt.boxes.compared import boxes_for
from commrt.boxes.device_plans import DeviceBoxes
from commrt.boxes.redistribution import (
    Redistribution,
    agreed_boxes,
    common_facts,
    device_boxes,
    make_redistribution,
)
from commrt.boxes.strided import address_table
from commrt.group.agreed_plans import agreed_plan
from commrt.subgroups import GroupCreation
from commrt.vocabulary.checks import check_timeout

if TYPE_CHECKING:
    from commrt.boxes.layouts import Layout

__all__ = ["Redistributing"]


class Redistributing(GroupCreation):
    """The part of a communicator that moves arrays between distributions."""

    @cached_property
    def _agreed_plans(self) -> dict[int, Any]:
        return {}

    @cached_property
    def _kept_boxes(self) -> dict[Any, DeviceBoxes]:
        """Plans of device arrays, by the operation and this rank's arguments."""
        return {}

    @cached_property
    def _compared_boxes(self) -> set[str]:
        """Operations on device arrays of which the ranks have compared a call."""
        return set()

    def redistribute(
        self,
        x: Any,
        source: Layout,
        target: Layout,
        *,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Move an array from one distribution to another; return this rank's part.

        As ``plan.redistribute``, with its arguments. Calls whose arrays are laid out
        like those of an earlier call use its plan. Of host arrays the ranks see that by
        a reduction of 8 bytes, and a nonblocking call waits for it, too; of arrays on
        devices they compare what they passed on the way.
        """
        what = "redistribute"
        whole: Any = self  # a communicator
        limit = self.timeout_s if timeout_s is None else check_timeout(what, timeout_s)

        def run(moved: Redistribution) -> Any:
            arrays = [moved.sent, moved.taken]
            strides = [each.layout.strides for each in arrays]
            said = str(moved.source), str(moved.target), moved.sent.dtype.name
            mine = (*said, strides, id(moved.on) if moved.on else None)

            def compared() -> Any:
                return agreed_plan(
                    whole, what, mine, limit, lambda: agreed_boxes(whole, moved)
                )

            if moved.on is not None:
                boxes, agrees = boxes_for(
                    whole,
                    what,
                    mine,
                    lambda: common_facts(moved),
                    compare=compared,
                    make=lambda: device_boxes(whole, moved),
                )
                return boxes.run(
                    *(arrays, moved.out, what, bool(nonblocking), limit, stream),
                    agrees=agrees,
                )
            plan = compared()
            table = address_table(arrays)
            owners = (table, *(array.owner for array in arrays))
            address, result = table.ctypes.data, moved.out
            return self.run_plan(
                plan, address, 0, owners, None, result, what, bool(nonblocking), limit
            )

        return make_redistribution(
            whole, x, source, target, out, run, nonblocking, stream
        )
