# SPDX-License-Identifier: Apache-2.0
"""Between which two elements of a dimension each output of a linear interpolation lies.

The formulas are torch's, in the element type's precision, in which torch rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.layers.spatial.windows import Range

__all__ = ["LinearSources", "linear_sources", "span_of"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LinearSources:
    """Output i is ``x[low[i]] * (1 - part[i]) + x[high[i]] * part[i]``."""

    low: Array
    high: Array
    part: Array


def linear_sources(
    extent: int,
    outputs: int,
    scale: float | None,
    align_corners: bool,
    dtype: type[np.floating[Any]],
) -> LinearSources:
    """Return where the outputs of a whole dimension lie.

    Args:
        extent: elements of the dimension.
        outputs: of the result.
        scale: outputs per element, if it was given as such; None: that of the extents.
        align_corners: the ends of both are at the same places; else their edges are.
        dtype: in which places are computed.
    """
    index = np.arange(outputs).astype(dtype)
    if align_corners:
        step = dtype(extent - 1) / dtype(outputs - 1) if outputs > 1 else dtype(0)
        place = index * step
    else:
        step = dtype(1 / scale) if scale else dtype(extent) / dtype(outputs)
        half = dtype(0.5)
        place = np.maximum((index + half) * step - half, dtype(0))
    low = np.minimum(place.astype(np.int64), extent - 1)
    high = np.minimum(low + 1, extent - 1)
    part = np.clip(place - low.astype(dtype), 0, 1).astype(dtype)
    return LinearSources(low, high, part)


def span_of(low: Sequence[int] | Array, high: Sequence[int] | Array) -> Range:
    """Return the range from the least of ``low`` to the largest of ``high``."""
    if len(low) == 0:
        return 0, 0
    return int(min(low)), int(max(high)) + 1
