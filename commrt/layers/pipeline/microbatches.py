# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of a step, as the first stage gets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.pipeline.agreement import Numbers
from commrt.layers.pipeline.boundary import DTYPES

__all__ = ["MicroBatches", "facts_of_replica", "facts_of_stage", "listed"]

Tensor: TypeAlias = torch.Tensor


class MicroBatches(NamedTuple):
    """Inputs of the first stage, one tuple of tensors for each micro-batch."""

    inputs: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, what: str, given: Any) -> MicroBatches:
        """Check a list of tensors or tuples of tensors."""
        found = []
        for index, each in enumerate(listed(what, "microbatches", given)):
            tensors = (each,) if isinstance(each, torch.Tensor) else each
            if (
                not isinstance(tensors, tuple | list)
                or not tensors
                or not all(isinstance(one, torch.Tensor) for one in tensors)
            ):
                raise UsageError(
                    f"{what}: microbatches[{index}]={shown(each)} must be a tensor, or "
                    f"a tuple of tensors"
                )
            found.append(tuple(tensors))
        return cls(tuple(found))

    def sizes(self) -> Numbers:
        """Return the samples of each micro-batch: the length of its first tensor."""
        firsts = (tensors[0] for tensors in self.inputs)
        return np.array([len(x) if x.ndim else 1 for x in firsts], np.int64)

    def facts(self) -> int:
        """Return a number for the types and shapes."""
        return _number_of(
            tuple(_facts(each) for each in tensors) for tensors in self.inputs
        )


def listed(what: str, name: str, given: Any) -> Sequence[Any]:
    """Return a list; UsageError for what is none, such as one tensor."""
    if isinstance(given, torch.Tensor | str | bytes | Mapping):
        given = None
    try:
        return [*given]
    except TypeError:
        raise UsageError(
            f"{what}: {name} must be a list with one entry for each micro-batch, such "
            f"as x.split(8)"
        ) from None


def facts_of_replica(stage: nn.Module, device: torch.device) -> int:
    """Return a number for all that replicas of a stage must have alike at first."""
    return _number_of((facts_of_stage(stage, device), *map(_facts, stage.buffers())))


def facts_of_stage(stage: nn.Module, device: torch.device) -> int:
    """Return a number for what messages may depend on: modes, and who is trained."""
    modes = tuple(each.training for each in stage.modules())
    casts = torch.is_autocast_enabled(device.type)
    kind = torch.get_autocast_dtype(device.type) if casts else torch.float32
    facts = modes, casts, DTYPES.index(kind)
    return _number_of((facts, *map(_facts, stage.parameters())))


def _facts(tensor: Tensor) -> tuple[object, ...]:
    kind = DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else -1
    is_dense = tensor.layout == torch.strided
    return kind, is_dense, tensor.requires_grad, tuple(tensor.shape)


def _number_of(facts: Iterable[object]) -> int:
    # Of numbers alone, so it is equal in all processes.
    return hash(tuple(facts))
