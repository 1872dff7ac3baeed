# SPDX-License-Identifier: Apache-2.0
"""Sparse COO tensors summed over all ranks, by commrt's sparse allreduce.

torch's gradients of embeddings are hybrid: an index names a row, and a value is a row
of numbers. commrt's sparse vectors name elements, so each row's elements are named one
by one, and the rows of the sum are found from them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from commrt.sparse.cost import ALGORITHMS
from commrt.torch.calls import Calls
from commrt.torch.errors import wrong_call
from commrt.torch.operands import plain
from commrt.torch.per_call import ASKED
from commrt.torch.profiling import profiled
from commrt.torch.reductions import reduction_of
from commrt.torch.work import CommrtWork

__all__ = ["sparse_allreduce"]

_SUMS = ("sum", "avg")


def sparse_allreduce(
    calls: Calls, x: torch.Tensor, opts: c10d.AllreduceOptions
) -> CommrtWork | None:
    """Sum a sparse tensor over all ranks, in place."""
    op = reduction_of(opts.reduceOp)
    if x.layout is not torch.sparse_coo:
        raise wrong_call(
            f"allreduce: a tensor of layout {x.layout}: expected a dense or a sparse "
            f"COO tensor"
        )
    if op.name not in _SUMS:
        raise wrong_call(
            f"allreduce: op={op.name!r} of sparse tensors: what is not stored counts "
            f"as zero, so only {' and '.join(_SUMS)} are defined"
        )
    given, shown = x.detach().coalesce(), _complex_of(x)
    out: list[Any] = []
    request: Any = None
    waits, limit = calls.waits(opts), calls.limit(opts)
    arguments: dict[str, Any] = {} if limit is None else {"timeout_s": limit}
    arguments["algorithm"] = _chosen(calls)
    calls.settle()
    with calls.raising(), profiled("sparse_allreduce"):
        request = calls.comm.sparse_allreduce(
            _elements(given), result="sparse", nonblocking=True, **arguments
        )
        if waits:
            out.append(request.wait())

    def back() -> None:
        total = out[0] if out else request.wait()
        summed = _like(x, total)
        if op.name == "avg":
            summed = summed / calls.comm.size
        with torch.no_grad():
            x.copy_(summed)  # a detached one would keep its entries to itself
            if shown is not None:
                shown.copy_(torch.view_as_complex(summed))

    return calls.end(request, waits, [x], back)


def _complex_of(x: torch.Tensor) -> torch.Tensor | None:
    """Return the complex tensor that torch's all_reduce has passed as pairs.

    A copy into such a view of a sparse tensor changes only the view.
    """
    base = x._base if x._is_view() else None
    return base if base is not None and base.is_sparse and base.is_complex() else None


def _chosen(calls: Calls) -> str | None:
    """Return the algorithm that the call or the group asks for."""
    asked = ASKED.get()
    if asked is None:
        return calls.sparse_algorithm
    name: str = asked.get("algorithm", "")
    if set(asked) != {"algorithm"} or set(name) & set("/{"):
        raise wrong_call(
            f"all_reduce of a sparse tensor within commrt.torch.using: {asked} names a "
            f"backend or parameters, which sparse sums have not; name an algorithm "
            f"alone, one of {', '.join(ALGORITHMS)}, or make the call outside"
        )
    return name


def _elements(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return the elements' places in the flat tensor, and their values."""
    indices, values = x.indices(), plain(x.values())
    places = torch.zeros(indices.shape[1], dtype=torch.int64, device=x.device)
    for axis in range(x.sparse_dim()):
        places = places * x.shape[axis] + indices[axis]
    row = math.prod(x.shape[x.sparse_dim() :])
    if x.dense_dim():
        within = torch.arange(row, device=x.device)
        places = (places[:, None] * row + within).reshape(-1)
    return places.contiguous(), values.reshape(-1), tuple(x.shape)


def _like(x: torch.Tensor, total: Any) -> torch.Tensor:
    """Return the sum as a tensor of the form of ``x``."""
    sparse, dense = x.shape[: x.sparse_dim()], x.shape[x.sparse_dim() :]
    row = math.prod(dense)
    places = total.indices.long()
    values = total.values
    if not row:
        places, values = places.new_empty(0), values.new_empty(0, *dense)
    elif x.dense_dim():
        rows, at = torch.unique(places // row, return_inverse=True)
        filled = values.new_zeros(len(rows) * row)
        filled[at * row + places % row] = values
        places, values = rows, filled.reshape(len(rows), *dense)
    indices: list[torch.Tensor] = []
    for length in reversed(sparse):
        indices.insert(0, places % length)
        places = places // length
    found = torch.stack(indices) if indices else places.new_empty(0, len(values))
    return torch.sparse_coo_tensor(
        found, values, x.shape, is_coalesced=True, check_invariants=False
    )
