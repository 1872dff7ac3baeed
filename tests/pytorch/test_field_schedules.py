# SPDX-License-Identifier: Apache-2.0
"""Learning rates for larger batches are those of their papers."""

from __future__ import annotations

import math

import pytest
import torch

from commrt.examples.field.schedules import scaled_lr, warm_up


def test_rates_follow_the_batch_by_their_rule() -> None:
    assert scaled_lr(0.1, 8, "linear") == 0.8
    assert scaled_lr(0.1, 8, "sqrt") == 0.1 * math.sqrt(8)
    assert scaled_lr(0.1, 8, "none") == 0.1
    assert scaled_lr(0.1, 0.25, "sqrt") == 0.05


def test_goyals_rate_of_8192_images() -> None:
    """The paper's own numbers: 0.1 for 256 images is 3.2 for 8192."""
    assert scaled_lr(0.1, 8192 / 256, "linear") == pytest.approx(3.2)


@pytest.mark.parametrize("factor", [0, -1])
def test_a_factor_of_no_batch_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        scaled_lr(0.1, factor, "linear")


def test_a_rule_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'linear', 'sqrt' or 'none'"):
        scaled_lr(0.1, 2, "cubic")


def test_a_warm_up_grows_by_equal_amounts_from_the_small_rate() -> None:
    found = [8 * warm_up(step, 4, 1 / 8) for step in range(6)]
    assert found == pytest.approx([1, 2.75, 4.5, 6.25, 8, 8])


def test_without_a_warm_up_the_rate_is_there_at_once() -> None:
    assert warm_up(0, 0, 0.1) == 1.0


def test_a_scheduler_of_torch_takes_the_warm_up() -> None:
    """The first step has the small rate, and the one behind the warm-up the large."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up(step, 3, 1 / 8)
    )
    rates = []
    for _ in range(5):
        rates += [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 1 / 3, 0.1 + 2 * 0.7 / 3, 0.8, 0.8])
