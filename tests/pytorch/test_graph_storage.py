# SPDX-License-Identifier: Apache-2.0
"""Graphs on disk: each rank gets what sharding gives it, from its own part of files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import (
    Case,
    axes_of,
    grids_of,
    karate,
    made_layers,
    outputs,
    random_graph,
)

from commrt.errors import UsageError
from commrt.layers.graphs import (
    cross_entropy3d,
    double_permutation,
    load_graph,
    save_graph,
    shard_graph,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run


def saved(case: Case, folder: Path, permuted: bool, blocks: int) -> Any:
    orders = double_permutation(case.graph, 4) if permuted else None
    save_graph(folder, case.graph, case.x, case.y, blocks=blocks, permutation=orders)
    return orders


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("shape", grids_of(1, 2, 3, 4, 8))
def test_loading_gives_what_sharding_gives(
    shape: tuple[int, int, int], permuted: bool, blocks: int, tmp_path: Path
) -> None:
    case = karate()
    orders = saved(case, tmp_path, permuted, blocks)
    layers = 5

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(shape)) as grid:
            found = load_graph(tmp_path, grid, layers=layers)
            right = shard_graph(
                case.graph, case.x, case.y, grid, layers=layers, permutation=orders
            )
            assert torch.equal(found.features.local, right.features.local)
            assert torch.equal(found.target.local, right.target.local)
            assert found.features.placement == right.features.placement
            assert found.target.placement == right.target.placement
            for layer in range(layers):
                one, other = (each.adjacency.block(layer) for each in (found, right))
                for name in ("forward", "backward"):
                    a, b = getattr(one, name), getattr(other, name)
                    assert a.shape == b.shape
                    x = np.random.default_rng(layer).standard_normal((a.shape[1], 3))
                    outs = [np.zeros((a.shape[0], 3)) for _ in range(2)]
                    for each, out in zip((a, b), outs, strict=True):
                        each.times(x, out)
                    assert np.allclose(*outs, rtol=1e-14, atol=1e-14)

    run(math.prod(shape), main)


def test_a_loaded_graph_trains(tmp_path: Path) -> None:
    case = random_graph(np.random.default_rng(3), 29, 0.2, 4, 3)
    orders = saved(case, tmp_path, True, 4)

    def main(comm: Any) -> tuple[float, float]:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 2}) as grid:
            losses = []
            for graph in (
                load_graph(tmp_path, grid, layers=3),
                shard_graph(
                    case.graph, case.x, case.y, grid, layers=3, permutation=orders
                ),
            ):
                layers = made_layers("sage", (4, 6, 5, 3), grid)
                y = outputs(layers, graph.features, graph.adjacency)
                loss = cross_entropy3d(y, graph.target)
                loss.backward()
                losses.append(float(loss.local.detach()))
            return losses[0], losses[1]

    for one, other in run(4, main):
        assert abs(one / other - 1) < 1e-13


def test_a_rank_reads_no_blocks_of_others(tmp_path: Path) -> None:
    """Blocks that no rank of a smaller job needs are not there."""
    case = karate()
    saved(case, tmp_path, False, 4)
    for path in tmp_path.glob("matrix-0-[23]-*.npy"):
        path.unlink()
    (tmp_path / "target-3.npy").unlink()

    def main(comm: Any) -> None:
        # The first half of the rows lies on place 0 of "z", which reads it alone.
        with ProcessGrid(comm, {"x": 1, "y": 1, "z": 2}) as grid:
            says = r"rank 1 cannot read its part"
            with pytest.raises(UsageError, match=says):
                load_graph(tmp_path, grid, layers=1)
            comm.barrier()

    run(2, main)


def test_features_are_read_by_rows_and_columns(tmp_path: Path) -> None:
    case = karate()
    saved(case, tmp_path, False, 2)

    def main(comm: Any) -> tuple[int, ...]:
        with ProcessGrid(comm, {"x": 2, "y": 2, "z": 2}) as grid:
            local = load_graph(tmp_path, grid, layers=1).features.local
            assert local.is_contiguous()
            # The rank keeps its own elements, and no map of a file.
            assert local.untyped_storage().nbytes() == local.numel() * 8
            return tuple(local.shape)

    shapes = run(8, main)
    assert sum(rows * columns for rows, columns in shapes) == 34 * 5


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "graph.json").unlink(),
        lambda folder: (folder / "graph.json").write_text("{}"),
        lambda folder: (folder / "graph.json").write_text("no json"),
        lambda folder: (folder / "matrix-0-0-0.npy").write_bytes(b"nothing"),
        lambda folder: (folder / "matrix-0-0-0.npy").write_bytes(b""),
        lambda folder: (folder / "features-0.npy").unlink(),
        lambda folder: (folder / "features-0.npy").write_bytes(b""),
    ],
)
def test_folders_that_are_no_graph_are_refused(harm: Any, tmp_path: Path) -> None:
    saved(karate(), tmp_path, False, 2)
    harm(tmp_path)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 1}) as grid:
            with pytest.raises(UsageError, match="cannot read its part"):
                load_graph(tmp_path, grid)
            comm.barrier()

    run(2, main)


def test_a_file_with_wrong_columns_is_refused(tmp_path: Path) -> None:
    saved(karate(), tmp_path, False, 2)
    path = tmp_path / "matrix-0-1-0.npy"
    with path.open("rb") as file:
        indptr, indices, data = (np.load(file) for _ in range(3))
    with path.open("wb") as file:
        for array in (indptr, indices + 17, data):
            np.save(file, array)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 1, "y": 2, "z": 1}) as grid:
            with pytest.raises(UsageError, match="columns from"):
                load_graph(tmp_path, grid)
            comm.barrier()

    run(2, main)


def test_graphs_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    case = karate()
    with pytest.raises(UsageError, match="blocks=0"):
        save_graph(tmp_path, case.graph, case.x, case.y, blocks=0)
    with pytest.raises(UsageError, match="each of the 34 nodes"):
        save_graph(tmp_path, case.graph, case.x[:3], case.y)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    saved(karate(), tmp_path, True, 2)
    about = json.loads((tmp_path / "graph.json").read_text())
    assert about == {
        "schema": "commrt-graph/1",
        "nodes": 34,
        "features": 5,
        "dtype": "float64",
        "blocks": 2,
        "permuted": True,
    }
    assert len([*tmp_path.glob("matrix-*.npy")]) == 8
