# SPDX-License-Identifier: Apache-2.0
"""An algorithm is one file: verified, offered, chosen by name and explained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commrt import algorithms
from commrt.errors import UsageError
from commrt.vocabulary.operations import SCHEDULED

HERE = Path(__file__).parent

FILE = '''# SPDX-License-Identifier: Apache-2.0
"""Two rings: the vector goes round backwards."""

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Builder


@algorithm("bcast", "backward_ring", complexity=1)
def bcast(b: Builder) -> None:
    """Pass the vector to the rank before."""
    ranks = b.sub((b.root - v) % b.size for v in range(b.size))
    if ranks.rank == 0:
        b.copy(b.out[:], b.inp[:])
    else:
        ranks.recv(ranks.out[:], ranks.rank - 1)
    if ranks.rank + 1 < b.size:
        ranks.send(ranks.out[:], ranks.rank + 1)
'''
"""The whole of a new algorithm."""

FOLDER = """
import importlib.util
import os
import sys

import commrt

found = importlib.util.find_spec("commrt.algorithms")
found.submodule_search_locations.append(os.environ["FOLDER_OF_ALGORITHMS"])
package = importlib.util.module_from_spec(found)
sys.modules[found.name] = commrt.algorithms = package
found.loader.exec_module(package)
"""
"""Imports the algorithms with one more folder to look for files in."""

CALLS = """
import algorithms_elsewhere
import numpy as np
from commrt import algorithms
from commrt.local import run

def main(comm):
    x = np.full(5, comm.rank, np.float32)
    comm.bcast(x, root=1, algorithm="backward_ring")
    found = comm.explain("bcast", 20, algorithm="backward_ring")
    return x.tolist(), found.choice.candidate.algorithm, str(found), [
        one.algorithm for one in comm.candidates("bcast", 20)
    ]

for values, chosen, explained, offered in run(3, main):
    assert values == [1.0] * 5, values
    assert chosen == "backward_ring", chosen
    assert "backward_ring" in explained, explained
    assert offered[0] == "backward_ring", offered  # by its number
print("all right")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "algorithms_elsewhere.py").write_text(FOLDER)
    own = tmp_path / "own"
    own.mkdir()
    (own / "backward_ring.py").write_text(FILE)
    (own / "_private.py").write_text("raise AssertionError('not an algorithm')")
    return tmp_path


def _run(folder: Path, *command: str) -> str:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {
        "PYTHONPATH": os.pathsep.join(paths),
        "FOLDER_OF_ALGORITHMS": str(folder / "own"),
    }
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_file_is_offered_chosen_by_name_and_explained(folder: Path) -> None:
    assert "all right" in _run(folder, "-c", CALLS)


def test_a_file_is_verified_by_the_tests_of_every_algorithm(folder: Path) -> None:
    said = _run(
        *(folder, "-m", "pytest", "-p", "algorithms_elsewhere", "-n", "0", "-q"),
        *("--collect-only", "-p", "no:cacheprovider", "-k", "backward_ring"),
        *(
            str(HERE / "test_algorithms.py"),
            str(HERE.parent / "schedule" / "test_verify_rounds.py"),
        ),
    )
    for test in (
        "test_right_on_1_to_33_ranks[bcast-backward_ring]",
        "test_right_as_the_engine_runs_it[bcast-backward_ring]",
        "test_right_when_ranks_span_nodes[bcast-backward_ring]",
    ):
        assert test in said
    said = _run(
        *(folder, "-m", "pytest", "-p", "algorithms_elsewhere", "-n", "0", "-q"),
        *("-p", "no:cacheprovider", "-k", "right_as_the_engine and backward_ring"),
        str(HERE / "test_algorithms.py"),
    )
    assert " passed" in said


def test_the_commands_know_a_file(folder: Path) -> None:
    program = "import algorithms_elsewhere; from commrt.commands import {}; {}"
    call = "verify.main(['backward_ring', '--ranks', '2..5'])"
    said = _run(folder, "-c", program.format("verify", call))
    assert "backward_ring" in said


SIMPLEST_FIRST = [
    *("direct", "recursive_doubling", "binomial", "dissemination", "pairwise", "ring"),
    *("bidirectional_ring", "neighbor_exchange", "halving_doubling"),
    *("scatter_allgather", "reduce_scatter_gather", "chain", "binary_tree"),
    *("double_tree", "shifted_halving_doubling", "two_level", "swing"),
]


@pytest.mark.parametrize("coll", SCHEDULED)
def test_the_simplest_stands_first(coll: str) -> None:
    found = algorithms.simplest_first(coll, algorithms.names(coll))
    known = [name for name in found if name in SIMPLEST_FIRST]
    assert known == sorted(known, key=SIMPLEST_FIRST.index)
    built_in = [algorithms.get(coll, name).built_in for name in found]
    assert built_in == sorted(built_in, reverse=True), "others stand after ours"


def test_the_order_names_only_algorithms_that_exist() -> None:
    with pytest.raises(UsageError, match="unknown bcast algorithm"):
        algorithms.simplest_first("bcast", ["sideways"])
