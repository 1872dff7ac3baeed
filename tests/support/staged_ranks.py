# SPDX-License-Identifier: Apache-2.0
"""Ranks with devices: callers and progress threads, simulated or real ones.

On a simulated device every rank has a caller and a thread that makes progress, and the
seed says who goes on when. On devices of threads the engine's own thread does it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

import numpy as np

from commrt.comm import Communicator, core_of
from commrt.devices import DeviceArray, DeviceStream, SimWorld, ThreadDevice
from commrt.errors import OrderingError
from commrt.fusion.device_buckets import DeviceBuckets
from commrt.local import LocalRanks

T = TypeVar("T")

_WORLDS: dict[int, LocalRanks] = {}
"""Making ranks takes longer than many a simulated run, since they measure how near
they are to each other: tests have duplicates of these, which nothing breaks."""
_KEPT: dict[int, LocalRanks] = {}


def kept_ranks(size: int) -> LocalRanks:
    """Return ranks that no run has broken."""
    ranks = _KEPT.get(size)
    if ranks is None or any(core_of(comm).failure for comm in ranks.comms):
        if size not in _WORLDS:
            _WORLDS[size] = LocalRanks(size)
        ranks = _KEPT[size] = copy(_WORLDS[size])
        ranks.comms = _WORLDS[size].each(lambda comm: comm.dup())
    return ranks


def renew_ranks() -> None:
    """Let the next run have communicators of its own: this one left something."""
    for ranks in _KEPT.values():
        for comm in ranks.comms:
            core_of(comm).devices.close()  # no progress is made for what hangs
    _KEPT.clear()


def forget_ranks() -> None:
    """Drop what is kept; between modules, and after a run that left something."""
    _KEPT.clear()
    _WORLDS.clear()


class WrongResultError(AssertionError):
    """What came is not what was given."""


def found_by(ranks: SimRanks, function: Callable[[Rank], Any]) -> str:
    """Run it; return what is found: "", or any of "race", "deadlock" and "wrong"."""
    found = set()
    try:
        ranks.run(function)
        if not ranks.world.violations:
            ranks.close()
    except WrongResultError:
        found.add("wrong")
    except OrderingError as error:
        found.add(error.status)
    if ranks.world.violations:
        found.add("race")
    if found:
        renew_ranks()
    return " and ".join(sorted(found))


def attach_anew(comm: Communicator, backend: str) -> Any:
    """Attach a backend to a communicator once more; return its new object."""
    old = core_of(comm).attached[backend]
    core_of(comm).attached[backend] = type(old)(old.backend, old.group, old.beside)
    return core_of(comm).attached[backend]


def forget_work(comm: Communicator) -> None:
    """Let a communicator make its work on devices anew."""
    core = core_of(comm)
    core.devices._stagers.clear()
    core.devices._messages.clear()
    core.fusion.buckets = DeviceBuckets(core, core.devices, core.fusion)
    core.devices.host_jobs._works.clear()
    core.devices.forget_plans()


class Rank:
    """What a caller works with."""

    carrier = "staged"
    """What is to move boxes."""

    def __init__(self, comm: Communicator, device: Any, **staging: int) -> None:
        self.comm = comm
        self.device = device
        self.rank = comm.rank
        forget_work(comm)
        for name, value in staging.items():
            setattr(core_of(comm).devices, name, value)
        self.stager = core_of(comm).devices.stager(device)
        self.messages = core_of(comm).devices.messages(device)
        self.ends_with: SimWorld | None = None
        self.stop = device.pinned_alloc(64)
        device.flag_store(self.stop, 0)
        self.pinned = [self.stop]
        self.arrays: list[DeviceArray] = []
        self.asides: list[DeviceStream] = []
        self.fields: list[DeviceArray] = []

    def begin(self) -> None:
        """Make the caller's stream; in the thread of the caller."""
        self.stream = DeviceStream(self.device)

    def array(self, values: Any, *, shape: Any = None) -> DeviceArray:
        """Return an array that the caller's stream fills once it comes to that."""
        return self.array_in(values, self.stream)

    def array_in(self, values: Any, stream: DeviceStream) -> DeviceArray:
        """Return an array that a stream fills once it comes to that."""
        given = np.ascontiguousarray(values)
        made = DeviceArray(self.device, given.shape, given.dtype)
        source = self.pin(given.nbytes)
        self.device.write(source, given.tobytes())
        self.device.memcpy_async(made.address, source, given.nbytes, stream.handle)
        self.arrays.append(made)
        return made

    def fill(self, array: DeviceArray, value: float) -> None:
        """Overwrite an array in the caller's stream."""
        values = np.full(array.shape, value, array.dtype)
        source = self.pin(array.nbytes)
        self.device.write(source, values.tobytes())
        self.device.memcpy_async(
            array.address, source, array.nbytes, self.stream.handle
        )

    def fetch(self, array: DeviceArray) -> Callable[[], Any]:
        """Copy an array in the caller's stream; the result says what it was then."""
        return self.fetch_in(array, self.stream)

    def fetch_in(self, array: DeviceArray, stream: DeviceStream) -> Callable[[], Any]:
        """Copy an array in a stream."""
        target = self.pin(array.nbytes)
        self.device.memcpy_async(target, array.address, array.nbytes, stream.handle)

        def value() -> Any:
            raw = self.device.read(target, array.nbytes)
            return np.frombuffer(raw, array.dtype).reshape(array.shape)

        return value

    def copy(self, targets: list[int], sources: list[int]) -> None:
        """Copy fields in the caller's stream, to or from pinned memory."""
        for target, source, field in zip(targets, sources, self.fields, strict=True):
            self.device.memcpy_async(target, source, field.nbytes, self.stream.handle)

    def pin(self, nbytes: int) -> int:
        """Return pinned memory that goes with this rank."""
        address = int(self.device.pinned_alloc(max(1, nbytes)))
        self.pinned.append(address)
        return address

    def go_on(self) -> None:
        """Raise where a run ends with the first thing that is found, and it is."""
        if self.ends_with is not None and self.ends_with.violations:
            raise OrderingError("enough is found", "race")

    def progress(self) -> None:
        """Make progress until the caller is done."""
        engine = core_of(self.comm).world.engine
        while not self.device.flag_load(self.stop):
            self.go_on()
            if not engine.step():
                self.device.pause()

    def finish(self) -> None:
        """Make progress until the host has seen the end of all calls."""
        while core_of(self.comm).devices.outstanding:
            if not core_of(self.comm).world.engine.step():
                self.device.pause()

    def end(self) -> None:
        """Give memory back that the caller used."""
        for array in self.arrays:
            array.free()
        for address in self.pinned:
            self.device.pinned_free(address)


