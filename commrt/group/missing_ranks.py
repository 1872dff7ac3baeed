# SPDX-License-Identifier: Apache-2.0
"""Words of a timeout: who keeps an operation waiting, and what kept the wait."""

from __future__ import annotations

from collections.abc import Sequence

from commrt.group.rank_states import Elsewhere

__all__ = ["have", "missing_elsewhere", "starved"]


def missing_elsewhere(found: Elsewhere, seq: int) -> list[str]:
    """Return who of other nodes keeps operation ``seq`` waiting."""
    ended = [rank for rank, one in found.items() if one.state == "dead"]
    silent = [rank for rank, one in found.items() if one.started is None]
    silent = [rank for rank in silent if rank not in ended]
    late = [
        rank
        for rank, one in found.items()
        if one.started is not None and one.started <= seq and rank not in ended
    ]
    where = "on another node" if len(late + ended + silent) == 1 else "elsewhere"
    said = []
    if late:
        said.append(have(late, where, "not started it"))
    if ended:
        said.append(have(ended, where, "ended, or cannot be reached"))
    if silent:
        said.append(have(silent, where, "not answered when asked"))
    return said


def starved(seconds: float, process_ran: bool) -> str:
    """Return what an error says of a wait that had no chance to look; "" else."""
    if not seconds:
        return ""
    if process_ran:
        return (
            f"this rank's wait got no chance to look for {seconds:.0f} s, because "
            f"other threads of its process kept Python, or one step took so long; "
        )
    return (
        f"this process itself did not run for {seconds:.0f} s of that (it was "
        f"stopped, or no core was left to it); "
    )


def have(ranks: Sequence[int], where: str, what: str) -> str:
    """Return that these ranks, in one place, have or have not done something."""
    plural, have = ("s", "have") if len(ranks) > 1 else ("", "has")
    return f"rank{plural} {', '.join(map(str, ranks))} {where} {have} {what}"
