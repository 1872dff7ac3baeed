# SPDX-License-Identifier: Apache-2.0
"""A scaler of losses whose ranks skip the same steps."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import RefusedError, UsageError, shown
from commrt.layers.sharded_update.optimizer import ShardedOptimizer

__all__ = ["GradScaler"]

Tensor: TypeAlias = torch.Tensor
_FAILED = 2.0
"""Says that a rank has an error; 1: it has an overflow."""


class GradScaler(torch.amp.GradScaler):  # type: ignore[misc]
    """torch's GradScaler, for optimizers that divide their work among ranks.

        scaler = GradScaler(comm)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    An overflow on any rank counts on all, so all skip the same steps and have the same
    scale. Of a ``ShardedOptimizer`` it looks at the sums over ranks, which it lets it
    make. Call ``unscale_(optimizer)`` before ``optimizer.clip_grad_norm_``.

    Args:
        comm: the optimizer's ranks.
        device: the type of device that scales lie on.
        kwargs: further ones of torch's GradScaler, equal on all ranks.

    Bytes: those of ``reduce_gradients``, and an ``allreduce`` of 8 for each look.
    """

    def __init__(self, comm: Communicator, device: str = "cpu", **kwargs: Any) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(f"GradScaler: comm={shown(comm)} must be a communicator")
        super().__init__(device, **kwargs)
        self._comm = comm

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients; return, by device, 1 where any rank found an overflow."""
        target: Any = optimizer
        if isinstance(optimizer, ShardedOptimizer):
            if not optimizer.is_reduced:
                optimizer.reduce_gradients()
            target = _Sums(optimizer.views)
        found: dict[torch.device, Tensor] = {}
        error: Exception | None = None
        try:
            found = super()._unscale_grads_(target, inv_scale, found_inf, allow_fp16)
        except Exception as caught:  # noqa: BLE001  the others wait to hear of it
            error = caught
        if not found:  # this rank has no gradients, and goes by those of the others
            found = {found_inf.device: found_inf}
        largest = torch.stack([each.detach().double().cpu() for each in found.values()])
        total = (
            torch.full((), _FAILED, dtype=torch.float64)
            if error is not None
            else largest.max()
        )
        if self._comm.size > 1:
            self._comm.allreduce(total, op="max")
        if error is not None:
            raise error
        if float(total) == _FAILED:
            raise RefusedError(
                f"GradScaler on {self._comm.name}: another rank raised an error as it "
                f"looked for overflows, so no rank goes on; that rank's error says why"
            )
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.mark_scaled()
        for each in found.values():
            each.fill_(float(total))
        return found


class _Sums:
    """Stands for an optimizer whose gradients are the sums of a rank's pieces."""

    def __init__(self, views: list[Tensor]) -> None:
        self.param_groups = [{"params": views}]
