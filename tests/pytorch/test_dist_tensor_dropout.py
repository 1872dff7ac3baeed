# SPDX-License-Identifier: Apache-2.0
"""Dropout of distributed tensors: one mask for any cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from dist_tensor_cases import drawn, leaf, off_by
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from commrt.errors import UsageError
from commrt.layers.agreed_seed import agreed_seed
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.dropout import dropout
from commrt.layers.tensors import DistTensor, Placement, Sharded, masks
from commrt.local import run

PLACEMENTS = [
    Placement("a", None, None, None),
    Placement(None, "a", "b", None),
    Placement(None, None, Sharded("b", sizes=(0, 5)), "a"),
    Placement(None, None, None, ("a", "b")),
    Placement(None, None, None, None),
]
MODULES = [
    (nn.Dropout(0.3), False),
    (nn.Dropout2d(0.4), True),
    (nn.Dropout(1.0), False),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("module", "whole_channels"), MODULES)
def test_a_mask_is_the_same_for_any_cut(
    placement: Placement,
    module: nn.Module,
    whole_channels: bool,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = drawn(random.Random(seed), (3, 7, 5, 6))
    monkeypatch.setattr(masks, "agreed_seed", lambda comm, **_: seed)
    one = whole.clone().requires_grad_()
    expected = dropout(
        *(one, module.p), seed=seed, cuts={}, whole_channels=whole_channels
    )
    expected.backward(whole)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 3, "b": 2}) as grid:
            x = leaf(whole, grid, placement)
            y = module(x)
            assert torch.equal(y.whole(), expected)
            y.backward(DistTensor.from_whole(whole, grid, placement))
            assert x.grad is not None
            assert torch.equal(x.grad.whole(), one.grad)

    run(6, main)


@pytest.mark.parametrize("only_first_draws", [True, False])
def test_all_ranks_get_the_number_that_the_first_one_draws(
    seed: int, only_first_draws: bool
) -> None:
    def main(comm: Any) -> list[int]:
        return [agreed_seed(comm, only_first_draws=only_first_draws) for _ in range(4)]

    torch.manual_seed(seed)
    first, *others = run(3, main)
    assert [first, first] == others
    assert len({*first}) == 4
    torch.manual_seed(seed)
    # Ranks that are threads share torch's generator.
    if only_first_draws:
        assert run(3, main)[2] == first
    else:
        alone = run(1, main)[0]
        torch.manual_seed(seed)
        with torch.device("meta"):  # which the host's generator does not heed
            assert alone == [agreed_seed(None) for _ in range(4)]


def test_a_checkpointed_dropout_drops_the_same_again(seed: int) -> None:
    whole = drawn(random.Random(seed), (2, 3, 8))
    drop = nn.Dropout(0.5)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            x = leaf(whole, grid, Placement(None, None, "a"))

            def square(local: Any) -> Any:
                part = DistTensor(local, x.shape, grid, x.placement)
                return drop(part).square().local

            # Ranks that are threads share torch's generator: only one restores it.
            y = checkpoint(
                *(square, x.local),
                use_reentrant=False,
                preserve_rng_state=grid.rank == 0,
            )
            kept = y.detach()
            y.sum().backward()
            # Of (2 x)^2 where it was kept: 8 x, and 0 elsewhere.
            right = torch.where(kept != 0, 8 * x.local.detach(), 0.0)
            assert off_by(x.local.grad, right) < 1e-14

    run(2, main)


def test_nothing_is_drawn_in_evaluation_or_on_one_rank(seed: int) -> None:
    whole = drawn(random.Random(seed), (2, 3, 8))

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 0}) as grid:
            x = DistTensor.from_whole(whole, grid, Placement(None, None, "a"))
            before = torch.get_rng_state()
            assert functional.dropout(x, 0.0).local is x.local
            assert nn.Dropout(0.5).eval()(x).local is x.local
            assert torch.equal(torch.get_rng_state(), before)
            if grid.num_ranks == 1:
                torch.manual_seed(seed)
                expected = functional.dropout(whole, 0.5)
                torch.manual_seed(seed)
                assert torch.equal(functional.dropout(x, 0.5).local, expected)

    run(1, main)
    run(2, main)


def test_dropout_refuses_what_it_cannot_see_whole() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            parts = DistTensor(torch.ones(4), (4,), grid, Placement(None, partial="a"))
            with pytest.raises(UsageError, match="parts on several ranks"):
                functional.dropout(parts, 0.5)
            dealt = Placement(Sharded("a", block=1))
            x = DistTensor.from_whole(torch.ones(4), grid, dealt)
            with pytest.raises(UsageError, match="one piece for each place"):
                functional.dropout(x, 0.5)

    run(2, main)
