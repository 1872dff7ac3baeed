# SPDX-License-Identifier: Apache-2.0
"""The program of the oracle's accuracy projects and trains by each strategy."""

from __future__ import annotations

from typing import Any

import pytest

EXPECTED = {
    ("cnn", 2): ["data 2", "zero3 2", "pipeline 2", "spatial 2x1", "filter 2"],
    ("mlp", 4): ["data 4", "zero3 4", "pipeline 4", "tensor 4", "tensor3d 1x2x2"],
}


def measured(model: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from commrt.bench.oracle_accuracy import measure

    dist.init_process_group("commrt")
    try:
        return measure([model], turns=1, batch=8, scale=8)
    finally:
        dist.destroy_process_group()


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(("model", "ranks"), EXPECTED)
def test_each_strategy_is_projected_and_trained(
    torchrun: Any, model: str, ranks: int
) -> None:
    rows = torchrun(ranks, measured, model=model)[0]
    ways = [row["way"] for row in rows]
    assert ways[:5] == EXPECTED[model, ranks]
    for row in rows:
        assert row["projected_ms"] > 0
        assert row["measured_ms"] > 0
        assert row["accuracy"] == pytest.approx(1 - abs(row["ratio"] - 1))
