# SPDX-License-Identifier: Apache-2.0
"""Plans of out-of-core training are the best ones, and fit their budgets."""

from __future__ import annotations

import itertools
import random

import pytest

from commrt.errors import UsageError
from commrt.layers.out_of_core import BlockCost, Link, plan
from commrt.layers.out_of_core.costs import MODES
from commrt.layers.out_of_core.timeline import (
    least_step_s,
    prefetch_begins,
    simulate,
)

EVEN = Link(10.0, 10.0)


def drawn(seed: int, count: int) -> tuple[list[BlockCost], Link]:
    """Return random blocks and a random link."""
    draws = random.Random(seed)
    costs = []
    for number in range(count):
        saved, output = draws.randint(0, 40), draws.choice((0, draws.randint(1, 9)))
        resident = 0 if number == 0 else draws.randint(0, 9)
        costs.append(
            BlockCost(
                draws.uniform(0.1, 3),
                draws.uniform(0.1, 5),
                saved,
                output,
                resident,
                num_transfers=draws.randint(1, 3),
                can_recompute=draws.random() > 0.1,
            )
        )
    link = Link(draws.uniform(3, 40), draws.uniform(3, 40), draws.uniform(0, 0.3))
    return costs, link


def least_budget(costs: list[BlockCost]) -> int:
    """Return a budget under which every block can be swapped."""
    return max(cost.saved_nbytes + cost.output_nbytes for cost in costs)


@pytest.mark.full(sample=15)
@pytest.mark.parametrize("seed", range(120))
def test_plans_are_the_best_of_all_choices(seed: int) -> None:
    costs, link = drawn(seed, 1 + seed % 6)
    budget = least_budget(costs) + random.Random(seed).randint(0, 60)
    times = [
        found.step_s
        for modes in itertools.product(MODES, repeat=len(costs))
        if (found := simulate(costs, modes, budget, link)) is not None
        and all(
            cost.can_recompute or mode != "recompute"
            for cost, mode in zip(costs, modes, strict=True)
        )
    ]
    chosen = plan(costs, budget, link)
    assert chosen.step_s == pytest.approx(min(times), rel=1e-12)
    assert chosen.step_s >= chosen.in_core_s * (1 - 1e-12)


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("seed", range(40))
def test_more_budget_is_never_slower(seed: int) -> None:
    costs, link = drawn(seed, 5)
    budgets = range(least_budget(costs), least_budget(costs) + 150, 7)
    times = [plan(costs, budget, link).step_s for budget in budgets]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(times))


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("count", [4, 12, 20])
def test_plans_are_no_slower_than_pure_ones(count: int, seed: int) -> None:
    costs, link = drawn(seed, count)
    budget = least_budget(costs) + 10 * random.Random(seed).randint(0, count)
    chosen = plan(costs, budget, link)
    assert chosen.peak_nbytes <= budget
    pure = [simulate(costs, [mode] * count, budget, link) for mode in MODES]
    for mode, each in zip(MODES, pure, strict=True):
        may = mode != "recompute" or all(cost.can_recompute for cost in costs)
        assert each is None or not may or chosen.step_s <= each.step_s


@pytest.mark.full(sample=5)
@pytest.mark.parametrize("seed", range(25))
def test_a_search_comes_near_the_best_choice(seed: int) -> None:
    """Thirteen blocks, of which five take no time and save nothing: eight matter."""
    costs, link = drawn(seed, 8)
    budget = least_budget(costs) + 40
    idle = BlockCost(0.0, 0.0, 0, num_transfers=0, can_recompute=False)
    best = plan(costs, budget, link).step_s
    found = plan([*costs, *[idle] * 5], budget, link).step_s
    assert best - 1e-9 <= found <= 1.1 * best


def test_a_timeline_by_hand() -> None:
    """Two blocks of 10 bytes in a budget of 20; a transfer takes a second."""
    costs = [BlockCost(2.0, 3.0, 10), BlockCost(2.0, 3.0, 10)]
    swapped = plan(costs, 20, EVEN, policy=("swap", "keep"))
    # 2 + 2 forward; block 0 has left at 3. Block 1's backward pass is from 4 to 7, and
    # block 0 comes back from 4 to 5.
    assert (swapped.step_s, swapped.stall_s) == (10.0, 0.0)
    assert swapped.prefetch == (1, None)
    assert swapped.peak_nbytes == 20
    tight = plan(costs, 10, EVEN, policy="swap")
    # Block 1 waits until block 0 has left, from 2 to 3, and computes until 5. It stays,
    # as it is asked for while it leaves: at 6. Its pass ends at 9, block 0 is back at
    # 10, and its pass ends at 13.
    assert (tight.step_s, tight.stall_s) == (13.0, 3.0)
    assert tight.prefetch == (0, 1)
    both = plan(costs, 20, EVEN, policy="recompute")
    assert (both.step_s, both.recompute_s) == (14.0, 4.0)


