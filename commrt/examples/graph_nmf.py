# SPDX-License-Identifier: Apache-2.0
"""Factors of handwritten digits, plain and with graphs, are compared as clusters.

    python -m commrt.run -n 2 -m commrt.examples.graph_nmf --check

Ranks have images of their own. Rows of W are clustered by k-means, and compared with
the digits by normalised mutual information: 1 where clusters are the digits, 0 where
they say nothing of them. mpiexec, torchrun and plain Python start the program, too. It
needs numpy alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

import commrt
from commrt.comm import Communicator
from commrt.examples.digits import load_digits
from commrt.examples.endings import ending_together
from commrt.science.nmf import Factorization, GraphKernel, GraphNMF
from commrt.science.rows import Floats, Ints

__all__ = ["GRAPHS", "clusters_of", "main", "mutual_information"]

NUM_CLUSTERS = 10
STARTS = 10
"""k-means begins so often, and the best clusters count."""
MOST_TURNS = 300
"""Of k-means, which has come to its end long before."""
TOLERANCE = 1e-10
"""Largest difference of W from one process, over its largest element."""

GRAPHS: Mapping[str, tuple[GraphKernel, ...]] = {
    "no graph": (),
    "5 neighbours": (GraphKernel(5),),
    "5 neighbours, width 0.5": (GraphKernel(5, 0.5),),
    "10 neighbours": (GraphKernel(10),),
    "five kernels": (
        GraphKernel(3),
        GraphKernel(5),
        GraphKernel(10),
        GraphKernel(10, 0.5),
        GraphKernel(10, 1.0),
    ),
}
"""Kernels of each line of the table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Factorise on the ranks that a launcher has started; return the exit status."""
    arguments = _arguments(argv)
    comm = commrt.init()
    with ending_together(comm):
        return _run(comm, arguments)


def _run(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Factorise on the ranks of a communicator; return the exit status."""
    images, digits = load_digits()
    x = images.reshape(len(images), -1) / 16.0
    truth = digits.astype(np.int64)
    if comm.rank == 0:
        print(f"{len(x)} images on {comm.size} ranks, {arguments.steps} steps")
        pixels = [
            mutual_information(clusters_of(x, seed), truth)
            for seed in range(arguments.seeds)
        ]
        print(_line("k-means of pixels", pixels))
    status = 0
    for name, kernels in GRAPHS.items():
        found, seconds = [], 0.0
        for seed in range(arguments.seeds):
            start = time.perf_counter()
            factors = _factors(comm, x, kernels, seed, arguments)
            seconds += time.perf_counter() - start
            whole = _gathered(comm, factors, len(x))
            if comm.rank == 0:
                found.append(_agreement(whole, factors.components, truth, seed))
            if arguments.check and seed == 0:
                status |= _compared(comm, x, kernels, whole, arguments)
        if comm.rank == 0:
            weights = np.array2string(factors.kernel_weights, precision=2)
            each = f"{seconds / arguments.seeds:.2f} s"
            print(_line(name, found), each, weights, flush=True)
    return status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m commrt.examples.graph_nmf", None, about)
    parser.add_argument("--steps", type=int, default=300, help="of each factorisation")
    parser.add_argument("--seeds", type=int, default=10, help="starts of each kind")
    parser.add_argument(
        "--weight", type=float, default=1000.0, help="of the graph in the objective"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="factorise in one process, too, and compare the first seed's factors",
    )
    found = parser.parse_args(argv)
    if found.seeds < 1:
        parser.error(f"--seeds {found.seeds}: expected a number from 1 on")
    return found


def _factors(
    comm: Communicator,
    x: Floats,
    kernels: Sequence[GraphKernel],
    seed: int,
    arguments: argparse.Namespace,
) -> Factorization:
    """Return the factors of this rank's images; collective."""
    model = GraphNMF(
        comm, NUM_CLUSTERS, kernels=kernels, graph_weight=arguments.weight, seed=seed
    )
    own = np.array_split(x, comm.size)[comm.rank]
    return model.fit(own, num_steps=arguments.steps)


