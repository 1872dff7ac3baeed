# SPDX-License-Identifier: Apache-2.0
"""A training step under a memory budget: mixed, pure and in-core, in turns.

    python -m commrt.bench.out_of_core
    python -m commrt.bench.out_of_core --budget 0.3 --speed 1500 --model mlp

The device is emulated: computation runs on the host, and a link of a given speed
(``ThrottledCopy``) leads to far memory. ``in core`` keeps all saved tensors. ``mixed``
is the plan that ``OutOfCore`` finds under the budget, ``swap`` swaps all blocks and
``recompute`` recomputes all. Gradients of all four are compared, bit by bit, before
anything is timed. All ways take turns. ``ms`` is the median of steps. ``ratio`` is the
mixed plan's time to each other one's, the median over turns. ``near`` is the most
bytes of saved tensors in a step, in MB. ``predicted`` is the plan's time, from blocks
that are timed in the same turn, and ``off`` is how far it is from the step of that
turn; both are medians over turns, too.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from commrt.bench.step_turns import rotated
from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from commrt.layers.out_of_core import BlockCost, OutOfCore

__all__ = ["Row", "main", "measure"]

WAYS = {"in core": "keep", "mixed": "auto", "swap": "swap", "recompute": "recompute"}


class Row(NamedTuple):
    """Figures of one way, each turn's; None: the budget is too small for it."""

    ms: list[float] | None
    predicted_ms: list[float]
    near_nbytes: int
    modes: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser("python -m commrt.bench.out_of_core")
    parser.add_argument("--model", choices=("cnn", "mlp"), default="cnn")
    parser.add_argument("--blocks", type=int, default=8, help="of the model")
    parser.add_argument("--batch", type=int, default=32, help="samples")
    parser.add_argument(
        "--width", type=int, default=24, help="channels, or features/32"
    )
    parser.add_argument(
        "--budget", type=float, default=0.5, help="part of the bytes in core"
    )
    parser.add_argument("--speed", type=float, default=400.0, help="of the link, MB/s")
    parser.add_argument("--latency-us", type=float, default=20.0, help="of a transfer")
    parser.add_argument("--turns", type=int, default=15, help="steps of each way")
    given = parser.parse_args(argv)
    if min(given.blocks, given.batch, given.width, given.turns) < 1:
        parser.error("expected numbers from 1")
    if not 0 < given.budget <= 1 or given.speed <= 0 or given.latency_us < 0:
        parser.error("expected a part of the bytes, a speed and a latency")
    rows = measure(
        *(given.model, given.blocks, given.batch, given.width),
        part=given.budget,
        bytes_per_s=given.speed * 1e6,
        latency_s=given.latency_us / 1e6,
        turns=given.turns,
    )
    print(_text(rows))
    return 0


def measure(
    kind: str,
    blocks: int,
    batch: int,
    width: int,
    *,
    part: float,
    bytes_per_s: float,
    latency_s: float,
    turns: int,
) -> dict[str, Row]:
    """Return each way's figures.

    Args:
        kind: ``cnn`` or ``mlp``.
        blocks: of the model.
        batch: samples of a step.
        width: channels of the CNN; the MLP has 32 times as many features.
        part: the budget, as a part of the bytes in core.
        bytes_per_s: of the link.
        latency_s: of each transfer.
        turns: steps of each way.

    Raises UsageError for a budget that no plan fits.
    """
    import torch

    from commrt.layers.out_of_core import OutOfCore, ThrottledCopy, plan

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, x = _model(kind, blocks, batch, width)
    with ThrottledCopy(bytes_per_s, latency_s) as far:
        whole = OutOfCore(
            model, x, budget_bytes=1 << 60, far=far, policy="keep", repeats=9
        )
        budget = int(part * whole.plan.in_core_nbytes)
        made, plans = {"in core": whole}, {"in core": whole.plan}
        for way, policy in [*WAYS.items()][1:]:
            try:
                # All plans follow from one measurement.
                plans[way] = plan(whole.plan.costs, budget, far.speeds(), policy=policy)
            except UsageError:
                if way == "mixed":
                    raise
                continue
            made[way] = OutOfCore(
                *(copy.deepcopy(model), x),
                budget_bytes=budget,
                far=far,
                policy=plans[way].modes,
                repeats=1,
            )
        _check_equal(made, x)
        times, costs = _in_turns(made, x, turns)
        rows = {way: Row(None, [], 0, ()) for way in WAYS}
        for way, each in made.items():
            modes, most = plans[way].modes, plans[way].budget_bytes
            expected_ms = [
                plan(turn, most, far.speeds(), policy=modes).step_s * 1e3
                for turn in costs
            ]
            rows[way] = Row(times[way], expected_ms, each.step.peak_nbytes, modes)
    return rows


