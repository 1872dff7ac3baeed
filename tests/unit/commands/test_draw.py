# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt draw`` shows what a schedule does."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.commands.draw import main
from commrt.schedule.draw import draw
from commrt.schedule.trace import trace
from commrt.schedule.verify import verify
from commrt.vocabulary.operations import COLLECTIVES

FIGURE = Path(__file__).parents[3] / "docs/figures/ring.svg"
SVG = "{http://www.w3.org/2000/svg}"

TWICE = """
from commrt.algorithms import algorithm

@algorithm("bcast", "{name}")
def author(b):
    b.blocks(1)
    {step}
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))


def texts(picture: str) -> list[str]:
    return [
        node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")
    ]


def labels(picture: str) -> list[str]:
    nodes = ElementTree.fromstring(picture).iter(f"{SVG}text")
    return [node.text or "" for node in nodes if node.get("class") == "label"]


@pytest.mark.parametrize("coll", COLLECTIVES)
def test_every_algorithm_has_a_picture_of_all_its_messages(coll: str) -> None:
    for size in (1, 2, 5, 6):
        for name in algorithms.names(coll, size):
            schedule = algorithms.schedule(coll, name, size, size - 1)
            found = trace(schedule)
            picture = draw(schedule)
            assert len(labels(picture)) == len(found.messages)
            assert found.num_columns == verify(schedule).critical_path
            assert len(re.findall(r">(?:rank|root) \d+<", picture)) == size


def test_the_head_line_counts() -> None:
    words = texts(draw(algorithms.schedule("allreduce", "ring", 8)))
    assert words[0] == "allreduce ring on 8 ranks"
    assert words[1] == (
        "14 messages on the critical path, 112 in all; the busiest rank sends 7/4 N "
        "and receives 7/4 N of N, the whole vector"
    )
    assert words.count("sends 7/4 N, receives 7/4 N") == 8


def test_labels_name_blocks_also_where_scratch_moves_them() -> None:
    found = labels(draw(algorithms.schedule("allgather", "dissemination", 4)))
    # Block r starts at rank r; the second message carries two.
    assert sorted(found) == ["0", "0,1", "0,3", "1", "1,2", "2", "2,3", "3"]


def test_labels_name_contributions_where_there_is_one_block() -> None:
    found = labels(draw(algorithms.schedule("allreduce", "recursive_doubling", 4)))
    assert sorted(found) == ["0", "0,1", "0,1", "1", "2", "2,3", "2,3", "3"]


def test_sums_are_white_until_they_are_complete() -> None:
    picture = draw(algorithms.schedule("allreduce", "ring", 4))
    # A reduce-scatter lap of partial sums, an allgather lap of finished ones.
    assert picture.count('height="11.8" fill="white"') == 12
    assert picture.count('height="11.8" fill="rgba') == 12


def test_tips_say_from_where_to_where() -> None:
    picture = draw(algorithms.schedule("reduce", "binomial", 2))
    assert "<title>rank 1 tmp0[0] to rank 0 out[0]: block 0 of 1; is added</title>" in (
        picture
    )


def test_root_and_parameters_are_in_the_head_line(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    argv = ["--ranks", "4", "--out", str(out)]
    assert main(["binomial", "--coll", "bcast", "--root", "2", *argv]) == 0
    words = texts(out.read_text())
    assert words[0] == "bcast binomial on 4 ranks, root 2"
    assert {"rank 1", "root 2"} < set(words)
    assert main(["direct", "--params", "shots=2", *argv]) == 0
    assert texts(out.read_text())[0] == "allreduce direct on 4 ranks, shots=2"


def test_an_algorithm_that_asks_for_nodes_is_drawn_on_two_or_on_those_given(
    tmp_path: Path,
) -> None:
    file = tmp_path / "picture.svg"
    for extra, lanes in (([], 8), (["--nodes", "3,5"], 8)):
        assert main(["two_level", "--ranks", "8", "--out", str(file), *extra]) == 0
        assert len(re.findall(r">(?:rank|root) \d+<", file.read_text())) == lanes
    words = ["--coll", "alltoall", "--params", "among=direct,leaders=1"]
    assert main(["two_level", "--ranks", "8", "--out", str(file), *words]) == 0
    assert "among = direct" in file.read_text() or "among=direct" in file.read_text()


def test_names_file_and_operation_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recursive_doubling", "--ranks", "3"]) == 0
    assert (tmp_path / "allreduce-recursive_doubling-3.svg").exists()
    assert capsys.readouterr().out == (
        "allreduce-recursive_doubling-3.svg: allreduce; recursive_doubling is also one "
        "for allgather, scan, exscan: choose by --coll\n"
    )


def test_a_wrong_algorithm_is_drawn_and_called_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.py"
    step = "b.recv(b.out[0], 1) if b.rank != 1 else b.send(b.out[0], 0)"
    file.write_text(TWICE.format(name="my_wrong", step=step))
    out = tmp_path / "wrong.svg"
    assert main([f"{file}:my_wrong", "--ranks", "2", "--out", str(out)]) == 0
    assert labels(out.read_text()) == ["?"]
    assert "the algorithm is wrong: bcast my_wrong" in capsys.readouterr().err


def test_what_never_ends_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lost.py"
    file.write_text(TWICE.format(name="my_lost", step="b.recv(b.out[0], b.rank + 1)"))
    out = tmp_path / "lost.svg"
    assert main([f"{file}:my_lost", "--ranks", "2", "--out", str(out)]) == 1
    assert not out.exists()
    assert "no picture: rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["rign"], 2, "did you mean 'ring'"),
        (["ring", "--ranks", "0"], 2, "size=0 is not a number of ranks"),
        (["ring", "--ranks", "1000000"], 2, "draw at most 128"),
        (["ring", "--coll", "alltoall"], 2, "unknown alltoall algorithm 'ring'"),
        (["ring", "--root", "8"], 2, "root=8 is not a rank below 8"),
        (["direct", "--params", "shots"], 2, "expected k=2"),
        (["direct", "--params", "shots=3"], 2, "not one of 1, 2"),
        (["neighbor_exchange", "--ranks", "5"], 2, "does not support 5 ranks"),
        (["ring", "--out", "nowhere/ring.svg"], 1, "nowhere/ring.svg"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_takes_the_operation_that_exists_for_so_many_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "chain.svg"
    # On two ranks an allreduce along a chain would be one exchange.
    assert main(["chain", "--ranks", "2", "--out", str(out)]) == 0
    assert texts(out.read_text())[0] == "reduce chain on 2 ranks, root 0"
    assert (
        "also one for bcast, scan, exscan: choose by --coll" in capsys.readouterr().out
    )


def test_the_figure_of_the_documents_is_what_the_command_makes(tmp_path: Path) -> None:
    out = tmp_path / "ring.svg"
    assert main(["ring", "--ranks", "4", "--out", str(out)]) == 0
    assert out.read_text() == FIGURE.read_text(), (
        "renew it: python -m commrt draw ring --ranks 4 --out docs/figures/ring.svg"
    )
