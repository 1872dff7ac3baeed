# SPDX-License-Identifier: Apache-2.0
"""An epoch of shuffled batches beside numpy's ``take`` of the same bytes.

    python -m commrt.bench.loading
    python -m commrt.run -n 2 -m commrt.bench.loading --fraction 0.3

``loader`` is an epoch of ``commrt.layers.samples.BatchLoader``: the order is drawn, and
each batch is copied. ``no thread`` is the same with ``prefetch=False``. ``take`` draws
an order, too, and copies batches of as many samples by ``numpy.take``, one array after
the other. All ways take turns on the same samples. Every array of each batch is touched
once. Times are medians over turns of rank 0, in milliseconds. ``ratio`` is that of a
way's time to take's, the median over turns. On several ranks an epoch includes the
exchange, and ``exchange`` says how long ``next_epoch`` takes by itself, and how many
bytes it sends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.step_turns import rotated

if TYPE_CHECKING:
    from commrt.comm import Communicator
    from commrt.layers.samples import PartialShuffle

__all__ = ["WORKLOADS", "main", "measure", "text"]

WORKLOADS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "digits": {"image": ((8, 8), "float32"), "label": ((), "int64")},
    "mnist": {"image": ((28, 28), "uint8"), "label": ((), "uint8")},
    "cifar": {"image": ((3, 32, 32), "uint8"), "label": ((), "int64")},
    "cifar-alone": {"image": ((3, 32, 32), "uint8")},
    "imagenet": {"image": ((3, 224, 224), "uint8"), "label": ((), "int64")},
}
"""Arrays of a sample: shape and type."""
Epoch = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, on the ranks that a launcher has started."""
    import commrt

    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m commrt.bench.loading", None, about)
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="some of these")
    parser.add_argument("--mib", type=int, default=128, help="samples of each rank")
    parser.add_argument("--batch", type=int, default=256, help="samples of a batch")
    parser.add_argument("--fraction", type=float, default=0.3)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args(argv)
    wanted = arguments.workload.split(",")
    if unknown := {*wanted} - {*WORKLOADS}:
        parser.error(f"--workload: {unknown}; expected some of {', '.join(WORKLOADS)}")
    comm = commrt.init()
    rows = [
        measure(
            comm,
            name,
            nbytes=arguments.mib << 20,
            batch_size=arguments.batch,
            fraction=arguments.fraction,
            turns=arguments.turns,
        )
        for name in wanted
    ]
    if comm.rank == 0:
        print(text(rows))
    return 0


def measure(
    comm: Communicator,
    workload: str,
    *,
    nbytes: int,
    batch_size: int,
    fraction: float,
    turns: int,
) -> dict[str, Any]:
    """Return times in ms by way, and what an exchange sends; collective.

    Args:
        comm: the ranks.
        workload: the arrays of a sample.
        nbytes: samples of each rank.
        batch_size: samples of a batch.
        fraction: of the exchange.
        turns: epochs of each way.
    """
    from commrt.layers.samples import BatchLoader, PartialShuffle

    samples = _drawn(workload, nbytes)
    with PartialShuffle(samples, comm, fraction) as shuffle:
        threaded = BatchLoader(shuffle, batch_size, overlap_steps=0)
        plain = BatchLoader(shuffle, batch_size, overlap_steps=0, prefetch=False)
        ways: dict[str, Epoch] = {
            "loader": lambda: [_touched(batch.samples) for batch in threaded],
            "no thread": lambda: [_touched(batch.samples) for batch in plain],
            "take": lambda: _taken(samples, len(plain)),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(1 + turns):
            for way in rotated([*ways], turn):
                comm.barrier()
                start = time.perf_counter()
                ways[way]()
                times[way].append((time.perf_counter() - start) * 1e3)
        times = {way: each[1:] for way, each in times.items()}  # the first warms up
        exchange = [_exchange_ms(comm, shuffle) for _ in range(turns)]
        share = 1.0 - 1.0 / comm.size
        sent = int(fraction * len(shuffle)) * share * shuffle.sample_nbytes
        return {
            "workload": workload,
            "nbytes": len(shuffle) * shuffle.sample_nbytes,
            "ms": times,
            "exchange_ms": exchange,
            "exchange_nbytes": round(sent),
        }


def _drawn(workload: str, nbytes: int) -> dict[str, Any]:
    arrays = WORKLOADS[workload]
    each = sum(np.dtype(t).itemsize * int(np.prod(s)) for s, t in arrays.values())
    number = max(1, nbytes // each)
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 100, (number, *shape)).astype(dtype)
        for name, (shape, dtype) in arrays.items()
    }


def _taken(samples: dict[str, Any], num_steps: int) -> list[Any]:
    number = len(next(iter(samples.values())))
    order = np.random.default_rng(number).permutation(number)
    found = []
    for step in range(num_steps):
        some = order[step * number // num_steps : (step + 1) * number // num_steps]
        batch = {name: np.take(each, some, axis=0) for name, each in samples.items()}
        found.append(_touched(batch))
    return found


def _touched(batch: dict[str, Any]) -> int:
    """Look at each array, as a program would that has got it."""
    return sum(int(each.reshape(-1)[-1]) for each in batch.values())


def _exchange_ms(comm: Communicator, shuffle: PartialShuffle) -> float:
    comm.barrier()
    start = time.perf_counter()
    shuffle.next_epoch()
    return (time.perf_counter() - start) * 1e3


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of medians, and of the ratios to numpy's ``take``."""
    ways = [*rows[0]["ms"]]
    header = f"{'workload':<12}{'MB':>7}" + "".join(f"{way:>13}" for way in ways)
    header += "".join(f"{'ratio':>8}" for _ in ways[:-1])
    lines = [header + f"{'exchange':>11}{'MB sent':>9}"]
    for row in rows:
        times, last = row["ms"], row["ms"][ways[-1]]
        line = f"{row['workload']:<12}{row['nbytes'] / 1e6:>7.0f}"
        line += "".join(f"{median(times[way]):>10.1f} ms" for way in ways)
        for way in ways[:-1]:
            ratios = [own / other for own, other in zip(times[way], last, strict=True)]
            line += f"{median(ratios):>8.2f}"
        line += f"{median(row['exchange_ms']):>8.1f} ms"
        lines.append(line + f"{row['exchange_nbytes'] / 1e6:>9.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
