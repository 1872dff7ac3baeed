# SPDX-License-Identifier: Apache-2.0
"""Data for the methods of science, cut over ranks, and dense references of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from commrt.science.nmf import Factorization, GraphKernel
from commrt.science.vecchia import Hyperparameters

Array = np.ndarray[Any, Any]

RANKS = (1, 2, 3, 4, 8)


def cut_of(total: int, size: int, seed: int = 0) -> list[slice]:
    """Return uneven pieces of rows; on three ranks and more one has none."""
    rng = np.random.default_rng([seed, size])
    ends = np.sort(rng.integers(0, total + 1, size - 1))
    if size > 2:
        ends[1] = ends[0]
    bounds = [0, *ends.tolist(), total]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def points_of(
    num: int, dimensions: int, seed: int = 0, noise: float = 0.1
) -> tuple[Array, Array]:
    """Return points and values of a smooth function of the first two dimensions."""
    rng = np.random.default_rng([seed, num, dimensions])
    x = rng.uniform(size=(num, dimensions))
    y = np.sin(5.0 * x[:, 0]) + (x[:, 1 % dimensions] - 0.5) ** 2
    return x, y + noise * rng.standard_normal(num)


def correlation(kernel: str, s: Array) -> Array:
    """Return f(s) as in the books, by the distance r."""
    r = np.sqrt(s)
    if kernel == "matern12":
        return np.exp(-r)
    if kernel == "matern32":
        return (1 + math.sqrt(3) * r) * np.exp(-math.sqrt(3) * r)
    if kernel == "matern52":
        return (1 + math.sqrt(5) * r + 5 * s / 3) * np.exp(-math.sqrt(5) * r)
    return np.exp(-s / 2)


def dense_covariance(kernel: str, a: Array, b: Array, values: Hyperparameters) -> Array:
    """Return the covariances of points, without the nugget."""
    difference = (a[:, None] - b[None]) / values.length_scales
    return values.variance * correlation(kernel, (difference**2).sum(-1))


def dense_log_likelihood(
    kernel: str, x: Array, y: Array, values: Hyperparameters, mean: float
) -> float:
    """Return the exact log-likelihood, by one matrix of all points."""
    matrix = dense_covariance(kernel, x, x, values) + values.nugget * np.eye(len(x))
    sign, log_determinant = np.linalg.slogdet(matrix)
    assert sign == 1
    rest = y - mean
    square = rest @ np.linalg.solve(matrix, rest)
    return float(-0.5 * (square + log_determinant + len(x) * math.log(2 * math.pi)))


def dense_prediction(
    kernel: str, x: Array, y: Array, new: Array, values: Hyperparameters, mean: float
) -> tuple[Array, Array]:
    """Return the exact means and variances, by one matrix of all points."""
    matrix = dense_covariance(kernel, x, x, values) + values.nugget * np.eye(len(x))
    crossed = dense_covariance(kernel, new, x, values)
    means = mean + crossed @ np.linalg.solve(matrix, y - mean)
    taken = (crossed * np.linalg.solve(matrix, crossed.T).T).sum(1)
    return means, values.variance - taken


def sent_between_barriers(log: Any) -> Counter[str]:
    """Return the bytes of each operation between a rank's first two barriers.

    Sends of messages count, and their receives do not.
    """
    found: Counter[str] = Counter()
    marks = 0
    for call in log.operations:
        if call.op == "barrier":
            marks += 1
        elif marks == 1 and call.nbytes and call.op != "recv":
            found[call.op] += call.nbytes
    assert marks == 2
    return found


def dense_kernels(x: Array, kernels: Sequence[GraphKernel]) -> Array:
    """Return the kernels (kernels, n, n) on the graph of nearest rows."""
    num = len(x)
    squares = ((x[:, None] - x[None]) ** 2).sum(-1)
    most = min(max(kernel.num_neighbors for kernel in kernels), num - 1)
    place = np.full((num, num), num)
    for row in range(num):
        others = [other for other in range(num) if other != row]
        others.sort(key=lambda other: (squares[row, other], other))
        for nth, other in enumerate(others[:most]):
            place[row, other] = nth
    place = np.minimum(place, place.T)
    edges = place < num
    found = np.zeros((len(kernels), num, num))
    for kernel, out in zip(kernels, found, strict=True):
        joined = edges & (place < kernel.num_neighbors)
        out[joined] = 1.0
        mean_square = squares[joined].mean() if joined.any() else 0.0
        if kernel.width is not None and mean_square > 0:
            scale = 2 * kernel.width**2 * mean_square
            out[joined] = np.exp(-squares[joined] / scale)
        if out.any():
            out *= num / out.sum()
    return found


def dense_objective(
    x: Array,
    found: Factorization,
    kernels: Sequence[GraphKernel],
    graph_weight: float,
    power: float,
) -> float:
    """Return the objective of factors with all rows, as its formula is written."""
    w, h = found.coefficients, found.components
    total = float(((x - w @ h) ** 2).sum())
    for kernel, t in zip(
        dense_kernels(x, kernels) if kernels else (), found.kernel_weights, strict=True
    ):
        laplacian = np.diag(kernel.sum(1)) - kernel
        factor = len(kernels) ** (power - 1) * t**power
        total += graph_weight * factor * float(np.trace(w.T @ laplacian @ w))
    return total


def dense_factors(
    x: Array,
    start: Factorization,
    kernels: Sequence[GraphKernel],
    graph_weight: float,
    power: float,
    num_steps: int,
) -> Factorization:
    """Return factors by plain matrices, from a start with all rows."""
    w, h, t = start.coefficients, start.components, start.kernel_weights
    dense = dense_kernels(x, kernels) if kernels else np.zeros((0, len(x), len(x)))
    laplacians = [np.diag(kernel.sum(1)) - kernel for kernel in dense]
    objectives = [dense_objective(x, start, kernels, graph_weight, power)]
    for _ in range(num_steps):
        h = h * (w.T @ x) / (w.T @ w @ h)
        if kernels:
            c = np.array([np.trace(w.T @ each @ w) for each in laplacians])
            t = c ** (-1 / (power - 1)) / (c ** (-1 / (power - 1))).sum()
        factors = len(kernels) ** (power - 1) * t**power if kernels else t
        mixed = np.tensordot(factors, dense, 1) * graph_weight
        down = w @ h @ h.T + mixed.sum(1)[:, None] * w
        w = w * (x @ h.T + mixed @ w) / down
        now = Factorization(w, h, t)
        objectives.append(dense_objective(x, now, kernels, graph_weight, power))
    return Factorization(w, h, t, tuple(objectives))
