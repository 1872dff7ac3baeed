# SPDX-License-Identifier: Apache-2.0
"""Many calls of all kinds on a simulated device, and what they leave behind.

    python tests/support/simulated_leaks.py --calls 10000000 --out counts.json

Two ranks of one thread share a simulated GPU. They make staged collectives, messages,
halo exchanges and buckets, eight rounds at a time, on arrays that the round before has
let go; wait for them in every way, or drop them; and make calls that fail: at the call,
at the wait, and so that the communicator is lost. In between everything is counted that
there is. What may be there in the end stands in ``Allowed``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from staged_ranks import SimRanks, forget_work, kept_ranks

from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import (
    CaptureError,
    CommError,
    TruncationError,
    UsageError,
)
from commrt.group.deferred_release import release_finished

SIZE = 2
ROUNDS = 8
"""Under way at the same time."""
COUNTS = (1, 7, 64)
BREAK_EVERY = 200_000
"""Calls between two communicators that are made to be lost. Not more often: the streams
that these leave alone take part in all clocks of the simulation."""
SAMPLES = 20
LOSSES = ("lengths", "message", "given up")
"""Ranks that differ in a length; a message that does not come; one gives up."""
_ENOUGH = {"first_nbytes": 1 << 18}
_LITTLE = 1 << 14
"""Of pinned memory for a communicator that is to be lost."""


Counts = dict[str, int]
Requests = list[tuple[int, Any]]


@dataclass(frozen=True)
class Allowed:
    """What may be there that was not there before."""

    resident_nbytes: int = 1 << 20
    """Of the process, beside a tenth of a byte for each call."""
    nbytes_per_call: float = 0.1
    resident_nbytes_per_loss: int = 1 << 17
    """What the simulation knows of it."""
    pooled_events: int = 16
    """Pools may become a little deeper in the second half of the calls."""
    python_blocks: int = 2_000
    """The interpreter's: caches that are not full yet."""
    python_blocks_per_loss: int = 20
    """What is remembered of the communicator: its number, and why it was lost."""


class Round:
    """The arrays of one round, on each rank; and its calls."""

    def __init__(self, rank: Any, number: int) -> None:
        self.comm, self.rank, self.number = rank.comm, rank.rank, number
        self.peer = 1 - rank.rank
        self.x = {n: DeviceArray(rank.device, n) for n in COUNTS}
        self.y = {n: DeviceArray(rank.device, n) for n in COUNTS}
        self.wide = {n: DeviceArray(rank.device, SIZE * n) for n in COUNTS}
        self.more = {n: DeviceArray(rank.device, SIZE * n) for n in COUNTS}
        self.nothing = DeviceArray(rank.device, 0)
        self.arrays = [self.nothing]
        for each in (self.x, self.y, self.wide, self.more):
            self.arrays += each.values()


def _collectives() -> Iterator[tuple[str, Callable[[Round, int, int, bool], Any]]]:
    """Yield calls by name; they are given count, root, and whether not to block."""
    yield (
        "allreduce",
        lambda at, n, root, nb: at.comm.allreduce(at.x[n], nonblocking=nb),
    )
    yield (
        "allreduce max",
        lambda at, n, root, nb: at.comm.allreduce(
            at.x[n], op="max", out=at.y[n], nonblocking=nb
        ),
    )
    yield (
        "allreduce ring",
        lambda at, n, root, nb: at.comm.allreduce(
            at.x[n], algorithm="ring", params={"piece": 64}, nonblocking=nb
        ),
    )
    yield (
        "allreduce nothing",
        lambda at, n, root, nb: at.comm.allreduce(at.nothing, nonblocking=nb),
    )
    yield (
        "bcast",
        lambda at, n, root, nb: at.comm.bcast(at.x[n], root=root, nonblocking=nb),
    )
    yield (
        "reduce",
        lambda at, n, root, nb: at.comm.reduce(at.x[n], root=root, nonblocking=nb),
    )
    yield (
        "allgather",
        lambda at, n, root, nb: at.comm.allgather(
            at.x[n], out=at.wide[n], nonblocking=nb
        ),
    )
    yield (
        "reduce_scatter",
        lambda at, n, root, nb: at.comm.reduce_scatter(
            at.wide[n], out=at.x[n], nonblocking=nb
        ),
    )
    yield (
        "alltoall",
        lambda at, n, root, nb: at.comm.alltoall(
            at.wide[n], out=at.more[n], nonblocking=nb
        ),
    )
    yield (
        "scan",
        lambda at, n, root, nb: at.comm.scan(at.x[n], out=at.y[n], nonblocking=nb),
    )
    yield (
        "allgatherv",
        lambda at, n, root, nb: at.comm.allgatherv(
            at.x[n], counts=[n, n], out=at.wide[n], nonblocking=nb
        ),
    )


