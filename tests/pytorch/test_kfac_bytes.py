# SPDX-License-Identifier: Apache-2.0
"""A step of K-FAC sends the bytes of its formulas, and sums while gradients come."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from kfac_cases import MODELS, loss_of, model_of, own_part
from recorded import logs_of
from science_cases import sent_between_barriers

import commrt.trace
from commrt.layers.kfac import KFAC
from commrt.layers.kfac.factor_sums import FactorSums
from commrt.local import run

E = 8
"""Bytes of an element."""
MEETING = 8 * 8
"""Bytes of each rank that check a step."""


def elements(side: int) -> int:
    return side * (side + 1) // 2


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("gradients", ["local", "synchronised"])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize(
    ("ranks", "workers"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (8, 4)]
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_of_kfac_sends_the_bytes_of_its_formula(
    kind: str, ranks: int, workers: int, step: int, gradients: str
) -> None:
    """Step 0 sums factors and inverts them, step 1 does neither, step 2 sums."""

    def main(comm: Any) -> Any:
        model = model_of(kind)
        with KFAC(
            *(model, comm),
            factor_every=2,
            inverse_every=3,
            gradient_workers=workers,
            gradients=gradients,
        ) as optimizer:
            for number in range(step + 1):
                x, y, _ = own_part(kind, ranks, comm.rank, number)
                optimizer.zero_grad()
                if number == step:
                    comm.barrier()
                if len(x):
                    loss_of(model(x), y, "mean", 1).backward()
                if gradients == "synchronised":  # as somebody else would leave them
                    for each in model.parameters():
                        each.grad = torch.full_like(each, 0.1)
                optimizer.step()
                if number == step:
                    comm.barrier()
            return optimizer.placement, sum(p.numel() for p in model.parameters())

    with commrt.trace.record() as recording:
        found = run(ranks, main)
    for rank, log in enumerate(logs_of(recording)):
        placement, numbers = found[rank]
        sides = placement.sides
        right: Counter[str] = Counter()
        if ranks > 1:
            right["allgather"] = (MEETING + 8) * ranks
            if step == 0:
                right["allgather"] += 8 * ranks
            if step != 1:
                triangles = sum(elements(a) + elements(g) + 1 for a, g in sides)
                right["allreduce"] += triangles * E
            if gradients == "local":
                parameters = len([*model_of(kind).parameters()])
                right["allreduce"] += numbers * E + parameters
        group = rank // workers
        mine = [
            each
            for each, owners in zip(sides, placement.owners, strict=True)
            if owners.inputs // workers == group
        ]
        if workers > 1 and step == 0:
            right["bcast"] += sum(elements(a) + elements(g) for a, g in mine) * E
        if workers < ranks:
            right["bcast"] += sum(a * g for a, g in sides) * E
        assert placement.factor_elements() == sum(
            elements(a) + elements(g) for a, g in sides
        )
        assert right["bcast"] == E * (
            placement.gradient_elements()
            + placement.broadcast_inverse_elements(rank) * (step == 0)
        )
        if ranks > 1 and step == 0 and gradients == "local":
            # The reducer's order of parameters.
            right["bcast"] += 8 * len([*model_of(kind).parameters()])
        assert sent_between_barriers(log) == +right


def test_sums_of_factors_start_before_the_backward_pass_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer's has started when the first layer's gradient comes."""
    events: dict[int, list[str]] = {0: [], 1: []}
    advance = FactorSums.advance

    def noted(self: FactorSums, factor: float, *, are_all: bool = False) -> bool:
        before = len(self._started)
        found = advance(self, factor, are_all=are_all)
        new = len(self._started) - before
        events[self._comm.rank] += ["start"] * new
        return found

    monkeypatch.setattr(FactorSums, "advance", noted)

    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as optimizer:
            first: Any = model.first
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            optimizer.zero_grad()
            first.weight.register_hook(lambda _: events[comm.rank].append("first"))
            loss_of(model(x), y, "mean", 1).backward()
            events[comm.rank].append("end")
            optimizer.step()

    run(2, main)
    for found in events.values():
        assert found.index("start") < found.index("first") < found.index("end")
        assert found.count("start") == 2


def test_a_rank_holds_the_bytes_of_its_formula() -> None:
    def main(comm: Any) -> Any:
        model = model_of("convolutions")
        with KFAC(model, comm, gradient_workers=2, inverse_every=2) as optimizer:
            held = []
            for step in range(2):
                x, y, _ = own_part("convolutions", 4, comm.rank, step)
                optimizer.zero_grad()
                if len(x):
                    loss_of(model(x), y, "mean", 1).backward()
                optimizer.step()
                held.append(optimizer.memory())
            return optimizer.placement, held

    for rank, (placement, (first, second)) in enumerate(run(4, main)):
        factors = placement.factor_elements() * E
        inverses = placement.inverse_elements(rank) * E
        assert first == (factors, 0, inverses)
        assert second == (factors, factors, inverses)
