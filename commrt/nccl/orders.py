# SPDX-License-Identifier: Apache-2.0
"""The one order of NCCL's work on each device of the process, and its end.

NCCL communicators of a device share it, whichever communicators of commrt they belong
to. A communicator that nobody uses is finalised with those of the other ranks as these
come to it; whoever has it last, at the end of the process, does not wait for long.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Any

from commrt import _native
from commrt.vocabulary.limits import deadline_after

__all__ = ["end_all", "order_of"]

_GRACE_S = 5.0
_ABORT_S = 2.0
_LOCK = threading.Lock()
_ORDERS: dict[int, tuple[Any, _native.NcclOrder]] = {}
_REGISTERED: list[int] = []


def order_of(device: Any, first_value: int = 0) -> _native.NcclOrder:
    """Return the order of a device's work, made at the first call for it.

    That allocates pinned memory, a stream and an event, which may wait for the device.
    """
    with _LOCK:
        found = _ORDERS.get(id(device))
        if found is None:
            made = _native.make_nccl_order(device, first_value)
            found = _ORDERS[id(device)] = device, made
        if not _REGISTERED:
            # Handlers run in the reverse order: before those of cupy and torch, which
            # take the driver away, as these were imported before their arrays came.
            atexit.register(_end_at_exit, os.getpid())
            _REGISTERED.append(os.getpid())
        return found[1]


def end_all(timeout_s: float = _GRACE_S) -> None:
    """End the communicators that nobody uses, and give back what devices hold for them.

    Those that other ranks have not come to end within ``timeout_s`` are aborted.
    """
    deadline = deadline_after(timeout_s)
    with _LOCK:
        orders = [order for _, order in _ORDERS.values()]
        _ORDERS.clear()
    while sum(order.sweep() for order in orders) and time.monotonic() < deadline:
        os.sched_yield()
    for order in orders:
        order.close(_ABORT_S)


def _end_at_exit(owner: int) -> None:
    """A forked process must not touch what is its parent's."""
    if os.getpid() == owner:
        end_all()
