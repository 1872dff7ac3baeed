# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt verify`` proves built-in and foreign algorithms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commrt.algorithms import _registry
from commrt.commands.verify import main

ALGORITHM = """
from commrt.algorithms import algorithm

@algorithm("bcast", "{name}")
def {name}(b):
    b.blocks(1)
    if b.rank == b.root:
        b.copy(b.out[0], b.inp[0])
        for peer in range(b.size):
            if peer != b.rank {condition}:
                b.send(b.inp[0], peer)
    else:
        b.recv(b.out[0], b.root)
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))


def test_one_line_per_operation_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["binomial", "--ranks", "2..4", "--root", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["reduce", "2"],
        ["reduce", "3"],
        ["reduce", "4"],
    ]
    assert len(lines) == 4 * 3 + 1
    assert "critical path    2" in lines[2]
    assert lines[-1] == (
        "binomial is right for reduce, bcast, gather, scatter on 2..4 ranks"
    )


def test_one_operation_and_all_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["direct", "--coll", "allreduce", "--ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["shots=1", "shots=2"]


def test_named_parameters_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dissemination", "--ranks", "9,10", "--params", "radix=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["alltoall", "9"],
        ["alltoall", "10"],
    ]
    assert all(line.endswith("radix=4") for line in lines[:-1])
    assert lines[-1] == "dissemination is right for alltoall on 9..10 ranks"
    swing = ["swing", "--ranks", "8", "--params", "torus=2x4,ports=all"]
    assert main(swing) == 0
    assert "torus=2x4 ports=all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ("radix=99", "radix=99 is not one of 2, 3, 4, 5"),
        ("shots=2", "no operation of dissemination has shots; its parameters: radix"),
        ("radix", "expected k=2 or k=2,parts=4"),
        ("radix=;", "expected k=2 or k=2,parts=4"),
    ],
)
def test_parameters_that_there_are_not_are_refused(
    params: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dissemination", "--ranks", "5", "--params", params]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ALGORITHM.format(name="my_flat", condition=""))
    assert main([f"{file}:my_flat", "--ranks", "1,5"]) == 0
    assert "my_flat is right for bcast on 1,5 ranks" in capsys.readouterr().out


def test_an_algorithm_that_asks_for_nodes_is_tried_on_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["two_level", "--coll", "bcast", "--ranks", "1..4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bcast", "1", "ranks", "not", "supported"]
    tried = {word for line in lines for word in line.split() if "nodes=" in word}
    assert tried == {
        f"nodes={one}" for one in ("001", "011", "010", "0011", "0111")
    } | {
        "nodes=0012",
        "nodes=0101",
    }
    assert main(["two_level", "--coll", "bcast", "--nodes", "3,1"]) == 0
    said = capsys.readouterr().out
    assert "nodes=0001 leaders=1" in said
    assert said.endswith("two_level is right for bcast on 4 ranks\n")


@pytest.mark.parametrize(
    ("nodes", "ranks", "said"),
    [
        ("2,x", "4", "expected ranks per node, as 2,3"),
        ("2,0", "2", "expected ranks per node, as 2,3"),
        ("2,2", "5", "are 4 ranks, not 5"),
    ],
)
def test_wrong_nodes_are_refused(
    nodes: str, ranks: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["two_level", "--coll", "bcast", "--ranks", ranks, "--nodes", nodes]
    assert main(call) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_algorithm_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_bcast.py").write_text(
        ALGORITHM.format(name="my_wrong", condition="and peer != 2")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["wrong_bcast:my_wrong", "--ranks", "2..3"]) == 1
    sys.modules.pop("wrong_bcast")
    out = capsys.readouterr().out
    assert "WRONG: bcast my_wrong on 3 ranks, root 0: rank 0 sends 0 messages" in out
    assert "my_wrong is WRONG for bcast" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rign"], "did you mean 'ring'"),
        (["ring", "--coll", "barrier"], "unknown barrier algorithm 'ring'"),
        (["ring", "--ranks", "0..3"], "expected 4, 1..64 or 2,4,8"),
        (["ring", "--ranks", "many"], "expected 4, 1..64 or 2,4,8"),
        (["binomial", "--root", "first"], "expected a rank or 'all'"),
        (["nowhere.py:x"], "cannot import 'nowhere.py'"),
        (["nowhere:x"], "cannot import 'nowhere'"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
