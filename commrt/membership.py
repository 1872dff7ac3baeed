# SPDX-License-Identifier: Apache-2.0
"""The members of a communicator that grows: which are new, which have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commrt.calls.channel import Channel
from commrt.errors import PeerFailedError
from commrt.founding import Founder
from commrt.job.liveness import findable, why_ended

__all__ = ["check_all_came", "gone_of", "newcomers_among", "words_of"]


def check_all_came(comm: Channel, came: Mapping[int, bytes]) -> None:
    """Raise PeerFailedError where not all ranks of ``comm`` have met in grow()."""
    if len(came) < comm.size:
        raise PeerFailedError(
            f"grow: ranks of {comm.name} have died meanwhile: call shrink(), and "
            f"then grow() on what that returns"
        )


def words_of(founder: Founder[Any]) -> dict[str, Any]:
    """Return what a newcomer must know to make the communicator, too; as JSON."""
    return {
        "name": founder.name,
        "deterministic": founder.deterministic,
        "timeout_s": founder.timeout_s,
    }


def gone_of(
    processes: Sequence[Mapping[str, str]], known: Callable[[int], str]
) -> Callable[[int], str]:
    """Return what says why a rank comes no more, by its process or as is ``known``."""
    mine = findable()
    return lambda rank: known(rank) or why_ended(processes[rank], mine)


def newcomers_among(living: Sequence[int], old: int) -> range:
    """Return which ranks are new; some of the ``old`` ones may have died meanwhile."""
    return range(sum(rank < old for rank in living), len(living))
