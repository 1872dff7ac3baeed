# SPDX-License-Identifier: Apache-2.0
"""The benchmark of halos beside the interior runs each layer in both ways."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import halo_layers
from commrt.layers.spatial import output_split
from commrt.local import run


@pytest.mark.parametrize("name", halo_layers.LAYERS)
def test_each_layer_is_timed_beside_and_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []

    def noted(overlap: bool | None, cut: Any) -> bool:
        asked.append(overlap)
        return was_apart(overlap, cut)

    def main(comm: Any) -> Any:
        return halo_layers.measure(comm, [name], (1, 2, 13, 8), turns=2)

    was_apart = output_split.is_apart
    for module in ("convolution", "pooling", "transposed_convolution"):
        monkeypatch.setattr(f"commrt.layers.spatial.{module}.is_apart", noted)
    (row,), _ = run(2, main)
    assert (row["layer"], len(row["beside_ms"]), len(row["behind_ms"])) == (name, 2, 2)
    assert sorted(map(str, asked)) == ["False"] * 6 + ["True"] * 6