class SimRanks:
    """Ranks on one simulated GPU."""

    def __init__(
        self,
        size: int,
        seed: int,
        queues: int = 8,
        *,
        bug: str | None = None,
        message_bug: str | None = None,
        staging: dict[str, int] | None = None,
        ends_early: bool = False,
        **switches: Any,
    ) -> None:
        """``ends_early``: where callers ask, a run ends with the first thing found.

        Most planted bugs show in the first calls; a run to the end takes three times as
        long, and tells nothing more.
        """
        self.world = SimWorld(seed=seed, queues=queues, **switches)
        self.devices = [
            self.world.device(f"rank {rank}", ordinal=0) for rank in range(size)
        ]
        made = kept_ranks(size)
        self.ranks = [
            Rank(comm, device, **(staging or {}))
            for comm, device in zip(made.comms, self.devices, strict=True)
        ]
        for each in self.ranks:
            each.ends_with = self.world if ends_early else None
            if bug is not None:
                each.stager.plant(bug)
            if message_bug is not None:
                each.messages.plant(message_bug)

    def run(self, function: Callable[[Rank], T]) -> list[T]:
        """Run a function on every rank, with progress beside; return the results."""

        def caller(rank: Rank) -> T:
            rank.begin()
            try:
                with rank.stream:
                    return function(rank)
            finally:
                # Where nothing goes on, who waits learns of it, too.
                with suppress(OrderingError):
                    rank.device.flag_store(rank.stop, 1)

        threads: dict[str, Callable[[], Any]] = {}
        for rank in self.ranks:
            threads[f"caller {rank.rank}"] = lambda rank=rank: caller(rank)
            threads |= self.threads_of(rank)
        try:
            found = self.world.run(threads)
        except BaseException:
            renew_ranks()
            raise
        return [found[f"caller {rank.rank}"] for rank in self.ranks]

    def threads_of(self, rank: Rank) -> dict[str, Callable[[], Any]]:
        """What runs beside a caller, by name."""
        return {f"progress {rank.rank}": rank.progress}

    def close(self) -> None:
        """Give everything back, and see that nothing is left and nothing was wrong."""
        for rank in self.ranks:
            core_of(rank.comm).devices.close()
            forget_work(rank.comm)
            rank.end()
        assert self.world.live_nbytes == 0
        self.world.check()


def hides_from(
    seeds: range, make: Callable[[int], SimRanks], function: Callable[[Rank], Any]
) -> list[int]:
    """Return the seeds by which a planted bug is not found, nor by two beside each.

    One interleaving in some hundred has done what a bug does not wait for.
    """

    def is_found(seed: int) -> bool:
        ranks = make(seed)
        try:
            ranks.run(function)
        except OrderingError:
            return True
        finally:
            renew_ranks()
            forget_ranks()
        return bool(ranks.world.violations)

    beside = range(0, 3 * _FAR, _FAR)
    return [
        seed for seed in seeds if not any(is_found(seed + other) for other in beside)
    ]


_FAR = 1000
"""Farther than a full run's seeds reach."""


def on_threads(
    size: int, function: Callable[[Rank], T], *, survives: bool = True, **device: Any
) -> list[T]:
    """Run a function on ranks with devices of threads, and the engine's threads.

    ``survives`` is False where a device is broken on the way.
    """
    from commrt.local import run

    def main(comm: Communicator) -> T:
        with ThreadDevice(
            **{**device, "seed": device.get("seed", 0) + comm.rank}
        ) as gpu:
            rank = Rank(comm, gpu)
            rank.begin()
            with rank.stream:
                result = function(rank)
            if survives:
                rank.stream.synchronize()
                comm.free()
                rank.end()
            return result

    return run(size, main)
