# SPDX-License-Identifier: Apache-2.0
"""Exchanges over threads, a store and a world of one: one contract for all."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bootstrap_contract import *  # noqa: F403  the tests of every kind
from bootstrap_contract import Maker
from dict_store import DictStore

from commrt.bootstrap import Bootstrap, ThreadWorld, connect
from commrt.bootstrap.base import ENDS, ByExchange, VainWaitError, poll_until
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import BackendError, PeerFailedError, RefusedError
from commrt.launch.detect import LaunchInfo


def _threads(size: int) -> Callable[[int], Bootstrap]:
    return ThreadWorld(size).bootstrap


def _store(size: int) -> Callable[[int], Bootstrap]:
    store = DictStore()
    return lambda rank: StoreBootstrap(store, rank, size)


@pytest.fixture(params=[_threads, _store])
def make(request: pytest.FixtureRequest) -> Maker:
    """Return each kind that needs no library."""
    kind: Maker = request.param
    return kind


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


class ManyAtOnce(DictStore):
    """A store that gives several values at once, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def has_extended_api(self) -> bool:
        return True

    def get(self, key: str) -> bytes:
        self.asked.append(1)
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.append(len(keys))
        return [self.values[key] for key in keys]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_rank_asks_for_all_blobs_at_once(run_threads, size: int) -> None:
    store = ManyAtOnce()

    def rank_main(rank: int) -> list[bytes]:
        peers = StoreBootstrap(store, rank, size)
        return peers.exchange(range(size), "k", bytes([rank]), 300)

    blobs = [bytes([rank]) for rank in range(size)]
    assert run_threads(size, rank_main) == [blobs] * size
    assert store.asked == [size] * size


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


@pytest.mark.parametrize("kind", ENDS)
def test_a_wait_for_ranks_that_have_all_come_does_not_fail(
    kind: type[Exception], run_threads
) -> None:
    def end() -> None:
        raise kind("the communicator has ended")

    assert poll_until(iter([False, True]).__next__, 240, end)
    with pytest.raises(kind):
        poll_until(lambda: False, 240, end)

    world, returned = ThreadWorld(2), threading.Event()

    def end_if_all_came() -> None:
        if returned.wait(0.01):
            end()

    def rank_main(rank: int) -> list[bytes]:
        peers = world.bootstrap(rank)
        peers.idle = end_if_all_came if rank == 0 else None
        said = peers.exchange(range(2), "k", b"%d" % rank, 240)
        returned.set()
        return said

    assert run_threads(2, rank_main) == [[b"0", b"1"]] * 2


def test_a_wait_in_vain_counts_a_refusal_only_where_the_others_have_not_come(
    run_threads,
) -> None:
    counted = []

    def refused() -> RefusedError:
        counted.append(1)
        return RefusedError("a rank has refused the next call")

    def heed() -> None:
        raise VainWaitError(refused)

    assert poll_until(iter([False, True]).__next__, 240, heed)
    assert counted == []
    with pytest.raises(RefusedError):
        poll_until(lambda: False, 240, heed)
    assert counted == [1]

    world, returned = ThreadWorld(2), threading.Event()

    def heed_if_all_came() -> None:
        if returned.wait(0.01):
            heed()

    def rank_main(rank: int) -> list[bytes]:
        peers = world.bootstrap(rank)
        check = heed_if_all_came if rank == 0 else None
        said = peers.exchange(range(2), "k", b"%d" % rank, 240, check)
        returned.set()
        return said

    assert run_threads(2, rank_main) == [[b"0", b"1"]] * 2
    assert counted == [1]


def test_plain_python_is_a_world_of_one_without_mpi_and_torch() -> None:
    code = (
        "import sys; from commrt.bootstrap import connect; "
        "from commrt.launch.detect import detect; "
        "peers = connect(detect({})); "
        "assert peers.exchange([0], 'k', b'b', 1) == [b'b']; "
        "sys.exit('mpi4py' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


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


def test_mpi4py_without_an_mpi_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after pip install mpi4py alone: its wheel brings no library."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: initialize, finalize = True, None")
    (package / "MPI.py").write_text(
        "raise RuntimeError('cannot load MPI library\\nlong explanation')"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        BackendError, match=r"library is not \(cannot load MPI library\): .*openmpi"
    ):
        connect(LaunchInfo("mpi", 0, 2, "test"))
    monkeypatch.delitem(sys.modules, "mpi4py")


def test_what_is_kept_of_exchanges_goes_when_they_are_forgotten() -> None:
    kept: ByExchange[list[int]] = ByExchange(list)
    for name in ("comm7/calls@a", "comm7/dup1/id@a", "comm7/dup1/id@b", "world/id@a"):
        kept.of(name).append(1)
    assert kept.of("comm7/calls@a") == [1]
    kept.forget("comm7/dup1")
    assert len(kept) == 2
    assert kept.of("comm7/dup1/id@a") == []
    kept.forget("comm7/dup1/id")
    kept.forget("comm")
    assert len(kept) == 2
    kept.forget("comm7")
    assert len(kept) == 1
    assert kept.of("world/id@a") == [1]
