# SPDX-License-Identifier: Apache-2.0
"""Sparse sums bound to their arguments.

A sparse vector is checked when the call is bound, and again at every run, since its
indices may be new.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from commrt.calls.bound_call import Binders, BoundCall
from commrt.device_calls.host_work import holds_device_arrays
from commrt.group.group import Group
from commrt.sparse.sums import SparseSums
from commrt.sparse.vector import parts_on_device

__all__ = ["sparse_binders"]


def sparse_binders(group: Group, sums: SparseSums) -> Binders:
    """Return the binders of the sparse sums, by name."""
    return {
        "sparse_allreduce": partial(_bind_sparse, group, sums),
        "topk_allreduce": partial(_bind_topk, group, sums),
    }


def _bind_sparse(
    group: Group, sums: SparseSums, x: Any, *, result: Any, out: Any, algorithm: Any
) -> BoundCall:
    """Return the sum of what ``x`` holds at each run."""
    group.check_usable()
    what = "sparse_allreduce"
    on_device = parts_on_device(what, x) is not None
    if not on_device and not holds_device_arrays(what, out=out):
        sums.check_sparse(x, result, out, algorithm, False, group.timeout_s)

    def run(nonblocking: bool) -> Any:
        return sums.sparse_allreduce(
            x, result=result, out=out, algorithm=algorithm, nonblocking=nonblocking
        )

    label = f"sparse/{algorithm or 'by fill'}"
    return BoundCall(what, label, run)


def _bind_topk(
    group: Group, sums: SparseSums, x: Any, k: Any, *, residual: Any
) -> BoundCall:
    """Return the largest elements of what ``x`` and ``residual`` hold at each run."""
    group.check_usable()
    if not holds_device_arrays("topk_allreduce", x=x, residual=residual):
        sums.check_topk(x, k, residual, False, group.timeout_s)

    def run(nonblocking: bool) -> Any:
        return sums.topk_allreduce(x, k, residual=residual, nonblocking=nonblocking)

    return BoundCall("topk_allreduce", "sparse/topk", run)
