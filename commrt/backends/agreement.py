# SPDX-License-Identifier: Apache-2.0
"""The ranks' one exchange at a communicator's first call on a device array.

A backend of devices tells the other ranks something, such as the version of its
library, and whether it can be used follows from all ranks' words. The words of all
backends go in one exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commrt.backends.base import Attached
from commrt.errors import MismatchError
from commrt.group.group import Group

__all__ = ["meet"]


def meet(
    group: Group,
    attached: Mapping[str, Attached],
    give_up: Callable[[str], None],
    device: Any,
    what: str,
    timeout_s: float,
) -> None:
    """Let the ranks tell each other all that is not agreed yet; collective.

    ``what`` is the operation that all of them call. Where they call different ones,
    ``give_up`` makes the communicator unusable. The meeting counts as an operation: who
    refuses that one has not come, and who refuses the next one has.
    """
    asked = {name: each for name, each in attached.items() if not each.is_agreed}
    told = {name: each.tells(device) for name, each in asked.items()}
    told = {name: mine for name, mine in told.items() if mine is not None}
    if not told:
        return
    blobs = group.world.bootstrap.exchange(
        group.world_ranks,
        # Ranks that leave a meeting, as one refuses its call, meet anew.
        f"comm{group.identity}/devices/{group.next_seq}",
        json.dumps({"what": what, "told": told}).encode(),
        timeout_s,
        group.heed_others,
    )
    group.pass_over()
    said = [json.loads(blob) for blob in blobs]
    _check_same_call(group, give_up, [each["what"] for each in said])
    for name in told:
        asked[name].settle([each["told"][name] for each in said], timeout_s)


def _check_same_call(
    group: Group, give_up: Callable[[str], None], called: Sequence[str]
) -> None:
    if len({*called}) == 1:
        return
    lines = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(called))
    give_up("the ranks differ in their first call on a device array")
    raise MismatchError(
        f"{group.name}: the ranks disagree on their first call on a device array, and "
        f"{group.name} cannot be used any more: {lines}; make the same call on all "
        f"ranks, on a new communicator"
    )
