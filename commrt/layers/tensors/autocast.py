# SPDX-License-Identifier: Apache-2.0
"""What torch's autocast asks of layers that multiply by themselves."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["full_precision", "is_autocast", "low_precision"]


def is_autocast(x: Any) -> bool:
    """Return whether autocast is on for the device of a tensor."""
    return bool(torch.is_autocast_enabled(x.device.type))


def low_precision(x: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the type that autocast has a product of ``dtype`` computed in.

    Products in float64 are left alone, as by torch.
    """
    if is_autocast(x) and dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def full_precision(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tensor that autocast has made short in a wider type; others as it is."""
    return x.to(dtype) if is_autocast(x) and x.dtype.itemsize < dtype.itemsize else x
