# SPDX-License-Identifier: Apache-2.0
"""Gradients of all ranks as one mean over samples, summed here or by somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.data import GradientReducer
from commrt.layers.kfac.scalars import on_host
from commrt.layers.tensor3d.once import mark_summed, refuse_summed

__all__ = ["Gradients", "bits_of"]

Tensor: TypeAlias = torch.Tensor

_BUCKET_NBYTES = 25 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = (1 << 63) - 1
_CHUNK = 1 << 20
"""Elements that are mixed at a time, for their mixed values take 8 bytes each."""
_ODD = 0x2545F4914F6CDD1D
"""A factor that spreads bits (Vigna 2016, arXiv 1402.6246)."""


def bits_of(tensors: Sequence[Tensor | None]) -> int:
    """Return a number of int64 that is equal where tensors have the same bits.

    Tensors with other bits, or the same ones in another order, have another number but
    for a chance of about 2⁻⁶³. Missing ones count as zeros. It is 0 where all bits are.
    """
    sums: list[Tensor] = []
    numbers: list[int] = []
    for number, each in enumerate(tensors):
        if each is None or not each.numel():
            continue
        flat = each.detach().view(_INTEGERS[each.element_size()]).reshape(-1)
        for begin in range(0, len(flat), _CHUNK):
            mixed = _mixed(flat[begin : begin + _CHUNK].to(torch.int64, copy=True))
            places = torch.arange(begin, begin + len(mixed), device=mixed.device)
            mixed *= 2 * places + 1  # odd, so no bit gets lost
            sums.append(_mixed(mixed).sum())
            numbers.append(2 * number + 1)
    found = 0
    for number, value in zip(numbers, on_host(sums), strict=True):
        found += number * int(value)
    return (found ^ (found >> 63)) & _WORD


def _mixed(integers: Tensor) -> Tensor:
    """Spread the bits of each integer, in place; 0 stays 0, and others differ."""
    integers ^= integers >> 32
    integers *= _ODD
    integers ^= integers >> 29
    return integers


class Gradients:
    """The gradients of a model's parameters.

    Args:
        comm: the ranks.
        named: parameters with their names, the same on all ranks.
        are_local: True: each rank has those of its own samples.
        loss: "mean", "sum" or "global_mean", as ``KFAC`` has it.
    """

    def __init__(
        self,
        comm: Communicator,
        named: Sequence[tuple[str, Tensor]],
        are_local: bool,
        loss: str,
    ) -> None:
        self._named, self._are_local, self._loss = named, are_local, loss
        self._reducer: GradientReducer | None = None
        if are_local and comm.size > 1:
            parameters = [each for _, each in named]
            self._reducer = GradientReducer(
                comm, parameters, op="sum", bucket_nbytes=_BUCKET_NBYTES
            )

    def check(self) -> None:
        """Raise UsageError for gradients that cannot be used, or were summed; local."""
        for name, parameter in self._named:
            gradient = parameter.grad
            if gradient is None:
                continue
            if hasattr(gradient, "to_local"):
                raise UsageError(
                    f"KFAC.step: the gradient of {name} is cut over ranks; K-FAC needs "
                    f"whole gradients on each rank"
                )
            if gradient.layout != torch.strided:
                raise UsageError(
                    f"KFAC.step: the gradient of {name} is sparse; make its layer "
                    f"with dense gradients"
                )
        if self._are_local:
            refuse_summed("KFAC.step", self._named)

    def present(self) -> list[bool]:
        """Return which parameters have a gradient on this rank."""
        return [parameter.grad is not None for _, parameter in self._named]

    def bits(self) -> int:
        """Return a number of int64 that is equal where all gradients are.

        It is 0 where one has NaN or infinity: such ones are equal by chance.
        """
        given = [p.grad for _, p in self._named if p.grad is not None]
        are_finite = on_host([torch.isfinite(each).all() for each in given])
        if not all(are_finite):
            return 0
        return bits_of([parameter.grad for _, parameter in self._named])

    def finish(self, own_samples: int, samples: int, scale: float) -> None:
        """Make gradients those of the mean over all samples.

        Collective where they are local: one ``allreduce`` for about 25 MiB of them,
        with a byte for each parameter. A parameter without a gradient on all ranks
        gets none.

        Args:
            own_samples: of this rank.
            samples: of all ranks, at least one.
            scale: by which the loss was multiplied.
        """
        factor = 1.0 / scale
        if self._are_local and self._loss == "sum":
            factor /= samples
        if self._reducer is None:
            for _, parameter in self._named:
                if parameter.grad is not None and factor != 1:
                    parameter.grad.mul_(factor)
        else:
            if self._loss == "mean":
                factor *= own_samples / samples
            given = []
            for _, parameter in self._named:
                gradient = parameter.grad
                # A mean over no samples may be NaN, and counts for nothing.
                is_there = gradient is not None and own_samples > 0
                if gradient is not None and is_there and factor != 1:
                    gradient.mul_(factor)
                given.append(gradient if is_there else None)
            sums = self._reducer(given)
            for (_, parameter), total in zip(self._named, sums, strict=True):
                parameter.grad = total
            mark_summed(self._named)

    def close(self) -> None:
        """Release its communicator; local, idempotent."""
        if self._reducer is not None:
            self._reducer.close()
