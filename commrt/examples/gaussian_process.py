# SPDX-License-Identifier: Apache-2.0
"""A Gaussian process learns a photograph from some of its pixels.

    python -m commrt.run -n 2 -m commrt.examples.gaussian_process --check

Ranks have pixels of their own: a row and a column each, and the brightness there. The
process learns length scales, variance and noise, and predicts other pixels. mpiexec,
torchrun and plain Python start the program, too. It needs numpy alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import commrt
from commrt.comm import Communicator
from commrt.examples.endings import ending_together
from commrt.examples.photo import load_photo
from commrt.science.rows import Floats
from commrt.science.vecchia import ScaledBlockVecchia, VecchiaModel
from commrt.science.vecchia.covariances import COVARIANCES

__all__ = ["Pixels", "main", "pixels_of"]

SEED = 1
NUM_NEW = 1000
TOLERANCE = 1e-10
"""Largest relative difference from one process. Sums have the same bits on any number
of ranks, so on one machine there is none."""


class Pixels(NamedTuple):
    """Some pixels of the photograph."""

    x: Floats
    """(pixels, 2): row and column."""
    y: Floats
    """(pixels,): brightness, from 0 to 1."""


def pixels_of(number: int) -> tuple[Pixels, Pixels]:
    """Return pixels to learn, and others to predict, at random places."""
    brightness = load_photo().mean(axis=2) / 255.0
    places = np.random.default_rng(SEED).permutation(brightness.size)
    rows, columns = np.unravel_index(places[: number + NUM_NEW], brightness.shape)
    x = np.column_stack([rows, columns]).astype(np.float64)
    y = brightness[rows, columns]
    return Pixels(x[:number], y[:number]), Pixels(x[number:], y[number:])


def part_of(pixels: Pixels, comm: Communicator) -> Pixels:
    """Return this rank's pixels; ranks may have different numbers of them."""
    pieces = (np.array_split(each, comm.size)[comm.rank] for each in pixels)
    return Pixels(*pieces)


def main(argv: Sequence[str] | None = None) -> int:
    """Learn and predict on the ranks that a launcher has started; return the status."""
    arguments = _arguments(argv)
    comm = commrt.init()
    with ending_together(comm):
        return _run(comm, arguments)


def _run(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Learn and predict on the ranks of a communicator; return the exit status."""
    known, new = pixels_of(arguments.points)
    model, seconds = _learned(comm, known, arguments)
    error = _error(model, part_of(new, comm))
    if comm.rank == 0:
        ms = seconds / model.num_evaluations * 1e3
        spread = float(np.sqrt(np.mean((new.y - known.y.mean()) ** 2)))
        print(
            f"{arguments.points} pixels on {comm.size} ranks: {seconds:.1f} s, "
            f"{model.num_evaluations} likelihoods of {ms:.0f} ms"
        )
        print(f"{model.hyperparameters}, log-likelihood {model.log_likelihood:.2f}")
        print(
            f"{NUM_NEW} other pixels: root mean square error {error:.4f}, "
            f"of the mean {spread:.4f}"
        )
    return _compared(comm, model, known, arguments) if arguments.check else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        "python -m commrt.examples.gaussian_process", None, about
    )
    parser.add_argument("--points", type=int, default=4000, help="pixels to learn")
    parser.add_argument("--neighbors", type=int, default=48, help="of a block")
    parser.add_argument("--block", type=int, default=24, help="pixels of a block")
    parser.add_argument("--steps", type=int, default=20, help="of each search")
    parser.add_argument("--kernel", choices=[*COVARIANCES], default="matern32")
    parser.add_argument(
        "--check",
        action="store_true",
        help="learn in one process, too, and compare; for up to 4000 pixels also with "
        "the exact log-likelihood",
    )
    found = parser.parse_args(argv)
    if not 1 <= found.points <= 200_000:
        parser.error(f"--points {found.points}: expected a number from 1 to 200000")
    return found


def _learned(
    comm: Communicator, known: Pixels, arguments: argparse.Namespace
) -> tuple[VecchiaModel, float]:
    """Return the model and the seconds that it took; collective."""
    process = ScaledBlockVecchia(
        comm,
        kernel=arguments.kernel,
        block_size=arguments.block,
        num_neighbors=arguments.neighbors,
    )
    own = part_of(known, comm)
    comm.barrier()
    start = time.perf_counter()
    model = process.fit(own.x, own.y, max_steps=arguments.steps)
    comm.barrier()
    return model, time.perf_counter() - start


def _error(model: VecchiaModel, new: Pixels) -> float:
    """Return the root mean square error over all ranks' new pixels; collective."""
    off = model.predict(new.x).mean - new.y
    sums = np.array([off @ off, len(off)])
    model.comm.allreduce(sums)
    return float(np.sqrt(sums[0] / sums[1]))


def _compared(
    comm: Communicator,
    model: VecchiaModel,
    known: Pixels,
    arguments: argparse.Namespace,
) -> int:
    """Compare with one process, and with the exact process; return the status."""
    with comm.create_group([comm.rank]) as alone:
        other, _ = _learned(alone, known, arguments)
    ours, theirs = model.hyperparameters.exact, other.hyperparameters.exact
    pairs = zip(
        [*ours, model.log_likelihood], [*theirs, other.log_likelihood], strict=True
    )
    worst = max(abs(mine - its) / abs(its) for mine, its in pairs)
    is_good = worst <= TOLERANCE
    if comm.rank == 0:
        print(
            f"against one process: off by at most {worst:.1e}, "
            f"{'within' if is_good else 'beyond'} the tolerance of {TOLERANCE:.0e}"
        )
        if arguments.points <= NUM_NEW * 4:
            exact = _exact_log_likelihood(model, known)
            print(f"exact log-likelihood at these numbers: {exact:.2f}")
    return 0 if is_good else 1


def _exact_log_likelihood(model: VecchiaModel, known: Pixels) -> float:
    """Return the log-likelihood by one matrix of all pixels; local."""
    values = model.hyperparameters
    scaled = known.x / values.length_scales
    inner = (scaled * scaled).sum(axis=1)
    squares = np.maximum(inner[:, None] + inner - 2.0 * scaled @ scaled.T, 0.0)
    np.fill_diagonal(squares, 0.0)
    matrix = values.variance * COVARIANCES[model.kernel](squares)[0]
    matrix[np.diag_indices(len(matrix))] += values.nugget
    lower = np.linalg.cholesky(matrix)
    rest = np.linalg.solve(lower, known.y - model.mean)
    constant = 0.5 * len(rest) * np.log(2.0 * np.pi)
    return float(-0.5 * rest @ rest - np.log(np.diag(lower)).sum() - constant)


if __name__ == "__main__":
    sys.exit(main())
