# SPDX-License-Identifier: Apache-2.0
"""The example of K-FAC prints its table, and takes fewer steps than SGD."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from commrt.examples import kfac
from commrt.examples.kfac import Setting, steps_to
from commrt.local import run


def test_kfac_takes_fewer_steps_than_sgd() -> None:
    def main(comm: Any) -> list[int]:
        torch.set_num_threads(1)
        return [
            steps_to(comm, setting, 0, 0.3, 60)
            for setting in (Setting(0.1), Setting(0.2, 0.03))
        ]

    found = run(2, main, timeout_s=240)
    assert found[0] == found[1]
    sgd, second_order = found[0]
    assert second_order < sgd


def test_the_example_of_kfac_prints_all_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kfac, "SGD", kfac.SGD[:1])
    monkeypatch.setattr(kfac, "K_FAC", kfac.K_FAC[:1])
    threads = torch.get_num_threads()
    said = io.StringIO()
    arguments = ["--most", "5", "--seeds", "1", "--last", "1"]
    with contextlib.redirect_stdout(said):
        assert kfac.main(arguments) == 0
    torch.set_num_threads(threads)
    lines = said.getvalue().splitlines()
    assert "on 2 ranks; mean of 1 seeds" in lines[0]
    assert [line[:5] for line in lines[1:]] == [
        "SGD, ",
        "K-FAC",
        "the b",
        "SGD, ",
        "K-FAC",
    ]


@pytest.mark.parametrize("wrong", ["--target", "--most", "--seeds", "--last"])
def test_wrong_numbers_of_the_example_of_kfac_are_refused(wrong: str) -> None:
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit),
    ):
        kfac.main([wrong, "0"])
    assert "expected a number above 0" in said.getvalue()
