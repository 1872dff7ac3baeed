# SPDX-License-Identifier: Apache-2.0
"""K-FAC on ranks is K-FAC of one process with all samples."""

from __future__ import annotations

from typing import Any

import pytest
from kfac_cases import MODELS, NEAR, distance, ranks_run, serial_run

CASES = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (8, 2), (8, 8)]


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("loss", ["mean", "sum", "global_mean"])
@pytest.mark.parametrize(("ranks", "workers"), CASES)
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_train_the_model_of_one_process(
    kind: str, ranks: int, workers: int, loss: str
) -> None:
    settings: dict[str, Any] = {
        "inverse_every": 3,
        "factor_every": 2,
        "weight_decay": 0.01,
        "lr": 0.05,
    }
    right = serial_run(kind, ranks, 6, **settings)
    found = ranks_run(kind, ranks, 6, loss=loss, gradient_workers=workers, **settings)
    for model in found:
        assert distance(model, right) < NEAR
