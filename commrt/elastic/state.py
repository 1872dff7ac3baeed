# SPDX-License-Identifier: Apache-2.0
"""The state of a training program, which can undo a half step."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from commrt.elastic.copies import copied, description, filled
from commrt.errors import UsageError, shown

__all__ = ["State"]

_STEPS_KEPT = 2
"""Ranks that call collectives in each step are at most one step apart."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


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
        if undo not in ("copy", "optimizer"):
            raise UsageError(f"State: undo={shown(undo)} must be 'copy' or 'optimizer'")
        self._entries = {name: _holder(name, each) for name, each in entries.items()}
        own = {name: _holder(name, each) for name, each in (local or {}).items()}
        self._local = {**own, "random generators": _Generators()}
        optimizers = [each for each in entries.values() if _is_optimizer(each)]
        self._updates = _Updates(optimizers if undo == "optimizer" else [])
        self._kept: dict[str, Any] = {}
        """Copies of entries as the step began."""
        self._kept_local: dict[int, dict[str, Any]] = {}
        """Copies of what is local, by the number of the step that began then."""
        self.is_whole = True
        """False where a half step cannot be undone here."""

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
        self._updates.begun = False

    def undo(self) -> None:
        """Return to what was when the step began, as far as that can be done here."""
        if not self._kept:
            return  # no step has begun since it was loaded
        if self._updates.begun:
            self.is_whole = False
            return
        managed = self._updates.managed()
        for name, kept in self._kept.items():
            holder = self._entries[name]
            again = copied(kept)  # some keep what they are given
            whole = filled(holder.state_dict(), again) if managed else again
            holder.load_state_dict(whole)

    def has_local(self, step: int) -> bool:
        """Return whether this rank knows what was local when a step began."""
        return step in self._kept_local

    def load_local(self, step: int) -> None:
        """Return to what was local when a step began."""
        for name, kept in self._kept_local[step].items():
            self._local[name].load_state_dict(copied(kept))

    def entries(self) -> dict[str, Any]:
        """Return the state of all entries, as another rank can load it."""
        return {name: each.state_dict() for name, each in self._entries.items()}

    def load(self, entries: Mapping[str, Any]) -> None:
        """Take over the entries of another rank."""
        for name, holder in self._entries.items():
            holder.load_state_dict(entries[name])
        self._kept.clear()
        self.is_whole = True

    def descriptions(self) -> list[str]:
        """Return a line for each array in the entries: its name, type and shape."""
        # An optimizer has arrays only from its first step on.
        return [
            line
            for name, each in self._entries.items()
            if not _is_optimizer(each.held)
            for line in description(name, each.state_dict())
        ]

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
            parameter.data_ptr()
            for each in self._optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }

    def _note(self, *_: Any) -> None:
        self.begun = True


def _holder(name: str, held: Any) -> Any:
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
        if not (_is_tensor(value) and value.data_ptr() in managed)
    }
