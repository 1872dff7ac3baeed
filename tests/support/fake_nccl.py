# SPDX-License-Identifier: Apache-2.0
"""A pretended libnccl for ranks that are threads, and what tests ask it.

    nccl = FakeNccl(22809)
    with nccl.ranks(4) as comms:            # an NcclComm per rank
        nccl.on_each(comms, lambda comm: ...)
    nccl.check()                            # nothing wrong was called, nothing waits

The library is C++ (tests/support/nccl_stub), compiled once: it runs collectives on host
memory when the kernels of all ranks have come to the heads of their streams, and writes
down every call that NCCL would not like.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stub_library import build_stub

from commrt import _native
from commrt.bootstrap import ThreadWorld
from commrt.nccl import Library, NcclComm, NcclConfig

__all__ = ["FakeNccl", "build"]

T = TypeVar("T")

DEADLINE_S = 300.0


def build(*defines: str) -> Path:
    """Return the compiled stub, made where the sources have changed."""
    # Named like the original, so that it is found among what is loaded.
    headers = ("devices/device.hpp", "devices/foreign_kernel.hpp")
    return build_stub(
        *("nccl_stub", "libnccl.so.2"),
        beside=["nccl_common"],
        headers=headers,
        defines=defines,
    )


class FakeNccl:
    """The library, and its state. One at a time."""

    def __init__(self, version: int = 22809) -> None:
        path = build()
        self._stub = ctypes.CDLL(str(path))
        for name in ("violations", "log", "pending"):
            getattr(self._stub, f"stub_{name}").restype = ctypes.c_char_p
        self._stub.stub_counter.restype = ctypes.c_long
        self._stub.stub_visits.restype = ctypes.c_long
        self._stub.stub_reset(version)
        opened, problem = _native.nccl_open(str(path), only_loaded=False)
        assert opened is not None, problem
        self.library = Library(opened, "test")

    def serve_devices(self) -> Library:
        """Work in the streams of commrt's devices without hardware; return the library.

        Communicators that are made from here on belong to the thread's current one.
        """
        function = ctypes.c_void_p(_native.current_device_function())
        self._stub.stub_serve(function)
        kinds = frozenset(("simulated", "threads"))
        return Library(self.library.native, "test", kinds)

    def set(self, name: str, value: int) -> None:
        """Set ``in_progress``, ``group_limit``, ``hang_init`` (rank + 1) and so on."""
        self._stub.stub_set(name.encode(), ctypes.c_long(value))

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """Make one call of ``function``, after ``after`` others, return ``code``."""
        self._stub.stub_fail(function.encode(), code, ctypes.c_long(after))

    def async_error(self, comm: Any, code: int) -> None:
        """Let the communicator of one rank fail in the background."""
        self._stub.stub_async_error(ctypes.c_void_p(comm.pointer), code)

    def unhang(self, comm: NcclComm) -> None:
        """End what ``set("hang_...")`` began."""
        self._stub.stub_unhang(ctypes.c_void_p(comm.pointer))

    def visits(self, comm: NcclComm) -> int:
        """Return how many calls there were; ``set("visits", n)`` waits for the n-th."""
        return int(self._stub.stub_visits(ctypes.c_void_p(comm.pointer)))

    def depth(self) -> int:
        """Return how many groups the calling thread has left open."""
        return int(self._stub.stub_depth())

    def release(self) -> None:
        """Let aborts and destructions go on that hang."""
        self._stub.stub_release()

    def counter(self, name: str) -> int:
        """Return how many calls, groups, polls, made, destroyed, aborted."""
        return int(self._stub.stub_counter(name.encode()))

    def violations(self) -> list[str]:
        """Return what was called wrongly."""
        return self._lines("violations")

    def pending(self) -> list[str]:
        """Return what waits in streams for what has not been called."""
        return self._lines("pending")

    def log(self) -> list[str]:
        """Return the calls since ``set("log", 1)``."""
        return self._lines("log")

    def check(self) -> None:
        """Assert that every call was right and that all has ended."""
        wrong = self.violations()
        assert wrong == [], wrong
        assert self.pending() == []

    def set_device(self, number: int) -> None:
        """Set the calling thread's device, as cudaSetDevice does."""
        self._stub.stub_set_device(number)

    def create(
        self,
        world: ThreadWorld,
        rank: int,
        timeout_s: float = DEADLINE_S,
        **config: Any,
    ) -> NcclComm:
        """Return one rank's communicator of all ranks of ``world``."""
        self.set_device(rank)
        return NcclComm.create(
            world.bootstrap(rank),
            config=NcclConfig(**config),
            taken=self.library,
            timeout_s=timeout_s,
        )

    @contextlib.contextmanager
    def ranks(self, size: int, **config: Any) -> Iterator[list[NcclComm]]:
        """Give a communicator per rank; close them all at the end."""
        world = ThreadWorld(size)
        comms = self.threads(size, lambda rank: self.create(world, rank, **config))
        try:
            yield comms
        except BaseException:
            self.on_each(comms, lambda comm: comm.abort(1.0))
            raise
        self.on_each(comms, lambda comm: comm.close(DEADLINE_S))

    def on_each(
        self, comms: Sequence[NcclComm], call: Callable[[NcclComm], T]
    ) -> list[T]:
        """Call with every rank's communicator, each on a thread of its own."""
        return self.threads(len(comms), lambda rank: call(comms[rank]))

    def threads(self, size: int, call: Callable[[int], T]) -> list[T]:
        """Call with every rank on a thread of its own; raise the first rank's error."""
        results: list[Any] = [None] * size
        errors: list[BaseException | None] = [None] * size

        def body(rank: int) -> None:
            self.set_device(rank)
            try:
                results[rank] = call(rank)
            except BaseException as error:  # noqa: BLE001  raised below
                errors[rank] = error

        threads = [
            threading.Thread(target=body, args=(rank,), daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        assert not [thread for thread in threads if thread.is_alive()], "ranks hang"
        for error in errors:
            if error is not None:
                raise error
        return results

    def errors(
        self, comms: Sequence[NcclComm], call: Callable[[NcclComm], object]
    ) -> list[Exception | None]:
        """Call on every rank; return the error of each."""

        def body(comm: NcclComm) -> Exception | None:
            try:
                call(comm)
            except Exception as error:  # noqa: BLE001  the test looks at it
                return error
            return None

        return self.on_each(comms, body)

    def _lines(self, what: str) -> list[str]:
        text: bytes = getattr(self._stub, f"stub_{what}")()
        return text.decode().splitlines()
