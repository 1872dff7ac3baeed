# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of pipelines run, compare what they time, and repeat what they draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from commrt.bench import pipeline, shisha
from commrt.errors import UsageError

DEADLINE_S = 300.0


def measured() -> Any:
    dist.init_process_group("commrt")
    rows = pipeline.measure(["tiny"], blocks=2, least_s=1e-3)
    dist.destroy_process_group()
    return rows


def test_steps_of_pipelines_are_timed_in_turns(torchrun: Any) -> None:
    for rows in torchrun(2, measured, deadline_s=DEADLINE_S):
        (row,) = rows
        assert row["workload"] == "tiny"
        assert [*row["us"]] == [
            *("commrt", "half in flight", "1F1B on commrt", "1F1B on gloo")
        ]
        assert all(len(each) == 2 for each in row["us"].values())
        assert all(time > 0 for each in row["us"].values() for time in each)


def alone() -> str:
    dist.init_process_group("commrt")
    try:
        pipeline.measure(["tiny"], 1)
    except UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_one_rank_is_no_pipeline(torchrun: Any) -> None:
    assert "start two at least" in torchrun(1, alone, deadline_s=DEADLINE_S)[0]


def test_searches_repeat_their_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--platforms", "5", "--layers", "7", "--places", "3"]
    said = []
    for _ in range(2):
        assert shisha.main(arguments) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    lines = said[0].splitlines()
    assert "an exhaustive search takes 90 trials" in lines[0]
    assert [line[:22].strip() for line in lines[2:]] == [*shisha.SEARCHES]


def test_searches_find_no_more_than_the_best() -> None:
    for layers, places in ((1, 1), (3, 3), (6, 2)):
        for outcomes in shisha.measure(4, layers, places, 3).values():
            assert all(each.fraction <= 1 + 1e-12 for each in outcomes)
            assert all(each.trials >= 1 for each in outcomes)


@pytest.mark.parametrize("wrong", [["--platforms", "0"], ["--places", "13"]])
def test_wrong_numbers_of_searches_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        shisha.main(wrong)