COLLECTIVES = dict(_collectives())
OTHERS = ("messages", "shorter", "truncated", "sendrecv", "halo", "buckets", "refused")
KINDS = (*COLLECTIVES, *OTHERS)


class Workload:
    """Ranks on a simulated device, what they call, and what there is of it."""

    def __init__(self, seed: int, **plants: Any) -> None:
        self.rng = random.Random(seed)
        self.ranks = SimRanks(SIZE, seed, staging=_ENOUGH, **plants)
        self.world = self.ranks.world
        self.made: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.rounds: list[list[Round]] = []
        self.steps = []
        self.streams = []
        for rank in self.ranks.ranks:
            rank.begin()
            rank.device.load_kernels(b"")
            self.steps.append(core_of(rank.comm).world.engine.step)
            self.rounds.append([Round(rank, number) for number in range(ROUNDS)])
            self.streams.append(rank.stream)
        self._make_halos()

    def _make_halos(self) -> None:
        made = kept_ranks(SIZE)
        self.carts: list[Any] = made.each(lambda comm: comm.cart((SIZE,), [True]))
        self.halos, self.fields = [], []
        for cart, rank in zip(self.carts, self.ranks.ranks, strict=True):
            forget_work(cart)
            self.fields.append(DeviceArray(rank.device, 6))
        self.halos = made.each(
            lambda comm: self.carts[comm.rank].plan.halo_exchange(
                self.fields[comm.rank], 1
            )
        )

    @property
    def calls(self) -> int:
        """Calls of all ranks so far."""
        return self.made.total()

    # -- calls ---------------------------------------------------------------------

    def run(self, calls: int) -> None:
        """Make so many more calls, and some to complete the rounds."""
        last = self.calls + calls
        while self.calls < last:
            before = self.calls // BREAK_EVERY
            self.turn([self.rng.choice(KINDS) for _ in range(ROUNDS)])
            if self.calls // BREAK_EVERY > before:
                self.lose()

    def saturate(self) -> None:
        """Have each kind under way as often as it ever is: pools are full then."""
        for kind in KINDS:
            for _ in range(3):
                self.turn([kind] * ROUNDS, blocks=False)
        for how in LOSSES:
            self.lose(how)
        self.turn(["halo"], blocks=False)

    def turn(self, kinds: list[str], *, blocks: bool = True) -> None:
        """Make the calls of rounds on all ranks, and let all of them end."""
        count, root = self.rng.choice(COUNTS), self.rng.randrange(SIZE)
        under_way: Requests = []
        has_halo = False
        for number, kind in enumerate(kinds):
            nonblocking = not blocks or self.rng.random() < 0.8
            if kind == "halo":
                if has_halo:  # its arrays are the plan's
                    continue
                has_halo = True
            for rank in self.rng.sample(range(SIZE), SIZE):
                with self.streams[rank]:
                    at = self.rounds[rank][number]
                    # No name is left for a request: it is dropped with this list.
                    under_way += [
                        (rank, each)
                        for each in self._call(kind, at, count, root, nonblocking)
                    ]
        self._end(under_way)

    def _call(
        self, kind: str, at: Round, count: int, root: int, nonblocking: bool
    ) -> list[Any]:
        """Make one rank's calls of a kind; return its requests."""
        self.made[kind] += 1
        if kind in COLLECTIVES:
            made = COLLECTIVES[kind](at, count, root, nonblocking)
            return [made] if nonblocking else []
        if kind == "halo":
            return [self.halos[at.rank].start()]
        if kind == "buckets":
            self.made[kind] += len(COUNTS) - 1
            with at.comm.fused(nbytes=200):
                return [at.comm.allreduce(at.x[n], nonblocking=True) for n in COUNTS]
        if kind == "refused":
            self._refused(at)
            return []
        return self._messages(kind, at, count)

    def _messages(self, kind: str, at: Round, count: int) -> list[Any]:
        comm, tag = at.comm, at.number
        if kind == "sendrecv":
            made = comm.sendrecv(
                at.x[count],
                dest=at.peer,
                out=at.y[count],
                source=at.peer,
                sendtag=tag,
                recvtag=tag,
                nonblocking=True,
            )
            return [made]
        self.made[kind] += 1
        out = at.more[count] if kind == "shorter" else at.y[count]
        x = at.wide[count] if kind == "truncated" else at.x[count]
        calls = [
            lambda: comm.recv(out, source=at.peer, tag=tag, nonblocking=True),
            lambda: comm.send(x, dest=at.peer, tag=tag, nonblocking=True),
        ]
        return [call() for call in self.rng.sample(calls, 2)]

    def _refused(self, at: Round) -> None:
        """Make a call that is wrong, and one that a capture refuses."""
        device, stream = at.x[1].device, self.streams[at.rank]
        if self.rng.random() < 0.5:
            try:
                at.comm.allreduce(at.x[1], out=at.wide[64], nonblocking=True)
            except UsageError:
                self.ended["a usage error"] += 1
            return
        device.begin_capture(stream.handle)
        try:
            at.comm.allreduce(at.x[1], nonblocking=True)
        except CaptureError:
            self.ended["refused in a capture"] += 1
        device.graph_destroy(device.end_capture(stream.handle))

    # -- ends ----------------------------------------------------------------------

    def _end(self, under_way: Requests) -> None:
        """Wait for requests in all ways, or for nothing; until nothing is under way."""
        kept: Requests = []
        for rank, request in under_way:
            way = self.rng.randrange(4)
            with self.streams[rank]:
                try:
                    if way < 2:
                        request.wait()
                except TruncationError:
                    self.ended["truncated"] += 1
                    continue
            if way in (0, 2):
                kept.append((rank, request))
            else:
                request.be_quiet()
                self.ended["dropped" if way == 3 else "dropped after wait()"] += 1
        under_way.clear()
        request = None
        # Who asks for a message, or for a part of a bucket, has it given to the device
        # once it has come: so they are asked whenever nothing else goes on.
        while kept:
            moved = self.step()
            while self.step():
                pass
            left = [pair for pair in kept if not self._has_ended(*pair)]
            if len(left) == len(kept) and not moved:
                self.ranks.devices[0].pause()
            kept = left
        self.drain()

    def _has_ended(self, rank: int, request: Any) -> bool:
        try:
            with self.streams[rank]:
                if not request.test():
                    return False
                request.synchronize()
                self.ended["waited for"] += 1
        except TruncationError:
            self.ended["truncated"] += 1
        return True

    def step(self) -> bool:
        """Let all ranks go on."""
        return any([step() for step in self.steps])

    def drain(self) -> None:
        """Go on until nothing is under way."""
        comms = [rank.comm for rank in self.ranks.ranks] + self.carts
        while any(core_of(comm).devices.outstanding for comm in comms):
            if not self.step():
                self.ranks.devices[0].pause()
        for stream in self.streams:
            stream.synchronize()

    def lose(self, how: str | None = None) -> None:
        """Make communicators, let calls of theirs fail, and free them."""
        how = self.rng.choice(LOSSES) if how is None else how
        comms = kept_ranks(SIZE).each(lambda comm: comm.dup())
        for rank, comm in enumerate(comms):  # to allocate waits for the device
            core_of(comm).devices.first_nbytes = _LITTLE
            core_of(comm).devices.stager(self.ranks.devices[rank])
            core_of(comm).devices.messages(self.ranks.devices[rank])
        # What failed may be read by the device yet: nobody else has these.
        arrays = [
            [
                DeviceArray(device, 64 if how == "lengths" and rank else 7),
                DeviceArray(device, 1),
            ]
            for rank, device in enumerate(self.ranks.devices)
        ]
        under_way = []
        for rank, comm in enumerate(comms):
            x, y = arrays[rank]
            with self.streams[rank]:
                calls = [comm.allreduce(x, nonblocking=True)]
                if how == "message":
                    calls.append(comm.recv(y, source=1 - rank, nonblocking=True))
                if how == "given up" and rank:
                    core_of(comm).give_up("it was told to")
            self.made["lost"] += len(calls)
            under_way += [(comm, request) for request in calls]
        if how == "message":
            core_of(comms[0]).give_up("nobody sends")
        for _ in range(200):
            self.step()
            for device in self.ranks.devices:
                device.event_query(self._mark(device))
        for comm, request in under_way:
            request.be_quiet()
            try:
                while not request.test():
                    if core_of(comm).devices.outstanding and not self.step():
                        core_of(comm).give_up("the others are gone")
            except CommError as error:
                self.ended[type(error).__name__] += 1
        for stream in self.streams:
            stream.synchronize()
        under_way.clear()
        for comm in comms:
            comm.free()
        for array in (each for some in arrays for each in some):
            array.free()
        self.lost[how] += 1

    def _mark(self, device: Any) -> int:
        """Return an event that happened; to ask for it lets others go on."""
        if not hasattr(self, "_marks"):
            self._marks = {id(each): each.event_create() for each in self.ranks.devices}
        return self._marks[id(device)]

    # -- counts --------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return what there is now, with nothing under way."""
        self.world.run_until_idle()
        # What calls held on to goes with the next call of the rank.
        nothing = np.zeros(0, "f4")
        calls = [
            rank.comm.allreduce(nothing, nonblocking=True) for rank in self.ranks.ranks
        ]
        while not all([call.test() for call in calls]):
            pass
        gc.collect()
        # What lost communicators have left comes back as ranks look, once it may.
        for rank in self.ranks.ranks:
            release_finished(core_of(rank.comm).world)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        arrays = [each for some in self.rounds for at in some for each in at.arrays]
        works = [(rank.stager, rank.messages) for rank in self.ranks.ranks]
        live = self.world.live
        return {
            "calls": self.calls,
            **{f"lost: {how}": self.lost[how] for how in LOSSES},
            "resident_nbytes": pages * resource.getpagesize(),
            "python_blocks": sys.getallocatedblocks(),
            "references": sum(map(sys.getrefcount, arrays)),
            "outstanding": sum(
                core_of(r.comm).devices.outstanding for r in self.ranks.ranks
            ),
            "works": sum(core_of(r.comm).num_device_work for r in self.ranks.ranks),
            "pinned_nbytes": sum(w.pinned_nbytes for pair in works for w in pair),
            "pooled_events": sum(w.num_events for pair in works for w in pair),
            **{
                name: live[name]
                for name in ("blocks", "nbytes", "streams", "events", "graphs", "flags")
            },
        }

    def close(self) -> None:
        """Give everything back but what was lost; see that nothing was wrong."""
        self.world.check()
        self.halos.clear()
        for cart in self.carts:
            cart.free()
        for rank, rounds, field in zip(
            self.ranks.ranks, self.rounds, self.fields, strict=True
        ):
            for at in rounds:
                rank.arrays += at.arrays
            rank.arrays.append(field)
            core_of(rank.comm).devices.close()
            forget_work(rank.comm)
            rank.end()


