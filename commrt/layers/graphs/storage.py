# SPDX-License-Identifier: Apache-2.0
"""Graphs on disk in blocks, of which each rank reads those that it needs.

One process saves, once; jobs of any grid load. A folder has ``graph.json``, blocks
``matrix-VARIANT-ROW-COLUMN.npy`` with row ends, columns and values, and pieces of rows,
``features-N.npy`` and ``target-N.npy``. With a double permutation there are also
``order-rows.npy`` and ``order-columns.npy``. Variant 0 is the matrix of even layers, 1
that of odd ones.

A rank reads the blocks that its part of the grid meets, and maps the pieces, so that
only its rows and columns of the features come from disk. Nothing is sent, but for one
allreduce of 8 bytes: a rank that cannot read tells the others.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from commrt.errors import UsageError, shown
from commrt.files.write import write_file
from commrt.layers.graphs.adjacency import Adjacency, adjacency_of, own_range
from commrt.layers.graphs.csr import CsrMatrix, Range, as_csr
from commrt.layers.graphs.permutation import DoublePermutation
from commrt.layers.graphs.roles import roles_of
from commrt.layers.graphs.sharded import ShardedGraph, check_nodes
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges, meet
from commrt.layers.tensors import DistTensor, Placement

__all__ = ["load_graph", "save_graph"]

Tensor: TypeAlias = torch.Tensor
SCHEMA = "commrt-graph/1"


def save_graph(
    folder: str | Path,
    graph: Any,
    x: Tensor,
    y: Tensor,
    *,
    blocks: int = 8,
    permutation: DoublePermutation | None = None,
) -> None:
    """Write a graph in blocks; one process calls it.

        save_graph("reddit", symmetrically_normalized(a), x, y, blocks=16)

    Args:
        folder: made if it is not there; files of an earlier graph are replaced.
        graph: a square matrix, as ``as_csr`` takes it.
        x: (N, D), features of the same type.
        y: (N,), int64 classes.
        blocks: pieces of the rows, and of the columns. A multiple of the largest axis
            lets ranks read no block in vain.
        permutation: as ``double_permutation`` draws it; both variants are written.
    """
    whole = as_csr(graph, "save_graph")
    if whole.shape[0] != whole.shape[1] or type(blocks) is not int or blocks < 1:
        raise UsageError(
            f"save_graph: a matrix of shape {whole.shape} in blocks={shown(blocks)}; "
            f"expected a square one, and a number from 1"
        )
    nodes = whole.shape[0]
    check_nodes("save_graph", nodes, x, y)
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    described = to / "graph.json"
    described.unlink(missing_ok=True)  # until all of the new graph is there
    pieces = even_ranges(nodes, blocks)
    for which in range(1 if permutation is None else 2):
        matrix = whole if permutation is None else permutation.matrix(whole, which)
        for row, rows in enumerate(pieces):
            for column, columns in enumerate(pieces):
                block = matrix.block(rows, columns)
                name = _block_name(which, row, column)
                _write(to / name, block.indptr, block.indices, block.data)
    if permutation is not None:
        _write(to / "order-rows.npy", permutation.rows)
        _write(to / "order-columns.npy", permutation.columns)
        x = x[torch.from_numpy(permutation.columns)]
    for number, (low, high) in enumerate(pieces):
        _write(to / f"features-{number}.npy", x[low:high].detach().numpy())
        _write(to / f"target-{number}.npy", y[low:high].numpy())
    about = {
        "schema": SCHEMA,
        "nodes": nodes,
        "features": x.shape[1],
        "dtype": whole.data.dtype.name,
        "blocks": blocks,
        "permuted": permutation is not None,
    }
    write_file(described, json.dumps(about, indent=1) + "\n")


def load_graph(
    folder: str | Path, grid: ProcessGrid, *, layers: int = 3
) -> ShardedGraph:
    """Return this rank's parts of a saved graph, as ``shard_graph`` does. Collective.

    Args:
        folder: as ``save_graph`` wrote it; all ranks see the same files.
        grid: three axes.
        layers: of the network.

    Raises UsageError on all ranks where one of them cannot read its part.
    """
    roles_of(grid, layers)
    error: Exception | None = None
    found: ShardedGraph | None = None
    try:
        found = _read_part(Path(folder), grid, layers)
    except (OSError, EOFError, ValueError, KeyError) as problem:
        error = problem
    first = np.array([grid.num_ranks if error is None else grid.rank], np.int64)
    grid.comm.allreduce(first, "min")
    if found is None or first[0] < grid.num_ranks:
        said = "" if error is None else f": {error}"
        raise UsageError(
            f"load_graph: rank {int(first[0])} cannot read its part of "
            f"{shown(str(folder))}{said}; expected the files that save_graph writes, "
            f"whole and readable on every rank"
        ) from error
    return found


def _read_part(folder: Path, grid: ProcessGrid, layers: int) -> ShardedGraph:
    roles = roles_of(grid, 0)
    about = json.loads((folder / "graph.json").read_text())
    if about.get("schema") != SCHEMA:
        raise ValueError(f"schema {about.get('schema')!r}; expected {SCHEMA!r}")
    nodes, width = about["nodes"], about["features"]
    pieces = even_ranges(nodes, about["blocks"])
    orders = None
    if about["permuted"]:
        orders = DoublePermutation(
            *(np.load(folder / f"order-{name}.npy") for name in ("rows", "columns"))
        )

    def read(which: int, rows: Range, columns: Range) -> CsrMatrix:
        return _read_block(folder, which, pieces, rows, columns, about["dtype"])

    adjacency: Adjacency = adjacency_of(grid, nodes, layers, orders, read)
    features = _read_rows(
        folder,
        "features",
        pieces,
        own_range(grid, (roles.inner, roles.rows), nodes),
        own_range(grid, (roles.features,), width),
    )
    last = roles_of(grid, layers).inner
    rows = own_range(grid, (last,), nodes)
    if orders is None:
        target = _read_rows(folder, "target", pieces, rows)
    else:
        target = _read_scattered(
            folder, pieces, orders.order_before(layers)[slice(*rows)]
        )
    return ShardedGraph(
        adjacency,
        DistTensor(torch.from_numpy(features), (nodes, width), grid, roles.resting),
        DistTensor(torch.from_numpy(target), (nodes,), grid, Placement(last)),
        layers,
        orders,
    )


def _block_name(which: int, row: int, column: int) -> str:
    return f"matrix-{which}-{row}-{column}.npy"


def _write(path: Path, *arrays: Any) -> None:
    """Write arrays one after the other."""
    held = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(held, np.ascontiguousarray(array), allow_pickle=False)
    write_file(path, held.getvalue())


def _read_block(
    folder: Path,
    which: int,
    pieces: tuple[Range, ...],
    rows: Range,
    columns: Range,
    dtype: str,
) -> CsrMatrix:
    """Return the block of these rows and columns, from the files that meet it."""
    parts: list[tuple[Any, Any, Any]] = []
    for row, piece in enumerate(pieces):
        for column, other in enumerate(pieces):
            inside, beside = meet(piece, rows), meet(other, columns)
            if inside[0] == inside[1] or beside[0] == beside[1]:
                continue
            path = folder / _block_name(which, row, column)
            with path.open("rb") as file:
                indptr, indices, data = (np.load(file) for _ in range(3))
            shape = piece[1] - piece[0], other[1] - other[0]
            stored = as_csr((indptr, indices, data, shape), path.name)
            block = stored.block(
                (inside[0] - piece[0], inside[1] - piece[0]),
                (beside[0] - other[0], beside[1] - other[0]),
            )
            parts.append(
                (
                    block.rows() + (inside[0] - rows[0]),
                    block.indices + (beside[0] - columns[0]),
                    block.data,
                )
            )
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, dtype)
    joined = [np.concatenate(each) for each in zip(nothing, *parts, strict=True)]
    shape = rows[1] - rows[0], columns[1] - columns[0]
    return CsrMatrix.from_entries(
        joined[0], joined[1], joined[2].astype(dtype, copy=False), shape
    )


def _read_rows(
    folder: Path,
    name: str,
    pieces: tuple[Range, ...],
    rows: Range,
    columns: Range | None = None,
) -> Any:
    """Return some rows, and of them some columns, from the pieces that have them."""
    found: list[Any] = []
    for number, piece in enumerate(pieces):
        low, high = meet(piece, rows)
        if low < high or (not found and number == len(pieces) - 1):
            held = np.load(folder / f"{name}-{number}.npy", mmap_mode="r")
            part = held[low - piece[0] : high - piece[0]] if low < high else held[:0]
            found.append(
                np.array(part if columns is None else part[:, slice(*columns)])
            )
    return np.concatenate(found)


def _read_scattered(folder: Path, pieces: tuple[Range, ...], nodes: Any) -> Any:
    """Return the targets of some nodes, in their order."""
    found = np.empty(len(nodes), np.int64)
    for number, (low, high) in enumerate(pieces):
        here = np.flatnonzero((nodes >= low) & (nodes < high))
        if len(here):
            held = np.load(folder / f"target-{number}.npy", mmap_mode="r")
            found[here] = held[nodes[here] - low]
    return found
