# SPDX-License-Identifier: Apache-2.0
"""Ranks on pretended nodes whose frames go when the test says so.

The engine's own carrier (engine/relay_carrier.hpp) gives them to a group that stands in
for gloo's: no thread, no torch, no network. ``bring`` does what threads do elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from relay_ranks import RelayRanks

from commrt import _native

__all__ = ["RanksByHand"]

_FRAMES = 0
"""The tag of frames; that of a payload is its number."""
Memory = np.ndarray[Any, Any]


class _Group:
    """One rank's calls of gloo, as RelayCarrier makes them."""

    def __init__(self, hand: _Hand, rank: int) -> None:
        self._hand, self._rank = hand, rank

    def send(self, tensors: Sequence[Memory], peer: int, tag: int) -> object:
        hand, (memory,) = self._hand, tensors
        if tag == _FRAMES:
            hand.frames.append((self._rank, peer, memory.copy()))
        else:
            hand.landing[peer].pop((self._rank, tag))[:] = memory
            hand.payloads.append((self._rank, peer))
        return object()

    def recv(self, tensors: Sequence[Memory], peer: int, tag: int) -> object:
        self._hand.landing[self._rank][peer, tag] = tensors[0]
        return object()


class _Hand:
    """What has been sent and not brought; stands in for threads that carry."""

    def __init__(self, relays: list[Any], _: object) -> None:
        ranks = range(len(relays))
        self._relays = relays
        self.frames: list[tuple[int, int, Memory]] = []
        self.payloads: list[tuple[int, int]] = []
        self.landing: list[dict[tuple[int, int], Memory]] = [{} for _ in ranks]
        groups = [_Group(self, rank) for rank in ranks]
        self.carriers = [
            _native.RelayCarrier(
                relay,
                group.send,
                group.recv,
                np.frombuffer,
                np.uint8,
                {peer: {} for peer in ranks},
            )
            for relay, group in zip(relays, groups, strict=True)
        ]

    def bring(self) -> None:
        """Hand over all that has been sent; what that causes to be sent stays."""
        frames, self.frames = self.frames, []
        for source, dest, frame in frames:
            if (source, dest) in self.payloads:
                self.payloads.remove((source, dest))
                self.carriers[source].left(dest)
            self.carriers[source].left(dest)
            at = frame.ctypes.data
            if (where := self._relays[dest].arrived(source, at, frame.size)) > 0:
                self._relays[dest].landed(source, where)

    def join(self) -> None:
        """Bring the last frames."""
        for _ in range(3):  # goodbyes and their answers
            for carrier in self.carriers:
                carrier.give_all()
            self.bring()
        for carrier in self.carriers:
            carrier.forget()


class RanksByHand(RelayRanks):
    """RelayRanks that are driven by one thread."""

    carrier_of = _Hand
    carrier: _Hand

    def bring(self) -> None:
        """Hand over what has been sent so far."""
        self.carrier.bring()