def _model(
    kind: str, blocks: int, batch: int, width: int
) -> tuple[nn.Sequential, torch.Tensor]:
    """Return blocks of which some compute long for their bytes, and some do not."""
    import torch
    from torch import nn

    made: list[nn.Module] = []
    if kind == "mlp":
        features = 32 * width
        for number in range(blocks):
            inner = features * (1 + number % 2)
            layers = [nn.Linear(features, inner), nn.GELU(), nn.Linear(inner, features)]
            made.append(nn.Sequential(*layers))
        return nn.Sequential(*made), torch.randn(batch, features)
    channels = 3
    for number in range(blocks):
        side = 1 if number % 2 else 3
        layers = []
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, width, side, padding=side // 2),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        made.append(nn.Sequential(*layers))
    return nn.Sequential(*made), torch.randn(batch, 3, 24, 24)


def _step(model: OutOfCore, x: torch.Tensor) -> None:
    model.zero_grad()
    model.zero_step()
    model(x).square().mean().backward()


def _check_equal(made: dict[str, OutOfCore], x: torch.Tensor) -> None:
    """Raise AssertionError unless all ways have the same gradients, to the bit."""
    import torch

    right = None
    for model in made.values():
        _step(model, x)
        found = [each.grad for each in model.parameters()]
        right = found if right is None else right
        for one, other in zip(found, right, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def _in_turns(
    made: dict[str, OutOfCore], x: torch.Tensor, turns: int
) -> tuple[dict[str, list[float]], list[list[BlockCost]]]:
    """Return each turn's times of steps in ms, and its costs of blocks.

    The machine is not equally fast at all times.
    """
    from commrt.layers.out_of_core.far import RealClock
    from commrt.layers.out_of_core.measuring import measure as measured

    times: dict[str, list[float]] = {way: [] for way in made}
    costs = []
    for turn in range(turns):
        for way in rotated([*made], turn):
            begin = time.perf_counter()
            _step(made[way], x)
            times[way].append((time.perf_counter() - begin) * 1e3)
        blocks = list(made["in core"].blocks)
        costs.append(measured(blocks, x, RealClock(), repeats=1))
    return times, costs


def _text(rows: dict[str, Row]) -> str:
    """Return a table."""
    lines = [
        f"{'way':<11}{'ms':>8}{'ratio':>7}{'predicted':>11}{'off':>7}{'near MB':>9}"
        f"  modes"
    ]
    mixed: Any = rows["mixed"].ms
    for way, row in rows.items():
        if row.ms is None:
            lines.append(f"{way:<11}{'-':>9}  the budget is too small")
            continue
        pairs = zip(row.predicted_ms, row.ms, strict=True)
        off = median(expected / its - 1 for expected, its in pairs)
        ratio = median(ours / its for ours, its in zip(mixed, row.ms, strict=True))
        modes = "".join(mode[0] for mode in row.modes)
        lines.append(
            f"{way:<11}{median(row.ms):>8.1f}{ratio:>7.3f}"
            f"{median(row.predicted_ms):>11.1f}{off:>7.1%}"
            f"{row.near_nbytes / 1e6:>9.2f}  {modes}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
