# SPDX-License-Identifier: Apache-2.0
"""How busy the machine was while tests ran: whose limits were near, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Moment", "describe", "now", "was_too_busy_to_tune"]

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Moment:
    """What the machine's cores had done until then, in seconds."""

    own: float
    """Of this process and of its children that have ended."""
    busy: float
    """Of all processes."""
    stolen: float
    """That the host of a virtual machine gave to others."""
    load: float
    """Mean number of runnable threads in the last minute."""


def now() -> Moment:
    """Return what was done so far."""
    times, ticks = os.times(), os.sysconf("SC_CLK_TCK")
    own = times.user + times.system + times.children_user + times.children_system
    # user, nice, system, idle, iowait, irq, softirq, steal
    first = _STAT.read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(one) / ticks for one in first)
    busy = user + nice + system + irq + softirq
    return Moment(own, busy, steal, os.getloadavg()[0])


def describe(begin: Moment, end: Moment, cores: int) -> str:
    """Return a line about the time between two moments.

    Args:
        begin: when the tests began.
        end: when they had ended, and their processes, too.
        cores: cores that they may use.
    """
    busy = max(end.busy - begin.busy, 0.01)
    others = max(0.0, 1 - (end.own - begin.own) / busy)
    stolen = (end.stolen - begin.stolen) / (busy + end.stolen - begin.stolen)
    words = "nothing to speak of beside the tests"
    if others > 0.2 or stolen > 0.05:
        words = f"other work took {others:.0%} of the time that cores were busy"
        if stolen > 0.05:
            words += f", and the host {stolen:.0%} more"
    return (
        f"machine: {cores} cores, load {begin.load:.1f} at the beginning and "
        f"{end.load:.1f} at the end; {words}"
    )


def was_too_busy_to_tune(ok: bool, stderr: str) -> bool:
    """Return whether other programs left the tuner nothing to decide, as it then says.

    Only where there are such programs: on a quiet machine it must decide.
    """
    return (
        not ok
        and os.getloadavg()[0] > len(os.sched_getaffinity(0))
        and "commrt-tune: no table was written: " in stderr
        and ("raise --budget" in stderr or "tune again when" in stderr)
    )
