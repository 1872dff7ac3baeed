# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: ordering bugs are found without a GPU, and found again by a seed.

A world has devices, each what one process sees of a GPU, and host threads that use
them. Its scheduler draws from the seed which command runs next and which host thread
goes on; of host threads only one runs at a time, and it gives way in its calls of the
device. Vector clocks follow what orders accesses to memory. A pair of accesses that
nothing orders is found in whatever order it happened; so is that nothing can go on.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from commrt._native import SimDevice
from commrt._native import SimWorld as _World
from commrt.errors import OrderingError, UsageError

__all__ = ["SimDevice", "SimOptions", "SimWorld"]


@dataclass(frozen=True)
class SimOptions:
    """Options of a simulated world. Switches are on where CUDA is so, or may be."""

    seed: int = 0
    """Draws all that happens."""
    queues: int = 8
    """Hardware queues of a device, shared by its streams in turn; 0: one for each."""
    preempt: float | None = None
    """Probability that a call lets others go on first, asked again after each of them;
    None: drawn from the seed."""
    check_order: bool = True
    """Find accesses to memory that nothing orders."""
    poison: bool = True
    """Fill memory when it is allocated and when it is freed."""
    alloc_syncs: bool = True
    """alloc() waits for all that the device was given."""
    free_syncs: bool = True
    """free() waits likewise; without, memory in use is found."""
    pinned_alloc_syncs: bool = True
    """pinned_alloc() and pinned_free() wait likewise."""
    first_launch_syncs: bool = True
    """The first launch of a kernel loads it, and waits; load_kernels() loads all."""
    legacy_stream_syncs: bool = True
    """Stream 0 and blocking streams wait for each other."""
    pageable_copies_block: bool = True
    """memcpy_async() with ordinary host memory waits for its stream."""
    host_copies_block: bool = True
    """memcpy_async() between host memory, pinned too, returns when it is done."""
    most_commands: int = 1020
    """Commands that a stream holds; a call that gives it one more waits. 0: any
    number."""
    unrecorded_wait_passes: bool = True
    """Waiting for an event without a record is nothing; without, an error."""
    wait_keeps_record: bool = True
    """A wait means the latest record when it was told; without, when it runs."""
    capture_forbids: bool = True
    """Calls that may disturb the capture of a stream fail, and end it."""
    ipc_checks: bool = True
    """Find memory that is freed while another process has it open."""
    memory_flags: bool = True
    """Streams can write flags and wait for them."""


class SimWorld:
    """Devices and host threads under one scheduler; ``with`` checks at its end.

    Calls from a thread that ``run`` did not start count as the host thread "main".
    """

    def __init__(self, options: SimOptions | None = None, **changes: Any) -> None:
        """Make a world of ``options`` with changes: ``SimWorld(seed=3, queues=1)``."""
        try:
            self.options = dataclasses.replace(options or SimOptions(), **changes)
        except TypeError:
            known = ", ".join(each.name for each in dataclasses.fields(SimOptions))
            raise UsageError(
                f"SimWorld has no such option among {sorted(changes)}. Known: {known}."
            ) from None
        given = dataclasses.asdict(self.options)
        if self.options.preempt is None:
            del given["preempt"]
        self._world = _World(given)
        self._devices: list[SimDevice] = []

    def device(
        self, name: str | None = None, *, ordinal: int | None = None
    ) -> SimDevice:
        """Return a new device; those of the same ``ordinal`` are on the same GPU."""
        name = name or f"sim{len(self._devices)}"
        made = self._world.device(name, -1 if ordinal is None else ordinal)
        self._devices.append(made)
        return made

    def run(self, threads: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
        """Run functions as host threads, by name; return what they return.

        An error of one is raised once all have ended; rather one that is not about a
        deadlock, which may be what the other error led to.
        """
        results: dict[str, Any] = {}
        errors: dict[str, BaseException] = {}

        def main(index: int, name: str) -> None:
            self._world.attach(index)
            try:
                results[name] = threads[name]()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[name] = error
            finally:
                self._world.detach()

        if not threads:
            return results
        self._world.begin(list(threads))
        started = [
            threading.Thread(target=main, args=pair, name=pair[1], daemon=True)
            for pair in enumerate(threads)
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        in_order = [errors[name] for name in threads if name in errors]
        if in_order:
            raise min(in_order, key=lambda error: isinstance(error, OrderingError))
        return {name: results[name] for name in threads}

    def step(self) -> bool:
        """Run one command that can run, drawn by the seed; False if there is none."""
        return self._world.step()

    def run_until_idle(self) -> None:
        """Run all commands; OrderingError where some are left that cannot run."""
        while self._world.step():
            pass
        if self._world.pending:
            raise OrderingError(
                f"{self._world.pending} commands of simulated devices cannot run: the "
                f"first command of each hardware queue waits for a flag or an event "
                f"that nothing sets. Set it, or order the streams in another way",
                "deadlock",
            )

    def check(self) -> None:
        """Raise OrderingError if anything was found so far."""
        found = self.violations
        if found:
            number = self._world.num_violations
            raise OrderingError(
                f"{number} violation{'s' * (number > 1)} (seed {self.options.seed}, "
                f"{self.options.queues} hardware queues):\n  " + "\n  ".join(found[:8]),
                "race",
            )

    @property
    def violations(self) -> list[str]:
        """The first 64 violations that were found."""
        return self._world.violations

    @property
    def deadlock(self) -> str:
        """Reason why nothing can go on; empty if something can."""
        return self._world.deadlock

    @property
    def commands(self) -> int:
        """Number of commands that the devices were given."""
        return self._world.commands

    @property
    def pending(self) -> int:
        """Number of commands that have not run."""
        return self._world.pending

    @property
    def digest(self) -> int:
        """A number that says what ran when: equal for equal runs."""
        return self._world.digest

    @property
    def live(self) -> dict[str, int]:
        """Numbers of things that were made and not given back, on all devices, by kind.

        ``blocks`` of memory and their ``nbytes``, ``streams``, ``events``, ``graphs``,
        ``captures``, and ``flags`` in memory; besides what the simulation itself keeps:
        ``ranges`` of memory that were touched, ``actors`` and ``locks``.
        """
        return self._world.live

    @property
    def live_nbytes(self) -> int:
        """Bytes that were allocated and not freed."""
        return self._world.live_nbytes

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.check()
