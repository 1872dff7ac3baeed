# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients that lie in parts on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TypeAlias

import torch

from commrt.comm import Communicator

__all__ = ["total_norm"]

Tensor: TypeAlias = torch.Tensor


def total_norm(views: Iterable[Tensor], power: float, comm: Communicator) -> Tensor:
    """Return the norm of all ranks' gradients, in float64 on the host; collective.

    Args:
        views: this rank's pieces, with their gradients.
        power: the order of the norm.
        comm: the ranks.

    Bytes: an ``allreduce`` of 8.
    """
    found = torch.zeros((), dtype=torch.float64)
    for view in views:
        if view.grad is None or not view.grad.numel():
            continue
        if power == inf:
            found = torch.maximum(found, view.grad.abs().max().double().cpu())
            continue
        gradient = torch.view_as_real(view.grad) if view.is_complex() else view.grad
        if view.is_complex() and power != 2:
            gradient = view.grad.abs()
        norm = torch.linalg.vector_norm(gradient, power, dtype=torch.float64)
        found += norm.cpu() ** power
    comm.allreduce(found, op="max" if power == inf else "sum")
    return found if power == inf else found ** (1.0 / power)
