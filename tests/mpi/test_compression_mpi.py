# SPDX-License-Identifier: Apache-2.0
"""Compressed collectives between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wire_reference import allreduce_off_by, off_by

import commrt
from commrt.errors import MismatchError, UsageError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump
from commrt.vocabulary.wire_formats import WIRE_FORMATS

NAMES = tuple(one.name for one in WIRE_FORMATS)
LENGTHS = (0, 1, 257, 100_003)


def nodes(text: str) -> dict[str, str]:
    """Return the environment that pretends these nodes."""
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_compressed(seed: int) -> list[Any]:
    comm: Any = commrt.init()
    wrong: list[Any] = []
    digest = hashlib.sha256()
    for name in NAMES:
        for count in LENGTHS:
            inputs = [
                np.random.default_rng((seed, rank)).standard_normal(count)
                for rank in range(comm.size)
            ]
            x = inputs[comm.rank].astype(np.float32)
            inputs = [each.astype(np.float32) for each in inputs]
            exact = sum((each.astype(np.float64) for each in inputs), np.zeros(count))
            limit = allreduce_off_by(name, inputs)
            out = np.empty_like(x)
            request = comm.allreduce(x, out=out, compress=name, nonblocking=True)
            residual = np.zeros_like(x)
            fed = comm.allreduce(x.copy(), compress=name, residual=residual)
            request.wait()
            for got in (out, fed):
                if not (np.abs(got - exact) <= limit).all():
                    wrong.append([name, count, "allreduce"])
                digest.update(got.tobytes())
            total = fed + comm.allreduce(residual.astype(np.float64))
            if not np.allclose(total, exact, atol=1e-5):
                wrong.append([name, count, "residual"])
            counts = [count] * comm.size
            many = np.tile(x, comm.size)
            parts = comm.alltoallv(
                many, send_counts=counts, recv_counts=counts, compress=name
            )
            same = comm.alltoall(many.copy(), compress=name)
            if not np.array_equal(parts, same):
                wrong.append([name, count, "alltoallv"])
            for source, block in enumerate(parts.reshape(comm.size, count)):
                magnitude = np.abs(inputs[source].astype(np.float64))
                far = np.abs(block - inputs[source]) > 1.0001 * off_by(name, magnitude)
                if far.any():
                    wrong.append([name, count, "alltoall"])
    return [wrong, digest.hexdigest()]


@pytest.mark.parametrize(
    ("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1"), (4, "2,2")]
)
def test_compressed_operations_keep_their_bound(
    mpirun: Any, size: int, where: str, seed: int
) -> None:
    said = mpirun(size, run_compressed, env=nodes(where), seed=seed)
    assert said == [[[], said[0][1]]] * size


def disagree() -> list[Any]:
    comm: Any = commrt.init()
    x = np.ones(1000, np.float32)
    try:
        comm.allreduce(x, compress="float16" if comm.rank else "bfloat16")
        text = "no error"
    except MismatchError as error:
        text = str(error)
    left = bool((x == 1).all())
    return [text, left, float(comm.allreduce(x, compress="int8")[0])]


@pytest.mark.parametrize("where", ["", "2,1"])
def test_ranks_that_compress_differently_get_an_error(mpirun: Any, where: str) -> None:
    for text, left, later in mpirun(3, disagree, env=nodes(where)):
        assert "disagree on compress" in text
        assert left
        assert abs(later - 3) < 0.03


def by_table() -> list[Any]:
    comm: Any = commrt.init()
    x = np.linspace(-1, 1, 3000, dtype=np.float32) * (comm.rank + 1)
    ruled = comm.allreduce(x.copy())
    asked = comm.allreduce(x.copy(), compress="int8")
    exact = comm.allreduce(x.copy(), compress="none")
    largest = comm.allreduce(x.copy(), op="max")
    words = str(comm.explain("allreduce", x.nbytes))
    return [
        bool(np.array_equal(ruled, asked)),
        bool(np.array_equal(ruled, exact)),
        float(largest[-1]),
        "shm/ring{compress=int8}" in words and "compressed: int8" in words,
        bool(np.array_equal(comm.allreduce(x.copy()), asked)),
    ]


def test_a_tables_rule_may_compress(mpirun: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    use = Candidate("shm", "ring", {"compress": "int8"})
    rule = Rule("allreduce", Match(0, None), use)
    file.write_text(dump(Table(this_machine(), (rule,))))
    got = mpirun(2, by_table, env={"COMMRT_TABLE": str(file)})
    assert got == [[True, False, 2.0, True, True]] * 2


def refuses() -> str:
    try:
        commrt.init()
    except UsageError as error:
        return str(error)
    except commrt.errors.TableError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        ("allreduce", "int9", "unknown compress='int9'; did you mean 'int8'"),
        ("bcast", "int8", "unknown parameter 'compress'"),
    ],
)
def test_a_rule_that_compresses_wrongly_is_refused(
    mpirun: Any, tmp_path: Path, op: str, value: str, message: str
) -> None:
    file = tmp_path / "t.yaml"
    use = Candidate("shm", "ring", {"compress": value})
    rule = Rule(op, Match(0, None), use)
    file.write_text(dump(Table(this_machine(), (rule,))))
    for text in mpirun(2, refuses, env={"COMMRT_TABLE": str(file)}):
        assert message in text
