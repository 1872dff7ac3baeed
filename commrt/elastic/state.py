# SPDX-License-Identifier: Apache-2.0
"""The state of a training program, which can undo a half step."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from commrt.elastic.copies import (
    Axes,
    address,
    assembled,
    copied,
    description,
    difference,
    filled,
    meshes_of,
    portable,
)
from commrt.errors import UsageError, shown

__all__ = ["Kept", "State"]

_STEPS_KEPT = 2
"""Ranks that call collectives in each step are at most one step apart."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass
class Kept:
    """Copies that a rank keeps while it has no state."""

    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Copies of all entries, by the number of the step that begins with them."""
    local: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Copies of what is local, by the number of the step that began then."""


class State:
    """Models, optimizers and all else that a step changes.

        state = State(model=model, optimizer=optimizer, local={"sampler": sampler})

    Each has ``state_dict`` and ``load_state_dict``, or is an array of numpy or a tensor
    of torch, which are filled in place.

    Args:
        entries: what is equal on all ranks, or on all replicas of a part of the model.
            A rank that lacks a step's state gets it from another one.
        local: what each rank has for itself. It stays with the rank. The random
            generators of Python, numpy and torch (host and current GPU) belong to it
            unasked.
        undo: how a step that failed in the middle is undone. ``"copy"``: from a copy of
            all entries, made when a step begins; that is right whatever a step does.
            ``"optimizer"``: parameters and state of torch optimizers are not copied. A
            rank whose optimizers had begun to update gets the state from one whose
            optimizers had not. It is right where nothing but ``optimizer.step()``
            changes them.
    """

    def __init__(
        self,
        *,
        local: Mapping[str, Any] | None = None,
        undo: Literal["copy", "optimizer"] = "copy",
        **entries: Any,
    ) -> None:
        if not isinstance(undo, str) or undo not in ("copy", "optimizer"):
            raise UsageError(f"State: undo={shown(undo)} must be 'copy' or 'optimizer'")
        if not isinstance(local, Mapping | None):
            raise UsageError(
                f"State: local={shown(local)} must be a mapping, such as "
                f'{{"sampler": sampler}}'
            )
        self._entries = {name: _holder(name, each) for name, each in entries.items()}
        own = {
            name: _holder(f"local[{shown(name)}]", each)
            for name, each in (local or {}).items()
        }
        self._local = {**own, "random generators": _Generators()}
        optimizers = [each for each in entries.values() if _is_optimizer(each)]
        self._updates = _Updates(optimizers if undo == "optimizer" else [])
        self._kept: dict[str, Any] = {}
        """Copies of entries as the step began."""
        self._begun: int | None = None
        """The number of that step; None: none has begun since it was loaded."""
        self._kept_local: dict[int, dict[str, Any]] = {}
        """Copies of what is local, by the number of the step that began then."""
        self._is_whole = True
        """False where it is what no step begins with."""

    def remember(self, step: int) -> None:
        """Keep what is needed to undo the step that begins."""
        managed = self._updates.managed()
        for name, holder in self._entries.items():
            if not _is_optimizer(holder.held) or not self._updates:
                before = self._kept.get(name)
                now = _without(holder.state_dict(), managed)
                self._kept[name] = copied(now, into=before)
        self._kept_local[step] = self._local_copies()
        for old in [each for each in self._kept_local if each <= step - _STEPS_KEPT]:
            del self._kept_local[old]
        self._begun, self._updates.begun = step, False

    def steps(self, done: int) -> tuple[int, ...]:
        """Return at the begin of which steps this rank can be; it has completed some.

        It has the state of now, unless a step has changed it halfway, and that of when
        the last step began, if there are copies.
        """
        if self._begun is None or done == self._begun:
            return (done,) if self._is_whole else ()
        return (done,) if self._updates else (done, self._begun)

    def undo(self, done: int) -> None:
        """Undo the step that fails, as far as that can be done here.

        Where ``done`` steps are completed and no other has begun, there is nothing to
        undo.
        """
        if done == self._begun:
            self.return_to(done)

    def return_to(self, step: int) -> None:
        """Return to what was when a step began that ``steps`` names."""
        if step != self._begun:
            return
        if self._updates.begun:
            self._is_whole = False
            return
        managed, meshes = self._updates.managed(), self._meshes()
        for name, kept in self._kept.items():
            holder = self._entries[name]
            again = assembled(copied(kept), meshes)  # some keep what they are given
            whole = filled(holder.state_dict(), again) if managed else again
            holder.load_state_dict(whole)

    def kept(self, done: int) -> Kept:
        """Return copies for a state made later, of all steps that ``steps`` names."""
        found: dict[int, dict[str, Any]] = {}
        is_halfway = done == self._begun
        if self._is_whole and not (is_halfway and self._updates.begun):
            if not is_halfway or self._updates:
                found[done] = copied(self.entries())
            if is_halfway and self._updates:
                for name, kept in self._kept.items():
                    found[done][name] = filled(found[done][name], kept)
            elif self._begun is not None and not self._updates:
                found[self._begun] = self._kept
        local = dict(self._kept_local)
        if not is_halfway:
            local[done] = self._local_copies()
        return Kept(found, local)

    def inherit(self, kept: Kept, step: int) -> None:
        """Take over what another state on this rank has kept of a step's begin."""
        if step in kept.entries:
            self.load(kept.entries[step])
        else:
            self._is_whole = False
        self._kept_local = dict(kept.local)

    def has_local(self, step: int) -> bool:
        """Return whether this rank knows what was local when a step began."""
        return step in self._kept_local

    def load_local(self, step: int) -> None:
        """Return to what was local when a step began."""
        for name, kept in self._kept_local[step].items():
            self._local[name].load_state_dict(copied(kept))

    def entries(self) -> dict[str, Any]:
        """Return the state of all entries, as another rank can load it."""
        return {
            name: portable(each.state_dict()) for name, each in self._entries.items()
        }

    def load(self, entries: Mapping[str, Any]) -> None:
        """Take over the entries of another rank."""
        meshes = self._meshes()
        for name, holder in self._entries.items():
            holder.load_state_dict(assembled(entries[name], meshes))
        self._kept.clear()
        self._begun, self._is_whole = None, True

    def descriptions(self) -> list[str]:
        """Return a line for each array in the entries: its name, type and shape."""
        # An optimizer has arrays only from its first step on.
        return [
            line
            for name, each in self._entries.items()
            if not _is_optimizer(each.held)
            for line in description(name, each.state_dict())
        ]

    def differences(self, entries: Mapping[str, Any]) -> str:
        """Return how another rank's entries differ in their arrays; empty: they fit."""
        theirs = [
            line
            for name, each in self._entries.items()
            if not _is_optimizer(each.held)
            for line in description(name, entries.get(name))
        ]
        mine = self.descriptions()
        return "" if mine == theirs else difference(mine, theirs)

    def _meshes(self) -> dict[Axes, Any]:
        """Return the meshes that DTensors of the entries are on."""
        found: dict[Axes, Any] = {}
        for each in self._entries.values():
            # An optimizer's state has DTensors like those that it updates.
            has = each.held.param_groups if _is_optimizer(each.held) else None
            found |= meshes_of(each.state_dict() if has is None else has)
        return found

    def _local_copies(self) -> dict[str, Any]:
        return {name: copied(each.state_dict()) for name, each in self._local.items()}


