# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of operations over several communicators, every result checked.

All ranks draw one program from a seed: which operation, on which communicator, of
which length, algorithm and fragmentation. Each then waits for what it has in flight in
an order of its own. STRESS_SEEDS=first:last runs more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases import SPREADS, Attempt, Case

from commrt import algorithms
from commrt.comm import core_of
from commrt.local import run
from commrt.vocabulary.operations import COLLECTIVES, operation

Array = npt.NDArray[Any]
_COUNTS = (0, 1, 2, 3, 5, 6, 7, 12, 13, 100, 1021, 4096, 20_011)
_LONG = 180_001
_STORES = ("plain", "stream", "stream_slots", "stream_both")


def _seeds() -> list[int]:
    given = os.environ.get("STRESS_SEEDS")
    if given is None:
        return list(range(4))
    first, last = map(int, given.split(":"))
    return list(range(first, last))


def _made(key: int, rank: int, count: int) -> Array:
    """Return what ``rank`` contributes: small integers, so that sums are exact."""
    return ((np.arange(count) * (key % 7 + 1) + 13 * rank + key) % 251).astype(np.int64)


def _expected(
    name: str, reduction: str, inputs: list[Array], rank: int, root: int
) -> Array | None:
    size = len(inputs)
    block = len(inputs[0]) // size
    mine = slice(rank * block, (rank + 1) * block)
    if name in ("allreduce", "reduce", "reduce_scatter"):
        total = np.max(inputs, axis=0) if reduction == "max" else np.sum(inputs, axis=0)
        if reduction == "avg":
            total = total / size
        if name == "reduce":
            return total if rank == root else None
        return total[mine] if name == "reduce_scatter" else total
    if operation(name).combines_some:
        of = operation(name).contributors(rank, size)
        combine = np.max if reduction == "max" else np.sum
        return combine(inputs[of.start : of.stop], axis=0) if of else None
    if name == "bcast":
        return inputs[root]
    if name == "scatter":
        return inputs[root][mine]
    if name == "alltoall":
        return np.concatenate([x[mine] for x in inputs])
    if name == "allgather" or rank == root:
        return np.concatenate(inputs)
    return None


Check = Callable[[], None]


