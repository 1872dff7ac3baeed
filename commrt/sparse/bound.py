# SPDX-License-Identifier: Apache-2.0
"""Sparse sums bound to their arguments.

A sparse vector is checked when the call is bound, and again at every run, since its
indices may be new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.calls.bound_call import BoundCall
from commrt.device_calls.host_work import holds_device_arrays
from commrt.sparse.vector import parts_on_device

if TYPE_CHECKING:
    from commrt.sparse.methods import SparseMethods

__all__ = ["bind_sparse", "bind_topk"]


def bind_sparse(
    comm: SparseMethods, x: Any, result: Any, out: Any, algorithm: Any
) -> BoundCall:
    """Return the sum of what ``x`` holds at each run."""
    comm.check_usable()
    if parts_on_device("sparse_allreduce", x) is None and not holds_device_arrays(out):
        comm._check_sparse(x, result, out, algorithm, False, comm.timeout_s)

    def run(nonblocking: bool) -> Any:
        return comm.sparse_allreduce(
            x, result=result, out=out, algorithm=algorithm, nonblocking=nonblocking
        )

    label = f"sparse/{algorithm or 'by fill'}"
    return BoundCall("sparse_allreduce", label, run)


def bind_topk(comm: SparseMethods, x: Any, k: Any, residual: Any) -> BoundCall:
    """Return the largest elements of what ``x`` and ``residual`` hold at each run."""
    comm.check_usable()
    if not holds_device_arrays(x, residual):
        comm._check_topk(x, k, residual, False, comm.timeout_s)

    def run(nonblocking: bool) -> Any:
        return comm.topk_allreduce(x, k, residual=residual, nonblocking=nonblocking)

    return BoundCall("topk_allreduce", "sparse/topk", run)
