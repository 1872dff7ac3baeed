# SPDX-License-Identifier: Apache-2.0
"""Batch normalization whose statistics are those of all ranks' batches."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from commrt.errors import UsageError
from commrt.hvd.current import current
from commrt.layers.spatial.normalization import batch_norm

__all__ = ["SyncBatchNorm"]

Tensor: TypeAlias = torch.Tensor


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """``torch.nn.BatchNorm`` of any dimensions, over the batches of all ranks.

    Arguments are those of ``torch.nn.BatchNorm2d``. Ranks may have batches of different
    sizes, also empty ones. In training forward and backward passes are collective: all
    ranks run the same layers in the same order. They meet in a round first, so that a
    rank may wait for an operation before. Raises MismatchError while one has joined.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(
                f"hvd.SyncBatchNorm: the input of shape {tuple(input.shape)} must have "
                f"a batch and channels"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized batch of this rank."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        kept = self.track_running_stats
        session = current()
        comms = []
        if uses_batch and session.comm.size > 1:
            session.meet("hvd.SyncBatchNorm", "forward")
            comms = [session.norm_comm()]
        found: Tensor = batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            comms=comms,
            training=uses_batch,
            momentum=momentum,
            eps=self.eps,
        )
        if comms and found.grad_fn is not None:
            found.grad_fn.register_prehook(
                lambda _: session.meet("hvd.SyncBatchNorm", "backward")
            )
        return found
