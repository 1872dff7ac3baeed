# SPDX-License-Identifier: Apache-2.0
"""Steps that the oracle projects, beside real ones of torch's and commrt's layers.

    python -m commrt.run -n 4 -m commrt.bench.oracle_accuracy

The ranks profile a network all at one time, so that times of layers hold what ranks
cost each other that share cores. They measure their collectives, project a step of each
strategy, and train by it: torch's DistributedDataParallel, FSDP2 and pipelining, and
commrt's ``ShardedOptimizer``, ``parallelize_cnn`` and ``tensor3d.parallelize``.
Strategies take turns. A step's time is that of the slowest rank, and the median over
turns counts. Accuracy is 1 - |projected - measured| / measured, as ParaDL has it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import names_of, report

if TYPE_CHECKING:
    from commrt.comm import Communicator
    from commrt.oracle.clocks import ClockName

__all__ = ["MODELS", "Way", "main", "measure"]

Build = Callable[[Any, Any, Any], Callable[[], object]]


@dataclass(frozen=True)
class Way:
    """One strategy on a grid of ranks, as it is projected and as it is run."""

    strategy: str
    ways: tuple[int, ...]
    build: Build
    """Makes a step of a model on its grid and a whole batch."""
    by_layer: bool = False
    """True if each layer's gradients are summed by an operation of their own."""
    segments: int = 4
    sleeps: bool = False
    """True if ranks wait for each other by design, which the clock of cores misses."""
    costs: Callable[[Way, Communicator, dict[str, Any]], Any] = lambda *_: None
    """Measures what its library's calls cost; None: what commrt's do."""

    @property
    def name(self) -> str:
        """The strategy and its grid."""
        return f"{self.strategy} {'x'.join(map(str, self.ways))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks of a launcher."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.oracle_accuracy")
    parser.add_argument("--model", type=names_of(MODELS), default=[*MODELS])
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--clock", choices=("wall", "cores"), default="wall")
    parser.add_argument("--out", help="file for all times, in JSON")
    arguments = parser.parse_args(argv)
    run = partial(
        measure,
        arguments.model,
        turns=arguments.turns,
        batch=arguments.batch,
        clock=arguments.clock,
    )
    report(run, _text, arguments.out)
    return 0


