# SPDX-License-Identifier: Apache-2.0
"""A picture of projections: time of an epoch over ranks, a line for each strategy."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from commrt.errors import BackendError, UsageError
from commrt.files.write import write_file
from commrt.oracle.projection import Projection

__all__ = ["plot", "plotted"]

_COLOURS = ("#c2410c", "#2563eb", "#059669", "#7c3aed", "#57534e", "#eab308", "#db2777")
FORMATS = ("svg", "png", "pdf")


def plotted(projections: Sequence[Projection]) -> Mapping[str, Sequence[Projection]]:
    """Return the fastest projection of each strategy for each number of ranks."""
    best: dict[tuple[str, int], Projection] = {}
    for one in projections:
        key = one.strategy, one.ranks
        if key not in best or one.epoch_s < best[key].epoch_s:
            best[key] = one
    found: dict[str, list[Projection]] = {}
    for name, ranks in sorted(best, key=lambda key: key[1]):
        found.setdefault(name, []).append(best[name, ranks])
    return found


def plot(
    projections: Sequence[Projection],
    out: str | Path,
    *,
    memory_nbytes: float | None = None,
) -> None:
    """Write a picture of projected times over ranks; hollow marks need more memory.

    Args:
        projections: any, of one network.
        out: a file whose name ends in ``.svg``, ``.png`` or ``.pdf``.
        memory_nbytes: bytes that a rank may keep; None: any number.

    Raises:
        BackendError: matplotlib is missing.
        UsageError: there is nothing to draw, or the file's name says no format.
    """
    path = Path(out)
    if path.suffix.lstrip(".") not in FORMATS:
        endings = ", ".join(f".{one}" for one in FORMATS)
        raise UsageError(f"{path}: expected a name that ends in {endings}")
    if not projections:
        raise UsageError("there are no projections to draw; ask for other ranks")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "the picture needs matplotlib: pip install 'commrt[report]'"
        ) from error
    limit = math.inf if memory_nbytes is None else memory_nbytes
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    marks = cycle("os^vD<>p")
    # Colours and marks repeat with other periods, so that pairs of them do not.
    styles = zip(plotted(projections).items(), cycle(_COLOURS), marks, strict=False)
    for (name, line), colour, mark in styles:
        ranks, times = [one.ranks for one in line], [one.epoch_s for one in line]
        axes.plot(ranks, times, color=colour, linewidth=1.3, label=name, marker=mark)
        large = [one for one in line if one.memory_nbytes > limit]
        axes.plot(
            [one.ranks for one in large],
            [one.epoch_s for one in large],
            color=colour,
            marker=mark,
            markerfacecolor="white",
            linestyle="none",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("projected time of an epoch, s (lower is better)")
    first = projections[0]
    axes.set_title(f"{first.step.table.name}, {first.origin}", fontsize=9)
    axes.grid(visible=True, which="major", color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    drawn = io.BytesIO()
    metadata = {"CreationDate" if path.suffix == ".pdf" else "Date": None}
    extra = {} if path.suffix == ".png" else {"metadata": metadata}
    figure.savefig(drawn, format=path.suffix.lstrip("."), **extra)
    write_file(path, drawn.getvalue())
