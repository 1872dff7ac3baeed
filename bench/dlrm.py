# SPDX-License-Identifier: Apache-2.0
"""A step of a recommendation model beside one over gloo, in one launch.

    torchrun --nproc-per-node 2 -m commrt.bench.dlrm
    torchrun --nproc-per-node 4 -m commrt.bench.dlrm --workload one-hot,many-hot

A step is the forward and the backward pass of ``commrt.examples.dlrm``'s network, with
sparse gradients of the tables, and the sum of the perceptrons' gradients. Tables lie
whole on ranks. The other way is written on ``torch.distributed.all_to_all_single`` and
``all_reduce`` alone, with groups of gloo: it has the same network and placement, keeps
a rank's tables in one parameter, packs lengths and indices into one message and rows
into another, and lets rows travel beside the bottom perceptron. A third way runs the
same code on groups of commrt. All ways take turns, block by block, so that they meet
the same machine. Losses and gradients are compared before anything is timed. Times are
medians over blocks, in microseconds, of rank 0. ``ratio`` is that of commrt's time to
each other one's, the median over blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from commrt.bench.in_process_group import measure_models
from commrt.bench.step_turns import Step, in_turns, table
from commrt.errors import UsageError

__all__ = ["WORKLOADS", "main", "measure"]


class Workload(NamedTuple):
    """A model and its samples."""

    num_tables: int
    num_embeddings: int
    embedding_dim: int
    length: int
    """Indices of a bag."""
    samples: int
    """Of each rank."""
    bottom: tuple[int, ...]
    top: tuple[int, ...]


WORKLOADS = {
    "small": Workload(8, 1000, 8, 1, 32, (16,), (16,)),
    "one-hot": Workload(26, 20_000, 16, 1, 128, (64, 32), (64, 32)),
    "many-hot": Workload(8, 20_000, 32, 10, 128, (64, 32), (64, 32)),
    "kaggle": Workload(26, 20_000, 16, 1, 128, (512, 256, 64), (512, 256)),
}
"""By name; the perceptrons of the last one are those of DLRM's script for Criteo's
Kaggle data."""
NUM_DENSE = 13


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, on the ranks that torchrun started."""
    return measure_models("commrt.bench.dlrm", WORKLOADS, measure, _text, argv)


def measure(
    wanted: Sequence[str], blocks: int, *, least_s: float = 0.05
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by workload and way."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    everyone: Any = dist.group.WORLD
    if dist.get_world_size() == 1:
        raise UsageError("dlrm: 1 rank; start two at least: one rank sends nothing")
    gloo = dist.new_group(backend="gloo")
    rows = []
    for name in wanted:
        workload = WORKLOADS[name]
        steps = {
            "commrt": _by_layer(workload, everyone.communicator),
            "gloo": _by_torch(workload, gloo),
            "torch on commrt": _by_torch(workload, everyone),
        }
        right, *others = (step() for step in steps.values())
        for other in others:
            torch.testing.assert_close(right, other, rtol=1e-4, atol=1e-5)
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"workload": name, "us": times})
    return rows


def _tables(workload: Workload) -> tuple[Any, ...]:
    from commrt.layers.embeddings import EmbeddingTable

    shape = workload.num_embeddings, workload.embedding_dim
    return tuple(
        EmbeddingTable(f"t{number}", *shape, sharding="table", lookups=workload.length)
        for number in range(workload.num_tables)
    )


def _given(workload: Workload, rank: int) -> tuple[Any, list[Any]]:
    """Return the numbers and the bags of a rank."""
    import torch

    draws = torch.Generator().manual_seed(rank)
    shape = workload.samples, workload.length
    bags = [
        torch.randint(workload.num_embeddings, shape, generator=draws)
        for _ in range(workload.num_tables)
    ]
    return torch.randn(workload.samples, NUM_DENSE, generator=draws), bags


def _network(workload: Workload, bags: Any) -> Any:
    """Return the network, whose perceptrons are the same on all ranks."""
    import torch

    from commrt.examples.dlrm import Network

    torch.manual_seed(1)
    sizes = NUM_DENSE, workload.bottom, workload.top, torch.float32
    return Network(bags, _tables(workload), *sizes)


def _by_layer(workload: Workload, comm: Any) -> Step:
    import torch

    from commrt.layers.embeddings import ShardedEmbeddingBags, sync_gradients
    from commrt.layers.process_grid import ProcessGrid

    grid = ProcessGrid(comm, {"data": 0})
    torch.manual_seed(2)
    layer = ShardedEmbeddingBags(_tables(workload), grid=grid)
    _fill(layer.parameters(), comm.rank)
    network = _network(workload, layer)
    return _step(workload, network, lambda: sync_gradients(network, grid))


def _by_torch(workload: Workload, group: Any) -> Step:
    import torch
    import torch.distributed as dist

    from commrt.bench.peer_dlrm import PackedTables
    from commrt.layers.embeddings import place

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    placement = place(_tables(workload), ranks)
    owners = [placement.of_table(n)[0].rank for n in range(workload.num_tables)]
    tables = PackedTables(
        owners, workload.num_embeddings, workload.embedding_dim, group
    )
    _fill(tables.parameters(), rank)
    network = _network(workload, tables)
    dense = [*network.bottom.parameters(), *network.top.parameters()]

    def synchronize() -> None:
        with torch.no_grad():
            flat = torch.cat([each.grad.view(-1) for each in dense])
            dist.all_reduce(flat, group=group)
            flat /= ranks
            parts = flat.split([each.numel() for each in dense])
            for each, part in zip(dense, parts, strict=True):
                each.grad.copy_(part.view_as(each))
            for each in tables.parameters():
                each.grad._values().div_(ranks)

    return _step(workload, network, synchronize)


def _fill(parameters: Any, rank: int) -> None:
    """Give the tables of both ways the same values."""
    import torch

    draws = torch.Generator().manual_seed(100 + rank)
    for each in parameters:
        with torch.no_grad():
            each.normal_(0, 0.1, generator=draws)


def _step(workload: Workload, network: Any, synchronize: Step) -> Step:
    """Return a step, which returns the loss and the gradients."""
    import torch
    import torch.distributed as dist

    dense, bags = _given(workload, dist.get_rank())
    target = torch.zeros(workload.samples)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    def step() -> list[Any]:
        network.zero_grad()
        loss = loss_of(network(dense, bags), target)
        loss.backward()
        synchronize()
        return [loss.detach(), *(each.grad for each in network.parameters())]

    first = step

    def compared() -> list[Any]:
        return [each.to_dense() if each.is_sparse else each for each in first()]

    return _OnceDense(compared, step)


class _OnceDense:
    """A step whose first call returns dense gradients, for comparisons."""

    def __init__(self, first: Step, later: Step) -> None:
        self._first: Step | None = first
        self._later = later

    def __call__(self) -> Any:
        """Run the step."""
        step, self._first = self._first or self._later, None
        return step()


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return table(rows, "workload")


if __name__ == "__main__":
    sys.exit(main())
