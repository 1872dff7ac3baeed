# SPDX-License-Identifier: Apache-2.0
"""Exchanges over threads, a store and a world of one: one contract for all."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from commrt.bootstrap import Bootstrap, ThreadWorld, connect
from commrt.bootstrap.base import poll_until
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import BackendError, PeerFailedError, TimeoutError_, UsageError
from commrt.launch import LaunchInfo


class DictStore:
    """The part of torch's Store that commrt uses, in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self.values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None


Maker = Callable[[int], Callable[[int], Bootstrap]]


def _threads(size: int) -> Callable[[int], Bootstrap]:
    return ThreadWorld(size).bootstrap


def _store(size: int) -> Callable[[int], Bootstrap]:
    store = DictStore()
    return lambda rank: StoreBootstrap(store, rank, size)


def _hash_store(size: int) -> Callable[[int], Bootstrap]:
    reason = "torch is not installed: its HashStore is not tested"
    distributed = pytest.importorskip("torch.distributed", reason=reason)
    store = distributed.HashStore()
    return lambda rank: StoreBootstrap(store, rank, size)


KINDS = pytest.mark.parametrize("make", [_threads, _store, _hash_store])


@KINDS
@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys_blob(make: Maker, size: int, run_threads) -> None:
    join = make(size)

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        return peers.exchange(range(size), "hello", b"x" * rank, 10)

    expected = [b"x" * rank for rank in range(size)]
    assert run_threads(size, rank_main) == [expected] * size


@KINDS
def test_blobs_come_in_members_order_and_from_members_only(
    make: Maker, run_threads
) -> None:
    join = make(4)

    def rank_main(rank: int) -> list[bytes] | None:
        if rank == 1:
            return None
        return join(rank).exchange([3, 0, 2], "some", bytes([rank]), 10)

    expected = [bytes([3]), bytes([0]), bytes([2])]
    assert run_threads(4, rank_main) == [expected, None, expected, expected]


@KINDS
def test_a_key_may_be_used_again(make: Maker, run_threads) -> None:
    join = make(3)

    def rank_main(rank: int) -> list[list[bytes]]:
        peers = join(rank)
        return [
            peers.exchange(range(3), "same", bytes([rank, turn]), 10)
            for turn in range(20)
        ]

    expected = [[bytes([r, turn]) for r in range(3)] for turn in range(20)]
    assert run_threads(3, rank_main) == [expected] * 3


@KINDS
def test_different_keys_may_be_exchanged_at_the_same_time(
    make: Maker, run_threads
) -> None:
    """Two threads of each rank, which start their exchanges in opposite orders."""
    join = make(2)
    ranks = [join(0), join(1)]

    def body(thread: int) -> list[bytes]:
        rank, which = divmod(thread, 2)
        return ranks[rank].exchange([0, 1], f"key {which}", bytes([thread]), 10)

    first, second = [bytes([0]), bytes([2])], [bytes([1]), bytes([3])]
    assert run_threads(4, body) == [first, second, first, second]


@KINDS
def test_timeout_names_exactly_the_members_that_did_not_arrive(
    make: Maker, run_threads
) -> None:
    join = make(5)

    def rank_main(rank: int) -> str:
        if rank in (1, 3):
            return ""
        with pytest.raises(TimeoutError_) as caught:
            join(rank).exchange(range(5), "arena", b"", 0.05)
        assert isinstance(caught.value, TimeoutError)
        return str(caught.value)

    messages = run_threads(5, rank_main)
    for rank in (0, 2, 4):
        assert f"rank {rank}: ranks 1, 3 did not arrive" in messages[rank]
        assert "'arena'" in messages[rank]


@KINDS
def test_a_blob_left_over_from_a_timeout_is_not_taken_for_the_next(
    make: Maker, run_threads
) -> None:
    join = make(2)
    gave_up = threading.Event()

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        if rank == 1:
            gave_up.wait(10)
        try:
            peers.exchange([0, 1], "k", b"old", 0.05)
        except TimeoutError_:
            assert rank == 0
        gave_up.set()
        return peers.exchange([0, 1], "k", b"new", 10)

    assert run_threads(2, rank_main) == [[b"new", b"new"]] * 2


@KINDS
@pytest.mark.parametrize("members", [[1, 2], [0, 0], [0, 3], [-1, 0], []])
def test_wrong_members_are_an_error_before_anything_is_sent(
    make: Maker, members: list[int]
) -> None:
    peers = make(3)(0)
    with pytest.raises(UsageError, match="members"):
        peers.exchange(members, "k", b"", 10)


def test_a_failed_thread_wakes_the_others(run_threads) -> None:
    world = ThreadWorld(3)

    def rank_main(rank: int) -> None:
        if rank == 2:
            world.fail(2, "ValueError: no data")
            return
        with pytest.raises(PeerFailedError, match="rank 2 failed: ValueError"):
            world.bootstrap(rank).exchange(range(3), "k", b"", 600)

    run_threads(3, rank_main)


def test_store_keys_are_freed(run_threads) -> None:
    store = DictStore()

    def rank_main(rank: int) -> None:
        peers = StoreBootstrap(store, rank, 3)
        for turn in range(4):
            peers.exchange(range(3), f"key {turn}", b"blob", 10)

    run_threads(3, rank_main)
    assert sorted(store.values) == [f"commrt/generation/{rank}" for rank in range(3)]


def test_a_second_bootstrap_on_the_same_store_starts_afresh(run_threads) -> None:
    store = DictStore()

    def rank_main(rank: int) -> list[bytes]:
        first = StoreBootstrap(store, rank, 2)
        first.exchange([0, 1], "k", b"first", 10)
        first.close()
        second = StoreBootstrap(store, rank, 2)
        return second.exchange([0, 1], "k", b"second", 10)

    assert run_threads(2, rank_main) == [[b"second"] * 2] * 2


def test_poll_until_gives_up_and_reports_it() -> None:
    assert poll_until(lambda: False, 0.0) is False
    assert poll_until(iter([False, True]).__next__, 10.0) is True


def test_plain_python_is_a_world_of_one_without_mpi_and_torch() -> None:
    code = (
        "import sys; from commrt.bootstrap import connect; "
        "from commrt.launch import detect; "
        "peers = connect(detect({})); "
        "assert peers.exchange([0], 'k', b'b', 1) == [b'b']; "
        "sys.exit('mpi4py' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_connect_gives_a_world_of_one_for_a_single_process() -> None:
    peers = connect(LaunchInfo("single", 0, 1, "test"))
    assert isinstance(peers, SingleBootstrap)
    assert (peers.rank, peers.size) == (0, 1)


@pytest.mark.parametrize(
    ("module", "kind", "extra"),
    [("mpi4py", "mpi", "openmpi"), ("torch.distributed", "torchrun", "torch")],
)
def test_a_missing_library_names_the_extra(
    module: str, kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    launch = LaunchInfo(kind, 0, 2, "test")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=rf"commrt\[{extra}\]"):
        connect(launch)
