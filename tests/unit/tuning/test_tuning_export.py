# SPDX-License-Identifier: Apache-2.0
"""What other libraries are told: only what they have, in their bytes and numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commrt import algorithms
from commrt.errors import TableError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.tuning.cli import main
from commrt.tuning.export import Exported
from commrt.tuning.export_nccl import export_nccl
from commrt.tuning.export_openmpi import OPENMPI, export_openmpi
from commrt.tuning.table_writer import write_table

HERE = Machine(Cpu("some", 1, 8))
NATIVE = "mpi/native"


def rules(
    op: str,
    *uses: tuple[int, str],
    ranks: int | None = 4,
    link_class: str = "near",
    device: str = "host",
    nodes: int | None = 1,
    redop: str | None = None,
) -> list[Rule]:
    """Return the rules of a cell from the first bytes of each range."""
    ends = [*[lo for lo, _ in uses[1:]], None]
    return [
        Rule(
            op,
            Match(
                lo,
                hi,
                ranks=ranks,
                nodes=nodes,
                link_class=link_class,
                device=device,
                redop=redop,
            ),
            Candidate.parse(use),
        )
        for (lo, use), hi in zip(uses, ends, strict=True)
    ]


def openmpi(*given: Rule) -> Exported:
    return export_openmpi(Table(HERE, given))


def numbers(exported: Exported) -> list[list[int]]:
    """Return the file's lines without comments, as its reader takes them."""
    lines = [line.split("#")[0].split() for line in exported.text.splitlines()]
    return [[int(word) for word in line] for line in lines if line]


def test_a_file_for_openmpi_holds_what_its_reader_expects() -> None:
    given = rules("allreduce", (0, "shm/recursive_doubling"), (8192, "shm/ring"))
    assert numbers(openmpi(*given)) == [
        [1],  # collectives
        [2],  # allreduce
        [2],  # numbers of ranks
        *([4], [2], [0, 3, 0, 0], [8192, 4, 0, 0]),
        *([5], [1], [0, 0, 0, 0]),  # what was not measured stays with Open MPI
    ]


def test_neighbouring_rank_counts_need_no_stop_between_them() -> None:
    given = [
        *rules("bcast", (0, "shm/binomial"), ranks=2),
        *rules("bcast", (0, "shm/ring"), ranks=3),
    ]
    assert numbers(openmpi(*given))[2:] == [
        [3],
        *([2], [1], [0, 6, 0, 0]),
        *([3], [1], [0, 9, 0, 0]),
        *([4], [1], [0, 0, 0, 0]),
    ]


@pytest.mark.parametrize(
    ("op", "use", "collective", "algorithm", "scale"),
    [
        ("allgather", "shm/dissemination", 0, 2, 4),
        ("allgather", "shm/recursive_doubling", 0, 3, 4),
        ("allgather", "shm/ring", 0, 4, 4),
        ("allreduce", "mpi/halving_doubling", 2, 6, 1),
        ("alltoall", "shm/direct", 3, 1, 4),
        ("alltoall", "shm/pairwise", 3, 2, 4),
        ("alltoall", "shm/dissemination", 3, 3, 4),
        ("bcast", "shm/direct", 7, 1, 1),
        ("bcast", "shm/halving_doubling", 7, 8, 1),
        ("reduce", "shm/binomial", 11, 5, 1),
        ("reduce_scatter", "shm/halving_doubling", 13, 3, 1),
    ],
)
def test_each_collective_has_its_numbers_and_its_bytes(
    op: str, use: str, collective: int, algorithm: int, scale: int
) -> None:
    found = numbers(openmpi(*rules(op, (0, NATIVE), (1000, use))))
    assert found[1] == [collective]
    assert found[5:7] == [[0, 0, 0, 0], [1000 * scale, algorithm, 0, 0]]


def test_every_algorithm_that_is_translated_exists_here() -> None:
    for op, ours in OPENMPI.items():
        assert set(ours.algorithms) <= set(algorithms.names(op)), op


def test_the_documented_numbers_are_these() -> None:
    page = Path(__file__).parents[3] / "docs/reference/selection-tables.md"
    rows = page.read_text().split("*Open MPI 5*")[1].split("\n\n")[1].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if " | " in row]
    for op, ours in OPENMPI.items():
        (said,) = (text for ops, text in cells if op in re.split(r"\W+", ops))
        found = dict(re.findall(r"`(\w+)` (\d+)", said))
        assert found == {name: str(number) for name, number in ours.algorithms.items()}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (rules("allreduce", (0, "shm/direct{shots=1}")), "no such allreduce"),
        (rules("reduce_scatter", (0, "shm/ring")), "no such reduce_scatter"),
        (rules("barrier", (0, "shm/direct")), "no such barrier"),
        (
            rules("allgather", (0, "shm/recursive_doubling"), ranks=6),
            "powers of two only",
        ),
        (rules("bcast", (0, "other/ring")), "has no other"),
        (rules("bcast", (0, "shm/ring"), ranks=None), "any number of ranks"),
        (rules("bcast", (0, "nccl/ring"), device="cuda"), "about cuda memory"),
        (rules("allreduce", (0, "shm/ring"), redop="max"), "or the reduction"),
        (
            rules("gather", (0, "shm/direct"), (4096, "shm/binomial")),
            "may count different bytes",
        ),
    ],
)
def test_what_openmpi_cannot_be_told_is_listed_not_mistranslated(
    given: list[Rule], why: str
) -> None:
    with pytest.raises(TableError, match=why):
        openmpi(*given)
    fine = rules("alltoall", (0, "shm/pairwise"))
    exported = openmpi(*given, *fine)
    assert exported.said == 1
    assert any(why in line for line in exported.left_out)
    assert numbers(exported) == numbers(openmpi(*fine))
    flat = " ".join(line.strip("# ") for line in exported.text.splitlines())
    assert why in flat


