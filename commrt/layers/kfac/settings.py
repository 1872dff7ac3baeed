# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of K-FAC, which stand in its parameter group and may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from commrt.errors import UsageError, shown

__all__ = ["Settings"]


class Settings(NamedTuple):
    """Checked hyperparameters of one step."""

    lr: float
    damping: float
    momentum: float
    weight_decay: float
    factor_decay: float
    factor_every: int
    inverse_every: int
    kl_clip: float | None

    @classmethod
    def of(cls, what: str, given: Mapping[str, Any]) -> Settings:
        """Return the settings in a mapping; UsageError where one does not fit."""
        values = {name: given[name] for name in cls._fields}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[name] = value = value.item()  # a learning rate may be a tensor
            if name in ("factor_every", "inverse_every"):
                if type(value) is not int or value < 1:
                    raise UsageError(
                        f"{what}: {name}={shown(value)} must be an integer from 1"
                    )
                continue
            if name == "kl_clip" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_positive = name in ("damping", "kl_clip")
            is_below_one = name in ("momentum", "factor_decay")
            fits = (
                is_number
                and math.isfinite(value)
                and value >= 0
                and not (is_positive and value == 0)
                and not (is_below_one and value >= 1)
            )
            if not fits:
                least = "above 0" if is_positive else "from 0"
                most = ", below 1" if is_below_one else ""
                raise UsageError(
                    f"{what}: {name}={shown(value)} must be a number {least}{most}"
                )
            values[name] = float(value)
        return cls(**values)