def left(samples: list[Counts], allowed: Allowed) -> Counts:
    """Return what is there that may not be, by name.

    Events are compared with the middle of the run: pools keep as many as were ever in
    use at once, which grows for ever, but ever more slowly; a leak goes on growing.
    """
    first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]
    found = {}
    for name, value in last.items():
        if name == "calls" or name.startswith("lost"):
            continue
        before = middle if name.endswith("events") else first
        losses = sum(last[f"lost: {how}"] - before[f"lost: {how}"] for how in LOSSES)
        grown = value - before[name]
        most = {
            "events": allowed.pooled_events,
            "pooled_events": allowed.pooled_events,
            "resident_nbytes": allowed.resident_nbytes
            + int(allowed.nbytes_per_call * (last["calls"] - before["calls"]))
            + allowed.resident_nbytes_per_loss * losses,
            "python_blocks": allowed.python_blocks
            + allowed.python_blocks_per_loss * losses,
        }.get(name, 0)
        if grown > most:
            found[name] = grown
    return found


def measure(
    calls: int, seed: int, report: Callable[[Counts], None] | None = None, **plants: Any
) -> tuple[list[Counts], Workload]:
    """Make calls; return what there was as it went on."""
    work = Workload(seed, **plants)
    work.saturate()
    work.run(2_000)
    work.saturate()
    for how in LOSSES:
        work.lose(how)
    samples = [work.counts()]
    for part in range(SAMPLES):
        work.run(calls * (part + 1) // SAMPLES - (work.calls - samples[0]["calls"]))
        samples.append(work.counts())
        if report is not None:
            report(samples[-1])
    return samples, work


def main() -> int:
    """Run a command line; return 1 where something is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="what is found, as JSON")
    args = parser.parse_args()
    start = time.monotonic()

    def report(sample: Counts) -> None:
        print(f"{time.monotonic() - start:.0f} s: {sample}", flush=True)

    samples, work = measure(args.calls, args.seed, report)
    found = left(samples, Allowed())
    work.close()
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "seconds": round(time.monotonic() - start, 1),
        "commands": work.world.commands,
        "calls": dict(work.made),
        "ends": dict(work.ended),
        "allowed": asdict(Allowed()),
        "samples": samples,
        "left": found,
    }
    text = json.dumps(result, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
