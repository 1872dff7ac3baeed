# SPDX-License-Identifier: Apache-2.0
"""Allreduce over a packet switch and a circuit switch, after Truong and Takano.

"Hybrid electrical/optical switch architectures for training distributed deep learning
in large-scale" (IEICE Transactions on Information and Systems E104-D(8), 2021) finds
that the transfers of data parallel training live long and rarely change, so that an
optical circuit switch can carry them. Only the abstract was read; the model is of this
project.

Each host has one port at a packet switch, which reaches every host, and one at a
circuit switch. A circuit joins a sender to one receiver at a higher rate; to join
another one takes ``reconfigure_us``, in which neither port carries anything. A message
takes whichever would deliver it first. Ports carry one message after the other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from commrt.algorithms import schedule
from commrt.schedule.ir import Op, Schedule, Step
from commrt.sim.quantities import nbytes_text

__all__ = [
    "HybridSwitch",
    "Outcome",
    "Ports",
    "kept_circuits",
    "play",
    "study_hybrid_switch",
]

_ALGORITHMS = ("ring", "halving_doubling", "recursive_doubling", "swing", "double_tree")
_RANKS = 64

_KNOWN = (
    "known (abstract): transfers of data parallel training are long-lived and rarely "
    "change; with a hybrid switch training took around 10 % less in simulation",
    "chosen here: 64 hosts; packets 12.5 GB/s and 1.5 us, circuits 50 GB/s and 1 us; "
    "20 us to change a circuit (a small mirror array), and 10 ms (a large one); a call "
    "that follows another one like it, as in training",
    "kept: circuits lead where a rank sends the most bytes, and never change; "
    "otherwise each message takes the switch that would deliver it first",
)


@dataclass(frozen=True)
class HybridSwitch:
    """Both switches: rates in bytes per microsecond, times in microseconds."""

    packet_rate: float = 12_500.0
    packet_us: float = 1.5
    circuit_rate: float = 50_000.0
    circuit_us: float = 1.0
    reconfigure_us: float = 20.0


@dataclass
class Ports:
    """The ports of all hosts between two calls."""

    size: int
    to: list[int] = field(default_factory=list)
    """The receiver to which each host's circuit leads; -1: none."""
    of: list[int] = field(default_factory=list)
    """The sender from which a circuit comes."""

    def __post_init__(self) -> None:
        self.to = self.to or [-1] * self.size
        self.of = self.of or [-1] * self.size

    def join(self, source: int, target: int) -> bool:
        """Let a circuit lead from one host to another; return whether that is new."""
        if self.to[source] == target:
            return False
        before, other = self.of[target], self.to[source]
        if before >= 0:
            self.to[before] = -1
        if other >= 0:
            self.of[other] = -1
        self.to[source], self.of[target] = target, source
        return True


@dataclass(frozen=True)
class Outcome:
    """One call."""

    time_us: float
    """Simulated time until the last rank is done."""
    changes: int
    """Circuits that were changed."""
    circuit_part: float
    """Part of all bytes that took circuits."""


def kept_circuits(one: Schedule, nbytes: int) -> Ports:
    """Return circuits from each rank to the one to which it sends the most bytes.

    Where two ranks would have the same receiver, the larger volume has it, and of equal
    ones that of the lower rank.
    """
    volume: dict[tuple[int, int], int] = {}
    for rank, program in enumerate(one.programs()):
        bounds = [space.bounds(nbytes) for space in program.spaces]
        for step in program.steps:
            if step.op is Op.SEND:
                pair = rank, step.peer
                volume[pair] = volume.get(pair, 0) + _length(step, bounds)
    ports = Ports(one.size)
    for source, target in sorted(volume, key=lambda pair: (-volume[pair], pair)):
        if ports.to[source] < 0 and ports.of[target] < 0:
            ports.join(source, target)
    return ports


def play(one: Schedule, nbytes: int, switch: HybridSwitch, ports: Ports) -> Outcome:
    """Return how a call of a schedule goes; ``ports`` are as an earlier call left them.

    Args:
        one: an allreduce.
        nbytes: of the vector.
        switch: the switches; a circuit rate of 0 leaves packets alone.
        ports: the circuits before the call; they are changed.
    """
    return _Call(one, nbytes, switch, ports).run()


def _length(step: Step, bounds: Sequence[Sequence[int]]) -> int:
    """Return the bytes that a step sends."""
    assert step.src is not None
    edges = bounds[step.src.space]
    return edges[step.src.hi] - edges[step.src.lo]


class _Switch:
    """From when on each port of one switch is free."""

    def __init__(self, size: int) -> None:
        self._sends = [0.0] * size
        self._receives = [0.0] * size

    def free_at(self, source: int, target: int) -> float:
        return max(self._sends[source], self._receives[target])

    def take(self, source: int, target: int, end_us: float) -> None:
        self._sends[source] = self._receives[target] = end_us


