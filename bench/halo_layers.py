# SPDX-License-Identifier: Apache-2.0
"""Layers of a tensor that is cut in space: the interior beside the halo, or behind it.

    python -m commrt.cluster run --hosts 2 --rate 20mbit --launcher torchrun \\
      --ranks 1 -- python -m commrt.bench.halo_layers --side 256 --channels 16

Each layer runs forward and backward on one sample, cut in height among all ranks: with
``overlap=True`` and without, in turns. A time is that of the slowest rank; figures are
medians over turns. Each process has one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.in_process_group import names_of

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["LAYERS", "main", "measure"]

_TURNS = 21


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks of a launcher."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.halo_layers")
    parser.add_argument(
        "--layer", type=names_of(LAYERS), default=list(LAYERS), help="names with commas"
    )
    parser.add_argument("--side", type=int, default=256, help="rows and columns")
    parser.add_argument("--channels", type=int, default=16, help="of the input")
    parser.add_argument("--turns", type=int, default=_TURNS, help="calls of each way")
    arguments = parser.parse_args(argv)
    import torch

    import commrt

    torch.set_num_threads(1)
    with commrt.init() as comm:
        shape = 1, arguments.channels, arguments.side, arguments.side
        rows = measure(comm, arguments.layer, shape, turns=arguments.turns)
        if comm.rank == 0:
            sys.stdout.write(_text(rows, shape, comm.size))
    return 0


def measure(
    comm: Communicator,
    wanted: Sequence[str],
    shape: tuple[int, int, int, int],
    *,
    turns: int = _TURNS,
) -> list[dict[str, Any]]:
    """Return milliseconds of a forward and backward pass, by layer; collective.

    Args:
        comm: the ranks.
        wanted: names of layers.
        shape: of the whole input; dimension 2 is cut.
        turns: timed calls of each way; one more before them is not timed.
    """
    import torch

    from commrt.layers.spatial import Cut

    torch.manual_seed(1)
    cut = Cut.even(comm, shape[2])
    low, high = cut.own
    x = torch.randn(shape)[:, :, low:high].clone().requires_grad_()
    rows = []
    for name in wanted:
        layer = LAYERS[name](shape[1])
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns + 1):
            for overlap in times:
                x.grad = None
                comm.barrier()
                begin = time.perf_counter()
                y, _ = layer(x, cuts={2: cut}, overlap=overlap)
                y.sum().backward()
                took = np.array([(time.perf_counter() - begin) * 1e3])
                comm.allreduce(took, op="max")
                if turn:
                    times[overlap].append(float(took[0]))
        beside, behind = times[True], times[False]
        rows.append({"layer": name, "beside_ms": beside, "behind_ms": behind})
    return rows


def _convolution(channels: int) -> Callable[..., Any]:
    import torch

    from commrt.layers.spatial.convolution import conv

    weight = torch.randn(channels, channels, 5, 5, requires_grad=True)
    return lambda x, **how: conv(x, weight, padding=2, **how)


def _transposed(channels: int) -> Callable[..., Any]:
    import torch

    from commrt.layers.spatial.transposed_convolution import conv_transpose

    weight = torch.randn(channels, channels, 4, 4, requires_grad=True)
    return lambda x, **how: conv_transpose(x, weight, stride=2, padding=1, **how)


def _max(channels: int) -> Callable[..., Any]:
    from commrt.layers.spatial.pooling import max_pool

    return lambda x, **how: max_pool(x, 3, stride=2, padding=1, **how)


def _average(channels: int) -> Callable[..., Any]:
    from commrt.layers.spatial.pooling import avg_pool

    return lambda x, **how: avg_pool(x, 5, stride=1, padding=2, **how)


LAYERS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "conv": _convolution,
    "conv_transpose": _transposed,
    "max_pool": _max,
    "avg_pool": _average,
}
"""Each takes a number of channels, and returns a layer."""


def _text(rows: Sequence[dict[str, Any]], shape: Sequence[int], size: int) -> str:
    lines = [f"# {shape[1]} channels, {shape[2]} x {shape[3]}, {size} ranks"]
    lines.append(f"{'ms':<16}{'beside':>10}{'behind':>10}{'ratio':>8}")
    for row in rows:
        beside, behind = median(row["beside_ms"]), median(row["behind_ms"])
        ratio = beside / behind
        lines.append(f"{row['layer']:<16}{beside:>10.2f}{behind:>10.2f}{ratio:>8.2f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
