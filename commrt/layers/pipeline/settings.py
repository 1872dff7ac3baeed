# SPDX-License-Identifier: Apache-2.0
"""Arguments of a pipeline's constructor, which are checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.pipeline.agreement import Numbers

__all__ = ["REDUCTIONS", "check", "check_alike", "device_of"]

REDUCTIONS = ("mean", "sum")

_CLASS = "MessageDrivenPipeline"
_MOST_IN_FLIGHT = 2**31 - 1


def check(
    stage: Any,
    loss_fn: Any,
    is_last: bool,
    reduction: Any,
    limit: int | None,
    in_flight: Any,
    fixed_shapes: Any,
) -> None:
    """Raise UsageError for arguments of the constructor that do not fit."""
    if not isinstance(stage, nn.Module):
        raise UsageError(
            f"{_CLASS}: stage={shown(stage)} must be a module, as split() returns it"
        )
    if not callable(loss_fn) and (is_last or loss_fn is not None):
        raise UsageError(
            f"{_CLASS}: loss_fn={shown(loss_fn)} must be callable on the last stage"
        )
    if reduction not in REDUCTIONS:
        raise UsageError(
            f'{_CLASS}: reduction={shown(reduction)} must be "mean" or "sum"'
        )
    if limit is None or not 1 <= limit <= _MOST_IN_FLIGHT:
        raise UsageError(
            f"{_CLASS}: in_flight={shown(in_flight)} must be an integer from 1 to "
            f"{_MOST_IN_FLIGHT}, or None"
        )
    if not isinstance(fixed_shapes, bool):
        raise UsageError(
            f"{_CLASS}: fixed_shapes={shown(fixed_shapes)} must be True or False"
        )
    devices = {each.device for each in (*stage.parameters(), *stage.buffers())}
    if len(devices) > 1:
        raise UsageError(
            f"{_CLASS}: the stage has tensors on {', '.join(map(str, devices))}; a "
            f"stage must be on one device"
        )


def check_alike(every: Numbers, ranks: Sequence[Sequence[int]]) -> None:
    """Raise UsageError, on all ranks, where their settings differ."""
    for number, name in enumerate(("reduction", "in_flight", "fixed_shapes")):
        others = np.flatnonzero(every[:, number] != every[0, number])
        if len(others):
            raise UsageError(
                f"{_CLASS}: rank {others[0]} has another {name} than rank 0; pass the "
                f"same on all ranks"
            )
    for stage, first in enumerate(ranks[0]):
        for column in ranks:
            if every[column[stage], 3] != every[first, 3]:
                raise UsageError(
                    f"{_CLASS}: stage {stage} of rank {column[stage]} differs from "
                    f"that of rank {first}; replicas must have the same parameters, "
                    f"frozen ones and modes"
                )


def device_of(stage: nn.Module, given: Any) -> torch.device:
    """Return a stage's device; UsageError where its tensors are on another one."""
    found = next((x.device for x in (*stage.parameters(), *stage.buffers())), None)
    if given is None:
        return torch.device("cpu" if found is None else found)
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"{_CLASS}: device={shown(given)} must be a device of torch, such as "
            f'"cuda", or None'
        ) from None
    if found is None:
        return device
    if found.type != device.type or device.index not in (None, found.index):
        raise UsageError(
            f"{_CLASS}: device={shown(given)}, and the stage has tensors on {found}; "
            f"move the stage there, or leave device out"
        )
    return torch.device(found)
