# SPDX-License-Identifier: Apache-2.0
"""Windows that leave a cut dimension, filled with the tensor's own elements.

Pattern and bytes: those of ``exchange``. A rank receives each element that it lacks
once. With "circular" it receives an element once for each time that the window goes
round the dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commrt.errors import UsageError, shown
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.exchange import window
from commrt.layers.spatial.windows import Range, clipped, source_of, wrapped

__all__ = ["MODES", "check_mode", "padded", "padded_window"]

MODES = ("zeros", "reflect", "replicate", "circular")


def check_mode(
    what: str, name: str, mode: str, extents: Sequence[int], pads: Sequence[Range]
) -> None:
    """Raise UsageError for a mode that there is not, or more padding than it allows."""
    if mode not in MODES:
        raise UsageError(
            f"{what}: {name}={shown(mode)} must be one of {', '.join(MODES)}"
        )
    for extent, pad in zip(extents, pads, strict=True):
        most = {"reflect": extent - 1, "circular": extent}.get(mode)
        if most is not None and max(pad) > most:
            raise UsageError(
                f"{what}: padding={pad} with {name}={mode!r} must be at most {most} "
                f"for a dimension of {extent}"
            )
        if mode == "replicate" and extent == 0:
            raise UsageError(f"{what}: {name}={mode!r} needs elements to repeat")


def padded_window(x: Any, dim: int, cut: Cut, reads: Sequence[Range], mode: str) -> Any:
    """Return the elements ``reads[rank]`` of a padded dimension; differentiable.

    Args:
        x: this rank's piece.
        dim: the dimension that is cut.
        cut: how it is cut.
        reads: for each rank a range that may begin below 0 and end behind the extent;
            equal on all ranks.
        mode: "zeros", "reflect", "replicate" or "circular".

    Collective over the cut's ranks, also in the backward pass.
    """
    extent = cut.extent
    if mode == "zeros":
        return window(x, dim, cut, [clipped(*each, extent) for each in reads])
    if mode == "circular":
        return window(x, dim, cut, [wrapped(*each, extent) for each in reads])
    sources = [_sources(each, extent, mode) for each in reads]
    spans = [(min(each), max(each) + 1) if each else (0, 0) for each in sources]
    x = window(x, dim, cut, [clipped(*each, extent) for each in spans])
    first, own = spans[cut.comm.rank][0], sources[cut.comm.rank]
    return _picked(x, dim, [each - first for each in own])


def padded(x: Any, dim: int, reads: Range, mode: str) -> Any:
    """Return the elements ``reads`` of a padded dimension that is not cut."""
    return _picked(x, dim, _sources(reads, x.shape[dim], mode))


def _sources(reads: Range, extent: int, mode: str) -> list[int]:
    return [source_of(place, extent, mode) for place in range(*reads)]


def _picked(x: Any, dim: int, places: list[int]) -> Any:
    if places == [*range(x.shape[dim])]:
        return x
    return x.index_select(dim, torch.tensor(places, dtype=torch.long, device=x.device))
