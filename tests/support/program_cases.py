# SPDX-License-Identifier: Apache-2.0
"""The cases of ``cases`` for programs of streams: their specs, and whole runs."""

from __future__ import annotations

import random

from cases import COUNTS, Attempt, Case, legal_pairs
from cases import inputs as case_inputs

from commrt import algorithms
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation

__all__ = ["draw", "spec_of"]


def spec_of(case: Case, attempt: Attempt) -> PlanSpec:
    """Return what a rank plans for its part of a case."""
    spec = operation(case.coll)
    xs = case_inputs(case)
    counts: tuple[tuple[int, ...], ...] = ()
    if case.coll == "alltoallv":
        pairs = case.pairs()
        counts = tuple(pairs[attempt.rank]), tuple(row[attempt.rank] for row in pairs)
    elif spec.count_arguments:
        counts = (tuple(case.counts()),)
    whole = {
        "times_size": sum(x.size for x in xs),
        "div_size": xs[case.root].size,
    }.get(spec.out_count, attempt.x.size)
    root_only = spec.has_root and spec.output_on == "all"
    has_x = spec.x_count != "none" and (not root_only or attempt.rank == case.root)
    has_out = attempt.want is not None
    reduction = ReduceOp[case.op.upper()] if spec.reduces else ReduceOp.SUM
    premul = spec.reduces and case.op == "premul_sum"
    return PlanSpec(
        op=spec,
        num_elements=0 if spec.x_count == "none" else whole,
        dtype=dtype_by_name(case.dtype),
        reduction=reduction,
        root=case.root,
        candidate=Candidate("nccl", str(case.algorithm), case.params),
        in_elements=attempt.x.size if has_x else 0,
        out_elements=attempt.want.size if attempt.want is not None else 0,
        has_output=has_out,
        counts=counts,
        factor=case.factor(attempt.rank) if premul else None,
    )


def draw(
    coll: str, size: int, rng: random.Random, without: tuple[str, ...] = ()
) -> Case:
    """Return a case of any algorithm, type, reduction, length, root and form."""
    names = [n for n in algorithms.names(coll, size) if n not in without]
    name = rng.choice(names)
    params: dict[str, int | str] = {
        key: rng.choice(values)
        for key, values in algorithms.param_choices(coll, name, size).items()
    }
    if rng.random() < 0.5:
        params["chunk"] = rng.choice([64, 256, 4096])
    spec = operation(coll)
    dtype, op = rng.choice(legal_pairs(coll))
    spreads = ("even", "ragged", "one") if spec.count_arguments else ("even",)
    return Case(
        coll=coll,
        size=size,
        algorithm=name,
        params=params,
        dtype=dtype,
        op=op if spec.reduces else "sum",
        root=rng.randrange(size) if spec.has_root else 0,
        count=rng.choice(COUNTS),
        # NCCL's form of in place, one a block of the other, is not a schedule's.
        in_place=spec.in_place and rng.random() < 0.5,
        spread=rng.choice(spreads),
    )
