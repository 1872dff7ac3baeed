# SPDX-License-Identifier: Apache-2.0
"""Copies of the nested containers that ``state_dict`` returns.

A DTensor is tied to the process groups of its mesh, which end with a fault. A copy of
it has this rank's piece, and what is needed to make a DTensor of it on a later mesh.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from commrt.errors import RecoveryError

__all__ = [
    "Axes",
    "Piece",
    "address",
    "assembled",
    "copied",
    "description",
    "difference",
    "filled",
    "meshes_of",
    "portable",
]

Axes = tuple[str | None, ...]
"""The names of a mesh's dimensions."""


@dataclass(frozen=True)
class Piece:
    """This rank's part of a DTensor, without the ranks that have the others."""

    local: Any
    axes: Axes
    """Of its mesh."""
    placements: Any
    shape: Any
    """Of the whole."""
    stride: Any


def portable(value: Any) -> Any:
    """Return the same state with pieces in place of DTensors; nothing is copied."""
    return _mapped(value, lambda one: _piece(one) if _is_dtensor(one) else one)


def assembled(value: Any, meshes: Mapping[Axes, Any]) -> Any:
    """Return a state with DTensors on these meshes in place of pieces."""

    def dtensor(one: Any) -> Any:
        if not isinstance(one, Piece):
            return one
        mesh = meshes.get(one.axes)
        if mesh is None:
            raise RecoveryError(
                f"the state has a DTensor on a mesh with the axes {one.axes}, and the "
                f"model, built anew, has none on such a mesh"
            )
        kind = sys.modules["torch.distributed.tensor"].DTensor
        return kind.from_local(
            *(one.local, mesh, one.placements),
            run_check=False,
            shape=one.shape,
            stride=one.stride,
        )

    return _mapped(value, dtensor)


def meshes_of(value: Any) -> dict[Axes, Any]:
    """Return the meshes of all DTensors in a state, by their axes."""
    found: dict[Axes, Any] = {}

    def look(one: Any) -> Any:
        if _is_dtensor(one):
            found[_axes(one.device_mesh)] = one.device_mesh
        return one

    _mapped(value, look)
    return found


def copied(value: Any, into: Any = None) -> Any:
    """Return a copy that shares nothing with ``value``; of DTensors, their pieces.

    ``into``: an earlier copy, whose memory is used again where arrays have kept their
    type and shape.
    """
    if _is_dtensor(value):
        value = _piece(value)
    if isinstance(value, Piece):
        before = into.local if isinstance(into, Piece) else None
        return replace(value, local=copied(value.local, before))
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
    if _is_dtensor(value):
        value = _piece(value)
    if isinstance(value, Piece):
        of = f" of {tuple(value.shape)}"
        return [f"{line}{of}" for line in description(name, value.local)]
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


def difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return how two lists of descriptions differ, for an error."""
    odd = sorted({*mine} ^ {*theirs})
    lines = [f"{line} ({'here' if line in mine else 'there'})" for line in odd[:4]]
    more = f", and {len(odd) - 4} more" if len(odd) > 4 else ""
    return ", ".join(lines) + more if lines else "its arrays come in another order"


def address(tensor: Any) -> int:
    """Return where a tensor's memory begins, of a DTensor that of its piece."""
    local = tensor.to_local() if _is_dtensor(tensor) else tensor
    return int(local.data_ptr())


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a state with ``leaf`` of all that is no container."""
    if isinstance(value, Mapping):
        return {key: _mapped(each, leaf) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf) for each in value)
    return leaf(value)


def _is_dtensor(value: Any) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def _piece(value: Any) -> Piece:
    return Piece(
        value.detach().to_local(),
        _axes(value.device_mesh),
        value.placements,
        value.shape,
        value.stride(),
    )


def _axes(mesh: Any) -> Axes:
    names = mesh.mesh_dim_names
    return (None,) * mesh.ndim if names is None else tuple(names)


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
