# SPDX-License-Identifier: Apache-2.0
"""Draw a comparison: time over size per library, from the raw data of ``compare``.

    python -m commrt.bench.figure docs/data/allreduce.json.gz docs/figures/allreduce.svg

Needs matplotlib (the extra ``report``).
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

from commrt.bench.compare import load
from commrt.bench.raw_data import damage_told
from commrt.errors import BackendError, CommError, UsageError
from commrt.files.visible import visible
from commrt.files.write import write_file

__all__ = ["curves", "main"]

Curves = dict[str, dict[int, float]]
"""library -> bytes -> median over launches, µs."""
_COLOURS = ("#c2410c", "#2563eb", "#059669", "#7c3aed", "#57534e", "#eab308")
_NAMES = {
    "mpi4py": "mpi4py + Open MPI",
    "intel": "mpi4py + Intel MPI",
    "mpich": "mpi4py + MPICH",
    "gloo": "torch gloo",
    "symmetric": "commrt, symmetric buffers",
    "copy": "copying on all ranks",
}


def curves(data: dict[str, Any], coll: str, link_class: str) -> Curves:
    """Return the medians of one operation in one state of the machine."""
    samples: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for launch in data["launches"]:
        if launch["coll"] != coll:
            continue
        for row in launch["rows"]:
            if row.get("link_class") == link_class and "median_us" in row:
                samples[launch["peer"]][row["nbytes"]].append(row["median_us"])
    return {
        peer: {n: statistics.median(times) for n, times in sorted(sizes.items())}
        for peer, sizes in samples.items()
    }


def _comparable(found: Curves) -> bool:
    """Return whether two libraries have figures of some sizes each, for a panel."""
    return sum(len(sizes) > 1 for sizes in found.values()) > 1


def draw(data: dict[str, Any], coll: str, out: Path) -> None:
    """Write one panel per link class that occurred."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "the figure needs matplotlib: pip install 'commrt[report]'"
        ) from error
    classes = [
        name
        for name in ("near", "far", "oversubscribed")
        if _comparable(curves(data, coll, name))
    ]
    if not classes:
        raise UsageError(
            f"no link class has figures of {coll} for two libraries: run the "
            f"comparison of {coll} with a peer first"
        )
    peers = {launch["peer"] for launch in data["launches"]}
    order = sorted(peers, key=lambda peer: (peer != "commrt", peer))
    colours = dict(zip(order, cycle(_COLOURS), strict=False))
    figure = Figure(figsize=(5.2 * len(classes), 3.8), layout="constrained")
    for index, link_class in enumerate(classes):
        axes = figure.add_subplot(1, len(classes), index + 1)
        found = curves(data, coll, link_class)
        for peer in filter(found.__contains__, order):
            sizes = found[peer]
            width = 2.2 if peer == "commrt" else 1.3
            axes.plot(
                list(sizes),
                list(sizes.values()),
                label=_NAMES.get(peer, peer),
                color=colours[peer],
                linewidth=width,
                linestyle="--" if peer == "symmetric" else "-",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_title(f"{coll}, {link_class} cores", fontsize=10)
        axes.grid(visible=True, which="major", color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if index == 0:
            axes.set_ylabel("time per call, µs (lower is better)")
    named = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=min(4, len(named)),
        frameon=False,
        fontsize=9,
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=out.suffix.lstrip("."), metadata={"Date": None})
    try:
        write_file(out, drawn.getvalue())
    except OSError as error:
        raise UsageError(f"the figure cannot be written: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Draw the raw data of ``bench compare --out``."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.figure")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--op", default="allreduce")
    args = parser.parse_args(argv)
    try:
        with damage_told(args.data):
            draw(load(str(args.data)), args.op, args.out)
    except CommError as error:
        print(f"commrt.bench.figure: {visible(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
