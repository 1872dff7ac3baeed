# SPDX-License-Identifier: Apache-2.0
"""Scales of losses, as torch's GradScaler hands them to an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from commrt.errors import UsageError

__all__ = ["ScaledLoss"]


class ScaledLoss:
    """The scale of gradients, and their overflows.

    ``GradScaler.step`` sets ``grad_scale`` and ``found_inf`` of an optimizer that skips
    steps itself. It removes both after a step without an error.

    Args:
        optimizer: the one that the scaler calls.
        scaler: the program's; None: it has none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._optimizer, self._scaler = optimizer, scaler

    def scale(self) -> float:
        """Return the factor by which losses are multiplied."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return float(scaler.get_scale())

    def check(self) -> None:
        """Raise UsageError unless the scaler that KFAC knows calls the optimizer."""
        is_called = hasattr(self._optimizer, "found_inf")
        if is_called and self._scaler is None:
            raise UsageError(
                "KFAC.step: a GradScaler calls it that KFAC does not know; pass it as "
                "grad_scaler, since factors need the scale, too"
            )
        is_scaling = self._scaler is not None and self._scaler.is_enabled()
        if is_scaling and not is_called:
            raise UsageError(
                "KFAC.step: the loss is scaled; call scaler.step(optimizer)"
            )

    def has_overflow(self) -> bool:
        """Return whether a gradient of this rank has an infinity or NaN."""
        found: Any = getattr(self._optimizer, "found_inf", 0)  # 0 without gradients
        return bool(found)

    def unscale(self) -> float:
        """Return the factor that gradients still have."""
        scale: Any = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def forget(self) -> None:
        """Remove what the scaler has set, as it does not do itself after an error.

        It would multiply the next scale by this one.
        """
        for name in ("grad_scale", "found_inf"):
            if hasattr(self._optimizer, name):
                delattr(self._optimizer, name)
