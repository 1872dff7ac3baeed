# SPDX-License-Identifier: Apache-2.0
"""The program of the oracle's accuracy projects and trains by each strategy."""

from __future__ import annotations

from typing import Any

import pytest

EXPECTED = {
    ("cnn", 2): ["data", "zero1", "zero2", "zero3", "pipeline", "spatial", "filter"],
    ("mlp", 4): ["data", "zero1", "zero2", "zero3", "pipeline", "tensor", "tensor3d"],
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
    ways = [row["way"].split()[0] for row in rows]
    assert ways[:7] == EXPECTED[model, ranks]
    for row in rows:
        assert row["projected_ms"] > 0
        assert row["measured_ms"] > 0
        assert row["accuracy"] == pytest.approx(1 - abs(row["ratio"] - 1))
