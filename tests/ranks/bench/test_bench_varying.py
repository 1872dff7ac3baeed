# SPDX-License-Identifier: Apache-2.0
"""The benchmark of new lengths: commrt's own calls, on ranks that are threads."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest

from commrt.bench import cli, varying
from commrt.bench.varying_calls import Own
from commrt.bench.varying_forms import FORMS
from commrt.bench.varying_lengths import Lengths, drawn
from commrt.errors import UsageError
from commrt.local import run

OF_TORCH = [
    *("allgather of a list", "alltoall of a list", "reduce_scatter of a list"),
    *("allgather at once", "reduce_scatter at once"),
]
OWN = [name for name in FORMS if name not in OF_TORCH]
JOB = {"operations": OWN, "elements": (3, 40), "calls": 3, "blocks": 2}
"""A halo exchange takes three elements: two halos, and what is between them."""


class Wrong(Own):
    """Calls that change a number of what they give."""

    def bind(self, name: str, lengths: Lengths, x: Any, out: Any) -> Any:
        """Return a call."""
        call = super().bind(name, lengths, x, out)

        def wrong() -> None:
            assert call is not None
            call()
            for array in (x, out):
                array[-1:] += 1

        return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_operation_gives_what_it_is_defined_to(size: int) -> None:
    def rank_main(comm: Any) -> None:
        rows = varying.measure_on(comm, {"commrt": Own(comm)}, JOB)
        assert [(row["op"], row["valid"]) for row in rows] == [
            (name, True) for name in OWN
        ]
        for row in rows:
            times = row["samples_us"]["commrt"]
            assert [*times] == ["new", "seen"]
            assert all(len(each) == 2 and min(each) > 0 for each in times.values())

    run(size, rank_main, timeout_s=300)


@pytest.mark.parametrize("size", [2, 3])
def test_a_wrong_result_is_seen(size: int) -> None:
    def rank_main(comm: Any) -> None:
        both = {"commrt": Own(comm), "mpi4py": Wrong(comm)}
        rows = varying.measure_on(comm, both, JOB)
        assert [row["op"] for row in rows if row["valid"]] == []
        said = varying.text(JOB, {**about(size), "rows": rows}).splitlines()
        assert len(said) == 3 + 2 * len(OWN)
        assert all(line.endswith("WRONG") for line in said[3:])

    run(size, rank_main, timeout_s=300)


def test_forms_that_only_torch_has_are_left_out() -> None:
    def rank_main(comm: Any) -> int:
        job = {**JOB, "operations": OF_TORCH}
        return len(varying.measure_on(comm, {"commrt": Own(comm)}, job))

    assert run(2, rank_main, timeout_s=300) == [0, 0]


@pytest.mark.parametrize("name", [*FORMS])
@pytest.mark.parametrize("size", [1, 3])
def test_no_lengths_are_drawn_twice(name: str, size: int) -> None:
    spec = FORMS[name]
    first, again = (
        [*islice(drawn(spec, size, (5, 24), random.Random(name)), 20)] for _ in "12"
    )
    assert first == again  # on every rank
    assert sorted(lengths.block for lengths in first) == [*range(5, 25)]
    for lengths in first:
        assert all(5 <= one <= 24 for row in lengths.matrix for one in row)
        sent = [sum(lengths.sent(rank)) for rank in range(size)]
        received = [sum(lengths.received(rank)) for rank in range(size)]
        assert sum(sent) == sum(received)
    with pytest.raises(UsageError, match="20 lengths, and more are asked for"):
        next(islice(drawn(spec, size, (5, 24), random.Random(name)), 20, None))


def about(ranks: int) -> dict[str, Any]:
    return {
        "versions": {"commrt": "1", "numpy": np.__version__},
        "ranks": ranks,
        "nodes": 1,
        "link_class": "near",
        "library": "",
    }


def test_the_table_compares_with_the_peer_of_each_way() -> None:
    samples = {
        "commrt": {"new": [5.0, 7.0, 9.0], "seen": [3.0, 4.0, 8.0]},
        "torch": {"new": [20.0], "seen": [10.0]},
        "mpi4py": {"new": [14.0], "seen": [14.0]},
    }
    rows = [{"op": "alltoallv", "valid": True, "samples_us": samples}]
    said = varying.text(JOB, {**about(2), "rows": rows}).splitlines()
    assert "2 ranks on 1 node(s), links near" in said[0]
    assert "3 to 40 elements" in said[1]
    own, torch, mpi4py = (line.split() for line in said[3:])
    assert own[:6] == ["alltoallv", "commrt", "4.00", "7.00", "2.00", "1.67"]
    assert own[6:] == ["3.00", "5.00", "2.00", "1.67", "0.357", "of", "mpi4py"]
    assert torch[2:] == ["10.00", "20.00", "10.00", "2.00"] * 2
    assert mpi4py[-1] == "1.00"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--op alltoally", "argument --op: 'alltoally' is unknown; did you mean"),
        ("--ways commrt,gloom", "argument --ways: 'gloom' is unknown"),
        ("-m 4096", "-m 4096: write the least and the most bytes"),
        ("-m 1:2", "-m 1:2: write the least and the most bytes"),
        ("-m a:b", "-m a:b: write the least and the most bytes"),
        ("-m 4:400", "blocks have 100 lengths there, and 417 are needed"),
    ],
)
def test_wrong_usage_is_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["varying", *line.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
