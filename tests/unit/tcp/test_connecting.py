# SPDX-License-Identifier: Apache-2.0
"""Ranks of different nodes find each other by TCP, and turn strangers away."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from commrt.bootstrap.threads import ThreadWorld
from commrt.errors import BackendError, TimeoutError_
from commrt.tcp.connecting import connect_ranks

DEADLINE_S = 300.0
NODES = ([[0], [1]], [[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1, 3, 4]])


class Watched:
    """A bootstrap whose exchanges a test sees, and may change."""

    def __init__(self, real: Any, change: Callable[[str, list[bytes]], None]) -> None:
        self._real, self._change = real, change
        self.rank, self.size = real.rank, real.size
        self.gone, self.idle = real.gone, real.idle

    def exchange(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        said = [*self._real.exchange(members, key, blob, timeout_s)]
        self._change(key, said)
        return said


def connect_all(
    run_threads: Any,
    nodes: list[list[int]],
    change: Callable[[str, list[bytes]], None] = lambda key, said: None,
    timeout_s: float = DEADLINE_S,
    own: Callable[[int], str | BackendError] = lambda rank: "127.0.0.1",
) -> list[Any]:
    """Return what each rank has got: its sockets, or its error."""
    size = sum(map(len, nodes))
    world = ThreadWorld(size)

    def connect(rank: int) -> Any:
        here = next(ranks for ranks in nodes if rank in ranks)
        away = [other for other in range(size) if other not in here]
        bootstrap: Any = Watched(world.bootstrap(rank), change)
        try:
            return connect_ranks(bootstrap, away, own(rank), timeout_s)
        except (BackendError, TimeoutError_) as error:
            return error

    return list(run_threads(size, connect))


@pytest.fixture
def closing() -> Iterator[list[socket.socket]]:
    kept: list[socket.socket] = []
    yield kept
    for one in kept:
        one.close()


def check_sockets(found: list[Any], closing: list[socket.socket]) -> None:
    """Check that each lane of each pair leads from one to the other."""
    for mine in found:
        closing += [one for lanes in mine.values() for one in lanes]
    for rank, mine in enumerate(found):
        for peer, lanes in mine.items():
            for lane, one in enumerate(lanes):
                there = found[peer][rank][lane]
                assert one.getsockname() == there.getpeername()
                assert there.getsockname() == one.getpeername()


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_each_pair_of_nodes_is_connected(
    run_threads: Any, closing: list[socket.socket], nodes: list[list[int]]
) -> None:
    found = connect_all(run_threads, nodes)
    check_sockets(found, closing)
    for rank, mine in enumerate(found):
        here = next(ranks for ranks in nodes if rank in ranks)
        assert {*mine} == {*range(len(found))} - {*here}


HELLOS = {
    "says nothing": b"",
    "speaks HTTP": b"GET / HTTP/1.1\r\nHost: you\r\n\r\n" * 4,
    "has no proof": b"commrt/1" + b"\0\0\0\1\0" + b"\0" * 32,
    "is a rank that is not": b"commrt/1" + b"\0\0\0\7\0" + b"\0" * 32,
    "asks for a lane that is not": b"commrt/1" + b"\0\0\0\1\7" + b"\0" * 32,
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_stranger_is_turned_away(
    run_threads: Any, closing: list[socket.socket], hello: bytes
) -> None:
    """Also one that comes before anybody else: rank 1 is told only after it."""
    lock = threading.Lock()

    def send_stranger(key: str, said: list[bytes]) -> None:
        if key != "tcp/place":
            return
        with lock:
            host, port, *_ = json.loads(said[0])
            stranger = socket.create_connection((host, port))
            stranger.sendall(hello)
            closing.append(stranger)

    found = connect_all(run_threads, [[0], [1]], send_stranger)
    strangers = [*closing]
    check_sockets(found, closing)
    for stranger in strangers:
        stranger.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):  # it said more than was read
            assert stranger.recv(100) == b""


def test_another_process_at_the_port_is_an_error(run_threads: Any) -> None:
    """Rank 1 connects with a listener that does not know its secret."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def mislead(key: str, said: list[bytes]) -> None:
            if key == "tcp/place":
                place = json.loads(said[0])
                place[1] = other.getsockname()[1]
                said[0] = json.dumps(place).encode()

        def answer() -> None:
            for _ in range(2):
                one, _ = other.accept()
                with one:
                    one.recv(100)
                    one.sendall(b"\0" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        _, error = connect_all(run_threads, [[0], [1]], mislead, timeout_s=2.0)
        thread.join()
    assert isinstance(error, BackendError)
    assert re.search("rank 1 cannot connect with rank 0, of another node", str(error))
    assert "another process listens there" in str(error)


def test_where_nobody_listens_is_an_error_and_who_is_missing_is_named(
    run_threads: Any,
) -> None:
    def mislead(key: str, said: list[bytes]) -> None:
        if key == "tcp/place":
            place = json.loads(said[0])
            place[1] = 1
            said[0] = json.dumps(place).encode()

    missed, refused = connect_all(run_threads, [[0], [1]], mislead, timeout_s=1.0)
    assert isinstance(missed, TimeoutError_)
    assert "no connection with ranks [1] within 1 s" in str(missed)
    assert isinstance(refused, BackendError)
    assert "port 1: Connection refused" in str(refused)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("192.0.2.1", r"rank 1 cannot listen at 192\.0\.2\.1: Cannot assign"),
        (BackendError("it has no address here"), "^rank 1: it has no address here$"),
    ],
    ids=["an address of others", "no address"],
)
def test_a_rank_that_cannot_listen_keeps_nobody_waiting(
    run_threads: Any, own: str | BackendError, message: str
) -> None:
    """The others have no deadline that would end their wait."""
    found = connect_all(
        *(run_threads, [[0], [1], [2]]),
        own=lambda rank: own if rank == 1 else "127.0.0.1",
    )
    assert [type(each) for each in found] == [BackendError] * 3
    assert [str(each) for each in found if not re.search(message, str(each))] == []
