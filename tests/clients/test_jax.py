# SPDX-License-Identifier: Apache-2.0
"""JAX on commrt: gradients summed by ``commrt.layers.data``, and its arrays in calls.

Its environment has no torch. Ranks are Open MPI's.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_calls import Calls, calls
from client_programs import DEADLINE_S, Program

import commrt
from commrt.errors import BufferError_
from commrt.layers.data import GradientReducer

PROGRAM = Program("JAX", "jax")
pytestmark = PROGRAM.marks
STEPS, ROWS, E = 6, 16, 4
WIDTHS = (12, 33, 17, 5)
"""Lengths that no number of ranks divides."""
LR, MOMENTUM = 0.1, 0.9


def parameters() -> list[Any]:
    """Return weights and biases, as every process begins with them."""
    import jax.numpy as jnp

    rng = np.random.default_rng(7)
    found = []
    for rows, columns in itertools.pairwise(WIDTHS):
        weight = rng.standard_normal((rows, columns)) / rows**0.5
        found += [jnp.asarray(weight, jnp.float32), jnp.zeros(columns, jnp.float32)]
    return found


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Any, Any]:
    """Return a rank's rows of a step, and what the model shall make of them."""
    x = np.random.default_rng(100 + step).standard_normal((ROWS, WIDTHS[0]))
    y = np.sin(x[:, :5]) + np.minimum(x[:, 5:10] ** 2, 1)
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return x[mine].astype(np.float32), y[mine].astype(np.float32)


def loss_of(given: list[Any], x: Any, y: Any) -> Any:
    """Return the mean square of what three layers get wrong."""
    import jax.numpy as jnp

    for at in range(0, len(given), 2):
        x = x @ given[at] + given[at + 1]
        x = jnp.tanh(x) if at + 2 < len(given) else x
    return jnp.mean((x - y) ** 2)


def trained(mean: Any, rank: int = 0, size: int = 1) -> list[float]:
    """Return the losses of a training whose gradients ``mean`` makes those of all."""
    import jax

    step_of = jax.jit(jax.value_and_grad(loss_of))
    move = jax.jit(lambda p, v: [a - LR * b for a, b in zip(p, v, strict=True)])
    given = parameters()
    velocity = [0 * each for each in given]
    losses = []
    for step in range(STEPS):
        loss, gradients = step_of(given, *batch(step, rank, size))
        gradients = mean(gradients)
        velocity = [MOMENTUM * v + g for v, g in zip(velocity, gradients, strict=True)]
        given = move(given, velocity)
        losses.append(float(loss))
    return losses


# -- training ------------------------------------------------------------------------

SMALL = 400
"""Bytes of a bucket: the gradients go into several."""


def training(folder: str) -> list[list[float]]:
    """Train with each way to sum gradients, one after the other."""
    import jax

    comm = commrt.init()
    one = GradientReducer(comm, parameters())
    small = GradientReducer(comm, parameters(), bucket_nbytes=SMALL, priority=True)
    assert len(small.buckets) > len(one.buckets) == 1
    found = []
    for name, mean in (
        ("reducer", one),
        ("small", small),
        ("halves", lambda gradients: added(comm, gradients)),
        ("calls", lambda gradients: averaged(comm, gradients)),
        ("compiled", compiled(comm)),
    ):
        with commrt.trace.record(f"{folder}/{name}"):
            found.append(trained(mean, comm.rank, comm.size))
            # JAX goes on by itself: nothing has waited for the last step's calls.
            jax.effects_barrier()
    one.close()
    small.close()
    return found


def added(comm: Any, gradients: list[Any]) -> list[Any]:
    """Give halves of the gradients twice, as of two micro-batches."""
    with GradientReducer(comm, gradients) as reducer:
        halves = [each / 2 for each in gradients]
        with reducer.no_sync():
            reducer.ready(0, halves[0])
            reducer.ready(3, halves[3])
        for index in (0, 3):
            reducer.ready(index, halves[index])
        for index in (5, 1, 4, 2):
            reducer.ready(index, gradients[index])
        return reducer.finish()


def averaged(comm: Any, gradients: list[Any]) -> list[Any]:
    """Start a call for each gradient, and wait for all."""
    requests = []
    for each in gradients:
        requests.append(comm.allreduce(each, op="avg", nonblocking=True))
    return [request.wait() for request in requests]


