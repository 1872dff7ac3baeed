# SPDX-License-Identifier: Apache-2.0
"""The page of sealed predictions says what the files say."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from commrt.bench.sealed.__main__ import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/internals/sealed-predictions.md").read_text()


@pytest.mark.parametrize("number", [1, 2])
def test_the_page_has_the_hash_of_what_was_sealed(number: int) -> None:
    sealed = ROOT / f"docs/data/sealed/round-{number}/predictions.json"
    digest = hashlib.sha256(sealed.read_bytes()).hexdigest()
    assert re.search(rf"^round-{number} {digest}$", PAGE, re.M)


@pytest.mark.parametrize("number", [1, 2])
def test_the_page_has_the_outcome(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / f"docs/data/sealed/round-{number}"
    assert main(["judge", "--folder", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines if number == 2 else lines[:5]
    tables = [line for line in shown if line.startswith("|")]
    assert len(tables) >= 5
    assert [line for line in tables if line not in PAGE] == []


def test_networks_that_nobody_has_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["measure", "--networks", "star-99"]) == 2
    assert "--networks star-99: expected some of" in capsys.readouterr().err


def test_nothing_that_was_measured_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ROOT / "docs/data/sealed/round-1"
    assert main(["judge", "--networks", "pair-4", "--folder", str(folder)]) == 2
    assert "no cell of these networks" in capsys.readouterr().err


def test_a_folder_without_predictions_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--folder", str(tmp_path)]) == 2
    assert "numbers.json" in capsys.readouterr().err
    assert main(["judge", "--folder", str(tmp_path)]) == 2
    assert "times.json.gz" in capsys.readouterr().err
