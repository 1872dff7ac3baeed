# SPDX-License-Identifier: Apache-2.0
"""An MPI library in Python, for ranks of one process: messages, and errors on demand.

    with FakeMpi().ranks([[0], [1]]) as ranks:      # two nodes of one rank each
        ranks.mpi.fail("MPI_Isend", after=2)        # the third call fails

The engine knows MPI as a table of function addresses; here they are ctypes callbacks.
A communicator's handle says which rank calls, so all ranks may share a thread, and
every test is repeatable. Short messages are complete when sent; others when received.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from commrt import _native, local
from commrt.core import Core
from commrt.launch.detect import LaunchInfo
from commrt.local import LocalRanks
from commrt.mpi import library
from commrt.runtime import open_world

__all__ = ["ERR_OTHER", "ERR_TRUNCATE", "FakeMpi", "MpiRanks", "prototype"]

ERR_OTHER, ERR_TRUNCATE = 16, 15
_FIRST_HANDLE = 1000
_EAGER_NBYTES = 1024
_COUNT_AT = 0  # where a status holds the length of its message
_CANCELLED_AT = 8

_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "h": ctypes.c_uint64,
}
_SIGNATURES = {
    "MPI_Isend": "pihiihp",
    "MPI_Irecv": "pihiihp",
    "MPI_Test": "ppp",
    "MPI_Cancel": "p",
    "MPI_Iprobe": "iihpp",
    "MPI_Get_count": "php",
    "MPI_Test_cancelled": "pp",
    "MPI_Error_class": "ip",
    "MPI_Error_string": "ipp",
    "MPI_Iallreduce": "ppihhhp",
}

# Callbacks must outlive every engine that may still call them.
_KEPT: list[Any] = []

_Route = tuple[int, int, int]
"""Source, destination and tag: what goes one route arrives in order."""


@dataclass
class _Message:
    route: _Route
    data: bytes
    address: int
    """Where a long message lies until it is received."""
    nbytes: int
    taken: bool = False


@dataclass
class _Receive:
    route: _Route
    address: int
    room: int
    message: _Message | None = None
    cancelled: bool = False


def prototype(name: str) -> Any:
    """Return the ctypes type of one of MPI's functions, as the engine calls it."""
    types = [_TYPES[code] for code in _SIGNATURES.get(name, "")]
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)


