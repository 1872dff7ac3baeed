# SPDX-License-Identifier: Apache-2.0
"""What the model expects between nodes that gloo connects, by what was measured."""

from __future__ import annotations

import math

import pytest

from commrt.backends.gloo.collectives import NATIVE, why_not
from commrt.backends.gloo.prediction import (
    NATIVE_GLOO,
    native_constants,
    predicted_us,
)
from commrt.backends.relayed import message_constants, relayed_us
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import BetweenNodes
from commrt.vocabulary.operations import COLLECTIVES

PAIR = CommFacts(2, 2, 1, 1, "network")
TWO_BY_TWO = CommFacts(4, 2, 2, 2, "network")
QUIET = BetweenNodes(alpha_us=50.0, beta_us=1e-3, native_us=40.0)
DIRECT = Candidate("gloo", "direct")


def floor_us(facts: CommFacts, asked: Query, between: BetweenNodes | None) -> float:
    """Return what gloo's own collective takes at least."""
    return predicted_us(facts, asked, NATIVE, between, only_floor=True)


def query(coll: str, nbytes: int) -> Query:
    """Return a question about float32."""
    reduces = coll in ("allreduce", "reduce", "reduce_scatter")
    has_root = coll in ("bcast", "reduce", "gather", "scatter")
    op, root = "sum" if reduces else None, 0 if has_root else None
    return Query(coll, nbytes, op=op, root=root)


@pytest.mark.parametrize("coll", ["allreduce", "alltoall", "bcast"])
def test_short_vectors_by_schedules_and_long_ones_by_gloo(coll: str) -> None:
    names = {"allreduce": "recursive_doubling", "alltoall": "direct"}
    schedule = Candidate("gloo", names.get(coll, "binomial"))
    for nbytes, sign in ((64, -1), (64 << 20, 1)):
        asked = query(coll, nbytes)
        by_schedule = predicted_us(PAIR, asked, schedule, QUIET)
        by_gloo = predicted_us(PAIR, asked, NATIVE, QUIET)
        assert sign * (by_schedule - by_gloo) > 0, (nbytes, by_schedule, by_gloo)


@pytest.mark.parametrize("coll", ["allgather", "reduce_scatter"])
def test_what_torch_copies_once_more_stays_with_schedules(coll: str) -> None:
    asked = query(coll, 16 << 20)
    by_gloo = predicted_us(PAIR, asked, NATIVE, QUIET)
    assert predicted_us(PAIR, asked, DIRECT, QUIET) < by_gloo


@pytest.mark.parametrize("coll", sorted(NATIVE_GLOO))
@pytest.mark.parametrize("facts", [PAIR, TWO_BY_TWO])
@pytest.mark.parametrize("between", [QUIET, None])
def test_no_floor_is_above_its_cost(
    coll: str, facts: CommFacts, between: BetweenNodes | None
) -> None:
    for nbytes in (0, 4096, 1 << 22):
        asked = query(coll, nbytes)
        cost = predicted_us(facts, asked, NATIVE, between)
        assert 0 < floor_us(facts, asked, between) <= cost * (1 + 1e-9)


def test_cost_follows_what_was_measured() -> None:
    slow = BetweenNodes(alpha_us=500.0, beta_us=1e-2, native_us=400.0)
    for candidate in (NATIVE, DIRECT):
        for nbytes in (8, 1 << 20):
            asked = query("alltoall", nbytes)
            one = predicted_us(PAIR, asked, candidate, QUIET)
            assert predicted_us(PAIR, asked, candidate, slow) > 5 * one


def test_ranks_that_share_cores_copy_at_a_higher_price() -> None:
    apart = message_constants(QUIET)
    shared = message_constants(QUIET, crowd=2.0)
    assert QUIET.beta_us < apart.beta_us < shared.beta_us
    assert native_constants(QUIET).beta_us == QUIET.beta_us


def test_schedules_cost_the_same_whoever_carries_them() -> None:
    """A relay that copies costs more, and the backend's name says nothing."""
    own = BetweenNodes(QUIET.alpha_us, QUIET.beta_us, 0.0, is_staged=False)
    asked = query("allreduce", 1 << 20)
    by_tcp = Candidate("tcp", "direct")
    assert relayed_us(PAIR, asked, by_tcp, QUIET) == predicted_us(
        PAIR, asked, DIRECT, QUIET
    )
    assert relayed_us(PAIR, asked, by_tcp, own) < relayed_us(PAIR, asked, by_tcp, QUIET)


def test_what_the_ranks_cannot_compare_is_never_gloos_unasked() -> None:
    assert predicted_us(PAIR, query("alltoallv", 0), NATIVE, QUIET) == math.inf
    direct = predicted_us(PAIR, query("alltoallv", 0), DIRECT, QUIET)
    same = predicted_us(PAIR, query("alltoallv", 1 << 30), DIRECT, QUIET)
    assert direct == same > QUIET.alpha_us


def test_comparing_is_a_part_of_the_cost() -> None:
    by_gloo = predicted_us(PAIR, query("bcast", 64), NATIVE, QUIET)
    assert by_gloo > 2 * QUIET.native_us + QUIET.alpha_us


@pytest.mark.parametrize(
    ("coll", "dtype", "op", "why"),
    [
        ("allreduce", "float32", "sum", None),
        ("allreduce", "float64", "avg", None),
        ("allreduce", "complex64", "sum", None),
        ("allreduce", "uint32", "sum", None),
        ("reduce_scatter", "int64", "bxor", None),
        ("allgather", "bfloat16", None, None),
        ("allreduce", "uint32", "max", "another one"),
        ("allreduce", "complex64", "prod", "another one"),
        ("allreduce", "int32", "avg", "another one"),
        ("allreduce", "float32", "min", "another one"),
        ("allreduce", "float32", "premul_sum", "another one"),
        ("allreduce", "float16", "sum", "rounded at every step"),
        ("reduce", "int8", "sum", "adds no int8"),
        ("reduce", "bool", "lor", "adds no bool"),
        ("reduce", "float32", "mine", "no reduction of yours"),
    ],
)
def test_what_keeps_the_rules(
    coll: str, dtype: str, op: str | None, why: str | None
) -> None:
    said = why_not(Query(coll, 4096, dtype=dtype, op=op))
    assert said == why if why is None else why in str(said)


def test_what_gloo_has_not() -> None:
    missing = {c for c in COLLECTIVES if "gloo has no" in (why_not(query(c, 8)) or "")}
    assert missing == {*COLLECTIVES} - {*NATIVE_GLOO, "alltoallv"}
    ordered = Query("allreduce", 64, op="sum", order="left")
    assert "any order" in str(why_not(ordered))
    assert "nothing to move" in str(why_not(query("bcast", 0)))
    assert why_not(query("barrier", 0)) is None
