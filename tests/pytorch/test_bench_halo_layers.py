# SPDX-License-Identifier: Apache-2.0
"""The benchmark of halos beside the interior runs each layer in both ways."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import halo_layers
from commrt.local import run


@pytest.mark.parametrize("name", halo_layers.LAYERS)
def test_each_layer_is_timed_beside_and_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    make = halo_layers.LAYERS[name]

    def noted(channels: int) -> Any:
        layer = make(channels)

        def call(x: Any, *, overlap: bool, **how: Any) -> Any:
            asked.append(overlap)
            return layer(x, overlap=overlap, **how)

        return call

    def main(comm: Any) -> Any:
        return halo_layers.measure(comm, [name], (1, 2, 13, 8), turns=2)

    monkeypatch.setitem(halo_layers.LAYERS, name, noted)
    (row,), _ = run(2, main)
    assert (row["layer"], len(row["beside_ms"]), len(row["behind_ms"])) == (name, 2, 2)
    assert sorted(asked) == [False] * 6 + [True] * 6
