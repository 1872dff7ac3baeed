# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts sends the bytes of its formula, and computes meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import Form, Split, axes_of, layer_of, splits_of
from tensor3d_cases import drawn_in

import commrt.trace
from commrt.layers.experts import MoE, trips
from commrt.layers.experts.mlp import MlpExperts
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

FORM = Form(num_experts=7, top_k=3, num_shared=1)
E = 8
"""Bytes of an element."""
Sent = Counter[tuple[str, str]]


def tokens_of(split: Split) -> list[Any]:
    """Return the tokens of each place along data and expert."""
    places = range(split[0] * split[1])
    return [drawn_in(place, 2 + place % 3, FORM.d_model) for place in places]


def step(comm: Any, form: Form, split: Split, losses: bool) -> tuple[Any, ...]:
    """Run a step between two barriers; return what this rank's tokens have chosen."""
    with ProcessGrid(comm, axes_of(split)) as grid:
        layer = layer_of(form, grid)
        layer.losses = losses
        place = grid.coords["data"] * split[1] + grid.coords["expert"]
        x = tokens_of(split)[place].requires_grad_()
        chosen = layer.router(x).experts
        comm.barrier()
        found = layer(x)
        loss = found.output.sum()
        if losses:
            loss = loss + found.balance_loss
        loss.backward()
        comm.barrier()
        return grid.coords, chosen


def axis_of(name: str) -> str:
    """Return the axes in a group's name."""
    return name.partition("[")[2].removesuffix("]")


def sent_between_barriers(log: Any) -> Sent:
    """Return the bytes of each operation by axis."""
    found: Sent = Counter()
    marks = 0
    for call in log.operations:
        if call.op == "barrier":
            marks += 1
        elif marks == 1 and call.nbytes:
            found[axis_of(call.group.name), call.op] += call.nbytes
    assert marks == 2
    return found


def places_of(form: Form, chosen: Any, ranks: int) -> list[set[tuple[int, int]]]:
    """Return the rows that tokens send to each rank, as (token, rank), one by one."""
    owner = [
        rank
        for rank in range(ranks)
        for _ in range(
            rank * form.num_experts // ranks, (rank + 1) * form.num_experts // ranks
        )
    ]
    rows: list[set[tuple[int, int]]] = [set() for _ in range(ranks)]
    for token, experts in enumerate(chosen.tolist()):
        for expert in experts:
            rows[owner[expert]].add((token, owner[expert]))
    return rows


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("losses", [True, False])
@pytest.mark.parametrize("split", splits_of(2, 3, 4, 6))
def test_a_mixture_of_experts_sends_the_bytes_of_its_formula(
    split: Split, losses: bool
) -> None:
    data, p, tensor = split
    with commrt.trace.record() as recording:
        ranks = run(data * p * tensor, lambda comm: step(comm, FORM, split, losses))
    most = -(-FORM.num_experts // p)
    chosen_by = {tuple(coords.values()): chosen for coords, chosen in ranks}
    for log, (coords, chosen) in zip(recording.logs(), ranks, strict=True):
        num_tokens, k = chosen.shape
        leaving = places_of(FORM, chosen, p)
        coming, came = 0, 0
        for source in range(p):
            at = coords["data"], source, coords["tensor"]
            rows = places_of(FORM, chosen_by[at], p)
            coming += len(rows[coords["expert"]])
            low, high = (
                (coords["expert"] + more) * FORM.num_experts // p for more in (0, 1)
            )
            of_source = chosen_by[at]
            came += int(((of_source >= low) & (of_source < high)).sum())
        r, c = sum(map(len, leaving)), num_tokens * k
        assert r <= num_tokens * min(k, p)
        d = FORM.d_model * E
        right: Sent = Counter()
        if p > 1:
            right["expert", "alltoall"] = 8 * p * (1 + most)
            forward = 4 * c + c * E + r * d + coming * d
            backward = r * d + coming * d + came * E
            right["expert", "alltoallv"] = forward + backward
        if tensor > 1:
            right["tensor", "allreduce"] = 2 * num_tokens * d + num_tokens * k * E
        if losses and data * p > 1:
            axes = [a for a, n in (("data", data), ("expert", p)) if n > 1]
            over = ",".join(axes)
            right[over, "allgather"] += 8 * FORM.num_experts * data * p
            right[over, "allreduce"] += 2 * (FORM.num_experts + 1) * E
        assert sent_between_barriers(log) == right


def test_one_rank_sends_nothing() -> None:
    with commrt.trace.record() as recording:
        run(1, lambda comm: step(comm, FORM, (1, 1, 1), True))
    assert sent_between_barriers(recording.logs()[0]) == Counter()


def test_a_token_travels_once_to_a_rank_with_several_of_its_experts() -> None:
    """All experts lie on two ranks: each token sends two rows, not seven."""
    form = replace(FORM, top_k=7, num_shared=0)
    with commrt.trace.record() as recording:
        ranks = run(2, lambda comm: step(comm, form, (1, 2, 1), False))
    for log, (_, chosen) in zip(recording.logs(), ranks, strict=True):
        rows = [
            call.nbytes
            for call in log.operations
            if call.op == "alltoallv" and call.dtype == "float64"
        ]
        # A choice's weight, then a token's rows.
        assert sorted(rows[:2]) == sorted(
            [len(chosen) * 7 * E, len(chosen) * 2 * form.d_model * E]
        )


def test_shared_experts_compute_while_tokens_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward between start and end of the dispatch, and backward likewise."""
    events: dict[int, list[str]] = {0: [], 1: []}
    starts, waits, forward = trips.Trip.start, trips.Trip.wait, MlpExperts.forward

    def start(self: trips.Trip, rows: Any, *, back: bool = False) -> Any:
        if rows.dim() == 2:  # tokens, not their weights
            events[self.comm.rank].append("start")
        return starts(self, rows, back=back)

    def wait(self: trips.Trip) -> Any:
        found = waits(self)
        if found.dim() == 2:
            events[self.comm.rank].append("wait")
        return found

    def computed(self: MlpExperts, x: Any, counts: Any) -> Any:
        rank = self.grid.rank
        kind = "shared" if self.num_experts == FORM.num_shared else "experts"
        events[rank].append(kind)
        y = forward(self, x, counts)
        y.register_hook(lambda _: events[rank].append(f"{kind} backward"))
        return y

    monkeypatch.setattr(trips.Trip, "start", start)
    monkeypatch.setattr(trips.Trip, "wait", wait)
    monkeypatch.setattr(MlpExperts, "forward", computed)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer: MoE = layer_of(FORM, grid)
            x = drawn_in(comm.rank, 4, FORM.d_model).requires_grad_()
            layer(x).output.sum().backward()

    run(2, main)
    there = ["start", "shared", "wait", "experts", "start", "wait"]
    back = ["start", "wait", "experts backward", "start", "shared backward", "wait"]
    assert events == {0: there + back, 1: there + back}
    assert torch.is_grad_enabled()
