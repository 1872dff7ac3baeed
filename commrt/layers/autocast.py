# SPDX-License-Identifier: Apache-2.0
"""The element types that torch's autocast asks for, where layers multiply themselves.

As torch does, it changes float32 and narrower types, and leaves float64 alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "full_precision",
    "is_autocast",
    "low_precision",
    "may_differ",
    "without_autocast",
]

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def is_autocast(x: Any) -> bool:
    """Return whether autocast is on for the device of a tensor."""
    return bool(torch.is_autocast_enabled(x.device.type))


def may_differ(x: Any, dtype: torch.dtype) -> bool:
    """Return whether autocast makes one type of that of ``x`` and of another one."""
    return is_autocast(x) and x.dtype in _CAST and dtype in _CAST


def low_precision(x: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the type that autocast has a product of ``dtype`` computed in."""
    if is_autocast(x) and dtype in _CAST:
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def full_precision(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tensor in ``dtype`` where autocast may have made it narrower."""
    return x.to(dtype) if may_differ(x, dtype) else x


@contextlib.contextmanager
def without_autocast(device_types: Iterable[str]) -> Iterator[None]:
    """Compute within in the types of the tensors, whatever is around.

    Args:
        device_types: such as "cuda"; of the devices that compute.
    """
    with contextlib.ExitStack() as stack:
        for each in device_types:
            stack.enter_context(torch.autocast(each, enabled=False))
        yield
