# SPDX-License-Identifier: Apache-2.0
"""Questions of a rank to ranks of other nodes: what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commrt import _native
from commrt.bootstrap.base import poll_until

__all__ = ["ask_peers"]

_ANSWER_S = 1.0


def ask_peers(
    relay: _native.Relay,
    abouts: Mapping[int, int],
    tag: int,
    send: Callable[[], object] = lambda: None,
) -> dict[int, tuple[Any, ...] | None]:
    """Return what each peer says that a rank does on a communicator.

    ``abouts``: for each peer the rank, itself or another one of its node. ``send``
    sends what is to be sent. The answers are rows as ``_native.rank_states`` has them.
    An empty one: it knows no such communicator, or has ended. None: it has not answered
    within a second; its process answers, whatever its program does.
    """
    asked = {peer: relay.ask(peer, tag, about) for peer, about in abouts.items()}
    send()
    told: dict[int, tuple[Any, ...] | None] = dict.fromkeys(asked)

    def heard() -> bool:
        for peer, question in asked.items():
            if told[peer] is None:
                told[peer] = relay.answer(question)
        return None not in told.values()

    poll_until(heard, _ANSWER_S)
    return told