class _Rank:
    """One rank's way through the program of ``seed``."""

    def __init__(self, comm: Any, seed: int, actions: int) -> None:
        self.program = random.Random(seed)
        self.own = random.Random(seed * 1000 + comm.rank)
        self.actions = actions
        halves = comm.split(comm.rank % 2, key=-comm.rank)
        self.comms = [comm, comm.dup(), halves]
        # A draw per communicator: groups of a split go through the same steps.
        self.pending: list[tuple[Any, Check]] = []
        self.key = 0

    def go(self) -> None:
        for _ in range(self.actions):
            self.key += 1
            which = self.program.choice(self.comms)
            if self.program.random() < 0.3:
                self._message(which)
            else:
                self._collective(which)
            while len(self.pending) > 24 or (self.pending and self.own.random() < 0.3):
                self._end_one()
        while self.pending:
            self._end_one()
        for comm in self.comms[1:]:
            comm.free()

    def _end_one(self) -> None:
        request, check = self.pending.pop(self.own.randrange(len(self.pending)))
        if self.own.random() < 0.3:
            request.test()
        request.wait()
        check()

    def _later(self, request: Any, nonblocking: bool, check: Check) -> None:
        if nonblocking:
            self.pending.append((request, check))
        else:
            check()

    def _collective(self, comm: Any) -> None:
        draw, size, key = self.program, comm.size, self.key
        name = draw.choice(COLLECTIVES)
        count = _LONG if draw.random() < 0.05 else draw.choice(_COUNTS)
        seed = draw.getrandbits(32)
        nonblocking = draw.random() < 0.7
        # Groups of a split differ in size: what follows must not draw from `program`.
        draw = random.Random(seed)
        spec = operation(name)
        root = draw.randrange(size)
        if name in ("reduce_scatter", "alltoall", "scatter"):
            count = count // size * size
        options: dict[str, Any] = {"nonblocking": nonblocking}
        reductions = ("sum", "max") if spec.combines_some else ("sum", "max", "avg")
        reduction = draw.choice(reductions) if spec.reduces else "sum"
        if spec.reduces:
            options["op"] = reduction
        if spec.has_root:
            options["root"] = root
        known = algorithms.names(name, size)
        if known and draw.random() < 0.8:
            options["algorithm"] = draw.choice(known)
            options["params"] = {
                "chunk": draw.choice((64, 1000, 8192, 131072)),
                "depth": draw.choice((1, 2, 4)),
                "reuse": draw.choice((1, 2, 3)),
                "store": draw.choice(_STORES),
            }
        if name == "barrier":
            self._later(comm.barrier(**options), nonblocking, lambda: None)
            return
        if spec.count_arguments:
            self._vector(comm, draw, name, count, options)
            return
        dtype = np.float64 if reduction == "avg" else np.int64
        inputs = [_made(key, r, count).astype(dtype) for r in range(size)]
        x = inputs[comm.rank].copy()
        if not (spec.in_place and draw.random() < 0.5):
            factor = {"same": 1.0, "times_size": size, "div_size": 1 / size}
            shape = round(count * factor[spec.out_count])
            options["out"] = np.full(shape, -1, dtype)
        expected = _expected(name, reduction, inputs, comm.rank, root)
        result = getattr(comm, name)(x, **options)

        def check() -> None:
            got = options.get("out", x)
            if expected is None:
                return
            where = f"{name}({count}, {options}) on {comm.name}"
            np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=where)
            assert (
                "out" not in options
                or name == "bcast"
                or (x == inputs[comm.rank]).all()
            )

        self._later(result, nonblocking, check)

    def _vector(
        self,
        comm: Any,
        draw: random.Random,
        name: str,
        count: int,
        options: dict[str, Any],
    ) -> None:
        case = Case(
            name,
            comm.size,
            options.get("algorithm"),
            options.get("params", {}),
            "int64",
            "sum",
            options.get("root", 0),
            min(count, 20_000),
            draw.random() < 0.5,
            draw.choice(SPREADS),
        )
        attempt = Attempt(case, comm.rank)
        nonblocking = options["nonblocking"]
        result = attempt.start(comm, nonblocking=nonblocking)

        def check() -> None:
            attempt.result = attempt.out
            assert attempt.verdict() is None, case

        self._later(result, nonblocking, check)

    def _message(self, comm: Any) -> None:
        draw, key = self.program, self.key
        seed = draw.getrandbits(32)
        draw = random.Random(seed)
        source, dest = draw.randrange(comm.size), draw.randrange(comm.size)
        count = draw.choice(_COUNTS)
        # Few tags: equal ones must not overtake.
        tag = draw.randrange(2)
        x = _made(key, source, count)
        if comm.rank == source:
            nonblocking = draw.random() < 0.5 or source == dest
            request = comm.send(x, dest=dest, tag=tag, nonblocking=nonblocking)
            self._later(request, nonblocking, lambda: None)
        if comm.rank == dest:
            out = np.full(count + 3, -1, np.int64)
            request = comm.recv(out, source=source, tag=tag, nonblocking=True)

            def check() -> None:
                assert request.received_nbytes == 8 * count
                assert request.source == source
                assert (out[:count] == x).all()
                assert (out[count:] == -1).all()

            self._later(request, True, check)


@pytest.mark.parametrize("thread", [False, True], ids=["caller", "thread"])
@pytest.mark.parametrize("seed", _seeds())
def test_whatever_is_in_flight_ends_right(seed: int, thread: bool) -> None:
    def rank_main(comm: Any) -> None:
        engine = core_of(comm).world.engine
        if thread:
            engine.start_thread()
        try:
            _Rank(comm, seed, actions=60).go()
        finally:
            engine.stop_thread()

    run(2 + seed % 4, rank_main, timeout_s=300)
