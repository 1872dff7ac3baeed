# SPDX-License-Identifier: Apache-2.0
"""The faults that this rank injects into its operations, where COMMRT_CHAOS asks."""

from __future__ import annotations

import sys
from typing import Protocol

from commrt import _native, env
from commrt.vocabulary.chaos import CODES, KINDS, parse_chaos

__all__ = ["inject_faults", "wanted_chaos"]


class _OfWorld(Protocol):
    chaos: _native.Chaos | None


class _OfGroup(Protocol):
    @property
    def world(self) -> _OfWorld: ...


def inject_faults(group: _OfGroup) -> None:
    """Inject the job's faults into the operations that begin on ``group`` from now."""
    if group.world.chaos is not None:
        assert isinstance(group, _native.Group)
        _native.inject_faults(group, group.world.chaos)


def wanted_chaos(rank: int, size: int) -> _native.Chaos | None:
    """Return what injects faults into this rank's operations; None: nobody asks.

    Rank 0 says on stderr that there will be faults, so that nobody takes them for real
    ones.
    """
    text = env.read_str("COMMRT_CHAOS")
    if text is None:
        return None
    chaos = parse_chaos(text)
    if rank == 0:
        faults = "; ".join(fault.text for fault in chaos.faults)
        sys.stderr.write(
            f"commrt chaos: COMMRT_CHAOS is set: faults are injected into this job of "
            f"{size} ranks (seed {chaos.seed}: {faults})\n"
        )
        beyond = {r for fault in chaos.faults for r in fault.ranks if r >= size}
        if beyond:
            sys.stderr.write(
                f"commrt chaos: no faults for ranks {sorted(beyond)}, which this job "
                f"does not have\n"
            )
    rules = [
        _native.FaultRule(
            kind=1 + KINDS.index(fault.kind),
            seconds=fault.seconds,
            codes=[CODES[op] for op in fault.ops],
            number=fault.number,
            every=fault.every,
            most=fault.most,
            chance=fault.chance,
            text=fault.text,
        )
        for fault in chaos.faults
        if not fault.ranks or rank in fault.ranks
    ]
    return _native.Chaos(chaos.seed, rank, rules)
