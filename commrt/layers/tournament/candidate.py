# SPDX-License-Identifier: Apache-2.0
"""A model and its optimizers as bytes, and the program's objects that take them."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.tournament.model_tensors import ModelTensors
from commrt.layers.tournament.optimizer_state import (
    facts_of,
    load,
    optimizers_of,
    split_off,
)
from commrt.layers.tournament.packing import Buffers, Slot, pack, slot_of, unpack

__all__ = ["Candidate", "Contestant", "Sizes"]

Tensor: TypeAlias = torch.Tensor


class Sizes(NamedTuple):
    """Bytes of a candidate's messages."""

    structure: int
    """Of the structure."""
    host: int
    """Of tensors in memory of the host."""
    device: int
    """Of tensors on a device."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One rank's part of a model with its optimizers' state, as bytes."""

    structure: bytes
    """The optimizers' numbers, and the facts of their tensors, pickled."""
    buffers: Buffers
    """The bytes of all tensors, by type of device."""

    def sizes(self) -> Sizes:
        """Return the bytes of its messages."""
        on = {device: each.numel() for device, each in self.buffers.items()}
        host = on.pop("cpu", 0)
        return Sizes(len(self.structure), host, sum(on.values()))


class Contestant:
    """A program's model and optimizers, from which candidates come and which take them.

    Args:
        model: of this rank.
        optimizers: of the model's parameters: one, or a list.
        ranks: of this rank's trainer, as ranks of the job.

    Raises UsageError for a model or optimizers that cannot be moved.
    """

    def __init__(self, model: nn.Module, optimizers: Any, ranks: Collection[int]):
        self._model = ModelTensors(model, ranks)
        self.optimizers = optimizers_of(optimizers, self._model)
        self._slots = [slot_of(each) for each in self._model.tensors]
        self.facts = self._model.facts, facts_of(self.optimizers, self._model)
        """Equal on ranks whose candidates this rank can take."""
        devices = {each.device for each in self._model.tensors}
        others = sorted({each for each in devices if each.type != "cpu"}, key=str)
        if len(others) > 1:
            raise UsageError(
                f"Tournament.step: the model lies on {', '.join(map(str, others))}; "
                f"expected one device beside the host"
            )
        self.device: torch.device | None = others[0] if others else None
        """The device of some of the model's tensors; None: all are on the host."""

    def packed(self) -> Candidate:
        """Return what this rank has now, in memory of its own."""
        state = split_off(self.optimizers)
        known = {"cpu"} if self.device is None else {"cpu", self.device.type}
        for each in state.tensors:
            if each.device.type not in known:
                raise UsageError(
                    f"Tournament.step: an optimizer's state has a tensor on "
                    f"{each.device}, where the model has none; expected one on "
                    f"{' or '.join(sorted(known))}"
                )
        structure = b""
        if self.optimizers:
            slots = [slot_of(each) for each in state.tensors]
            structure = pickle.dumps((state.structure, slots))
        return Candidate(structure, pack([*self._model.tensors, *state.tensors]))

    def take_model(self, candidate: Candidate) -> None:
        """Give the model the candidate's values, in place."""
        self._model.take(self._parts(candidate)[0])

    def take(self, candidate: Candidate) -> None:
        """Give the model and the optimizers the candidate's values."""
        values, structure, tensors = self._parts(candidate)
        self._model.take(values)
        load(self.optimizers, structure, tensors)

    def _parts(self, candidate: Candidate) -> tuple[list[Tensor], bytes, list[Tensor]]:
        """Return values of the model, and structure and tensors of the optimizers."""
        structure: bytes = b""
        slots: list[Slot] = []
        if candidate.structure:
            structure, slots = pickle.loads(candidate.structure)
        found = unpack([*self._slots, *slots], candidate.buffers)
        return found[: len(self._slots)], structure, found[len(self._slots) :]
