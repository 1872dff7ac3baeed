# SPDX-License-Identifier: Apache-2.0
"""The examples train, and lose as much as one process does, step by step."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from commrt.examples import (
    cnn,
    dlrm,
    experts,
    gcn,
    gpt_fsdp,
    gpt_tensor_parallel,
    out_of_core,
    runs,
    sharded_digits,
)
from commrt.examples.digits import load_digits
from commrt.examples.documents import load_documents, windows
from commrt.examples.tumours import TABLES, load_measurements, load_samples

DEADLINE_S = 300.0
EXAMPLES = {
    "cnn": cnn.main,
    "dlrm": dlrm.main,
    "experts": experts.main,
    "gcn": gcn.main,
    "gpt_fsdp": gpt_fsdp.main,
    "gpt_tensor_parallel": gpt_tensor_parallel.main,
    "out_of_core": out_of_core.main,
    "sharded_digits": sharded_digits.main,
}


def trained(names: Sequence[str], arguments: Sequence[str]) -> list[Any]:
    found = []
    for name in names:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = EXAMPLES[name](arguments)
        found.append([name, status, said.getvalue()])
    return found


def check(results: list[list[Any]], names: Sequence[str], backend: str) -> None:
    for name, (called, status, said) in zip(names, results[0], strict=True):
        assert called == name
        assert status == 0, said
        assert f"backend {backend}" in said
        assert "against one process: off by at most" in said
    # The other ranks say nothing.
    for other in results[1:]:
        assert [each[1:] for each in other] == [[0, ""]] * len(names)


def test_the_examples_on_two_ranks(torchrun: Any) -> None:
    results = torchrun(
        2,
        trained,
        names=[*EXAMPLES],
        arguments=["--steps", "3", "--check"],
        deadline_s=DEADLINE_S,
    )
    check(results, [*EXAMPLES], "commrt")


def test_the_examples_on_ranks_of_mpiexec(mpirun: Any) -> None:
    """Which has no variables of torch's: each rank would train alone by these."""
    results = mpirun(
        2,
        trained,
        names=[*EXAMPLES],
        arguments=["--steps", "3", "--check"],
        deadline_s=DEADLINE_S,
    )
    check(results, [*EXAMPLES], "commrt")
    assert all("3 steps on 2 ranks" in said for _, _, said in results[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("nranks", "names", "backend"),
    [
        (1, ["cnn", "dlrm", "experts", "gcn", "gpt_fsdp", "out_of_core"], "commrt"),
        # One job only: a second one of gloo meets the first one's keys in the store.
        (2, ["cnn"], "gloo"),
        (2, ["gpt_tensor_parallel"], "gloo"),
        (
            3,
            ["cnn", "dlrm", "experts", "gcn", "out_of_core", "sharded_digits"],
            "commrt",
        ),
        (4, ["dlrm", "experts", "gcn", "gpt_fsdp", "gpt_tensor_parallel"], "commrt"),
    ],
)
def test_other_ranks_and_backends(
    torchrun: Any, nranks: int, names: list[str], backend: str
) -> None:
    arguments = ["--steps", "10", "--check", "--backend", backend]
    results = torchrun(
        nranks, trained, names=names, arguments=arguments, deadline_s=DEADLINE_S
    )
    check(results, names, backend)


def refused() -> list[Any]:
    return [trained(["cnn"], []), trained(["gpt_tensor_parallel"], [])]


@pytest.mark.full
def test_ranks_that_do_not_divide_the_work(torchrun: Any) -> None:
    results = torchrun(7, refused, deadline_s=DEADLINE_S)
    [[_, first, said]], [[_, second, told]] = results[0]
    assert (first, second) == (2, 2)
    assert "7 ranks: expected a divisor of 120" in said
    assert "7 ranks: expected 2, 4" in told


def test_losses_beyond_the_tolerance_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs.dist, "get_rank", lambda: 0)
    assert runs.compare([2.0, 1.0], [2.0, 1.00005]) == 0
    assert runs.compare([2.0, 1.0], [2.0, 1.001]) == 1
    assert "step 1: 1.0 here, 1.001 in one process" in capsys.readouterr().err
    assert runs.compare([float("nan"), 1.0], [2.0, 1.0]) == 1


def test_the_digits_are_those_of_the_data_set() -> None:
    images, digits = load_digits()
    assert images.shape == (1797, 8, 8)
    assert int(images.max()) == 16
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits).tolist() == counts
    assert digits[:10].tolist() == list(range(10))
    assert int(images.astype(int).sum()) == 561718


def test_the_tumours_are_those_of_the_data_set() -> None:
    measured, is_benign = load_measurements()
    assert measured.shape == (569, 30)
    assert int(is_benign.sum()) == 357
    assert float(measured[0, 0]) == pytest.approx(17.99)
    assert float(measured.sum(dtype=np.float64)) == pytest.approx(1056474.46, abs=0.01)
    samples = load_samples()
    assert samples.dense.mean(0).abs().max() < 1e-12
    for table, bags in zip(TABLES, samples.bags, strict=True):
        assert len(bags) == 569
        assert 0 <= int(bags.min()) <= int(bags.max()) < table.num_embeddings
    # Eighths of the data, up to equal values.
    assert torch.bincount(samples.bags[0].reshape(-1)).tolist() == pytest.approx(
        [71] * 80, abs=8
    )


def test_the_text_is_the_documents() -> None:
    text = load_documents()
    assert b"\n# Design\n" in text
    rows = windows(text, 5, 16, 2)
    assert rows.shape == (5, 17)
    assert torch.equal(rows, windows(text, 5, 16, 2))
    assert bytes(rows[3].tolist()) in text


def test_the_command_line() -> None:
    with pytest.raises(SystemExit):
        runs.arguments_of("cnn", cnn.__doc__, 5, ["--steps", "0"])
    assert runs.arguments_of("cnn", cnn.__doc__, 5, []).steps == 5
