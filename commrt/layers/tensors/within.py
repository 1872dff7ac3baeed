# SPDX-License-Identifier: Apache-2.0
"""The module of a parallel model whose forward pass runs in this thread.

``parallelize_cnn`` enters a module before its forward pass and leaves it behind. So
functions of tensors know what the module's strategy asks of them, and an error says
where in the model it arose. Without a module around them, functions move nothing that
they were not asked to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from commrt.layers.tensors.placement import Placement

__all__ = ["Tile", "Within", "enter", "leave", "within"]


@dataclass(frozen=True)
class Tile:
    """Where a rank's tile of a parameter lies in the whole one."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    placement: Placement


@dataclass(frozen=True, eq=False)
class Within:
    """What a module's strategy asks of the functions that the module calls."""

    path: str
    """The module's name in the model, such as ``layer1.0.conv2``."""
    filters: tuple[str, ...]
    """Axes of the grid that shall cut output channels."""
    stationary: str
    """The form of products over channels: "auto", "x", "y" or "w"."""
    allow_gather: bool
    """Whether a function may give a rank more than its share of an operand."""
    tiles: Mapping[int, Tile] = field(default_factory=dict)
    """Parameters of which this rank keeps a tile, by the ``id`` of the tile."""


_ENTERED: ContextVar[tuple[Within, ...]] = ContextVar("commrt_within", default=())


def within() -> Within | None:
    """Return the innermost module that was entered in this thread; None: none was."""
    entered = _ENTERED.get()
    return entered[-1] if entered else None


def enter(module: Within) -> None:
    """Enter a module."""
    _ENTERED.set((*_ENTERED.get(), module))


def leave() -> None:
    """Leave the innermost module."""
    _ENTERED.set(_ENTERED.get()[:-1])
