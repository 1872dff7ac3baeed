# SPDX-License-Identifier: Apache-2.0
"""Training goes on when ranks are killed, and gets the same bits as a fresh world."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_training import WIDTH, Training
from run_ranks import RunRanks

import commrt
from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import RecoveryError, UsageError

AFTER = 5
"""Steps after a recovery that a fresh world repeats."""


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def trains(deaths: dict[str, list[int]], until: int, within: int = 0) -> dict[str, Any]:
    """Ranks die at steps; the others note their state whenever they go on.

    ``within``: in this call of the step.
    """
    comm = commrt.init(deterministic=True)
    first = comm.rank
    training = Training(first)
    dumps: dict[int, dict[str, Any]] = {}
    results: dict[int, list[str]] = {}
    done = 0

    def step(comm: Communicator, number: int) -> None:
        nonlocal done
        if number in {int(at) for at, who in deaths.items() if first in who}:
            if within:  # its peers may have its part, or not
                comm.allreduce(np.zeros(WIDTH), nonblocking=True)
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(comm, number)
        results[number] = training.hexadecimal()
        done = number + 1

    def changed(comm: Communicator) -> None:
        numbers = comm.allgather(np.array([done]))
        dumps[int(numbers.min())] = {**training.dump(), "rank": comm.rank}

    comm = elastic.run(step, training.state, until=until, on_change=changed)
    return {
        "size": comm.size,
        "dumps": {str(at): dump for at, dump in dumps.items()},
        "results": {str(at): result for at, result in results.items()},
    }


def begins_from(dumps: list[dict[str, Any]], begin: int) -> list[list[str]]:
    comm = commrt.init(deterministic=True)
    training = Training.from_dump(dumps[comm.rank])
    results = []
    for number in range(begin, begin + AFTER):
        training.step(comm, number)
        results.append(training.hexadecimal())
    return results


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(
    ("size", "deaths", "within"),
    [
        (2, {7: [0]}, 0),
        (3, {7: [0]}, 0),
        (3, {0: [2]}, 1),
        (3, {7: [1]}, 1),
        (4, {7: [1, 2]}, 1),
        (5, {7: [4], 8: [0], 15: [2]}, 0),
    ],
)
def test_a_fresh_world_gets_the_same_bits(
    ranks: RunRanks, size: int, deaths: dict[int, list[int]], within: int
) -> None:
    texts = {str(at): who for at, who in deaths.items()}
    found = ranks.survivors(size, trains, deaths=texts, until=20, within=within)
    dead = [rank for who in deaths.values() for rank in who]
    left = [rank for rank in range(size) if rank not in dead]
    assert [*found] == left
    assert {said["size"] for said in found.values()} == {len(left)}
    last = max(deaths)
    begin = max(int(at) for at in found[left[0]]["dumps"])
    assert last - 1 <= begin <= last + 1
    dumps = [found[rank]["dumps"][str(begin)] for rank in left]
    assert [dump["rank"] for dump in dumps] == list(range(len(left)))
    fresh = ranks(len(left), begins_from, dumps=dumps, begin=begin)
    for number, rank in enumerate(left):
        results = found[rank]["results"]
        again = [results[str(at)] for at in range(begin, begin + AFTER)]
        assert again == fresh[number]


def counts_until_all_are_there() -> list[Any]:
    """Rank 1 dies once and comes again; the ranks go on until it has taken 5 steps."""
    comm = commrt.init()
    new, first = bool(comm.joined), comm.rank
    training = Training(first)
    together = np.zeros(1)
    state = elastic.State(
        counter=training.counter,
        weights=training.weights,
        velocity=training.velocity,
        together=together,
        local={"noise": training},
    )

    def step(comm: Communicator, number: int) -> None:
        if first == 1 and number == 3 and not new:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(comm, number)
        together[0] += comm.size == 3 and number > 3
        if together[0] == 5:
            raise StopIteration

    with pytest.raises(StopIteration):
        elastic.run(step, state, until=10**9)
    return training.hexadecimal()


def test_a_rank_that_comes_again_has_the_state(ranks: RunRanks) -> None:
    again = RunRanks(ranks.folder, options=("--restarts", "1"))
    found = again.survivors(3, counts_until_all_are_there)
    assert len(found) == 3
    assert len({str(said) for said in found.values()}) == 1


def has_a_part(dies: list[int]) -> list[Any]:
    """Replicas of two ranks, each of which has half of the model."""
    comm = commrt.init()
    first = comm.rank
    mine = np.full(3, float(first % 2))
    pairs: list[Communicator] = []

    def changed(comm: Communicator) -> None:
        pairs[:] = [comm.create_group([comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])]

    def step(comm: Communicator, number: int) -> None:
        if number == 3 and first in dies:
            os.kill(os.getpid(), signal.SIGKILL)
        pairs[0].barrier()
        comm.barrier()
        mine[...] += 1

    try:
        comm = elastic.run(
            step, elastic.State(mine=mine), until=6, replica_size=2, on_change=changed
        )
    except RecoveryError as error:
        return [str(error)]
    return [comm.rank, comm.size, mine[0], commrt.init().size]


def test_whole_replicas_go_on(ranks: RunRanks) -> None:
    found = ranks.survivors(6, has_a_part, dies=[3])
    assert "its replica lacks other ranks, and 2 go on" in found.pop(4)[0]
    weights = {0: 6.0, 1: 7.0, 2: 6.0, 5: 7.0}
    expected = {old: [new, 4, weights[old], 4] for new, old in enumerate(weights)}
    assert found == expected


def test_without_a_whole_replica_all_say_so(ranks: RunRanks) -> None:
    found = ranks.survivors(4, has_a_part, dies=[1, 3])
    for said in found.values():
        assert "no rank that lives has part 1 of 2 of the model" in said[0]


def has_another_model(folder: str) -> list[Any]:
    comm = commrt.init()
    new, first = bool(comm.joined), comm.rank
    weights = np.zeros(4 if new else 3)
    refused = Path(folder, "refused")

    def step(comm: Communicator, number: int) -> None:
        if first == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(weights)
        # All leave in the same step, once the newcomer has been sent away.
        if comm.allreduce(np.array([float(refused.exists())]))[0]:
            raise StopIteration

    try:
        elastic.run(step, elastic.State(weights=weights), until=10**9)
    except StopIteration:
        return ["went on", comm.size]
    except RecoveryError as error:
        refused.touch()
        return ["refused", str(error)]
    return []


def test_one_that_joins_with_another_model_is_refused(
    ranks: RunRanks, tmp_path: Path
) -> None:
    again = RunRanks(ranks.folder, options=("--restarts", "1"))
    found = again.survivors(3, has_another_model, folder=str(tmp_path))
    assert [found[0][0], found[2][0], found[1][0]] == ["went on", "went on", "refused"]
    assert "weights: float64 (3,) (there), weights: float64 (4,) (here)" in found[1][1]


def test_wrong_arguments_say_what_is_wrong() -> None:
    state = elastic.State()
    wrong: list[dict[str, Any]] = [
        {"until": -1},
        {"until": 2.5},
        {"until": 3, "replica_size": 0},
        {"until": 3, "replica_size": 2},
    ]
    for arguments in wrong:
        with pytest.raises(UsageError, match=r"^elastic\.run: "):
            elastic.run(lambda comm, number: None, state, **arguments)
    with pytest.raises(UsageError, match=r"state=3 must be a commrt\.elastic\.State"):
        elastic.run(lambda comm, number: None, 3, until=1)  # type: ignore[arg-type]


def test_a_rank_alone_takes_all_steps() -> None:
    numbers: list[int] = []
    comm = elastic.run(
        lambda comm, number: numbers.append(number), elastic.State(), until=4
    )
    assert (numbers, comm.size) == ([0, 1, 2, 3], 1)