def test_a_block_is_recomputed_where_its_transfer_would_stall() -> None:
    quick = [BlockCost(1.0, 2.0, 10, resident_nbytes=1) for _ in range(6)]
    slow = plan(quick, 24, Link(2.0, 2.0))
    assert {"keep", "recompute"} <= {*slow.modes}
    fast = plan(quick, 24, Link(1e3, 1e3))
    assert "recompute" not in fast.modes
    assert fast.modes[0] == "swap"
    assert fast.modes[-1] == "keep"


def test_all_is_kept_where_all_fits() -> None:
    costs, link = drawn(3, 6)
    found = plan(costs, 10**6, link)
    assert found.modes == ("keep",) * 6
    assert found.step_s == pytest.approx(found.in_core_s)
    assert found.peak_nbytes == found.in_core_nbytes


def test_blocks_are_asked_for_in_order_and_where_they_fit() -> None:
    costs = [BlockCost(1.0, 1.0, size) for size in (4, 9, 4, 9, 4)]
    assert prefetch_begins(costs, ["swap"] * 5, 13) == [1, 2, 3, 4, 4]
    assert prefetch_begins(costs, ["swap"] * 5, 100) == [4] * 5
    assert prefetch_begins(costs, ["swap"] * 5, 9) == [0, 1, 2, 3, 4]
    assert prefetch_begins(costs, ["swap"] * 5, 8) is None
    modes = ["swap", "recompute", "swap", "keep", "keep"]
    assert prefetch_begins(costs, modes, 17) == [3, None, 4, None, None]


def test_plans_say_what_they_do() -> None:
    text = str(plan([BlockCost(1.0, 2.0, 3_000_000)], 4_000_000, EVEN))
    assert "0  keep           3.000" in text
    assert "3.000 of 4.000 MB near" in text


@pytest.mark.parametrize(
    ("budget", "policy", "message"),
    [
        (9, "auto", "budget_bytes=9 is less than block 1 needs alone, 10 bytes"),
        (12, "keep", "budget_bytes=12 is too small for modes keep, keep"),
        (12, "both", "policy='both'"),
        (12, ("keep",), "a mode for each of 2 blocks"),
        (12, ("keep", "stay"), "a mode for each of 2 blocks"),
        (50, ("keep", "recompute"), "block 1 cannot be recomputed"),
        (-1, "auto", "budget_bytes=-1"),
        (True, "auto", "budget_bytes=True"),
    ],
)
def test_plans_that_cannot_be(budget: int, policy: str, message: str) -> None:
    costs = [BlockCost(1, 1, 5), BlockCost(1, 1, 10, can_recompute=False)]
    with pytest.raises(UsageError) as caught:
        plan(costs, budget, EVEN, policy=policy)
    assert message in str(caught.value)


def test_costs_and_links_that_are_none() -> None:
    with pytest.raises(UsageError, match="no blocks"):
        plan([], 1, EVEN)
    with pytest.raises(UsageError, match="block 0"):
        plan([BlockCost(-1.0, 1.0, 1)], 1, EVEN)
    with pytest.raises(UsageError, match="in_bytes_per_s=0"):
        Link(1.0, 0.0)
    with pytest.raises(UsageError, match="latency_s=-1"):
        Link(1.0, 1.0, -1.0)


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_many_blocks_are_the_best_of_all_choices(seed: int) -> None:
    """Some blocks are alike, so many choices take the same time."""
    costs, link = drawn(seed, 8)
    costs[seed:6] = [costs[seed]] * (6 - seed)
    budget = least_budget(costs) + 15 * seed
    times = [
        found.step_s
        for modes in itertools.product(MODES, repeat=8)
        if (found := simulate(costs, modes, budget, link)) is not None
        and all(
            cost.can_recompute or mode != "recompute"
            for cost, mode in zip(costs, modes, strict=True)
        )
    ]
    assert plan(costs, budget, link).step_s == pytest.approx(min(times), rel=1e-11)


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("seed", range(60))
def test_no_step_is_shorter_than_its_first_blocks_allow(seed: int) -> None:
    costs, link = drawn(seed, 6)
    draws = random.Random(seed)
    found = 0
    for _ in range(50):
        budget = least_budget(costs) + draws.randint(0, 120)
        modes = [draws.choice(MODES) for _ in costs]
        whole = simulate(costs, modes, budget, link)
        for begun in range(7):
            least_s = least_step_s(costs, modes[:begun], budget, link)
            if whole is not None:
                assert least_s is not None
                assert least_s <= whole.step_s * (1 + 1e-12)
                found += 1
    assert found


def test_of_equally_quick_plans_the_one_that_moves_less_is_chosen() -> None:
    costs = [BlockCost(1.0, 1.0, size) for size in (8, 3, 5, 2)]
    found = plan(costs, 16, Link(1e6, 1e6))
    assert found.modes == ("keep", "swap", "keep", "keep")
    idle = plan([BlockCost(1.0, 1.0, 0), *costs], 16, Link(1e6, 1e6))
    assert idle.modes == ("keep", "keep", "swap", "keep", "keep")
