# SPDX-License-Identifier: Apache-2.0
"""Pooling to an output of a given size, of a tensor that is cut in space.

Output u of m takes the elements ``[u n // m, ceil((u + 1) n / m))`` of n. Each rank
pools the part of each window that it has, one cut dimension after another. The rank
that owns an output gets these parts, and pools them.

Pattern and bytes: one exchange along each cut dimension, in which a rank sends one
element for each output of another rank that its piece takes part in, times the other
extents. Inputs never travel. The backward pass sends as many bytes as came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from commrt.layers.spatial.arguments import (
    check_cuts,
    check_outputs,
    cut_of_outputs,
    per_dimension,
    whole_extents,
)
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.empty_results import empty_result
from commrt.layers.spatial.exchange import fetch
from commrt.layers.spatial.windows import (
    Range,
    adaptive_outputs,
    adaptive_window,
    meet,
)

__all__ = ["adaptive_avg_pool", "adaptive_max_pool"]

AVG = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
MAX = {
    1: functional.adaptive_max_pool1d,
    2: functional.adaptive_max_pool2d,
    3: functional.adaptive_max_pool3d,
}


def adaptive_avg_pool(
    x: Any, output_size: int | Sequence[int | None], *, cuts: Mapping[int, Cut]
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of means, a given number of them, and its cuts.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        output_size: spatial extents of the whole result; None keeps a dimension's.
        cuts: the dimensions of ``x`` that are cut; the batch may be one.

    The result is cut by even pieces: with one output, the last rank has it. Collective
    over the communicators of the cuts, also in the backward pass. ``x`` must need a
    gradient on all ranks or on none. Where no spatial dimension is cut among several
    ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit, before anything is sent.
    """
    return _pooled("adaptive_avg_pool", x, output_size, cuts, is_max=False)


def adaptive_max_pool(
    x: Any, output_size: int | Sequence[int | None], *, cuts: Mapping[int, Cut]
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of maxima, a given number of them, and its cuts.

    Like ``adaptive_avg_pool``. The values have the bits of torch's.
    """
    return _pooled("adaptive_max_pool", x, output_size, cuts, is_max=True)


def _pooled(
    what: str,
    x: Any,
    output_size: int | Sequence[int | None],
    cuts: Mapping[int, Cut],
    is_max: bool,
) -> tuple[Any, dict[int, Cut]]:
    dims = check_cuts(what, x, cuts)
    extents = whole_extents(x, cuts)[2:]
    outputs = _outputs(what, output_size, extents)
    check_outputs(what, extents, [*extents])
    made = cut_of_outputs(cuts, outputs)
    along = [dim for dim, cut in cuts.items() if dim >= 2 and cut.comm.size > 1]
    # Torch's function pools dimensions that are not cut first: there is less to send.
    sizes = [x.shape[dim] if dim in along else m for dim, m in enumerate(outputs, 2)]
    if 0 in sizes:
        x = empty_result((*x.shape[:2], *sizes), x)
    elif sizes != [*x.shape[2:]] or not along:
        x = (MAX if is_max else AVG)[dims](x, sizes)
    for dim in along:
        x = _pooled_along(x, dim, cuts[dim], made[dim], is_max)
    return x, made


def _outputs(
    what: str, output_size: int | Sequence[int | None], extents: Sequence[int]
) -> tuple[int, ...]:
    """Return the extents of the result."""
    if not isinstance(output_size, int) and output_size is not None:
        sizes = [*output_size]
        if len(sizes) == len(extents):
            pairs = zip(sizes, extents, strict=True)
            output_size = [n if size is None else size for size, n in pairs]
    return per_dimension(what, "output_size", output_size, len(extents), 1)


# -- one dimension that is cut ---------------------------------------------------------


def _pooled_along(x: Any, dim: int, cut: Cut, made: Cut, is_max: bool) -> Any:
    """Return this rank's outputs of one dimension."""
    extent, outputs = cut.extent, made.extent
    touched = [adaptive_outputs(piece, extent, outputs) for piece in cut.pieces]
    # The parts of all ranks in a row: which output each belongs to never decreases.
    row = [output for each in touched for output in range(*each)]
    parts = Cut(cut.comm, tuple(high - low for low, high in touched))
    mine = touched[cut.comm.rank]
    low = cut.own[0]
    windows = [adaptive_window(out, extent, outputs) for out in range(*mine)]
    inside = [meet(each, cut.own) for each in windows]
    ranges = [(first - low, last - low) for first, last in inside]
    if is_max:
        x = _maxima(x, dim, ranges)
    else:
        x = _sums(x, dim, ranges, [last - first for first, last in windows])
    needs = [_rows_of(out, row) for out in made.pieces]
    x = fetch(x, dim, parts, needs)
    own = row[slice(*needs[cut.comm.rank])]
    ranges = [_rows_of((out, out + 1), own) for out in range(*made.own)]
    if all(high - low == 1 for low, high in ranges):
        return x
    return (
        _maxima(x, dim, ranges) if is_max else _sums(x, dim, ranges, [1] * len(ranges))
    )


def _rows_of(out: Range, row: Sequence[int]) -> Range:
    """Return where in a row of parts those of some outputs are."""
    places = [place for place, output in enumerate(row) if out[0] <= output < out[1]]
    return (places[0], places[-1] + 1) if places else (0, 0)


def _maxima(x: Any, dim: int, ranges: Sequence[Range]) -> Any:
    """Return the largest elements of ranges of one dimension."""
    if not ranges or 0 in x.shape:
        return empty_result([*x.shape[:dim], len(ranges), *x.shape[dim + 1 :]], x)
    found = [
        x.narrow(dim, low, high - low).max(dim, keepdim=True).values
        for low, high in ranges
    ]
    return torch.cat(found, dim)


def _sums(x: Any, dim: int, ranges: Sequence[Range], divisors: Sequence[int]) -> Any:
    """Return the sums of ranges of one dimension, each divided by a number."""
    weights = torch.zeros(len(ranges), x.shape[dim], dtype=x.dtype)
    for number, ((low, high), divisor) in enumerate(zip(ranges, divisors, strict=True)):
        weights[number, low:high] = 1 / divisor
    weights = weights.to(x.device)
    return (x.movedim(dim, -1) @ weights.T).movedim(-1, dim)
