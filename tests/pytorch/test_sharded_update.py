# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer has the bits of the plain one, whatever cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_update_cases import (
    OPTIMIZERS,
    assert_equal_state,
    on_ranks,
    trained_alone,
    trained_together,
)

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_plain_one(kind: str, ranks: int) -> None:
    expected, plain = trained_alone(kind, ranks, 4)

    def main(comm: Any) -> Any:
        found, optimizer = trained_together(comm, kind, 4)
        with optimizer:
            for mine, right in zip(found, expected, strict=True):
                assert torch.equal(mine, right)
            return optimizer.whole_state_dict()

    states = on_ranks(ranks, main)
    assert states[1:] == [None] * (ranks - 1)
    assert_equal_state(states[0], plain.state_dict())
