# SPDX-License-Identifier: Apache-2.0
"""Deaths of ranks that have come to ``init`` and have not yet met all others there.

Each says in the store in which process it is. Who waits for others there asks the
kernel for those of its machine, and leaves word of what it sees for ranks elsewhere.
Of ranks that have ended before they came the launcher says so, where it is commrt.run.
Afterwards the ranks watch each other (liveness.py), and nobody looks into the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from commrt.bootstrap.store import StoreBootstrap
from commrt.job.liveness import findable, why_ended

__all__ = ["Arrivals"]

_PERIOD_S = 0.05
"""Time between two looks."""
_MOST_PART = 1 / 20
"""Part of the time that looks may take: with many ranks they are seldom."""


class Arrivals:
    """Which ranks have come and have ended, as far as ranks of this job see."""

    def __init__(self, bootstrap: StoreBootstrap) -> None:
        """Say that this rank has come; local."""
        self._bootstrap = bootstrap
        self._mine = findable()
        self._found: dict[int, dict[str, Any]] = {}
        self._whys: dict[int, str] = {}
        self._next_look_s = 0.0
        bootstrap.post(f"came/{bootstrap.rank}", json.dumps(self._mine).encode())

    def gone(self, rank: int) -> str:
        """Return why a rank comes no more; empty where its process runs, or may."""
        begun_s = time.monotonic()
        if begun_s >= self._next_look_s:
            self._look()
            ended_s = time.monotonic()
            pause_s = max(_PERIOD_S, (ended_s - begun_s) / _MOST_PART)
            self._next_look_s = ended_s + pause_s
        return self._whys.get(rank, "")

    def close(self) -> None:
        """Say that this rank looks no more; what was said ends with the last rank."""
        self._bootstrap.retire("came")

    def _look(self) -> None:
        """Learn who has ended: of others' words, or by the kernel.

        A rank leaves word before it ends because of a death that it has seen. So where
        there are words, processes say nothing more.
        """
        if self._whys:
            return
        others = [r for r in range(self._bootstrap.size) if r != self._bootstrap.rank]
        self._whys = self._told(others)
        seen = {} if self._whys else self._seen(others)
        if seen:
            self._whys = self._told(others) or seen
            for rank, why in self._whys.items():
                self._bootstrap.post(f"ended/{rank}", why.encode())

    def _told(self, ranks: Iterable[int]) -> dict[int, str]:
        words = {rank: self._bootstrap.posted(f"ended/{rank}") for rank in ranks}
        return {rank: said.decode() for rank, said in words.items() if said is not None}

    def _seen(self, ranks: Iterable[int]) -> dict[int, str]:
        said = self._bootstrap.ended()
        whys = {rank: said.get(rank) or self._why_ended(rank) for rank in ranks}
        return {rank: why for rank, why in whys.items() if why}

    def _why_ended(self, rank: int) -> str:
        if rank not in self._found:
            said = self._bootstrap.posted(f"came/{rank}")
            if said is None:
                return ""
            self._found[rank] = json.loads(said)
        return why_ended(self._found[rank], self._mine)
