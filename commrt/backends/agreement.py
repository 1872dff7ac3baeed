# SPDX-License-Identifier: Apache-2.0
"""The ranks' one meeting at a communicator's first call on a device array.

Each carrier of such calls (NCCL, memory of peers, an MPI that takes device memory) has
something to tell the other ranks, and follows from what all of them told. All that is
told in one exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from commrt.errors import MismatchError

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Carrier", "meet"]


class Carrier(Protocol):
    """What of a carrier the ranks agree upon."""

    @property
    def is_agreed(self) -> bool:
        """Whether they have."""
        ...

    def tells(self, device: Any) -> Any:
        """Return what this rank tells the others, for JSON.

        None where nothing is asked: what holds is settled then, by facts that all ranks
        know, so none of them asks.
        """
        ...

    def settle(self, said: Sequence[Any], timeout_s: float) -> None:
        """Settle what holds by what all ranks told; the same on each; collective."""
        ...


def meet(
    comm: Communicator,
    carriers: Mapping[str, Carrier],
    device: Any,
    what: str,
    timeout_s: float,
) -> None:
    """Let the ranks tell each other all that is not agreed yet; collective.

    ``what`` is the operation that all of them call.
    """
    asked = {name: each for name, each in carriers.items() if not each.is_agreed}
    told = {name: each.tells(device) for name, each in asked.items()}
    told = {name: mine for name, mine in told.items() if mine is not None}
    if not told:
        return
    blobs = comm.world.bootstrap.exchange(
        comm.world_ranks,
        f"comm{comm.identity}/devices",
        json.dumps({"what": what, "told": told}).encode(),
        timeout_s,
    )
    said = [json.loads(blob) for blob in blobs]
    _check_same_call(comm, [each["what"] for each in said])
    for name in told:
        asked[name].settle([each["told"][name] for each in said], timeout_s)


def _check_same_call(comm: Communicator, called: Sequence[str]) -> None:
    if len({*called}) == 1:
        return
    lines = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(called))
    comm.give_up("the ranks differ in their first call on a device array")
    raise MismatchError(
        f"{comm.name}: the ranks disagree on their first call on a device array, and "
        f"{comm.name} cannot be used any more: {lines}"
    )
