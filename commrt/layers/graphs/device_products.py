# SPDX-License-Identifier: Apache-2.0
"""Products of a graph's blocks with features on an accelerator.

The native kernel reads memory of the host. Elsewhere torch multiplies, by the sparse
library of the device. A block goes to a device at its first product there and stays as
long as the block does.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from commrt.layers.graphs.csr import CsrMatrix, Range

__all__ = ["times_on_device"]

Tensor: TypeAlias = torch.Tensor
Parts: TypeAlias = tuple[Tensor, Tensor, Tensor]

_COPIES: WeakKeyDictionary[CsrMatrix, dict[torch.device, Parts]] = WeakKeyDictionary()


def times_on_device(
    a: CsrMatrix, x: Tensor, out: Tensor, rows: Range | None = None
) -> None:
    """Write the product of a matrix and dense columns, or some rows of it.

    Args:
        a: the matrix, in memory of the host.
        x: a row for each of its columns, on any device of torch.
        out: on the same device; a row for each of the matrix's.
        rows: the rows of ``out`` that are written; None: all.

    Sums are those of the device's library, in an order of its own.
    """
    low, high = rows or (0, a.shape[0])
    ends, columns, values = _parts(a, x.device)
    # The rows' ends are known on the host: no wait for the device.
    first, last = int(a.indptr[low]), int(a.indptr[high])
    if low == high:
        return
    part: Any = torch.sparse_csr_tensor(
        ends[low : high + 1] - first,
        columns[first:last],
        values[first:last],
        size=(high - low, a.shape[1]),
        check_invariants=False,
    )
    # torch has sparse products in narrow types on few devices, autocast or not.
    with torch.autocast(x.device.type, enabled=False):
        out[low:high] = part @ x.detach()


def _parts(a: CsrMatrix, device: torch.device) -> Parts:
    """Return the matrix's arrays on a device."""
    copies = _COPIES.setdefault(a, {})
    found = copies.get(device)
    if found is None:
        ends, columns, values = (
            torch.tensor(array, device=device)
            for array in (a.indptr, a.indices, a.data)
        )
        found = copies[device] = ends, columns, values
    return found