def measure(
    models: Sequence[str],
    *,
    turns: int = 7,
    batch: int = 16,
    scale: int = 1,
    clock: ClockName = "wall",
) -> list[dict[str, Any]]:
    """Return projected and measured milliseconds of a step; collective.

    Args:
        models: keys of ``MODELS``.
        turns: timed steps of each way; one more before them is not timed.
        batch: samples of a step, over all ranks; a multiple of the ranks.
        scale: divides widths, for tests.
    """
    import torch
    import torch.distributed as dist

    from commrt.oracle import Oracle
    from commrt.oracle.clocks import Stopwatch
    from commrt.oracle.measuring import measured_costs
    from commrt.oracle.torch_layers import profile

    torch.set_num_threads(1)
    comm = dist.group.WORLD.communicator
    how: dict[str, Any] = {"clock": clock, "rounds": 2}
    watch = Stopwatch(comm, clock=clock, rounds=3)
    rows = []
    for name in models:
        torch.manual_seed(1)
        model, example = MODELS[name](batch, scale)
        ways = [
            way for way in _ways(name, comm.size) if clock == "wall" or not way.sleeps
        ]
        steps = {
            way.name: way.build(copy.deepcopy(model), way, example) for way in ways
        }
        pairs: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
        for _ in range(turns):
            costs = measured_costs(comm, **how)
            table = profile(
                *(model, example),
                part=max(1, batch // comm.size),
                comm=comm,
                pieces=sorted({comm.size, 2}),
                name=name,
                **how,
            )
            for way in ways:
                took = watch.together_s(steps[way.name], most=1)
                oracle = Oracle(
                    *(table, way.costs(way, comm, how) or costs, batch),
                    segments=way.segments,
                    gradients_by_layer=way.by_layer,
                )
                projected = oracle.project(way.strategy, way.ways, batch=batch)
                pairs[way.name].append((projected.step_s, took))
        rows += [_row(name, comm.size, way.name, pairs[way.name]) for way in ways]
    return rows


def _row(
    model: str, ranks: int, way: str, pairs: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return medians, and the accuracy of the median ratio of a turn's two times."""
    ratio = median(projected / took for projected, took in pairs)
    return {
        "model": model,
        "ranks": ranks,
        "way": way,
        "projected_ms": median(projected for projected, _ in pairs) * 1e3,
        "measured_ms": median(took for _, took in pairs) * 1e3,
        "ratio": ratio,
        "accuracy": 1 - abs(ratio - 1),
        "pairs_s": pairs,
    }


# -- networks --------------------------------------------------------------------------


def _cnn(batch: int, scale: int) -> tuple[Any, Any]:
    """Return convolutions on pictures, and a batch of these."""
    import torch
    from torch import nn

    def pair(inputs: int, outputs: int) -> list[Any]:
        first = nn.Conv2d(inputs, outputs, 3, padding=1)
        second = nn.Conv2d(outputs, outputs, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(2)]

    width = 64 // scale
    layers = [*pair(16, width), *pair(width, 2 * width)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 16)]
    return nn.Sequential(*layers), torch.randn(batch, 16, 32, 32)


def _mlp(batch: int, scale: int) -> tuple[Any, Any]:
    """Return pairs of linear layers, and a batch of rows."""
    import torch
    from torch import nn

    width = 384 // scale
    layers: list[Any] = []
    for _ in range(2):
        layers += [nn.Linear(width, 4 * width), nn.GELU()]
        layers += [nn.Linear(4 * width, width)]
    return nn.Sequential(*layers), torch.randn(batch, 64, width)


MODELS: dict[str, Callable[[int, int], tuple[Any, Any]]] = {"cnn": _cnn, "mlp": _mlp}
"""Each makes a model and its batch, for so many samples and a divisor of widths."""


def _ways(model: str, ranks: int) -> list[Way]:
    """Return what is run and projected on so many ranks."""
    found = [
        Way("data", (ranks,), _ddp),
        Way("zero1", (ranks,), _sharded_update),
        Way("zero2", (ranks,), _fsdp, True, costs=_fsdp_costs),
        Way("zero3", (ranks,), _fsdp, True, costs=_fsdp_costs),
        Way("pipeline", (ranks,), _pipeline, sleeps=True),
    ]
    half = ranks // 2
    if model == "cnn":
        found += [
            Way("spatial", (ranks, 1), _cut("height"), by_layer=True),
            Way("filter", (ranks,), _cut("filter"), by_layer=True, costs=_layer_costs),
            Way(
                "channel", (ranks,), _cut("channel"), by_layer=True, costs=_layer_costs
            ),
        ]
        if ranks > 2:
            found += [
                Way(
                    "data+filter",
                    (half, 2),
                    _cut("sample", "filter"),
                    True,
                    costs=_layer_costs,
                ),
                Way("data+spatial", (half, 2, 1), _cut("sample", "height"), True),
            ]
        return found
    found += [Way("tensor", (ranks,), _megatron)]
    if ranks > 2:
        found += [
            Way("tensor3d", (1, half, 2), _tensor3d, by_layer=True),
            Way("tensor3d", (half, 1, 2), _tensor3d, by_layer=True),
        ]
    return found


# -- steps -----------------------------------------------------------------------------


def _communicator() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD.communicator


def _part(x: Any) -> Any:
    """Return this rank's samples."""
    comm = _communicator()
    return x.tensor_split(comm.size)[comm.rank]


def _trained(
    model: Any, x: Any, loss: Callable[[Any], Any], optimizer: Any = None
) -> Callable[[], object]:
    """Return a step; by itself with torch's SGD."""
    import torch

    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        model.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    return step


def _plain_loss(y: Any) -> Any:
    return y.square().mean()


def _ddp(model: Any, way: Way, example: Any) -> Callable[[], object]:
    from torch.nn.parallel import DistributedDataParallel

    return _trained(
        DistributedDataParallel(model, gradient_as_bucket_view=True),
        _part(example),
        _plain_loss,
    )


def _sharded_update(model: Any, way: Way, example: Any) -> Callable[[], object]:
    import torch

    from commrt.layers.sharded_update import ShardedOptimizer

    parameters = [*model.parameters()]
    sgd = torch.optim.SGD
    optimizer = ShardedOptimizer(parameters, _communicator(), sgd, lr=1e-3)
    return _trained(model, _part(example), _plain_loss, optimizer)


def _fsdp(model: Any, way: Way, example: Any) -> Callable[[], object]:
    """Return a step of ``zero3``, or of ``zero2``: weights stay whole in between."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", way.ways)
    let_go = way.strategy == "zero3"
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=let_go)
    fully_shard(model, mesh=mesh, reshard_after_forward=let_go)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    return _trained(model, _part(example), _plain_loss, optimizer)


def _fsdp_costs(way: Way, comm: Communicator, how: dict[str, Any]) -> Any:
    """Return costs of FSDP2's transfers, with its hooks and copies of weights.

    A layer gathers its weights, as ``zero3`` twice, and scatters their gradients. So
    each takes a half or a third of what FSDP2 adds to the step of a layer with few
    samples.
    """
    import torch
    from torch import nn

    from commrt.oracle.clocks import Stopwatch
    from commrt.oracle.costs import MeasuredCosts

    watch = Stopwatch(comm, **how)
    points = []
    for width in (16, 128, 512, 768):
        x = torch.randn(comm.size, width)
        plain = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        alone = watch.together_s(_trained(copy.deepcopy(plain), x[:1], _plain_loss))
        both = watch.together_s(_fsdp(plain, way, x))
        nbytes = 4 * (width + 1) * width
        transfers = len(plain) * (3 if way.strategy == "zero3" else 2)
        points.append((nbytes, max(both - alone, 1e-7) / transfers))
    key = comm.size, 1
    found = {(coll, *key): tuple(points) for coll in ("allgather", "reduce_scatter")}
    return MeasuredCosts(found, f"measured by {comm.size} ranks of FSDP2")


def _layer_costs(_: Way, comm: Communicator, how: dict[str, Any]) -> Any:
    """Return costs of moves as commrt's layers make them, with new tensors each time.

    Halos, and sums of gradients, are made as ``measured_costs`` does.
    """
    import torch

    from commrt.layers.process_grid import ProcessGrid
    from commrt.layers.tensors import DistTensor, Placement, Sharded
    from commrt.oracle.clocks import Stopwatch
    from commrt.oracle.costs import MeasuredCosts
    from commrt.oracle.measuring import measured_costs

    watch = Stopwatch(comm, **how)
    raw = measured_costs(comm, **how)
    found = dict(raw.points)
    for ranks in sorted({2, comm.size}):
        grid = ProcessGrid(comm, {"others": comm.size // ranks, "some": ranks})
        whole = Placement.replicated(2)
        places = {
            "allgather": (Placement(None, Sharded(("some",))), ranks),
            "allreduce": (Placement(None, None, partial=("some",)), 1),
        }
        for coll, (placement, parts) in places.items():
            points = []
            for nbytes in (1 << 12, 1 << 17, 1 << 20, 1 << 22):
                columns = nbytes // 64
                local = torch.ones(16, columns // parts, requires_grad=True)
                x = DistTensor(local, (16, columns), grid, placement)
                move = partial(x.redistribute, placement=whole)
                points.append((nbytes, watch.together_s(move)))
            found[coll, ranks, 1] = tuple(points)
        grid.free()
    return MeasuredCosts(found, f"measured by {comm.size} ranks of commrt's layers")


def _pipeline(model: Any, way: Way, example: Any) -> Callable[[], object]:
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from commrt.oracle.layer_table import contiguous
    from commrt.oracle.torch_layers import layer_sizes

    comm = _communicator()
    table = layer_sizes(model, example[:1])
    flops = table.with_flops_per_s(1e9)
    runs = contiguous(flops.layers, comm.size)
    first = sum(len(run) for run in runs[: comm.rank])
    mine = model[first : first + len(runs[comm.rank])]
    stage = PipelineStage(mine, comm.rank, comm.size, torch.device("cpu"))

    def loss(y: Any, target: Any) -> Any:
        return y.square().mean()

    schedule = ScheduleGPipe(stage, way.segments, loss_fn=loss)
    optimizer = (
        torch.optim.SGD(mine.parameters(), 1e-3) if [*mine.parameters()] else None
    )
    target = torch.zeros(len(example), 1)

    def step() -> None:
        mine.zero_grad()
        given = (example,) if comm.rank == 0 else ()
        last = comm.rank == comm.size - 1
        schedule.step(*given, **({"target": target} if last else {}))
        if optimizer is not None:
            optimizer.step()

    return step


def _cut(*roles: str) -> Build:
    """Return how ``parallelize_cnn`` makes a step with a role for each axis."""

    def build(model: Any, way: Way, example: Any) -> Callable[[], object]:
        from commrt.layers.cnn import ParallelStrategy, parallelize_cnn
        from commrt.layers.process_grid import ProcessGrid

        axes = dict(zip(roles, way.ways, strict=False))
        grid = ProcessGrid(_communicator(), axes)
        strategy = ParallelStrategy(**{role: role for role in roles})
        cuts = {"filter", "channel"} & {*roles}
        parallelize_cnn(model, grid, strategy, cut_weights=bool(cuts))
        return _trained(model, example, lambda y: _plain_loss(y).redistribute())

    return build


def _megatron(model: Any, way: Way, example: Any) -> Callable[[], object]:
    return _on_grid(model, {"x": way.ways[0]}, example)


def _tensor3d(model: Any, way: Way, example: Any) -> Callable[[], object]:
    return _on_grid(model, dict(zip("zyx", way.ways, strict=True)), example)


def _on_grid(model: Any, axes: Mapping[str, int], example: Any) -> Callable[[], object]:
    from commrt.layers.process_grid import ProcessGrid
    from commrt.layers.tensor3d import parallelize

    grid = ProcessGrid(_communicator(), axes)
    cut = parallelize(model, grid)
    x = example
    if axes.get("z", 1) > 1:
        x = x.tensor_split(axes["z"])[grid.coords["z"]]
    # Megatron's input has a gradient, as that of a layer behind others.
    return _trained(cut, x.clone().requires_grad_(), _plain_loss)


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = f"{'model':6}{'ranks':>6}  {'strategy':20}"
    lines = [head + f"{'projected':>12}{'measured':>12}{'ratio':>8}{'accuracy':>10}"]
    for row in rows:
        times = f"{row['projected_ms']:>9.1f} ms{row['measured_ms']:>9.1f} ms"
        lines.append(
            f"{row['model']:6}{row['ranks']:>6}  {row['way']:20}{times}"
            f"{row['ratio']:>8.3f}{row['accuracy']:>10.3f}"
        )
    lines.append(f"mean accuracy {mean(row['accuracy'] for row in rows):.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
