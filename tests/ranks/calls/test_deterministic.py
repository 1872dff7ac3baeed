# SPDX-License-Identifier: Apache-2.0
"""deterministic=True: the same bits, whatever ran, in any pieces, whoever waited."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rounding import REDUCING, TYPES, from_the_left, same_numbers, telling

import commrt
from commrt.bench.price import measure
from commrt.comm import core_of
from commrt.errors import MismatchError, UsageError
from commrt.local import LocalRanks, run
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import operation

OPS = ("sum", "avg", "prod", "premul_sum")
TRANSPORTS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk": 1024},
    {"chunk": 8192, "store": "stream_both", "depth": 3, "reuse": 1},
)


def ways(comm: Any, coll: str, name: str, op: str) -> Iterator[dict[str, Any]]:
    """Name every algorithm that may run, with its parameters and some transports."""
    for each in comm.candidates(coll, 4096, dtype=name, op=op):
        for transport in TRANSPORTS:
            params = {**each.params, **transport}
            yield {"algorithm": each.algorithm, "params": params}


def call(comm: Any, coll: str, x: Any, op: str, **more: Any) -> Any:
    if op == "premul_sum":
        more["factor"] = 1 / 3
    if coll == "reduce":
        more["root"] = comm.size - 1
    return getattr(comm, coll)(x, op=op, **more)


def expected(comm: Any, coll: str, name: str, op: str, count: int) -> Any:
    """Return the sum from the left, or None where this rank gets nothing."""
    size, rank = comm.size, comm.rank
    if coll == "reduce" and rank != size - 1:
        return None
    contributors = operation(coll).contributors(rank, size)
    if not contributors:
        return None
    xs = [telling(name, other, count) for other in contributors]
    total = from_the_left(xs, op, 1 / size if op == "avg" else 1 / 3)
    if coll != "reduce_scatter":
        return total
    return total[rank * count // size : (rank + 1) * count // size]


def differences(comm: Any, coll: str, name: str, op: str) -> list[str]:
    wrong = []
    for count in (1, 7, 3000):
        length = count * comm.size if coll == "reduce_scatter" else count
        want = expected(comm, coll, name, op, length)
        mine = telling(name, comm.rank, length)
        for way in (*ways(comm, coll, name, op), {}):
            for in_place in (False, True):
                x = mine.copy()
                out = None if in_place or want is None else np.zeros_like(want)
                got = call(comm, coll, x, op, out=out, **way)
                if want is not None and not same_numbers(got, want):
                    wrong.append(f"{coll} {name} {op} {way} {count} {in_place}")
    return wrong


@pytest.mark.full(sample=40)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("coll", REDUCING)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_every_way_gives_the_bits_of_the_sum_from_the_left(
    size: int, coll: str, name: str, op: str
) -> None:
    if op == "avg" and operation(coll).combines_some:
        op = "sum"

    def rank_main(comm: Any) -> list[str]:
        with comm.dup(deterministic=True) as same:
            return differences(same, coll, name, op)

    wrong = run(size, rank_main, timeout_s=300)
    assert [line for lines in wrong for line in lines] == []


def test_without_it_algorithms_differ() -> None:
    """What the other tests compare would show another order."""

    def rank_main(comm: Any) -> set[bytes]:
        x = telling("float32", comm.rank, 3000)
        return {
            comm.allreduce(x.copy(), algorithm=name).tobytes()
            for name in ("direct", "ring", "recursive_doubling")
        }

    assert all(len(found) == 3 for found in run(4, rank_main, timeout_s=300))


def test_exact_operations_keep_all_their_algorithms() -> None:
    def rank_main(comm: Any) -> None:
        with comm.dup(deterministic=True) as same:
            assert (same.deterministic, comm.deterministic) == (True, False)
            for dtype, op in (
                ("int32", "sum"),
                ("float32", "max"),
                ("bfloat16", "min"),
                ("float64", "land"),
                ("uint8", "bxor"),
            ):
                usual, kept = (
                    c.candidates("allreduce", 4096, dtype=dtype, op=op)
                    for c in (comm, same)
                )
                assert kept == usual
            assert same.candidates("allgather", 64) == comm.candidates("allgather", 64)
            few = same.candidates("allreduce", 4096)
            assert 0 < len(few) < len(comm.candidates("allreduce", 4096))

    run(4, rank_main, timeout_s=300)


def test_what_would_combine_otherwise_is_refused_and_explained() -> None:
    def rank_main(comm: Any) -> str:
        with comm.dup(deterministic=True) as same:
            x = np.ones(8)
            with pytest.raises(
                UsageError, match=r"ring.* must not .*deterministic=True"
            ):
                same.allreduce(x, algorithm="ring")
            # A chain adds from the left, and rounds at every rank.
            assert same.scan(x, algorithm="chain")[0] == comm.rank + 1
            half = x.astype(np.float16)
            with pytest.raises(UsageError, match=r"one rounding.* was rounded"):
                same.scan(half, algorithm="chain")
            return str(same.explain("allreduce", 4096))

    text = run(4, rank_main, timeout_s=300)[0]
    assert "order=left" in text
    assert "not    local/ring: deterministic=True asks for one order: rank" in text


def test_it_is_inherited_and_may_be_said_anew() -> None:
    def rank_main(comm: Any) -> None:
        with comm.dup(deterministic=True) as same:
            made = [
                same.dup(),
                same.split(0),
                same.create_group(range(comm.size)),
                same.cart((0,)),
            ]
            assert [each.deterministic for each in made] == [True] * 4
            with same.mesh({"a": 0, "b": 1}) as mesh:
                assert mesh["a"].deterministic
            other = [
                same.dup(deterministic=False),
                same.split(0, deterministic=False),
                made[-1].dup(deterministic=False),
                comm.create_group(range(comm.size), deterministic=True),
            ]
            assert [each.deterministic for each in other] == [False] * 3 + [True]
            for each in (*made, *other):
                each.free()
        with pytest.raises(UsageError, match="deterministic=1 must be True or False"):
            comm.dup(deterministic=1)

    run(2, rank_main, timeout_s=300)


def test_ranks_must_agree_about_it() -> None:
    def rank_main(comm: Any) -> str:
        with pytest.raises(MismatchError) as raised:
            comm.dup(deterministic=comm.rank == 1)
        assert comm.allreduce(np.ones(3)).tolist() == [comm.size] * 3
        return str(raised.value)

    texts = run(3, rank_main, timeout_s=300)
    assert len({*texts}) == 1
    assert "rank 1 of the job: deterministic=True" in texts[0]


def test_a_users_reduction_meets_from_the_left() -> None:
    def rank_main(comm: Any) -> bool:
        with comm.dup(deterministic=True) as same:
            op = commrt.reduction(lambda a, b: a + b, commutative=True)
            want = expected(same, "allreduce", "float32", "sum", 3000)
            return all(
                same_numbers(
                    same.allreduce(telling("float32", comm.rank, 3000), op=op, **way),
                    want,
                )
                for way in ways(same, "allreduce", "float32", "sum")
            )

    assert run(5, rank_main, timeout_s=300) == [True] * 5


@pytest.mark.parametrize("thread", [False, True], ids=["callers", "progress thread"])
def test_nonblocking_beside_others_and_with_a_progress_thread(thread: bool) -> None:
    def rank_main(comm: Any) -> bool:
        with comm.dup(deterministic=True) as same:
            engine = core_of(comm).world.engine
            if thread:
                engine.start_thread()
            try:
                requests = [
                    (
                        name,
                        same.allreduce(
                            telling(name, comm.rank, 3000), op=op, nonblocking=True
                        ),
                        op,
                    )
                    for name in ("float32", "bfloat16", "float8_e5m2")
                    for op in ("sum", "avg")
                    for _ in range(5)
                ]
                random.Random(comm.rank).shuffle(requests)
                return all(
                    same_numbers(
                        request.wait(), expected(same, "allreduce", name, op, 3000)
                    )
                    for name, request, op in requests
                )
            finally:
                engine.stop_thread()

    assert run(3, rank_main, timeout_s=300) == [True] * 3


@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize("coll", REDUCING)
def test_any_order_of_progress(coll: str, name: str, seed: int) -> None:
    rng = random.Random(f"{coll} {name} {seed}")
    with LocalRanks(3) as ranks:
        comms = ranks.each(lambda comm: comm.dup(deterministic=True))
        for way in ways(comms[0], coll, name, "sum"):
            requests = [
                call(
                    comm,
                    coll,
                    telling(name, comm.rank, 999),
                    "sum",
                    nonblocking=True,
                    **way,
                )
                for comm in comms
            ]
            for _ in range(50_000):
                if all(request.done for request in requests):
                    break
                favourite = rng.randrange(3)
                for _ in range(rng.choice([1, 1, 2, 30])):
                    ranks.step(favourite)
            for comm, request in zip(comms, requests, strict=True):
                want = expected(comm, coll, name, "sum", 999)
                got = request.wait()
                assert want is None or same_numbers(got, want), way
        for comm in comms:
            comm.free()


def test_arrays_of_the_symmetric_heap_and_repetition() -> None:
    def rank_main(comm: Any) -> set[bool]:
        with comm.dup(deterministic=True) as same:
            right = set()
            for name in ("float32", "bfloat16"):
                dtype = telling(name, 0, 1).dtype
                x, out = same.empty(60_000, dtype), same.empty(60_000, dtype)
                for op in ("sum", "avg"):
                    want = expected(same, "allreduce", name, op, 60_000)
                    for _ in range(4):
                        x[:] = telling(name, comm.rank, 60_000)
                        right.add(same_numbers(same.allreduce(x, op=op, out=out), want))
                        right.add(same_numbers(same.allreduce(x, op=op), want))
            return right

    assert run(3, rank_main, timeout_s=300) == [{True}] * 3


@pytest.mark.parametrize(
    ("what", "coll"),
    [
        ("order", "reduce_scatter"),
        ("types", "allreduce"),
        ("counts", "gather"),
        ("algorithms", "allreduce"),
    ],
)
def test_its_price_can_be_measured(what: str, coll: str) -> None:
    pair = "local/ring beside local/direct"
    detail = pair if what == "algorithms" else "bfloat16"

    def rank_main(comm: Any) -> dict[str, Any]:
        return measure(comm, what, coll, detail, 4096, turns=2)

    rows = run(3, rank_main, timeout_s=300)
    assert rows[0] == rows[1] == rows[2]
    assert (rows[0]["op"], rows[0]["nbytes"]) == (coll, 4096)
    assert all(rows[0][name] > 0 for name in ("first_us", "second_us", "ratio"))
    said = str(rows[0]["detail"])
    assert said.startswith("local/") if what == "order" else said == detail


def test_the_reference_is_one_rounding_for_short_floats() -> None:
    assert dtype_by_name("bfloat16").is_short_float
    one, tiny = (np.full(1, v).astype(np.float16) for v in (1.0, 2.0**-11))
    total = from_the_left([one, tiny, tiny], "sum", 1)
    assert float(total[0]) == 1 + 2.0**-10
