# SPDX-License-Identifier: Apache-2.0
"""The example of tournaments prints its table, and tournaments beat none."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from commrt.examples import tournament
from commrt.local import run

DEADLINE_S = 300.0


def gained(comm: Any) -> tuple[float, float]:
    torch.set_num_threads(1)
    alone, played = (
        tournament.trained(comm, name, 0, 240, 20)[0]
        for name in ("alone", "Pairwise()")
    )
    return alone, played


@pytest.mark.parametrize("ranks", [4, 8])
def test_trainers_in_tournaments_learn_more(ranks: int) -> None:
    found = run(ranks, gained, timeout_s=240)
    assert all(each == found[0] for each in found)
    alone, played = found[0]
    assert played > alone + 0.01


def test_trainers_have_different_images() -> None:
    splits = [tournament.split_of(3, trainer) for trainer in range(4)]
    assert [len(each.digits) for each in splits[0]] == [100, 50, 1197]
    rows = [
        tuple(row)
        for train, validation, _ in splits
        for split in (train, validation)
        for row in split.pixels.tolist()
    ]
    assert len({*rows}) == len(rows) == 600
    assert not {*rows} & {tuple(row) for row in splits[0][2].pixels.tolist()}


def table(arguments: list[str]) -> list[Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = tournament.main(arguments)
    return [status, said.getvalue()]


def test_the_example_of_tournaments_on_processes(torchrun: Any) -> None:
    arguments = ["--steps", "4", "--every", "2", "--seeds", "1"]
    first, *others = torchrun(4, table, arguments=arguments, deadline_s=DEADLINE_S)
    status, said = first
    assert status == 0
    assert "4 trainers on 4 ranks" in said
    lines = said.splitlines()
    assert [line[:26].strip() for line in lines[2:]] == [*tournament.RULES]
    assert others == [[0, ""]] * 3


@pytest.mark.parametrize("wrong", ["--steps", "--every", "--seeds"])
def test_wrong_numbers_of_the_example_are_refused(wrong: str) -> None:
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit),
    ):
        tournament.main([wrong, "0"])
    assert f"{wrong} 0: expected a number from 1" in said.getvalue()
