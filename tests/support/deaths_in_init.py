# SPDX-License-Identifier: Apache-2.0
"""A rank that dies in ``init``, and what the others hear."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import commrt
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import PeerFailedError
from commrt.launch.detect import detect

__all__ = ["begins", "check_heard", "comes"]


def die_before_exchange(number: int) -> None:
    """Let this process die where it would begin its exchange of that number."""
    exchange, begun = StoreBootstrap.exchange, []

    def dying(self: StoreBootstrap, members: Sequence[int], *args: Any) -> list[bytes]:
        if len(begun) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        begun.append(members)
        return exchange(self, members, *args)

    StoreBootstrap.exchange = dying  # type: ignore[method-assign]


def begins(dies: int, number: int) -> str:
    """Return what a rank hears whose peer dies in ``init``."""
    if detect().rank == dies:
        die_before_exchange(number)
    with pytest.raises(PeerFailedError) as raised:
        commrt.init()
    return str(raised.value)


def comes(dies: int, how: str) -> str:
    """Return what a rank hears in ``init`` whose peer ends before it comes there."""
    if detect().rank == dies:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    with pytest.raises(PeerFailedError) as raised:
        commrt.init()
    return str(raised.value)


def check_heard(heard: Mapping[int, str], size: int, dies: int) -> None:
    """Check that all others have heard which rank died, and how that was seen."""
    assert sorted(heard) == sorted({*range(size)} - {dies})
    told = re.compile(rf"rank {dies}\b.*, because process \d+ .*has ended")
    assert all(told.search(text) for text in heard.values()), heard
