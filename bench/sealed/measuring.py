# SPDX-License-Identifier: Apache-2.0
"""Times cells in clusters on this machine, one network after the other."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from commrt import bench
from commrt.bench.sealed.cells import Cell, runners
from commrt.bench.sealed.networks import CLUSTER
from commrt.cluster.topology import Topology
from commrt.errors import BackendError
from commrt.files.write import write_file
from commrt.launch.mpiexec import child_environment, run_process

__all__ = ["Times", "measured"]

Times = Mapping[str, Mapping[str, Sequence[float]]]
"""Microseconds of each call, by the names of cells and of candidates."""
_LIMIT_S = 3600.0
_RANK = Path(bench.__file__ or "").resolve().parent / "sealed" / "rank.py"


def measured(cells: Sequence[Cell], say: Callable[[str], None]) -> Times:
    """Return the times of all candidates of all cells.

    Args:
        cells: of any networks; each network becomes a cluster of its own.
        say: is told which network is measured.

    Raises:
        BackendError: there is no cluster here (it needs root), or a rank failed.
    """
    found: dict[str, Mapping[str, Sequence[float]]] = {}
    for network in dict.fromkeys(cell.network for cell in cells):
        own = [cell for cell in cells if cell.network == network]
        say(f"{network}: {len(own)} cells")
        found.update(_on_network(own))
    return found


def _on_network(cells: Sequence[Cell]) -> Times:
    with tempfile.TemporaryDirectory(prefix="commrt-sealed-") as folder:
        network, job = Path(folder, "network.yaml"), Path(folder, "job.json")
        result = Path(folder, "times.json")
        write_file(network, _yaml(cells[0].topology))
        write_file(
            job,
            json.dumps({"result": str(result), "cells": [*map(_described, cells)]}),
        )
        words = ["run", "--topology", str(network), *CLUSTER, "--launcher", "torchrun"]
        argv = [sys.executable, "-m", "commrt.cluster", *words, "--"]
        argv += [sys.executable, str(_RANK), str(job)]
        done = run_process(argv, child_environment(sys.executable), timeout_s=_LIMIT_S)
        if not done.ok or not result.exists():
            raise BackendError(f"{cells[0].network}: {done.describe_failure()}")
        times: Times = json.loads(result.read_text())
    return times


def _described(cell: Cell) -> dict[str, Any]:
    candidates = [
        {"name": str(one), "algorithm": one.algorithm, "params": dict(one.params)}
        for one, _ in runners(cell)
    ]
    return {
        "key": cell.key,
        "op": cell.op,
        "num_elements": cell.num_elements,
        "candidates": candidates,
    }


def _yaml(topology: Topology) -> str:
    links = [
        {"ends": [*link.ends], "rate": f"{(link.rate or 0) // 1000}kbit"}
        for link in topology.links
    ]
    return yaml.safe_dump(
        {
            "hosts": [*topology.hosts],
            "switches": [*topology.switches],
            "links": links,
        }
    )
