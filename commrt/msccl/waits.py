# SPDX-License-Identifier: Apache-2.0
"""Waits of one GPU's thread blocks for each other: which steps come before which.

The steps of a thread block run in order, and a step may wait for one of another. So a
vector clock for each step says everything: how many steps of each thread block are done
when it begins (C. Fidge, "Timestamps in message-passing systems that preserve the
partial ordering", 1988).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commrt.errors import ScheduleError, UsageError
from commrt.msccl.document import Algorithm, Gpu, Step, ThreadBlock

__all__ = ["Timed", "steps_in_order"]


_MOST_TIMES = 1 << 25
"""Most numbers in the clocks of one GPU."""


class Timed(NamedTuple):
    """One step, and what is done when it begins."""

    block: ThreadBlock
    place: int
    """The place of its thread block among those of its GPU."""
    step: Step
    done: tuple[int, ...]
    """Steps of each thread block that are done, by the block's place."""
    awaited: tuple[int, int] | None
    """Place of a thread block, and the step of it that this one waits for."""

    def comes_after(self, place: int, number: int) -> bool:
        """Return whether step ``number`` of the block at ``place`` is done by then."""
        return self.done[place] > number


def steps_in_order(algorithm: Algorithm, gpu: Gpu) -> list[Timed]:
    """Return the steps of a GPU, each behind all that it waits for.

    Raises:
        UsageError: a step waits for one that does not exist.
        ScheduleError: a step waits for one that never says that it is done, or steps
            wait for each other for ever.
    """
    blocks = [*gpu.blocks.values()]
    places = {block.number: place for place, block in enumerate(blocks)}
    num_times = len(blocks) * sum(len(block.steps) for block in blocks)
    if num_times > _MOST_TIMES:
        raise algorithm.wrong(
            gpu.line, f"gpu {gpu.rank} has too many steps in too many thread blocks"
        )
    signals = [_signals(block) for block in blocks]
    waits = [
        [
            _awaited(algorithm, block, step, blocks, places, signals)
            for step in block.steps
        ]
        for block in blocks
    ]
    order: list[Timed] = []
    times: list[list[tuple[int, ...]]] = [[] for _ in blocks]
    """The steps that are done as each step ends, as far as steps were reached."""
    sleeping: dict[tuple[int, int], list[int]] = {}
    ready = deque(range(len(blocks)))
    while ready:
        place = ready.popleft()
        block, ended = blocks[place], times[place]
        while len(ended) < len(block.steps):
            number = len(ended)
            wait = waits[place][number]
            if wait is not None and len(times[wait[0]]) <= wait[1]:
                sleeping.setdefault(wait, []).append(place)
                break
            done = ended[-1] if ended else (0,) * len(blocks)
            if wait is not None:
                done = tuple(map(max, done, times[wait[0]][wait[1]]))
            step = block.steps[number]
            order.append(Timed(block, place, step, done, wait))
            ended.append((*done[:place], number + 1, *done[place + 1 :]))
            ready.extend(sleeping.pop((place, number), ()))
    if sleeping:
        raise _circle(algorithm, gpu, blocks, sleeping)
    return order


def _signals(block: ThreadBlock) -> list[int]:
    """Return for each step the next one, from it on, that says it is done, or -1."""
    found, following = [-1] * len(block.steps), -1
    for step in reversed(block.steps):
        if step.is_awaited and step.type != "nop":
            following = step.number
        found[step.number] = following
    return found


def _awaited(
    algorithm: Algorithm,
    block: ThreadBlock,
    step: Step,
    blocks: Sequence[ThreadBlock],
    places: Mapping[int, int],
    signals: Sequence[Sequence[int]],
) -> tuple[int, int] | None:
    """Return the place of the block, and the step, that a step really waits for.

    A flag of the thread block holds the last step that says it is done. So a wait for
    one that does not say so ends with the next one that does.
    """
    if step.waits_for is None:
        return None
    number, wanted = step.waits_for
    if number not in places or wanted >= len(blocks[places[number]].steps):
        raise _no_step(algorithm, step, number, wanted)
    place = places[number]
    if blocks[place] is block:
        if wanted < step.number:
            return place, wanted
        raise ScheduleError(
            f"{algorithm.source}, line {step.line}: step {step.number} of tb {number} "
            f"waits for step {wanted} of the same thread block, which comes later"
        )
    if signals[place][wanted] >= 0:
        return place, signals[place][wanted]
    line = blocks[place].steps[wanted].line
    raise ScheduleError(
        f"{algorithm.source}, lines {step.line} and {line}: the step waits for "
        f"ever for step {wanted} of tb {number}, which never says that it is done; set "
        f"its hasdep to 1"
    )


def _no_step(algorithm: Algorithm, step: Step, block: int, wanted: int) -> UsageError:
    return algorithm.wrong(
        step.line,
        f"depid={block} deps={wanted} names no step of this gpu; expected a thread "
        f"block and a step of it",
    )


def _circle(
    algorithm: Algorithm,
    gpu: Gpu,
    blocks: Sequence[ThreadBlock],
    sleeping: Mapping[tuple[int, int], Sequence[int]],
) -> ScheduleError:
    """Return the error for thread blocks that wait for each other."""
    waits_for = {
        place: wait for wait, sleepers in sleeping.items() for place in sleepers
    }
    place, seen = next(iter(waits_for)), list[int]()
    while place not in seen:
        seen.append(place)
        place = waits_for[place][0]
    circle = seen[seen.index(place) :]
    told = [
        f"tb {blocks[one].number} waits for step {waits_for[one][1]} of tb "
        f"{blocks[waits_for[one][0]].number} (line "
        f"{blocks[waits_for[one][0]].steps[waits_for[one][1]].line})"
        for one in circle
    ]
    return ScheduleError(
        f"{algorithm.source}: thread blocks of gpu {gpu.rank} wait for each other for "
        f"ever: {', '.join(told)}"
    )