def _gathered(comm: Communicator, factors: Factorization, num_rows: int) -> Floats:
    """Return the rows of W of all ranks; collective."""
    pieces = np.array_split(np.arange(num_rows), comm.size)
    counts = tuple(len(piece) * NUM_CLUSTERS for piece in pieces)
    whole = np.empty((num_rows, NUM_CLUSTERS))
    comm.allgatherv(
        factors.coefficients.reshape(-1), counts=counts, out=whole.reshape(-1)
    )
    return whole


def _compared(
    comm: Communicator,
    x: Floats,
    kernels: Sequence[GraphKernel],
    whole: Floats,
    arguments: argparse.Namespace,
) -> int:
    """Compare with one process; return 1 beyond the tolerance."""
    with comm.create_group([comm.rank]) as alone:
        other = _factors(alone, x, kernels, 0, arguments).coefficients
    worst = float(np.abs(whole - other).max() / other.max())
    is_good = worst <= TOLERANCE
    if comm.rank == 0:
        print(
            f"against one process: W is off by at most {worst:.1e}, "
            f"{'within' if is_good else 'beyond'} the tolerance of {TOLERANCE:.0e}"
        )
    return 0 if is_good else 1


def _agreement(w: Floats, h: Floats, truth: Ints, seed: int) -> float:
    """Return how well clusters of images agree with the digits; local."""
    # Each component counts by the length of its picture.
    scaled = w * np.linalg.norm(h, axis=1)
    return mutual_information(clusters_of(scaled, seed), truth)


def clusters_of(rows: Floats, seed: int) -> Ints:
    """Return the cluster of each row by k-means, the best of several starts; local.

    Starts are those of Arthur and Vassilvitskii 2007, "k-means++".
    """
    draws = np.random.default_rng(seed)
    best, found = np.inf, np.zeros(len(rows), np.int64)
    for _ in range(STARTS):
        centers = _first_centers(rows, draws)
        for _ in range(MOST_TURNS):
            squares = _squares(rows, centers)
            labels = squares.argmin(axis=1)
            moved = np.array(
                [
                    rows[labels == each].mean(axis=0) if each in labels else center
                    for each, center in enumerate(centers)
                ]
            )
            if np.allclose(moved, centers, rtol=0, atol=1e-9):
                break
            centers = moved
        total = float(squares.min(axis=1).sum())
        if total < best:
            best, found = total, labels.astype(np.int64)
    return found


def _first_centers(rows: Floats, draws: np.random.Generator) -> Floats:
    centers = rows[[draws.integers(len(rows))]]
    while len(centers) < NUM_CLUSTERS:
        squares = _squares(rows, centers).min(axis=1)
        chosen = draws.choice(len(rows), p=squares / squares.sum())
        centers = np.concatenate([centers, rows[[chosen]]])
    return centers


def _squares(rows: Floats, centers: Floats) -> Floats:
    inner = (rows * rows).sum(axis=1)[:, None] + (centers * centers).sum(axis=1)
    squares: Floats = np.maximum(inner - 2.0 * rows @ centers.T, 0.0)
    return squares


def mutual_information(one: Ints, other: Ints) -> float:
    """Return the mutual information of two labels over the mean of their entropies."""
    table = np.zeros((one.max() + 1, other.max() + 1))
    np.add.at(table, (one, other), 1.0)
    table /= len(one)
    first, last = table.sum(axis=1), table.sum(axis=0)
    both = table[table > 0]
    shared = (both * np.log(both / np.outer(first, last)[table > 0])).sum()
    entropies = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in (first, last)]
    return float(shared / np.mean(entropies)) if max(entropies) > 0 else 1.0


def _line(name: str, found: Sequence[float]) -> str:
    return (
        f"{name:24} {np.mean(found):.3f} ({np.min(found):.3f} to {np.max(found):.3f})"
    )


if __name__ == "__main__":
    sys.exit(main())
