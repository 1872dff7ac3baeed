# SPDX-License-Identifier: Apache-2.0
"""Ways to make one training step, timed in turns on the ranks of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

__all__ = ["Step", "in_turns", "rotated", "table"]

Step = Callable[[], Any]
Way = TypeVar("Way")


def in_turns(
    steps: Mapping[str, Step], *, blocks: int, least_s: float
) -> dict[str, list[float]]:
    """Return the times of each way's blocks, in µs for a step; collective.

    Args:
        steps: by way. All ways take turns, so that they meet the same machine.
        blocks: turns of each way.
        least_s: how long a block is to last about.
    """
    import torch.distributed as dist

    repetitions = _repetitions(next(iter(steps.values())), least_s)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(blocks):
        for way in rotated([*steps], turn):
            dist.barrier()
            times[way].append(round(_block_us(steps[way], repetitions), 2))
    return times


def rotated(ways: Sequence[Way], turn: int) -> list[Way]:
    """Return the order of ways in a turn: of three or more, each begins one way later.

    None runs twice in a row, where two turns meet: it would find its own data in the
    caches. Two ways keep their order for that reason. Of more, none always comes first,
    or always behind the same other one.
    """
    first = turn % len(ways) if len(ways) > 2 else 0
    return [*ways[first:], *ways[:first]]


def _repetitions(step: Step, least_s: float) -> int:
    """Return how many steps a block has, the same number on all ranks."""
    import torch
    import torch.distributed as dist

    step()
    one_s = torch.tensor([_block_us(step, 2) / 1e6])
    dist.all_reduce(one_s, op=dist.ReduceOp.MAX)
    return max(2, min(500, round(least_s / float(one_s))))


def _block_us(step: Step, repetitions: int) -> float:
    step()
    start = time.perf_counter()
    for _ in range(repetitions):
        step()
    return (time.perf_counter() - start) / repetitions * 1e6


def table(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Return medians and the ratios of the first way's time to each other one's.

    Args:
        rows: each has a name under ``what``, and times of ways under "us".
        what: the first column.
    """
    ways = [*rows[0]["us"]]
    width = max(20, 2 + max(len(row[what]) for row in rows))
    header = f"{what:<{width}}" + "".join(f"{way:>18}" for way in ways)
    lines = [header + "".join(f"{'ratio':>8}" for _ in ways[1:])]
    for row in rows:
        times = row["us"]
        text = f"{row[what]:<{width}}"
        text += "".join(f"{median(times[way]):>18.1f}" for way in ways)
        for way in ways[1:]:
            pairs = zip(times[ways[0]], times[way], strict=True)
            text += f"{median(mine / other for mine, other in pairs):>8.3f}"
        lines.append(text)
    return "\n".join(lines)
