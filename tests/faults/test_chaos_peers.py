# SPDX-License-Identifier: Apache-2.0
"""The script that kills ranks of other systems, too: its verdicts, on commrt alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import chaos_peers
import pytest
from chaos_peers import Recovery, Running, System, campaign, check, common_world
from elastic_training import Training
from kill_loop import AFTER, Diary, Kill, taken_again


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_of_commrt_go_on_under_this_script(
    seed: int, pytestconfig: pytest.Config
) -> None:
    drawn = seed + 8 * int(pytestconfig.getoption("seed") or 0)
    system = System("commrt.elastic", Path(sys.executable))
    found = [each for job in campaign(system, 3, drawn) for each in job]
    assert [each.outcome for each in found] == ["right"] * 3, found
    assert all((each.seconds or 0.0) > 0.0 for each in found)


def diaries(folder: Path, *, model: float = 0.0, step: int = 0, bit: int = -1) -> None:
    """Write what two survivors say; the arguments say what is wrong on the second."""
    trainings = [Training(3), Training(5)]
    for training in trainings:
        training.counter[...] = 7
    trainings[1].weights[0] += model
    again = taken_again([each.dump() for each in trainings], 7, rounded=True)
    for rank, training in enumerate(trainings):
        diary = Diary(folder, rank)
        diary.enter("2", rank, 2, training)
        for number in range(AFTER):
            bits = again[rank][number]
            if rank == 1 and number == bit:
                bits = [(float.fromhex(bits[0]) + 1e-9).hex(), *bits[1:]]
            shown = 7 + number + step * rank
            at = 100.0 + number + rank / 2
            diary.say(step=shown, world="2", bits=bits, at=at, left=AFTER - number)
        diary.close()


@pytest.mark.parametrize(
    ("wrong", "outcome", "detail"),
    [
        ({}, "right", ""),
        ({"bit": 0}, "wrong", "other bits"),
        ({"bit": AFTER - 1}, "wrong", "other bits"),
        ({"model": 1e-9}, "wrong", "the models differ"),
        ({"step": 1}, "wrong", "first steps"),
    ],
)
def test_results_are_compared_with_a_fresh_world(
    tmp_path: Path, wrong: dict[str, float], outcome: str, detail: str
) -> None:
    diaries(tmp_path, **wrong)  # type: ignore[arg-type]
    assert common_world(tmp_path, [0, 1]) == "2"
    what = Recovery("made up", 0, 2, "")
    check(what, Kill(2, 99.0, 0), tmp_path, [0, 1], "2", rounded=True)
    assert what.outcome == outcome
    assert what.detail.startswith(detail)
    assert what.seconds == 1.5


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_does_not_go_on_has_crashed_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(chaos_peers, "RECOVERY_S", 0.2)
    diaries(tmp_path)
    pid = os.getpid()
    if ended:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            pid = process.pid
    for rank, number in enumerate([os.getpid(), pid]):
        text = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()[:-1]
        text[0] = f'{{"pid": {number}}}'
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(text) + "\n")
    running = Running(System("made up", Path(sys.executable)), tmp_path, 0)
    world, trouble = chaos_peers.recover(running, tmp_path, [0, 1])
    running.end()
    assert (world, trouble) == ("", "crashed: rank 1" if ended else "hung")
