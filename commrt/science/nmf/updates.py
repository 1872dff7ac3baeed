# SPDX-License-Identifier: Apache-2.0
"""The steps of a graph-regularised factorisation, and why its objective never rises.

The objective is F(W, H, t) = |X - W H|^2 + lam sum_k a_k(t) tr(W^T L_k W), with
a_k(t) = p^(g - 1) t_k^g for p kernels, g > 1, and t on the simplex: t_k >= 0, sum t_k =
1. Equal t_k give the mean of the kernels. Each step changes one of H, t and W.

**W and H.** For fixed H and t, F is the quadratic w^T M w - 2 b^T w + const. The vector
w has all elements of W, one column after the other, and b those of X H^T. The matrix M
is (H H^T) (x) 1 + lam 1 (x) (D - A), where (x) is the Kronecker product. A
multiplicative step is w + s with s = -g / k, where g = M w - b is half the gradient
and k = (M+ w) / w takes the part M+ = (H H^T) (x) 1 + lam 1 (x) D. Then F changes by

    2 g^T s + s^T M s = -s^T (2 diag(k) - M) s.

The matrix in brackets has no negative eigenvalue. It is the sum of twice
diag((H H^T w) / w) - H H^T plus H H^T, which both have none (Lee and Seung 2001,
"Algorithms for non-negative matrix factorization", lemma 2), and of lam (2 D - D + A) =
lam (D + A), for which x^T (D + A) x = 1/2 sum A_ij (x_i + x_j)^2. So F never rises,
though all elements change at once. H is the case lam = 0. The step of W is that of Cai
et al. 2011, "Graph regularized nonnegative matrix factorization". Adding one small
number above and below the line makes k larger, and is a step of the same form.

**t.** For t alone F is sum_k c_k t_k^g with c_k >= 0, which is convex. Where all c_k >
0, the derivatives g c_k t_k^(g - 1) must be equal, so t_k is c_k^(-1 / (g - 1)) over
their sum: the minimum itself, so F does not rise. Where some c_k = 0, any t on these
gives 0. The weights t^g are those of Wang et al. 2009, "Unified video annotation via
multigraph learning". Without the power (g = 1) all weight goes to one kernel. As g
grows, t becomes equal and a_k tends to a multiple of 1 / c_k, so each kernel has the
same part of F.
"""

from __future__ import annotations

import numpy as np

from commrt.science.rows import Floats

__all__ = ["effective_weights", "inner_products", "multiplied", "simplex_step"]

_TINY = 1e-100
"""Keeps quotients finite; no sum of products of usual size is changed by it."""
_LARGEST = 1e100
"""Of a kernel's factor; only weights far from equal, with a large power, come there."""


def multiplied(factor: Floats, up: Floats, down: Floats) -> Floats:
    """Return a factor after a multiplicative step, element by element.

    Args:
        factor: not negative.
        up, down: the negative and the positive part of half the gradient.
    """
    return factor * ((up + _TINY) / (down + _TINY))


def inner_products(w: Floats, x: Floats) -> Floats:
    """Return W^T X, then W^T W, one after the other in a flat array; local."""
    return np.concatenate([(w.T @ x).reshape(-1), (w.T @ w).reshape(-1)])


def simplex_step(roughness: Floats, power: float) -> Floats:
    """Return the kernels' weights of the smallest objective, on the simplex.

    Args:
        roughness: (kernels,): tr(W^T L_k W), from 0 on.
        power: g, above 1. Near 1 the smoothest kernel has all weight; a large one makes
            all weights equal.
    """
    smoothest = roughness.min(initial=np.inf)
    if smoothest <= 0:
        weights = (roughness <= 0).astype(np.float64)
    else:
        weights = (smoothest / roughness) ** (1.0 / (power - 1.0))
    found: Floats = weights / weights.sum()
    return found


def effective_weights(weights: Floats, power: float) -> Floats:
    """Return what each kernel is multiplied by: p^(g - 1) t^g; 1 for one kernel.

    Computed as (p t)^g / p, since p^(g - 1) alone may be beyond all numbers. At most
    1e100, so that products stay finite.
    """
    with np.errstate(over="ignore"):
        factors = (len(weights) * weights) ** power / len(weights)
    found: Floats = np.minimum(factors, _LARGEST)
    return found
