# SPDX-License-Identifier: Apache-2.0
"""A step of a recommendation model beside one over gloo, in one launch.

    torchrun --nproc-per-node 2 -m commrt.bench.dlrm
    torchrun --nproc-per-node 4 -m commrt.bench.dlrm --workload one-hot,many-hot

A step is the forward and the backward pass of ``commrt.examples.dlrm``'s network, with
sparse gradients of the tables, the sum of the perceptrons' gradients, and a step of
torch's SGD. Tables lie whole on ranks. The other way is written on torch.distributed's
``all_to_all_single`` and ``all_reduce`` alone, with groups of gloo: it has the same
network and placement, keeps a rank's tables in one parameter, packs lengths and indices
into one message and rows into another, and lets rows travel beside the bottom
perceptron. A third way runs the same code on groups of commrt. The fourth one sends
nothing, since each rank has all tables for itself: no communication is quicker. All
ways take turns, block by block, so that they meet the same machine. Losses and
parameters are compared before anything is timed. Times are medians over blocks, in
microseconds, of rank 0. ``ratio`` is that of commrt's time to each other one's, the
median over blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commrt.bench.in_process_group import measure_models
from commrt.bench.step_turns import Step, in_turns, table
from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

    from commrt.comm import Communicator

__all__ = ["WORKLOADS", "main", "measure", "step_on"]


class Workload(NamedTuple):
    """A model and its samples."""

    num_tables: int
    num_embeddings: int
    embedding_dim: int
    length: int
    """Indices of a bag."""
    samples: int
    """Samples of each rank."""
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
            "commrt": step_on(workload, everyone.communicator),
            "gloo": _by_torch(workload, gloo),
            "torch on commrt": _by_torch(workload, everyone),
        }
        right, *others = [step() for step in steps.values()]
        for other in others:
            torch.testing.assert_close(right, other, rtol=1e-4, atol=1e-5)
        comm = everyone.communicator
        steps["alone"] = step_on(workload, comm.split(comm.rank))
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


def step_on(workload: Workload, comm: Communicator) -> Step:
    """Return a step with commrt's layers; collective.

    Args:
        workload: the model and its samples.
        comm: the ranks that share the tables.
    """
    import torch

    from commrt.layers.embeddings import ShardedEmbeddingBags
    from commrt.layers.process_grid import ProcessGrid

    grid = ProcessGrid(comm, {"data": 0})
    torch.manual_seed(2)
    layer = ShardedEmbeddingBags(_tables(workload), grid=grid)
    _fill(layer.parameters(), comm.rank)
    network = _network(workload, layer)
    # Looked up at each call: logs do not see a method that was taken before they began.
    return _step(workload, network, lambda x: grid.comm.allreduce(x))


def _by_torch(workload: Workload, group: dist.ProcessGroup) -> Step:
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
    return _step(workload, network, lambda x: dist.all_reduce(x, group=group))


def _fill(parameters: Any, rank: int) -> None:
    """Give the tables of both ways the same values."""
    import torch

    draws = torch.Generator().manual_seed(100 + rank)
    for each in parameters:
        with torch.no_grad():
            each.normal_(0, 0.1, generator=draws)


def _step(workload: Workload, network: Any, add_up: Callable[[Any], Any]) -> Step:
    """Return a step, which returns the loss and the parameters.

    Args:
        workload: has the samples.
        network: is trained.
        add_up: sums a tensor over all ranks.
    """
    import torch
    import torch.distributed as dist

    dense, bags = _given(workload, dist.get_rank())
    target = torch.zeros(workload.samples)
    num_samples = workload.samples * dist.get_world_size()
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    own = [*network.bottom.parameters(), *network.top.parameters()]
    sizes = [each.numel() for each in own]

    def step() -> list[Any]:
        optimizer.zero_grad()
        logits = network(dense, bags)
        loss = loss_of(logits, target, reduction="sum") / num_samples
        loss.backward()
        with torch.no_grad():
            flat = torch.cat([each.grad.view(-1) for each in own])
            add_up(flat)
            for each, part in zip(own, flat.split(sizes), strict=True):
                each.grad.copy_(part.view_as(each))
        optimizer.step()
        return [loss.detach(), *(each.detach() for each in network.parameters())]

    return step


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return table(rows, "workload")


if __name__ == "__main__":
    sys.exit(main())
