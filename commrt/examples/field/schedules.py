# SPDX-License-Identifier: Apache-2.0
"""Learning rates for larger batches: two rules, and a warm-up."""

from __future__ import annotations

import math

__all__ = ["scaled_lr", "warm_up"]


def scaled_lr(lr: float, factor: float, rule: str) -> float:
    """Return the learning rate for batches that are ``factor`` times as large.

    Args:
        lr: the one that suits the small batch.
        factor: samples of the large batch over those of the small one, above 0.
        rule: "linear": ``factor * lr`` (Goyal et al. 2017, "Accurate, Large Minibatch
            SGD", arXiv 1706.02677, section 2.1). "sqrt": ``sqrt(factor) * lr``, which
            keeps the variance of the steps (Krizhevsky 2014, "One weird trick", arXiv
            1404.5997, section 5). "none": ``lr``.
    """
    if factor <= 0:
        raise ValueError(f"scaled_lr: factor={factor}; expected a number above 0")
    if rule == "linear":
        return lr * factor
    if rule == "sqrt":
        return lr * math.sqrt(factor)
    if rule == "none":
        return lr
    raise ValueError(f"scaled_lr: rule={rule!r}; expected 'linear', 'sqrt' or 'none'")


def warm_up(step: int, num_steps: int, start: float) -> float:
    """Return the part of the learning rate that a step takes: a line up to 1.

    Goyal et al. 2017, section 2.2: the rate begins with that of the small batch, grows
    by the same amount in each step, and is the large one after ``num_steps``.

    Args:
        step: number of the step, from 0.
        num_steps: steps of the warm-up; 0: there is none.
        start: the part at step 0, such as the small rate over the large one.
    """
    if step >= num_steps:
        return 1.0
    return start + (1.0 - start) * step / num_steps
