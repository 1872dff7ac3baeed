# SPDX-License-Identifier: Apache-2.0
"""Arguments of K-FAC that name one of several ways, and do not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commrt.errors import UsageError, shown

__all__ = ["GRADIENTS", "LOSSES", "check_choices"]

LOSSES = ("mean", "sum", "global_mean")
GRADIENTS = {"local": True, "synchronised": False}
"""True for gradients that are of a rank's own samples alone."""


def check_choices(
    model: Any, gradients: Any, loss: Any, samples_of: Any, grad_scaler: Any
) -> None:
    """Raise UsageError for arguments of the constructor that do not fit."""
    for name, value, known in (
        ("gradients", gradients, GRADIENTS),
        ("loss", loss, LOSSES),
    ):
        if value not in known:
            raise UsageError(
                f"KFAC: {name}={shown(value)} must be one of {', '.join(known)}"
            )
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if is_ddp and GRADIENTS[gradients]:
        raise UsageError(
            "KFAC: the model is in DistributedDataParallel, which averages gradients; "
            'give gradients="synchronised", or the bare model'
        )
    if samples_of is not None and not callable(samples_of):
        raise UsageError(f"KFAC: samples_of={shown(samples_of)} must be callable")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise UsageError(
            f"KFAC: grad_scaler={shown(grad_scaler)} must be a torch.amp.GradScaler"
        )
