# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers of commrt beside torch's ZeroRedundancyOptimizer, in one launch.

    torchrun --nproc-per-node 2 -m commrt.bench.sharded_update
    torchrun --nproc-per-node 2 -m commrt.bench.sharded_update --width 512 --layers 8

``update``: gradients are summed already; AdamW updates its part, and the new values
come to all ranks. ``train``: forward and backward passes of linear layers, sums of the
gradients and the update. Beside torch's optimizer the sums are DDP's.
torch's ways run once with process groups of commrt and once with those of gloo. All
ways are in one launch and take turns, block by block, so that they meet the same
machine. They begin alike, and must have equal parameters after three steps. Times are
medians over blocks, in microseconds for a step, of rank 0. ``ratio`` is that of
commrt's time to each other one's, the median over blocks.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import report
from commrt.bench.step_turns import Step, in_turns, table

if TYPE_CHECKING:
    import torch.distributed as dist

    from commrt.comm import Communicator

__all__ = ["main", "measure"]

_BLOCKS = 15
_BATCH = 32
_LR = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.sharded_update")
    parser.add_argument("--width", type=int, default=512, help="features of a layer")
    parser.add_argument("--layers", type=int, default=16, help="linear layers")
    parser.add_argument("--blocks", type=int, default=_BLOCKS, help="turns of each way")
    parser.add_argument("--out", help="write all times to this file")
    given = parser.parse_args(argv)
    for name in ("width", "layers", "blocks"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: expected a number from 1")
    report(
        lambda: measure(given.width, given.layers, blocks=given.blocks),
        lambda rows: table(rows, "step"),
        given.out,
    )
    return 0


def measure(
    width: int, layers: int, *, blocks: int = _BLOCKS, least_s: float = 0.1
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by kind of step and way."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    everyone: Any = dist.group.WORLD
    groups = {"on commrt": everyone, "on gloo": dist.new_group(backend="gloo")}
    rows = []
    for kind in ("update", "train"):
        ours = _Commrts(_model(width, layers), everyone.communicator, kind)
        ways: dict[str, _Commrts | _Torchs] = {"commrt": ours}
        for name, group in groups.items():
            ways[f"torch {name}"] = _Torchs(_model(width, layers), group, kind)
        _check(ways)
        steps: dict[str, Step] = {name: way.step for name, way in ways.items()}
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"step": f"{kind} {layers}x{width}", "us": times})
        ours.close()
    return rows


def _model(width: int, layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class _Commrts:
    """A model and commrt's optimizer."""

    def __init__(self, model: Any, comm: Communicator, kind: str) -> None:
        import torch

        from commrt.layers.sharded_update import ShardedOptimizer

        self.model, self._kind = model, kind
        self._x = _batch(model, comm.rank)
        self._optimizer: Any = ShardedOptimizer(
            model.parameters(),
            comm,
            torch.optim.AdamW,
            gradients="own" if kind == "train" else "summed",
            lr=_LR,
        )
        _give_gradients(model)

    def step(self) -> None:
        """Train for a step, or update alone."""
        _run(self.model, self._x, self._optimizer, self._kind)

    def close(self) -> None:
        """Free the optimizer."""
        self._optimizer.close()


class _Torchs:
    """A model, under DDP where it trains, and torch's optimizer."""

    def __init__(self, model: Any, group: dist.ProcessGroup, kind: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        self.model, self._kind = model, kind
        self._x = _batch(model, dist.get_rank())
        self._run = model
        if kind == "train":
            self._run = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
        self._optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=_LR
        )
        _give_gradients(model)

    def step(self) -> None:
        """Train for a step, or update alone."""
        _run(self._run, self._x, self._optimizer, self._kind)


def _batch(model: Any, rank: int) -> Any:
    import torch

    draws = torch.Generator().manual_seed(rank)
    return torch.randn(_BATCH, model[0].in_features, generator=draws)


def _give_gradients(model: Any) -> None:
    import torch

    draws = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draws)


def _run(model: Any, x: Any, optimizer: Any, kind: str) -> None:
    if kind == "train":
        optimizer.zero_grad()
        model(x).square().mean().backward()
    optimizer.step()


def _check(ways: dict[str, _Commrts | _Torchs]) -> None:
    """Raise AssertionError unless all ways have equal parameters after three steps."""
    import torch

    found = []
    for way in ways.values():
        for _ in range(3):
            way.step()
        found.append(copy.deepcopy([*way.model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    sys.exit(main())
