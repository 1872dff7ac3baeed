# SPDX-License-Identifier: Apache-2.0
"""Nonblocking calls of several steps, of which every rank knows the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commrt.comm import Communicator

__all__ = ["STEPPED_CALLS", "Call", "expected", "sparse", "total"]

Call = Callable[[Communicator], Any]


def sparse(comm: Communicator, algorithm: str | None = None) -> Any:
    """Start a sparse sum, whose result is dense."""
    x = np.array([comm.rank, 7]), np.ones(2, np.float32), 9
    return comm.sparse_allreduce(
        x, result="dense", algorithm=algorithm, nonblocking=True
    )


def _largest(comm: Communicator) -> Any:
    x = np.arange(9, dtype=np.float32) * 2
    return comm.topk_allreduce(x, 2, nonblocking=True)


def _compressed(comm: Communicator) -> Any:
    x = np.full(9, 2.0, np.float32)
    return comm.allreduce(x, out=np.empty_like(x), compress="float16", nonblocking=True)


STEPPED_CALLS: dict[str, Call] = {
    "sparse": sparse,
    "ring": lambda comm: sparse(comm, "ring"),
    "largest": _largest,
    "compressed": _compressed,
}


def total(found: Any) -> float:
    """Return the sum of what a call has returned."""
    return float(np.sum(getattr(found, "values", found)))


def expected(name: str, size: int) -> float:
    """Return the sum of what a call is to return."""
    return {"largest": 30.0 * size, "compressed": 18.0 * size}.get(name, 2.0 * size)
