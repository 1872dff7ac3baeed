# SPDX-License-Identifier: Apache-2.0
"""Gradients of a step: put aside those of before, summed over replicas, put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.request import Request, wait_all

__all__ = ["GradientSums", "KeptGradients", "broadcast_from_first"]

Tensor: TypeAlias = torch.Tensor

_BUCKET_NBYTES = 32 << 20
"""Bytes of one sum, about."""


class KeptGradients:
    """Gradients that parameters had before a step, which begins without any."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._kept = [(each, each.grad) for each in parameters]
        for each in parameters:
            each.grad = None

    def add(self) -> None:
        """Add the step's gradients to those of before."""
        with torch.no_grad():
            for parameter, before in self._kept:
                if before is None:
                    continue
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before

    def restore(self) -> None:
        """Forget the step's gradients."""
        for parameter, before in self._kept:
            parameter.grad = before


class _Bucket(NamedTuple):
    parameters: list[Tensor]
    flat: Tensor
    """Gradients, and behind them 1 for each parameter that has one, else 0."""
    request: Request


class GradientSums:
    """Sums of a stage's gradients over replicas, which are under way.

    Args:
        comm: the ranks that have this stage.
        parameters: those that are trained, the same on all of these ranks.

    Bytes: an ``allreduce`` of all gradients, and of an element for each parameter.
    """

    def __init__(self, comm: Communicator, parameters: Sequence[Tensor]) -> None:
        self._comm, self._parameters = comm, parameters
        self._buckets: list[_Bucket] = []
        self.is_started = False

    def check(self) -> None:
        """Raise UsageError for gradients that cannot be summed; local."""
        for each in self._parameters:
            if each.grad is not None and each.grad.layout != torch.strided:
                raise UsageError(
                    f"MessageDrivenPipeline: a gradient of shape {tuple(each.shape)} "
                    f"has layout {each.grad.layout}; only dense ones are summed over "
                    f'"data": use sparse=False'
                )

    def start(self) -> None:
        """Start all sums; ranks without a gradient add zeros. Collective."""
        # All memory is taken before anything starts: replicas start all sums, or none.
        packed: list[tuple[list[Tensor], Tensor]] = []
        for parameters in _buckets(self._parameters):
            there = [each.grad is not None for each in parameters]
            parts = [
                torch.zeros_like(each).reshape(-1)
                if each.grad is None or each.grad.layout != torch.strided
                else each.grad.reshape(-1)
                for each in parameters
            ]
            first = parameters[0]
            flags = torch.tensor(there, device=first.device).to(first.dtype)
            packed.append((parameters, torch.cat([*parts, flags])))
        self.is_started = True
        for parameters, flat in packed:
            request = self._comm.allreduce(flat, nonblocking=True)
            self._buckets.append(_Bucket(parameters, flat, request))

    def wait(self) -> None:
        """Wait for all sums, and forget them."""
        wait_all([each.request for each in self._buckets])

    def take(self) -> None:
        """Give parameters their sums; None where no rank has a gradient."""
        self.wait()
        for parameters, flat, _ in self._buckets:
            lengths = [each.numel() for each in parameters]
            *sums, flags = flat.split([*lengths, len(parameters)])
            found = zip(parameters, sums, flags.tolist(), strict=True)
            for parameter, total, num_ranks in found:
                parameter.grad = total.view(parameter.shape) if num_ranks else None


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one type and device, the last ones first."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in reversed(parameters):
        alike.setdefault((each.dtype, each.device), []).append(each)
    for found in alike.values():
        bucket: list[Tensor] = []
        nbytes = 0
        for each in found:
            if bucket and nbytes + each.nbytes > _BUCKET_NBYTES:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(each)
            nbytes += each.nbytes
        yield bucket


def broadcast_from_first(comm: Communicator, stage: nn.Module) -> RuntimeError | None:
    """Give a stage the parameters and buffers of the first replica; collective.

    Returns torch's error for a tensor that it does not write to, such as an expanded
    one, so that ranks of other stages may hear of it.
    """
    error: RuntimeError | None = None
    with torch.no_grad():
        for tensor in (*stage.parameters(), *stage.buffers()):
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            comm.bcast(values, root=0)
            try:
                tensor.copy_(values)
            except RuntimeError as wrong:
                error = error or wrong
    return error
