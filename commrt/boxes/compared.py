# SPDX-License-Identifier: Apache-2.0
"""Plans of calls that move boxes, kept where the caller has none at hand.

For arrays on the host, the ranks agree that their arguments fit
(``group/agreed_calls.py``), and each plans by itself.

Calls on device arrays block no host. A rank's own arguments decide which boxes leave,
which come and which kernels run. The arguments of others have to fit, and the ranks
compare that on the way: a word for each fact travels with the call (``StagedAgreement``
in ``native/staging/staged_plan.hpp``), and no message leaves before all ranks are known
to agree. So a rank with new arguments plans alone, beside ranks that have a plan.

The ranks compare the first call of an operation in full before they give anything to a
device, which names the ranks that differ. NCCL waits for no host, so the ranks compare
nothing after the first call by NCCL. In check mode they compare each call before they
give anything to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from commrt import _native
from commrt.boxes.device_plans import DeviceBoxes
from commrt.calls import arguments
from commrt.group.agreed_calls import AgreedCalls, Sums
from commrt.planning.kept_plans import KeptPlans
from commrt.vocabulary.operations import operation

__all__ = ["ComparedBoxes", "Facts", "Planner"]

Facts = Mapping[str, Any]
"""Facts that ranks must agree on, by name. A value is None if this rank does not know
it. All ranks have the same names in the same order."""


class Planner(Sums, Protocol):
    """A communicator that plans calls of its own, without the other ranks."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def plans_limit_nbytes(self) -> int:
        """Most bytes of plans that it keeps."""
        ...

    @property
    def checker(self) -> Any:
        """Compares calls in check mode; else None."""
        ...

    def plan_alone(self, call: arguments.Call, bound: arguments.Bound) -> Any:
        """Return the plan of a call by a schedule, which this rank makes alone."""
        ...


class ComparedBoxes:
    """The plans of one communicator's calls that move boxes."""

    def __init__(self, ranks: Planner) -> None:
        self._ranks = ranks
        self.agreed = AgreedCalls(ranks)
        """Asks all ranks whether their calls fit."""
        self.kept: KeptPlans[DeviceBoxes] = KeptPlans(ranks)
        """Plans of device arrays, by the operation and this rank's arguments."""
        self._maxima: dict[int, _native.Plan] = {}
        """Plans of maxima, by the number of words."""
        self._compared: set[str] = set()
        """Operations on device arrays of which the ranks have compared a call."""

    def on_device(
        self,
        what: str,
        mine: tuple[Any, ...],
        facts: Callable[[], Facts],
        *,
        compare: Callable[[], None],
        make: Callable[[], DeviceBoxes],
    ) -> tuple[DeviceBoxes, bool]:
        """Return the plan of a call, and whether the call itself has to compare.

        Args:
            what: the operation.
            mine: all that this rank's plan depends on.
            facts: returns what is to fit.
            compare: raises an error on all ranks unless their calls fit; collective.
            make: plans, without the other ranks.
        """
        checks = self._ranks.checker is not None  # which names all ranks' arguments
        # Equal on all ranks, as they make the same calls.
        is_first = what not in self._compared
        if checks or is_first:
            compare()
        key = what, repr(mine)
        found = self.kept.find(key)
        if found is None:
            found = make()
            self._compared.add(what)
            if not checks:
                found.agree_on(*self.agreement({"the operation": what, **facts()}))
            self.kept.keep(key, found)
        return found, not (checks or is_first)

    def agreement(self, facts: Facts) -> tuple[_native.Plan, list[int], list[str]]:
        """Return what the host runs, the words, and what they stand for."""
        words = [_word(fact) for fact in facts.values()]
        length = 2 * len(words)
        if length not in self._maxima:
            self._maxima[length] = self._maximum(length)
        return self._maxima[length], words, list(facts)

    def _maximum(self, length: int) -> _native.Plan:
        """Return the plan of a maximum of so many words, by a schedule.

        Ranks make it at different calls, so nothing that they would make together.
        """
        x = np.zeros(length, np.uint64)
        call = arguments.parse(operation("allreduce"), (x,), {"op": "max"})
        bound = arguments.bind(call, self._ranks.rank, self._ranks.size)
        plan: _native.Plan = self._ranks.plan_alone(call, bound)
        return plan


def _word(fact: Any) -> int:
    if fact is None:
        return 0
    digest = blake2b(repr(fact).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
