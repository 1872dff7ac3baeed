# SPDX-License-Identifier: Apache-2.0
"""Costs of a simulated message beside its links: overheads, protocols, reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from commrt import _native
from commrt.errors import UsageError

__all__ = ["Costs"]

_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Costs:
    """Costs that ranks and transports add to the time on links; none, if left out.

    Overheads and reductions occupy the rank's one core, one after the other. They are
    the ``o`` of LogP (Culler et al., "LogP: towards a realistic model of parallel
    computation", PPoPP 1993); a link's latency is its ``L``.

    Raises:
        UsageError: a cost is negative or not finite.
    """

    send_overhead_us: float = 0.0
    """Work of the sender's core for each message."""
    receive_overhead_us: float = 0.0
    """Work of the receiver's core for each message, once it has arrived."""
    reduce_us_per_byte: float = 0.0
    """Work for each byte of an operand that is reduced into another."""
    copy_us_per_byte: float = 0.0
    """Work for each byte of a local copy."""
    eager_nbytes: int | None = None
    """A message up to this length leaves when it is sent, and its send is over. Longer
    ones wait for their receive (*rendezvous*). None: all messages leave at once."""
    handshake: bool = False
    """True if rendezvous costs a request and an answer, one latency each."""
    local_latency_us: float = 0.0
    """Latency between two ranks of one host."""
    local_gbytes_per_s: float | None = None
    """Rate between two ranks of one host, for each message; None: no time at all."""
    in_order: bool = False
    """True if messages from one rank to another flow one after the other, as over one
    connection; else those on their way at one time share the links."""
    queued_nbytes: int = 0
    """A message up to this length passes its first link after those that left before
    it, whatever their ways are after that: its host hands it to the link at once.
    Longer ones share the link."""
    burst_nbytes: float = 0.0
    """Bytes that a link that rested passes at once, beside its rate: the tokens of a
    bucket, as limits of virtual machines and ``commrt.cluster`` have them."""
    contention_penalty: float = 0.0
    """Loss of shared links: with n flows a link carries 1/(1 + penalty (1 - 1/n)) of
    its rate. A penalty of 1 halves a link that very many flows share."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not (0 <= value < math.inf):
                raise UsageError(
                    f"{one.name} is {value}; expected a finite number from 0"
                )
        if self.local_gbytes_per_s == 0:
            raise UsageError("local_gbytes_per_s is 0; expected a rate above 0 or none")

    def native(self) -> _native.SimulatedCosts:
        """Return the engine's form."""
        made = _native.SimulatedCosts()
        made.send_overhead_us = self.send_overhead_us
        made.receive_overhead_us = self.receive_overhead_us
        made.reduce_us_per_byte = self.reduce_us_per_byte
        made.copy_us_per_byte = self.copy_us_per_byte
        eager = self.eager_nbytes
        made.eager_nbytes = _MOST_BYTES if eager is None else min(eager, _MOST_BYTES)
        made.handshake = self.handshake
        made.local_latency_us = self.local_latency_us
        local = self.local_gbytes_per_s
        made.local_rate = math.inf if local is None else 1000.0 * local
        made.in_order = self.in_order
        made.queued_nbytes = min(self.queued_nbytes, _MOST_BYTES)
        made.burst_nbytes = self.burst_nbytes
        made.contention_penalty = self.contention_penalty
        return made