def compiled(comm: Any) -> Any:
    """Return a compiled function that calls commrt in the middle of its computation."""
    import jax
    from jax.experimental import io_callback

    def called(*gradients: Any) -> tuple[Any, ...]:
        means = []
        for each in gradients:
            means.append(comm.allreduce(each, op="avg"))
        return tuple(means)

    @jax.jit
    def mean(gradients: list[Any]) -> list[Any]:
        halves = [each * 0.5 for each in gradients]
        shapes = tuple(jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients)
        return [2 * g for g in io_callback(called, shapes, *halves, ordered=True)]

    return mean


@pytest.mark.parametrize("size", [2, 4])
def test_training(
    mpirun: Any, compare: Any, account: Any, tmp_path: Path, size: int
) -> None:
    got = mpirun(size, training, deadline_s=DEADLINE_S, folder=str(tmp_path))
    want = trained(lambda gradients: gradients)
    hows = (
        *("one bucket", "buckets of 400 B by priority", "gradients added up"),
        *("a call for each gradient", "calls in a compiled function"),
    )
    for how, *ranks in zip(hows, *got, strict=True):
        compare(f"{PROGRAM}, {how}", want, ranks)
    nbytes = [E * each.size for each in parameters()]
    for name, place in (("calls", "averaged"), ("compiled", "called")):
        each = calls(f"test_jax.{place}", "allreduce", range(size), *nbytes)
        formula = Calls({call: STEPS * n for call, n in each.items()})
        account(f"{PROGRAM}, {name}", tmp_path / name, formula, Calls())


# -- arrays --------------------------------------------------------------------------


def arrays() -> list[bool]:
    """Return whether calls with JAX's arrays are right, by kind of array."""
    import jax
    import jax.numpy as jnp

    comm = commrt.init()
    rank, size = comm.rank, comm.size
    jax.config.update("jax_enable_x64", True)
    types = ("float32", "float64", "bfloat16", "float16", "int8", "int64", "complex64")
    found = []
    for dtype in types:
        for shape in ((), (1,), (7,), (0, 3), (5, 257)):
            plain = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + rank
            x = jnp.asarray(plain, dtype)
            sums = comm.allreduce(x)
            each = [plain - rank + other for other in range(size)]
            found += [
                type(sums) is np.ndarray and sums.dtype == x.dtype,
                np.array_equal(sums, np.sum(each, axis=0).astype(x.dtype)),
                # What never changes has not, and what was made is JAX's as it is.
                np.array_equal(x, plain.astype(x.dtype)),
                bool((jax.jit(jnp.add)(sums, x) == sums + np.asarray(x)).all()),
            ]
    return [all(found), *others(comm)]


def others(comm: Any) -> list[bool]:
    """Return whether other operations and arguments are right."""
    import jax.numpy as jnp

    rank, size = comm.rank, comm.size
    x = jnp.arange(2 * size, dtype=jnp.float32) + rank
    plain, before = np.asarray(x), np.array(x)
    ranks = [before - rank + other for other in range(size)]
    out = np.empty_like(before)
    last = size - 1
    told = comm.bcast(x, root=last)
    totals = comm.reduce(x, root=last)
    prefix = comm.exscan(x)
    planned = comm.plan.allreduce(x, out=np.empty_like(before))
    found = [
        comm.allreduce(x, out=out) is out and np.array_equal(out, sum(ranks)),
        np.array_equal(comm.allreduce(x > 2), np.any([r > 2 for r in ranks], axis=0)),
        np.array_equal(comm.allgather(x), ranks),
        np.array_equal(comm.reduce_scatter(x), sum(ranks)[2 * rank : 2 * rank + 2]),
        np.array_equal(
            comm.alltoall(x),
            np.concatenate([r[2 * rank : 2 * rank + 2] for r in ranks]),
        ),
        np.array_equal(told, ranks[last]) and (told is x) == (rank == last),
        totals is None if rank != last else np.array_equal(totals, sum(ranks)),
        np.array_equal(comm.scan(x), sum(ranks[: rank + 1])),
        np.array_equal(prefix, sum(ranks[:rank]) if rank else before),
        np.array_equal(comm.allreduce(x, nonblocking=True).wait(), sum(ranks)),
        np.array_equal(planned(), sum(ranks)),
    ]
    try:
        comm.allreduce(before, out=x)
        found.append(False)
    except BufferError_ as error:
        found.append("read-only" in str(error))
    right, left = (rank + 1) % size, (rank - 1) % size
    comm.sendrecv(x, dest=right, out=out, source=left)
    found.append(np.array_equal(out, ranks[left]))
    found.append(np.array_equal(plain, before) and np.array_equal(x, before))
    return [bool(each) for each in found]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays(mpirun: Any, size: int) -> None:
    got = mpirun(size, arrays, deadline_s=DEADLINE_S)
    assert [rank.index(False) for rank in got if False in rank] == []