def test_links_that_openmpi_cannot_tell_apart_get_the_near_ones() -> None:
    given = [
        *rules("bcast", (0, "shm/ring"), link_class="far"),
        *rules("bcast", (0, "shm/binomial")),
    ]
    exported = openmpi(*given)
    assert [0, 6, 0, 0] in numbers(exported)
    assert "link_class=far" in exported.left_out[0]


def test_one_choice_for_all_bytes_of_a_gather_is_safe() -> None:
    assert [0, 2, 0, 0] in numbers(openmpi(*rules("gather", (0, "shm/binomial"))))


def test_parameters_of_our_transport_are_said_to_be_lost() -> None:
    exported = openmpi(*rules("bcast", (0, "shm/ring{chunk=65536,store=stream}")))
    assert [0, 9, 0, 0] in numbers(exported)
    assert "without chunk, store" in exported.left_out[0]


# -- NCCL ------------------------------------------------------------------------------


def nccl(*given: Rule) -> Exported:
    return export_nccl(Table(HERE, given))


def lines(exported: Exported) -> list[str]:
    return [line for line in exported.text.splitlines() if not line.startswith("#")]


RING = "nccl/ring{channels=8,proto=simple}"
TREE = "nccl/tree{channels=2,proto=ll}"


def test_a_file_for_nccl_has_inclusive_ends_channels_and_a_true_maximum() -> None:
    given = rules(
        "allreduce", (0, TREE), (65536, RING), ranks=16, nodes=2, device="cuda"
    )
    assert lines(nccl(*given)) == [
        "allreduce,0,65535,tree,ll,2,2,16",
        f"allreduce,65536,{2**63 - 1},ring,simple,8,2,16",
    ]


def test_nccl_counts_all_ranks_bytes_of_an_allgather() -> None:
    given = rules("allgather", (0, TREE), (1024, RING), device="cuda")
    assert lines(nccl(*given))[0] == "allgather,0,4095,tree,ll,2,1,4"
    given = rules("reduce_scatter", (0, TREE), (1024, RING), device="cuda")
    assert lines(nccl(*given))[0] == "reducescatter,0,1023,tree,ll,2,1,4"


def test_what_holds_for_any_ranks_comes_last_as_the_first_match_counts() -> None:
    given = [
        *rules("bcast", (0, TREE), ranks=None, nodes=None, device="cuda"),
        *rules("bcast", (0, RING), device="cuda"),
    ]
    assert [line.split(",")[6:] for line in lines(nccl(*given))] == [
        ["1", "4"],
        ["-1", "-1"],
    ]


@pytest.mark.parametrize(
    ("op", "use", "why"),
    [
        ("allreduce", "nccl/native", "no algorithm of NCCL"),
        ("allreduce", "nccl/ring", "needs the parameters proto and channels"),
        ("allreduce", "nccl/ring{channels=8,proto=big}", "proto is none of"),
        ("allreduce", "nccl/ring{channels=-1,proto=ll}", "no number above 0"),
        ("allreduce", "nccl/ring{channels=x,proto=ll}", "no number above 0"),
        ("allreduce", "shm/ring", "NCCL does not run it"),
        ("alltoall", RING, "is not asked about it"),
    ],
)
def test_what_nccl_cannot_be_told_is_listed(op: str, use: str, why: str) -> None:
    given = rules(op, (0, use), device="cuda")
    with pytest.raises(TableError, match="forces one channel") as raised:
        nccl(*given)
    assert why in str(raised.value)
    exported = nccl(*given, *rules("bcast", (0, RING), device="cuda"))
    assert exported.said == 1
    assert any(why in line for line in exported.left_out)


def test_no_line_is_longer_than_the_plugin_reads() -> None:
    many = [
        one
        for ranks in range(2, 12)
        for one in rules("alltoall", (0, RING), device="cuda", ranks=ranks)
    ]
    exported = nccl(*many, *rules("bcast", (0, RING), device="cuda"))
    assert len(exported.left_out) == 10
    assert max(map(len, exported.text.splitlines())) < 255


# -- the command -----------------------------------------------------------------------


def test_the_command_says_on_stderr_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.yaml", tmp_path / "rules"
    given = [
        *rules("alltoall", (0, "shm/pairwise")),
        *rules("barrier", (0, "shm/direct")),
    ]
    write_table(Table(HERE, tuple(given)), path)
    assert main(["export", str(path), "--to", "openmpi"]) == 0
    printed = capsys.readouterr()
    assert "Open MPI has no such barrier" in printed.err
    assert main(["export", str(path), "--to", "openmpi", "--out", str(out)]) == 0
    assert out.read_text() == printed.out
    capsys.readouterr()
    assert main(["export", str(path), "--to", "nccl", "--out", str(out)]) == 1
    assert "no file was written" in capsys.readouterr().err
    assert "pairwise" in out.read_text()
