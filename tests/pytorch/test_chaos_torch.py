# SPDX-License-Identifier: Apache-2.0
"""Some kills of what ``make chaos`` runs whole, and what that must notice."""

from __future__ import annotations

import pytest
from chaos_torch import KINDS, campaign
from chaos_torch_checks import check_bits, check_errors, check_held, worlds_of
from kill_loop import AFTER, Kill

Lines = list[dict[str, object]]


@pytest.mark.whole
@pytest.mark.full(sample=1)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_of_torch_are_killed_at_random_moments(
    seed: int, pytestconfig: pytest.Config
) -> None:
    drawn = seed + 8 * int(pytestconfig.getoption("seed") or 0)
    kinds = [*KINDS[drawn % 3 :], *KINDS[: drawn % 3]]
    found = [*campaign(kinds, 4, drawn)]
    assert sum(len(each.kills) for each in found) == 4
    assert not [line for each in found for line in each.growth]


def entered(world: str, rank: int, size: int, begin: int, at: float) -> Lines:
    """Return what a rank writes about a world, whose bits are the steps' numbers."""
    line = {"world": world, "rank": rank, "size": size, "begin": begin, "at": at}
    lines: Lines = [{**line, "state": "s", "bits": f"{begin}"}]
    for number in range(begin, begin + AFTER):
        bits = f"{number + 1}"
        lines.append({"step": number, "world": world, "bits": bits, "at": at + 1})
    held = {"threads": 2, "descriptors": 9 + size, "segments": 3}
    return [*lines, {"held": held, "world": world}]


def job() -> dict[int, Lines]:
    """Return the diaries of three ranks, of which the last is killed at 5.0."""
    named: Lines = [{"error": "rank 2 has died: process 77 on x has ended", "at": 5.1}]
    found: dict[int, Lines] = {2: entered("world", 2, 3, 0, 1.0)}
    for rank in range(2):
        after = entered("world.2", rank, 2, 7, 6.0)
        found[rank] = [*entered("world", rank, 3, 0, 1.0), *named, *after]
        found[rank].append({"end": True})
    return found


def fresh(end: int = 12) -> dict[str, list[list[str]]]:
    """Return what fresh worlds give that do the same."""
    return {
        "world": [[f"{n}" for n in range(end)]] * 3,
        "world.2": [[f"{n}" for n in range(7, 7 + end)]] * 2,
    }


KILL = Kill(2, 5.0, 77)


def test_a_job_that_goes_on_rightly_passes() -> None:
    worlds = worlds_of(job())
    check_bits(worlds, fresh(), chained=True)
    check_errors(KILL, worlds, job(), grows=False)
    assert check_held(job()) == []


@pytest.mark.parametrize(
    ("number", "place", "change", "words"),
    [
        (1, 1, {"bits": "x"}, "step 0: bits"),
        (0, AFTER, {"step": 9}, "took the steps"),
        (1, 0, {"bits": "x"}, "dumped another state"),
        (0, AFTER + 3, {"begin": 8}, "begins with the steps"),
        (1, AFTER + 3, {"bits": "6"}, "world: another state after 7 steps"),
    ],
)
def test_what_goes_wrong_is_noticed(
    number: int, place: int, change: dict[str, object], words: str
) -> None:
    said = job()
    said[number][place].update(change)
    with pytest.raises(AssertionError, match=words):
        check_bits(worlds_of(said), fresh(), chained=True)


def test_who_does_not_name_the_dead_is_noticed() -> None:
    said = job()
    said[1][AFTER + 2]["error"] = "process 76 has ended"
    with pytest.raises(AssertionError, match="did not name"):
        check_errors(KILL, worlds_of(said), said, grows=False)


def test_what_a_survivor_keeps_is_noticed() -> None:
    said: dict[int, Lines] = {0: []}
    for turn in range(9):
        said[0] += entered(f"world.{turn}", 0, 2 + turn % 2, turn, 1.0 + turn)
    assert check_held(said) == []
    for turn in range(9):
        held = {"threads": 2, "descriptors": 11, "segments": 3 + turn}
        said[0][7 * turn + AFTER + 1]["held"] = held
    found = check_held(said)
    assert len(found) == 4
    assert found[-1] == "process 0 in world.8: segments 11, 3 before"