class _Held:
    """An entry with ``state_dict``."""

    def __init__(self, held: _Stateful) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.held.load_state_dict(state)


class _Array:
    """An entry that is an array itself."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held[...] = state


class _Generators:
    """The random generators of a process."""

    held = None

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"python": random.getstate()}
        found["numpy"] = np.random.get_state()  # programs use it
        torch = sys.modules.get("torch")
        if torch is not None:
            found["torch"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "torch" in state:
            sys.modules["torch"].set_rng_state(state["torch"])
        if "cuda" in state:
            sys.modules["torch"].cuda.set_rng_state(state["cuda"])


class _Updates:
    """Notes that an optimizer of torch begins an update."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.begun = False
        self._optimizers = optimizers
        for each in optimizers:
            each.register_step_pre_hook(self._note)

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def managed(self) -> set[int]:
        """Return the addresses of the parameters that they update."""
        return {
            address(parameter)
            for each in self._optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }

    def _note(self, *_: Any) -> None:
        self.begun = True


def _holder(name: str, held: Any) -> Any:
    with suppress(Exception):  # of an object that cannot be asked
        if isinstance(held, _Stateful):
            return _Held(held)
    if isinstance(held, np.ndarray) or _is_tensor(held):
        return _Array(held)
    raise UsageError(
        f"State: {name}={shown(held)} has no state_dict() and load_state_dict(), "
        f"and is no array"
    )


def _is_tensor(held: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(held, torch.Tensor)


def _is_optimizer(held: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(held, torch.optim.Optimizer)


def _without(state: Any, managed: set[int]) -> Any:
    """Return a state without the parameters at these addresses."""
    if not managed or not isinstance(state, Mapping):
        return state
    return {
        key: value
        for key, value in state.items()
        if not (_is_tensor(value) and address(value) in managed)
    }
