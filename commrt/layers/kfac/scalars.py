# SPDX-License-Identifier: Apache-2.0
"""Numbers that a program reads from tensors, few times; local.

Each read of a number makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["on_host"]

Tensor: TypeAlias = torch.Tensor


def on_host(scalars: Sequence[Tensor]) -> list[Any]:
    """Return the values of tensors of one element, read once for each device and type.

    Args:
        scalars: on any devices.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, each in enumerate(scalars):
        kinds.setdefault((each.device, each.dtype), []).append(at)
    found: list[Any] = [None] * len(scalars)
    for places in kinds.values():
        values = torch.stack([scalars[at].reshape(()) for at in places]).tolist()
        for at, value in zip(places, values, strict=True):
            found[at] = value
    return found