class FakeMpi:
    """The library. ``fail`` makes calls fail, ``hold`` keeps messages from arriving."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self.held = False
        self._failures: dict[str, tuple[int, int]] = {}
        self._messages: dict[_Route, deque[_Message]] = defaultdict(deque)
        self._receives: dict[_Route, deque[_Receive]] = defaultdict(deque)
        self._requests: dict[int, _Message | _Receive | None] = {}
        self._next_request = 1
        table = dict.fromkeys(library.FUNCTIONS, 0)
        for name in library.FUNCTIONS:
            callback = prototype(name)(self._entry(name))
            _KEPT.append(callback)
            address = ctypes.cast(callback, ctypes.c_void_p).value
            assert address is not None
            table[name] = address
        _native.load_mpi(table, 0, 0, ERR_TRUNCATE)

    def ranks(self, nodes: Sequence[Sequence[int]]) -> MpiRanks:
        """Return all ranks of ``nodes``, joined by this library."""
        return MpiRanks(self, [list(ranks) for ranks in nodes])

    def fail(self, name: str, code: int = ERR_OTHER, *, after: int = 0) -> None:
        """Make the call of ``name`` that follows ``after`` others return ``code``."""
        self._failures[name] = (after, code)

    def on_the_way(self) -> int:
        """Return how many messages nobody has received."""
        return sum(map(len, self._messages.values()))

    def _entry(self, name: str) -> Callable[..., int]:
        function = getattr(self, "_" + name.removeprefix("MPI_").lower(), None)

        def call(*arguments: Any) -> int:
            with self._lock:
                self.calls.append(name)
                if name in self._failures:
                    after, code = self._failures.pop(name)
                    if after == 0:
                        return code
                    self._failures[name] = (after - 1, code)
                return int(function(*arguments)) if function is not None else ERR_OTHER

        return call

    # -- the functions, without their prefix -------------------------------------------

    def _isend(
        self,
        address: int,
        count: int,
        _type: int,
        dest: int,
        tag: int,
        comm: int,
        request: int,
    ) -> int:
        short = count <= _EAGER_NBYTES
        data = ctypes.string_at(address, count) if short and count else b""
        route = comm - _FIRST_HANDLE, dest, tag
        message = _Message(route, data, address or 0, count)
        self._messages[route].append(message)
        self._start(request, None if short else message)
        return 0

    def _irecv(
        self,
        address: int,
        count: int,
        _type: int,
        source: int,
        tag: int,
        comm: int,
        request: int,
    ) -> int:
        route = source, comm - _FIRST_HANDLE, tag
        receive = _Receive(route, address or 0, count)
        self._receives[route].append(receive)
        self._start(request, receive)
        self._deliver(route)
        return 0

    def _test(self, request: int, flag: int, status: int) -> int:
        number = ctypes.c_uint64.from_address(request).value
        pending = self._requests.get(number)
        if pending is not None:
            self._deliver(pending.route)
        done, code = True, 0
        if isinstance(pending, _Message):
            done = pending.taken
        elif isinstance(pending, _Receive):
            done = pending.message is not None or pending.cancelled
            ctypes.c_int.from_address(status + _CANCELLED_AT).value = pending.cancelled
            if pending.message is not None:
                arrived = pending.message.nbytes
                ctypes.c_int64.from_address(status + _COUNT_AT).value = arrived
                code = ERR_TRUNCATE if arrived > pending.room else 0
        ctypes.c_int.from_address(flag).value = done
        if done:
            self._requests.pop(number, None)
            ctypes.c_uint64.from_address(request).value = 0
        return code

    def _cancel(self, request: int) -> int:
        pending = self._requests[ctypes.c_uint64.from_address(request).value]
        if isinstance(pending, _Receive) and pending.message is None:
            pending.cancelled = True
            self._receives[pending.route].remove(pending)
        return 0

    def _iprobe(self, source: int, tag: int, comm: int, flag: int, status: int) -> int:
        route = source, comm - _FIRST_HANDLE, tag
        self._deliver(route)  # a message that has a receive is not found
        found = () if self.held else self._messages[route]
        ctypes.c_int.from_address(flag).value = bool(found)
        if found:
            ctypes.c_int64.from_address(status + _COUNT_AT).value = found[0].nbytes
        return 0

    def _get_count(self, status: int, _type: int, count: int) -> int:
        nbytes = ctypes.c_int64.from_address(status + _COUNT_AT).value
        ctypes.c_int.from_address(count).value = nbytes
        return 0

    def _test_cancelled(self, status: int, flag: int) -> int:
        cancelled = ctypes.c_int.from_address(status + _CANCELLED_AT).value
        ctypes.c_int.from_address(flag).value = cancelled
        return 0

    def _error_class(self, code: int, found: int) -> int:
        ctypes.c_int.from_address(found).value = code
        return 0

    def _error_string(self, code: int, text: int, length: int) -> int:
        said = f"pretended error {code}\nin two lines".encode()
        ctypes.memmove(text, said + b"\0", len(said) + 1)
        ctypes.c_int.from_address(length).value = len(said)
        return 0

    def _iallreduce(self, *arguments: int) -> int:
        self._start(arguments[-1], _Message((0, 0, 0), b"", 0, 0))  # never complete
        return 0

    # -- matching ------------------------------------------------------------------

    def _start(self, request: int, pending: _Message | _Receive | None) -> None:
        self._requests[self._next_request] = pending
        ctypes.c_uint64.from_address(request).value = self._next_request
        self._next_request += 1

    def _deliver(self, route: _Route) -> None:
        messages, receives = self._messages[route], self._receives[route]
        while messages and receives and not self.held:
            message, receive = messages.popleft(), receives.popleft()
            nbytes = min(message.nbytes, receive.room)
            if nbytes:
                ctypes.memmove(receive.address, message.data or message.address, nbytes)
            message.taken = True
            receive.message = message


class MpiRanks(LocalRanks):
    """LocalRanks on pretended nodes: between them messages go through a FakeMpi."""

    def __init__(self, mpi: FakeMpi, nodes: list[list[int]]) -> None:
        self.mpi, self.nodes = mpi, nodes

        def connect(world: Any, rank: int, size: int, timeout_s: float) -> Core:
            launch = LaunchInfo("single", rank, size, "threads of one process")
            mine = open_world(world.bootstrap(rank), launch, in_process=True)
            mine.timeout_s, mine.nodes = timeout_s, nodes
            mine.mpi = _FIRST_HANDLE + rank
            mine.mpi_ranks = tuple(range(size))
            identity = mine.agree_id(range(size), "world")
            return Core(mine, range(size), "local", identity)

        with (
            mock.patch.object(local, "_connect", connect),
            mock.patch.object(library, "handle", lambda comm: comm),
        ):
            super().__init__(sum(map(len, nodes)))


_IDLE_PASSES = 70
"""So many without progress, and nothing will happen: a rank that needs nothing looks
for messages in every 64th."""


def settle(ranks: MpiRanks) -> None:
    """Step all ranks until nothing moves."""
    idle = 0
    while idle < _IDLE_PASSES:
        moved = [ranks.step(rank) for rank in range(len(ranks.comms))]
        idle = 0 if any(moved) else idle + 1
