# SPDX-License-Identifier: Apache-2.0
"""The example of tournaments prints its table, and tournaments beat none."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from tournament_cases import threads_of_torch

from commrt.examples import tournament
from commrt.layers.tournament import Draws
from commrt.local import run

DEADLINE_S = 300.0


def gained(comm: Any) -> tuple[float, float]:
    alone, played = (
        tournament.trained(comm, name, 0, 240, 20)[0]
        for name in ("alone", "Pairwise()")
    )
    return alone, played


@pytest.mark.parametrize("ranks", [4, 8])
def test_trainers_in_tournaments_learn_more(ranks: int) -> None:
    with threads_of_torch(1):
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


def test_trainers_whose_scores_are_compared_judge_by_the_same_images() -> None:
    """As many as a trainer has of its own otherwise, which nobody trains on."""
    splits = [tournament.split_of(3, trainer, is_shared=True) for trainer in range(4)]
    first = splits[0][1].pixels.tolist()
    assert len(first) == 50
    assert all(split.pixels.tolist() == first for _, split, _ in splits)
    others = [row for each in splits for kind in (0, 2) for row in each[kind].pixels]
    assert not {tuple(row) for row in first} & {tuple(row.tolist()) for row in others}
    for line in tournament.RULES.values():
        if line is not None:
            judged_alone = line.selection.partners(Draws(0, 0), 4) == (0, 1, 2, 3)
            assert line.compares_trainers == judged_alone


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
