# SPDX-License-Identifier: Apache-2.0
"""Halos, neighbours, redistribution, messages, buckets and host work on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from run_ranks import RunRanks

DEADLINE_S = 300.0


def boxes(seed: int, number: int) -> int:
    """Run drawn halos, neighbours and redistributions; return how much was compared."""
    import random

    import halo_cases
    from boxes_on_device import OnDevice
    from layout_cases import move_drawn
    from neighbor_cases import check_all, draw_grid, grid_edges

    import commrt
    from commrt.devices import DeviceStream
    from commrt.devices.registry import cuda_device

    comm = commrt.init()
    gpu = cuda_device(0)
    rng = random.Random(f"boxes on a GPU {comm.size} {seed}")
    compared = 0
    with DeviceStream(gpu) as stream:
        there = OnDevice(
            comm, SimpleNamespace(device=gpu, stream=stream, carrier="staged")
        )
        for _ in range(number):
            compared += halo_cases.check(there, halo_cases.draw(rng, comm.size, 3))
            dims, periodic = draw_grid(rng, comm.size)
            outgoing = [2 * len(dims)] * comm.size
            with there.cart(dims, periodic) as cart:
                edges = grid_edges(dims, periodic)
                compared += check_all(cart, edges, outgoing, seed)
            compared += move_drawn(there, rng)
    comm.barrier()
    return compared


@pytest.mark.parametrize("size", [2, 3])
def test_boxes(size: int, seed: int, ranks: RunRanks) -> None:
    found = ranks(size, boxes, deadline_s=DEADLINE_S, seed=seed, number=3)
    assert all(each > 0 for each in found), found


def others() -> list[str]:
    """Compare calls on device arrays with the same calls on host arrays."""
    import numpy as np

    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    comm = commrt.init()
    gpu, rank, size = cuda_device(0), comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    wrong: list[str] = []

    def greater(x: Any, y: Any) -> Any:
        return np.maximum(x * 2, y * 2) / 2

    largest = commrt.reduction(greater)

    def values(count: int) -> Any:
        generator = np.random.default_rng(count + rank)
        return generator.integers(-40, 40, count).astype("f4")

    with DeviceStream(gpu) as stream:

        def there(given: Any) -> DeviceArray:
            return DeviceArray(gpu, given.shape, given.dtype).put(given)

        def check(what: str, got: Any, want: Any) -> None:
            stream.synchronize()
            if not np.array_equal(got.get(), want):
                wrong.append(f"rank {rank}: {what}: {got.get()[:4]}, not {want[:4]}")

        for count in (0, 1, 1001, 300_000):
            host = values(count)
            x, out = there(host), there(np.zeros(count, "f4"))
            want = np.zeros(count, "f4")
            comm.sendrecv(host, dest=right, source=left, out=want)
            comm.sendrecv(x, dest=right, source=left, out=out)
            check(f"sendrecv {count}", out, want)
            coming = comm.recv(out, source=left, tag=3, nonblocking=True)
            leaving = comm.send(x, dest=right, tag=3, nonblocking=True)
            coming.wait()
            leaving.wait()
            check(f"send and recv {count}", out, want)
            # between host and device memory
            coming = comm.recv(out, source=left, tag=4, nonblocking=True)
            comm.send(host, dest=right, tag=4)
            coming.wait()
            check(f"from the host {count}", out, want)
            if count:
                own = comm.allreduce(host.copy(), op=largest)
                check(
                    f"a function {count}", comm.allreduce(there(host), op=largest), own
                )
                own = comm.allreduce(host.copy(), compress="float16")
                got = comm.allreduce(there(host), compress="float16")
                check(f"compressed {count}", got, own)
        with comm.fused():
            arrays = [there(values(n)) for n in (1, 7, 500, 4096) * 5]
            requests = [comm.allreduce(each, nonblocking=True) for each in arrays]
        for request in requests:
            request.wait()
        for n, got in zip((1, 7, 500, 4096) * 5, arrays, strict=True):
            check(f"fused {n}", got, comm.allreduce(values(n)))
        host = values(5000)
        bound = comm.plan.allreduce(x := there(host))
        for _ in range(3):
            x.put(host)
            bound()
            check("bound", x, comm.allreduce(host.copy()))
        picked = np.sort(np.random.default_rng(rank).permutation(5000)[:200])
        want = np.zeros(5000, "f4")
        comm.sparse_allreduce((picked, host[picked], (5000,)), out=want)
        got = there(np.zeros(5000, "f4"))
        comm.sparse_allreduce((there(picked), there(host[picked]), (5000,)), out=got)
        check("sparse", got, want)
    comm.barrier()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_buckets_and_host_work(size: int, ranks: RunRanks) -> None:
    assert ranks(size, others, deadline_s=DEADLINE_S) == [[]] * size


def many_in_flight(number: int) -> int:
    """Start more calls than streams hold commands; return how many sums are wrong."""
    import numpy as np

    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    comm = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        xs = [DeviceArray(gpu, 2, "float32") for _ in range(number)]
        for i, x in enumerate(xs):
            x.put(np.full(2, comm.rank + i, "f4"))
        requests = [
            comm.allreduce(x, nonblocking=True, algorithm="staged/direct") for x in xs
        ]
        for request in requests:
            request.wait()
        stream.synchronize()
        base = comm.size * (comm.size - 1) / 2
        wrong = sum(
            bool((x.get() != base + comm.size * i).any()) for i, x in enumerate(xs)
        )
        # One call of more pieces than a stream holds commands.
        long = DeviceArray(gpu, 1200 * 16, "float32").put(np.ones(1200 * 16, "f4"))
        comm.allreduce(long, algorithm="staged/direct", params={"piece": 64})
        stream.synchronize()
        wrong += int((long.get() != comm.size).sum())
    comm.barrier()
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_more_calls_than_streams_hold_commands(size: int, ranks: RunRanks) -> None:
    found = ranks(size, many_in_flight, deadline_s=DEADLINE_S, number=1500)
    assert found == [0] * size