class _Call:
    """One call under way: a step runs once all that it waits for is done."""

    def __init__(
        self, one: Schedule, nbytes: int, switch: HybridSwitch, ports: Ports
    ) -> None:
        self._switch, self._ports = switch, ports
        self._packets, self._circuits = _Switch(one.size), _Switch(one.size)
        programs = one.programs()
        self._bounds = [
            [space.bounds(nbytes) for space in program.spaces] for program in programs
        ]
        self._steps = [[*program.steps] for program in programs]
        self._since = [[0.0] * len(steps) for steps in self._steps]
        self._waits = [[len(step.deps) for step in steps] for steps in self._steps]
        self._after: list[list[list[int]]] = []
        self._arrivals: dict[tuple[int, int], deque[int]] = {}
        self._ready: list[tuple[float, int, int]] = []
        self._changes = self._sent = self._by_circuit = 0
        for rank, steps in enumerate(self._steps):
            self._after.append([[] for _ in steps])
            for place, step in enumerate(steps):
                for dep in step.deps:
                    self._after[rank][dep].append(place)
                if step.op in (Op.RECV, Op.RRED):
                    self._waits[rank][place] += 1  # for its message
                    pair = step.peer, rank
                    self._arrivals.setdefault(pair, deque()).append(place)
            for place, waits in enumerate(self._waits[rank]):
                if waits == 0:
                    heapq.heappush(self._ready, (0.0, rank, place))

    def run(self) -> Outcome:
        """Let all steps run, the earliest first."""
        end_us = 0.0
        while self._ready:
            now, rank, place = heapq.heappop(self._ready)
            end_us = max(end_us, now)
            step = self._steps[rank][place]
            if step.op is Op.SEND:
                arrival = self._arrivals[rank, step.peer].popleft()
                self._let(step.peer, arrival, self._send(now, rank, step))
            for later in self._after[rank][place]:
                self._let(rank, later, now)
        part = self._by_circuit / max(1, self._sent)
        return Outcome(end_us, self._changes, part)

    def _let(self, rank: int, place: int, at_us: float) -> None:
        """Note that one of the things that a step waits for is done."""
        self._since[rank][place] = max(self._since[rank][place], at_us)
        self._waits[rank][place] -= 1
        if self._waits[rank][place] == 0:
            heapq.heappush(self._ready, (self._since[rank][place], rank, place))

    def _send(self, now: float, rank: int, step: Step) -> float:
        """Send a message by the switch that delivers it first; return when it comes."""
        switch, peer = self._switch, step.peer
        nbytes = _length(step, self._bounds[rank])
        self._sent += nbytes
        begin = max(now, self._packets.free_at(rank, peer))
        gone = begin + nbytes / switch.packet_rate
        if switch.circuit_rate > 0:
            begin = max(now, self._circuits.free_at(rank, peer))
            if self._ports.to[rank] != peer:
                begin += switch.reconfigure_us
            end = begin + nbytes / switch.circuit_rate
            if end + switch.circuit_us < gone + switch.packet_us:
                self._circuits.take(rank, peer, end)
                self._changes += self._ports.join(rank, peer)
                self._by_circuit += nbytes
                return end + switch.circuit_us
        self._packets.take(rank, peer, gone)
        return gone + switch.packet_us


def study_hybrid_switch(quick: bool = False) -> Iterator[str]:
    """Yield the lines of the study.

    Args:
        quick: 16 ranks and two lengths only.
    """
    yield "Allreduce over a packet switch with circuits beside it: simulated times"
    yield from _KNOWN
    yield (
        "time of the second call, in that of the same algorithm over packets alone; "
        "circuits that each rank changes in it; part of the bytes that took circuits"
    )
    ranks = 16 if quick else _RANKS
    lengths = [1 << n for n in ((20, 28) if quick else (16, 20, 24, 28, 30))]
    yield (
        f"{'algorithm':<20}{'bytes':>9}{'packets alone':>15}"
        f"{'kept: time':>12}{'circuits':>10}"
        f"{'20 us: time':>13}{'changes':>9}{'circuits':>10}"
        f"{'10 ms: time':>13}{'changes':>9}{'circuits':>10}"
    )
    best: dict[int, list[tuple[float, str]]] = {length: [] for length in lengths}
    for name in _ALGORITHMS:
        one = schedule("allreduce", name, ranks)
        for length in lengths:
            alone = play(one, length, HybridSwitch(circuit_rate=0.0), Ports(ranks))
            line = f"{name:<20}{nbytes_text(length):>9}{alone.time_us / 1e3:>12.3f} ms"
            never = HybridSwitch(reconfigure_us=math.inf)
            kept = play(one, length, never, kept_circuits(one, length))
            line += f"{kept.time_us / alone.time_us:>12.2f}{kept.circuit_part:>10.0%}"
            best[length] += [
                (alone.time_us, f"{name}, packets alone"),
                (kept.time_us, f"{name}, circuits kept"),
            ]
            for change_us, text in ((20.0, "20 us"), (10_000.0, "10 ms")):
                switch, ports = HybridSwitch(reconfigure_us=change_us), Ports(ranks)
                play(one, length, switch, ports)
                second = play(one, length, switch, ports)
                line += (
                    f"{second.time_us / alone.time_us:>13.2f}"
                    f"{second.changes / ranks:>9.1f}{second.circuit_part:>10.0%}"
                )
                best[length].append((second.time_us, f"{name}, circuits of {text}"))
            yield line
        one.forget_programs()
    for length, found in best.items():
        time, what = min(found)
        yield f"{nbytes_text(length)}: {what}, in {time / 1e3:.3f} ms (simulated)"
