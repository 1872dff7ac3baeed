# SPDX-License-Identifier: Apache-2.0
"""Copies of the nested containers that ``state_dict`` returns."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["copied", "description", "filled"]


def copied(value: Any, into: Any = None) -> Any:
    """Return a copy that shares nothing with ``value``.

    ``into``: an earlier copy, whose memory is used again where arrays have kept their
    type and shape.
    """
    if _is_array(value):
        if _are_alike(value, into):
            into[...] = value
            return into
        return value.copy() if isinstance(value, np.ndarray) else _clone(value)
    if isinstance(value, Mapping):
        named = into if isinstance(into, Mapping) else {}
        return {key: copied(each, named.get(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        same = type(into) is type(value) and len(into) == len(value)
        before = into if same else [None] * len(value)
        return type(value)(map(copied, value, before))
    return copy.deepcopy(value)


def filled(now: Any, kept: Any) -> Any:
    """Return a state with what is in ``kept`` from there."""
    return {**now, **kept} if isinstance(now, Mapping) else kept


def description(name: str, value: Any) -> list[str]:
    """Return a line for each array in a state: its name, type and shape."""
    if _is_array(value):
        kind = str(value.dtype).removeprefix("torch.")
        return [f"{name}: {kind} {tuple(value.shape)}"]
    if isinstance(value, Mapping):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), each) for number, each in enumerate(value)]
    else:
        return []
    return [line for key, each in items for line in description(f"{name}.{key}", each)]


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    tensor = torch is not None and isinstance(value, torch.Tensor)
    return tensor or isinstance(value, np.ndarray)


def _clone(tensor: Any) -> Any:
    return tensor.detach().clone()


def _are_alike(value: Any, other: Any) -> bool:
    return (
        type(other) is type(value)
        and other.dtype == value.dtype
        and other.shape == value.shape
        and getattr(other, "device", None) == getattr(value, "device", None)
    )
