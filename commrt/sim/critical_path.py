# SPDX-License-Identifier: Apache-2.0
"""The chain of messages and steps that a simulated run waited for, in words.

It is walked back from the last step: a receive waited for its message or for the steps
before it, a message for its sender or, in rendezvous, for its receiver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commrt.sim.quantities import time_text
from commrt.sim.simulate import Simulated

__all__ = ["Leg", "Shares", "critical_path", "describe", "shares"]


@dataclass(frozen=True)
class Leg:
    """A message or a local step of the chain."""

    start_us: float
    end_us: float
    rank: int
    """The rank that works, or sends."""
    peer: int
    """The rank that receives; -1 for a local step."""
    text: str
    """The step in the words of the schedule's verifier."""
    message: int
    """Its number, or -1."""


def critical_path(run: Simulated) -> list[Leg]:
    """Return the legs of the chain, in order of time."""
    steps, messages = run.steps, run.messages
    if not len(steps.done_us):
        return []
    of_step: dict[int, int] = {}
    for column in (messages.send, messages.recv):
        of_step.update(zip(column.tolist(), range(len(column)), strict=True))
    legs: list[Leg] = []
    at, now = int(steps.done_us.argmax()), run.time_us
    while at >= 0:
        rank, index = run.place_of(at)
        text = run.schedule.program(rank).describe_step(index)
        ready, number = float(steps.ready_us[at]), of_step.get(at, -1)
        ended = float(messages.ended_us[number]) if number >= 0 else now
        if number < 0 or ended > now or ready > ended:
            # A local step, or the part of another one that the core worked on.
            legs.append(Leg(min(ready, now), now, rank, -1, text, -1))
            at, now = int(steps.cause[at]), min(ready, now)
            continue
        if now > ended:
            legs.append(Leg(ended, now, rank, -1, f"{text}: its core works", -1))
            cause = int(steps.cause[at])
            if cause >= 0 and steps.done_us[cause] > ended:
                at, now = cause, min(now, float(steps.done_us[cause]))
                continue
        send, recv = int(messages.send[number]), int(messages.recv[number])
        begun = float(messages.begun_us[number])
        sender, sent = run.place_of(send)
        words = run.schedule.program(sender).describe_step(sent)
        receiver = run.place_of(recv)[0]
        legs.append(Leg(begun, ended, sender, receiver, words, number))
        posted, wanted = float(messages.posted_us[number]), float(steps.ready_us[recv])
        if begun > posted and wanted > posted:
            at, now = int(steps.cause[recv]), wanted
            continue
        given = float(steps.ready_us[send])
        if posted > given:
            words = f"{words}: its core works"
            legs.append(Leg(given, posted, sender, -1, words, -1))
        at, now = int(steps.cause[send]), given
    return _in_order(legs[::-1])


def _in_order(legs: list[Leg]) -> list[Leg]:
    """Return the legs that take time; a core begins when the leg before has ended."""
    found: list[Leg] = []
    for leg in legs:
        if leg.message < 0 and found and found[-1].end_us > leg.start_us:
            leg = replace(leg, start_us=found[-1].end_us)
        if leg.end_us > leg.start_us:
            found.append(leg)
    return found


@dataclass(frozen=True)
class Shares:
    """Where the time of the chain went, in microseconds."""

    latency_us: float
    bytes_us: float
    """Time that the bytes would have taken, had each message been alone."""
    sharing_us: float
    """Time that sharing links added to that."""
    work_us: float
    """Overheads, reductions and copies."""
    waiting_us: float
    """The rest: protocols, and cores at work on other steps."""


def shares(run: Simulated, legs: list[Leg]) -> Shares:
    """Return where the time of a chain went."""
    latency = alone = sharing = work = 0.0
    for leg in legs:
        if leg.message < 0:
            work += leg.end_us - leg.start_us
            continue
        flowing = float(run.messages.flowing_us[leg.message])
        latency += flowing - leg.start_us
        way = run.way_of(leg.message)
        links = run.network.links
        rates = [min(links.shared_rate[one], links.flow_rate[one]) for one in way]
        least = leg.end_us - flowing
        if rates:
            least = float(run.messages.nbytes[leg.message]) / float(min(rates))
        alone += least
        sharing += max(0.0, leg.end_us - flowing - least)
    known = latency + alone + sharing + work
    return Shares(latency, alone, sharing, work, max(0.0, run.time_us - known))


def describe(run: Simulated, legs: list[Leg], most: int = 40) -> list[str]:
    """Return a sentence for each leg, and one for the whole chain.

    Args:
        run: the run.
        legs: its critical path.
        most: legs to name; of a longer chain the first and the last ones.
    """
    part = shares(run, legs)
    messages = sum(leg.message >= 0 for leg in legs)
    head = (
        f"critical path: {messages} messages, {time_text(run.time_us)} (simulated): "
        f"latency {time_text(part.latency_us)}, bytes {time_text(part.bytes_us)}, "
        f"sharing of links {time_text(part.sharing_us)}, work of cores "
        f"{time_text(part.work_us)}, other waiting {time_text(part.waiting_us)}"
    )
    lines = [
        f"step {number}: {_sentence(run, leg)}"
        for number, leg in enumerate(legs, start=1)
    ]
    if len(lines) > most:
        half = most // 2
        left_out = f"... {len(lines) - 2 * half} more ..."
        lines = [*lines[:half], left_out, *lines[-half:]]
    return [head, *lines]


def _sentence(run: Simulated, leg: Leg) -> str:
    took = f"{time_text(leg.start_us)} to {time_text(leg.end_us)}"
    if leg.message < 0:
        return f"{leg.text}, {took}"
    nbytes = int(run.messages.nbytes[leg.message])
    said = f"rank {leg.rank} → {leg.peer}, {nbytes:,} bytes, {took}"
    link = int(run.messages.bottleneck[leg.message])
    sharers = int(run.messages.sharers[leg.message])
    if link < 0 or sharers < 2:
        return f"{said}, alone on its way"
    others = "1 other flow" if sharers == 2 else f"{sharers - 1} other flows"
    return f"{said}, shares link {run.network.link_name(link)} with {others}"
