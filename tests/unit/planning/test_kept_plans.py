# SPDX-License-Identifier: Apache-2.0
"""Plans that Python keeps: the last used ones, within a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from commrt.planning.kept_plans import KeptPlans


@dataclass
class Group:
    plans_limit_nbytes: int


@dataclass(frozen=True)
class OfLength:
    nbytes: int


@given(st.integers(0, 20_000), st.lists(st.integers(0, 12), max_size=60))
def test_the_last_used_stay_within_the_limit(limit: int, calls: list[int]) -> None:
    kept: KeptPlans[OfLength] = KeptPlans(Group(limit))
    used: list[int] = []
    for call in calls:
        if kept.find(call) is None:
            kept.keep(call, OfLength(300 * call))
        used = [*(each for each in used if each != call), call]
        assert kept.find(call) == OfLength(300 * call)
        assert kept.nbytes <= limit or len(kept) == 1
        assert kept.nbytes >= sum(300 * each for each in used[-len(kept) :])
    found = [each for each in used if kept.find(each) is not None]
    assert found == used[len(used) - len(kept) :]
    kept.forget()
    assert (len(kept), kept.nbytes) == (0, 0)


def test_long_keys_and_plans_that_do_not_tell_count_too() -> None:
    kept: KeptPlans[object] = KeptPlans(Group(1 << 20))
    for number in range(4000):
        kept.keep((number, *range(1000, 1020)), object())
    assert kept.nbytes <= 1 << 20
    assert 100 < len(kept) < 256
    assert kept.find((3999, *range(1000, 1020))) is not None
    assert kept.find((0, *range(1000, 1020))) is None
