# SPDX-License-Identifier: Apache-2.0
"""Scenarios of messages, groups, works, futures, errors and limits."""

from __future__ import annotations

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from scenarios import numbers, raised, scenario
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# -- messages ------------------------------------------------------------------------


def neighbours(group: Any) -> tuple[int, int]:
    """Return who comes after and before this rank in a ring."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return (rank + 1) % size, (rank - 1) % size


@scenario(ranks=2)
def messages_round_a_ring(group: Any) -> Any:
    right, left = neighbours(group)
    found = []
    for count in (0, 1, 100_000):
        out = torch.zeros(count)
        sent = dist.isend(numbers(group, count), right, group=group)
        dist.recv(out, left, group=group)
        sent.wait()
        found.append(out)
    return found


@scenario(ranks=2)
def messages_of_every_type(group: Any) -> Any:
    right, left = neighbours(group)
    found = []
    for name in ("float16", "bfloat16", "float64", "int8", "int64", "bool"):
        x = numbers(group, 7, getattr(torch, name))
        out = torch.zeros_like(x)
        works = [dist.irecv(out, left, group=group), dist.isend(x, right, group=group)]
        for work in works:
            work.wait()
        found.append(out)
    return found


@scenario(ranks=2)
def messages_by_their_tags(group: Any) -> Any:
    """Received in another order than they were sent."""
    right, left = neighbours(group)
    sent = [
        dist.isend(numbers(group, 3) + tag, right, group=group, tag=tag)
        for tag in (5, 6, 7)
    ]
    outs = {tag: torch.zeros(3) for tag in (7, 5, 6)}
    for tag, out in outs.items():
        dist.recv(out, left, group=group, tag=tag)
    for work in sent:
        work.wait()
    return outs


@scenario(ranks=2)
def messages_in_a_batch(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    others = [r for r in range(size) if r != rank]
    outs = {r: torch.zeros(50_000) for r in others}
    mine = numbers(group, 50_000)
    ops = [dist.P2POp(dist.isend, mine, r, group) for r in others]
    ops += [dist.P2POp(dist.irecv, outs[r], r, group) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


@scenario(ranks=2)
def messages_from_any_source(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        for tag, count in ((2, 3), (3, 20_000)):
            dist.send(torch.full((count,), float(rank)), 0, group=group, tag=tag)
        return None
    found = []
    for tag, count in ((2, 3), (3, 20_000)):
        for _ in range(size - 1):
            out = torch.zeros(count)
            source = dist.recv(out, group=group, tag=tag)
            found.append((tag, source, float(out[0]), float(out[-1])))
    return sorted(found)


@scenario(ranks=2)
def objects_as_messages(group: Any) -> Any:
    right, left = neighbours(group)
    got: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        dist.send_object_list(["from", {"rank": 0}], right, group=group)
        dist.recv_object_list(got, left, group=group)
    else:
        dist.recv_object_list(got, left, group=group)
        dist.send_object_list([*got[:1], dist.get_rank(group)], right, group=group)
    return got


@scenario(ranks=2)
def messages_beside_collectives(group: Any) -> Any:
    right, left = neighbours(group)
    out, x = torch.zeros(1000), numbers(group, 1000)
    received = dist.irecv(out, left, group=group)
    summed = dist.all_reduce(x, group=group, async_op=True)
    sent = dist.isend(numbers(group, 1000) * 2, right, group=group)
    for work in (summed, sent, received):
        work.wait()
    return [x, out]


@scenario(ranks=2)
def a_batch_that_receives_last(group: Any) -> Any:
    """Long sends first on all ranks, received in the other direction."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    others = [r for r in range(size) if r != rank]
    outs = {r: torch.zeros(300_000) for r in others}
    mine = numbers(group, 300_000)
    ops = [dist.P2POp(dist.isend, mine, r, group) for r in others]
    ops += [dist.P2POp(dist.irecv, outs[r], r, group) for r in reversed(others)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


@scenario(gloo_cannot="its messages lie together in memory", ranks=2)
def messages_of_any_strides(group: Any) -> Any:
    right, left = neighbours(group)
    table = torch.zeros(4, 6)
    x = torch.arange(12.0).reshape(4, 3)
    sent = dist.isend(x.t() + dist.get_rank(group), right, group=group, tag=5)
    dist.recv(table[:, ::2].t(), left, group=group, tag=5)
    sent.wait()
    want = torch.zeros(4, 6)
    want[:, ::2] = x + left
    return [(table, want)]


@scenario(gloo_cannot="its works do not say whose message it was", ranks=2)
def receives_under_way_from_any_source(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        x = torch.full((20_000,), float(rank))
        dist.send(x, 0, group=group, tag=4)
        return []
    outs = [torch.zeros(20_000) for _ in range(size - 1)]
    works = [dist.irecv(out, group=group, tag=4) for out in outs]
    for work in works:
        work.wait()
    sources = [work.source_rank() for work in works]
    ends = [int(out[-1]) for out in outs]
    return [(ends, sources), (sorted(sources), [*range(1, size)])]


@scenario(gloo_cannot="it sends no rank a message of its own")
def messages_to_oneself(group: Any) -> Any:
    out, rank = torch.zeros(3), dist.get_rank(group)
    works = [
        dist.irecv(out, rank, group=group, tag=9),
        dist.isend(torch.ones(3), rank, group=group, tag=9),
    ]
    for work in works:
        work.wait()
    return [(out, torch.ones(3))]


# -- groups --------------------------------------------------------------------------


def backend(group: Any) -> str:
    found: str = dist.get_backend(group)
    return found


@scenario()
def groups_of_some_ranks(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = []
    for ranks in ([0], [size - 1, 0][:size], [*range(size)][::-1]):
        some = dist.new_group(ranks, backend=backend(group))
        if rank in ranks:
            x = numbers(group, 5)
            dist.all_reduce(x, group=some)
            y = numbers(group, 2)
            dist.broadcast(y, ranks[0], group=some)
            outs = [torch.empty(2) for _ in ranks]
            dist.all_gather(outs, numbers(group, 2), group=some)
            found += [x, y, outs, dist.get_group_rank(some, rank)]
            dist.destroy_process_group(some)
    return found


@scenario(ranks=2)
def a_group_made_by_its_members(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ranks = [0, size - 1]
    if rank not in ranks:
        return None
    some = dist.new_group(ranks, backend=backend(group), use_local_synchronization=True)
    x = numbers(group, 5)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=some)
    dist.destroy_process_group(some)
    return x


@scenario()
def two_groups_in_turns(group: Any) -> Any:
    """Operations of two groups of the same ranks are under way together."""
    other = dist.new_group(backend=backend(group))
    found = [numbers(group, 3000) + i for i in range(6)]
    works = [
        dist.all_reduce(x, group=other if i % 2 else group, async_op=True)
        for i, x in enumerate(found)
    ]
    for work in reversed(works):
        work.wait()
    dist.destroy_process_group(other)
    return found


@scenario()
def a_mesh_of_rows_and_columns(group: Any) -> Any:
    """Collectives along each axis of a mesh whose groups are of the backend."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    width = size if size % 2 else 2
    table = torch.arange(size).reshape(-1, width)
    made = [
        dist.new_subgroups_by_enumeration(each.tolist(), backend=backend(group))[0]
        for each in (table.t(), table)
    ]
    mesh = DeviceMesh.from_group(made, "cpu", mesh=table, mesh_dim_names=("b", "a"))
    found = []
    for name in ("a", "b"):
        x = numbers(group, 4) * (rank + 1)
        dist.all_reduce(x, group=mesh[name].get_group())
        found.append(x)
    return [*found, mesh.get_coordinate()]


@scenario(gloo_cannot="it is not the default group, of which the mesh is made")
def a_mesh_of_the_default_group(group: Any) -> Any:
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    x, y = torch.ones(2), torch.ones(2)
    dist.all_reduce(x, group=mesh["b"].get_group())
    dist.all_reduce(y, group=mesh["a"].get_group())
    z = funcol.all_reduce(torch.ones(3), "sum", mesh["b"])
    mine = torch.full((1,), float(dist.get_rank(group)))
    parts = funcol.all_gather_tensor(mine, 0, mesh["b"])
    name = mesh["b"].get_group().group_name
    found = dist.distributed_c10d._resolve_process_group(name)
    return [
        (x, torch.full((2,), float(size))),
        (y, torch.ones(2)),
        (z + 0, torch.full((3,), float(size))),
        (parts + 0, torch.arange(float(size))),
        (found is mesh["b"].get_group(), True),
    ]


@scenario(gloo_cannot="it is another backend")
def what_a_group_of_commrt_has(group: Any) -> Any:
    return [
        (dist.get_backend(group), "commrt"),
        ((group.name(), group._get_backend_name()), ("commrt", "commrt")),
        (group._device_types[0], torch.device("cpu")),
        (group.communicator.size, dist.get_world_size(group)),
        (group.communicator.rank, dist.get_rank(group)),
    ]


@scenario()
def what_a_group_says_of_itself(group: Any) -> Any:
    return [
        dist.get_world_size(group),
        dist.get_rank(group),
        (group.rank(), group.size()),
        dist.get_process_group_ranks(group),
        dist.get_global_rank(group, group.rank()),
        bool(group.group_name),
        dist.distributed_c10d._resolve_process_group(group.group_name) is group,
    ]


@scenario()
def barriers(group: Any) -> Any:
    """What a rank has written before a barrier the others find behind it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, 0, group=group)
    folder, found = Path(str(box[0])), []
    for turn in range(3):
        (folder / f"{turn}.{rank}").touch()
        dist.barrier(group=group)
        found.append(all((folder / f"{turn}.{r}").exists() for r in range(size)))
    dist.barrier(group=group, async_op=True).wait()
    if rank == 0:
        shutil.rmtree(folder)
    return found


# -- works and futures ---------------------------------------------------------------


@scenario()
def works_of_every_collective(group: Any) -> Any:
    """All under way together, and waited for in the other order."""
    size = dist.get_world_size(group)
    x, y, out = numbers(group, 999), numbers(group, 9), torch.empty(9 * size)
    part, moved = torch.empty(2), torch.empty(2 * size)
    works = [
        dist.all_reduce(x, group=group, async_op=True),
        dist.broadcast(y, 0, group=group, async_op=True),
        dist.all_gather_into_tensor(out, numbers(group, 9), group, async_op=True),
        dist.reduce_scatter_tensor(
            part, numbers(group, 2 * size), group=group, async_op=True
        ),
        dist.all_to_all_single(
            moved, numbers(group, 2 * size), group=group, async_op=True
        ),
    ]
    waited = [work.wait() for work in reversed(works)]
    return [waited, [work.is_completed() for work in works[:3]], x, y, out, part, moved]


@scenario(gloo_cannot="its works have no result of their own")
def what_a_work_says_at_its_end(group: Any) -> Any:
    x = numbers(group, 1000)
    work = dist.all_reduce(x, group=group, async_op=True)
    ended = work.wait()
    out = torch.zeros(3)
    works = [dist.isend(out, dist.get_rank(group), group=group)]
    works.append(dist.irecv(out, dist.get_rank(group), group=group))
    for each in works:
        each.wait()
    return [
        ((ended, work.is_completed(), work.is_success()), (True, True, True)),
        ((work.exception(), work.result()[0] is x), (None, True)),
        (work.get_future().value()[0], x),
        (works[1].result()[0] is out, True),
    ]


@scenario()
def a_work_that_is_waited_for_with_a_limit(group: Any) -> Any:
    x = numbers(group, 5)
    work = dist.all_reduce(x, group=group, async_op=True)
    return [work.wait(timedelta(seconds=300)), work.wait(), x]


@scenario()
def a_work_that_nobody_waits_for(group: Any) -> Any:
    dist.all_reduce(numbers(group, 5), group=group, async_op=True)
    x = numbers(group, 5)
    dist.all_reduce(x, group=group)
    return x


@scenario()
def futures_and_their_callbacks(group: Any) -> Any:
    x = numbers(group, 5)
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    halved = future.then(lambda f: f.value()[0] / 2)
    return [halved.wait(), halved.then(lambda f: f.value().sum()).wait(), x]


@scenario()
def futures_of_gathers(group: Any) -> Any:
    size = dist.get_world_size(group)
    out = torch.empty(3 * size)
    x = numbers(group, 3)
    work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
    work.get_future().wait()
    return out


@scenario()
def several_futures_together(group: Any) -> Any:
    found = [numbers(group, 5) + i for i in range(4)]
    futures = [
        dist.all_reduce(x, group=group, async_op=True).get_future() for x in found
    ]
    torch.futures.wait_all(futures)
    return found


@scenario()
def collectives_in_callbacks(group: Any) -> Any:
    def again(future: Any) -> torch.Tensor:
        work = dist.all_reduce(future.value()[0], group=group, async_op=True)
        found: torch.Tensor = work.get_future().wait()[0]
        return found

    work = dist.all_reduce(numbers(group, 3), group=group, async_op=True)
    return work.get_future().then(again).wait()


# -- errors and limits ---------------------------------------------------------------


@scenario()
def wrong_calls_raise_and_the_group_goes_on(group: Any) -> Any:
    size, x = dist.get_world_size(group), numbers(group, 5)
    kinds = [
        raised(lambda: dist.all_gather([torch.zeros(1)] * (size + 1), x, group=group)),
        raised(
            lambda: dist.reduce_scatter(x, [torch.zeros(1)] * (size + 1), group=group)
        ),
        raised(
            lambda: dist.all_to_all_single(
                torch.zeros(3), torch.zeros(3), [1] * size, [2] * size, group=group
            )
        ),
        raised(lambda: dist.scatter(x, None, 99, group=group)),
        raised(lambda: dist.broadcast(x, 99, group=group)),
        raised(lambda: dist.send(x, 99, group=group)),
    ]
    dist.all_reduce(x, group=group)
    return [[kind != "nothing" for kind in kinds], x]


def apart(group: Any, limit_s: float) -> Any:
    """Return a group of its own, as one of gloo's ends with a limit that has passed."""
    limit = timedelta(seconds=limit_s)
    return dist.new_group(backend=backend(group), timeout=limit)


@scenario(ranks=2)
def a_limit_of_the_group(group: Any) -> Any:
    """The last rank does not come; the others get an error, and go on."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    other = apart(group, 0.3)
    kind = ""
    if rank < size - 1:
        kind = raised(lambda: dist.all_reduce(torch.ones(3), group=other))
    dist.barrier(group=group)
    x = numbers(group, 5)
    dist.all_reduce(x, group=group)
    return [kind, x]


@scenario(ranks=2)
def a_limit_of_a_wait(group: Any) -> Any:
    """A receive that nobody sends for ends with the limit of the wait."""
    other = apart(group, 30)
    kind = ""
    if dist.get_rank(group) == 0:
        work = dist.irecv(torch.zeros(3), 1, group=other)
        kind = raised(lambda: work.wait(timedelta(seconds=0.2)))
    dist.barrier(group=group)
    return kind


@scenario(ranks=2)
def an_operation_that_ends_after_its_limit(group: Any) -> Any:
    """A wait whose limit has passed gives up the wait, not the operation."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    other = apart(group, 30)
    store = dist.PrefixStore(backend(group), dist.distributed_c10d._get_default_store())
    x = numbers(group, 3)
    kind = ""
    if rank == size - 1:
        store.wait(["late"])
        dist.all_reduce(x, group=other)
    else:
        work = dist.all_reduce(x, group=other, async_op=True)
        kind = raised(lambda: work.wait(timedelta(seconds=0.2)))
        if store.add("waited", 1) == size - 1:
            store.set("late", "1")
        work.wait()
    return [kind, x]
