# SPDX-License-Identifier: Apache-2.0
"""Running averages of a layer's two factors, their damping and their inverses; local.

Inverses come from Cholesky factors, not from eigenvectors. They take fewer operations,
and are symmetric, so half of their elements travel. Damping is then split
between both factors (Martens and Grosse 2015, arXiv 1503.05671, section 6.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.kfac.factor_sums import LayerSums
from commrt.layers.kfac.triangles import packed, side_of, trace_of, unpacked

__all__ = ["Averages", "Pair", "averaged", "damping_of", "inverse_of"]

Tensor: TypeAlias = torch.Tensor


class Pair(NamedTuple):
    """A layer's two factors, as triangles."""

    inputs: Tensor
    gradients: Tensor


class Averages(NamedTuple):
    """Running averages of a layer's factors."""

    factors: Pair
    updates: int
    """How many steps are in them."""


def averaged(
    before: Averages | None,
    sums: LayerSums,
    samples: int,
    gradient_factor: float,
    decay: float,
) -> Averages | None:
    """Return averages with one more step in them; None where there is nothing.

    Args:
        before: the averages so far; None: this is the first step.
        sums: of all ranks.
        samples: of all ranks.
        gradient_factor: by which products of gradients are multiplied.
        decay: at most the weight of the averages so far; in step k it is at most
            1 - 1/k (Martens and Grosse 2015, section 5).
    """
    if not sums.places or not samples:
        return before
    new = Pair(sums.inputs / samples, sums.gradients * (gradient_factor / sums.places))
    updates = 1 if before is None else before.updates + 1
    if before is None:
        return Averages(new, updates)
    old = min(1 - 1 / updates, decay)
    pairs = zip(before.factors, new, strict=True)
    # Not in place: the factors that the inverses are of may be these.
    return Averages(Pair(*(a * old + b * (1 - old) for a, b in pairs)), updates)


def damping_of(factors: Pair, damping: float) -> tuple[float, float]:
    """Return what is added to the diagonals of A and of G.

    Their product is ``damping``; their ratio is that of the mean eigenvalues.
    """
    means = [float(trace_of(each)) / side_of(len(each)) for each in factors]
    root = math.sqrt(damping)
    if min(means) <= 0:
        return root, root
    ratio = math.sqrt(means[0] / means[1])
    return root * ratio, root / ratio


def inverse_of(name: str, triangle: Tensor, shift: float) -> Tensor:
    """Return the triangle of the inverse of a factor plus ``shift`` times identity.

    It is computed in float64: in float32 a factorisation fails where eigenvalues differ
    by more than about 10⁷. Raises UsageError where the matrix is not positive definite.
    """
    matrix = unpacked(triangle.double())
    matrix.diagonal().add_(shift)
    root, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(root.diagonal()).all()):
        raise UsageError(
            f"KFAC.step: a factor of {name}, with {shift:.1e} on its diagonal, is not "
            f"positive definite; raise damping"
        )
    return packed(torch.cholesky_inverse(root)).to(triangle.dtype)
