# SPDX-License-Identifier: Apache-2.0
"""Node-shared memory: shared, private to the user, lazily touched, and gone after."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from commrt.bootstrap import ThreadWorld
from commrt.errors import (
    BackendError,
    MismatchError,
    PeerFailedError,
    TimeoutError_,
    UsageError,
)
from commrt.job import arena
from commrt.job.passed_descriptors import DescriptorServer, receive_descriptor

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["memfd", "devshm"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each kind of shared memory."""
    monkeypatch.setenv("COMMRT_SHM", request.param)
    kind: str = request.param
    return kind


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_member_sees_what_the_others_write(
    source: str, size: int, run_threads
) -> None:
    world = ThreadWorld(size)
    written = threading.Barrier(size)

    def rank_main(rank: int) -> tuple[bytes, int]:
        peers = world.bootstrap(rank)
        with arena.share(peers, range(size), "test", 100, 10) as shared:
            view = shared.view()
            view[rank * shared.region_nbytes] = rank + 1
            written.wait(300)
            seen = bytes(view[r * shared.region_nbytes] for r in range(size))
            written.wait(300)
            return seen, shared.region_nbytes

    expected = bytes(rank + 1 for rank in range(size)), PAGE
    assert run_threads(size, rank_main) == [expected] * size


def test_a_subset_shares_without_the_others(source: str, run_threads) -> None:
    world = ThreadWorld(3)

    def rank_main(rank: int) -> int:
        if rank == 1:
            return 0
        with arena.share(world.bootstrap(rank), [2, 0], "pair", 1, 10) as shared:
            return shared.nbytes

    assert run_threads(3, rank_main) == [2 * PAGE, 0, 2 * PAGE]


def test_no_descriptor_and_no_name_outlive_the_call(source: str, run_threads) -> None:
    world = ThreadWorld(2)
    before = set(os.listdir("/proc/self/fd"))
    arenas = run_threads(
        2, lambda rank: arena.share(world.bootstrap(rank), [0, 1], "k", 1, 10)
    )
    # Only this thread is left, so the listing's own descriptor has one number.
    assert set(os.listdir("/proc/self/fd")) == before
    assert [name for name in os.listdir("/dev/shm") if name.startswith("commrt")] == []
    for shared in arenas:
        shared.close()


def _resident_shared_kib() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssShmem:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


def test_memory_is_not_used_before_it_is_touched(run_threads) -> None:
    world = ThreadWorld(2)
    before = _resident_shared_kib()

    def rank_main(rank: int) -> None:
        region = 256 << 20
        with arena.share(world.bootstrap(rank), [0, 1], "big", region, 10) as shared:
            assert shared.view()[shared.nbytes - 1] == 0
            assert _resident_shared_kib() - before < 1024

    run_threads(2, rank_main)


def test_more_than_the_memory_limit_is_an_error_on_every_member(
    source: str, run_threads
) -> None:
    world = ThreadWorld(2)

    def rank_main(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            arena.share(world.bootstrap(rank), [0, 1], "k", 1 << 50, 10)
        return str(caught.value)

    for message in run_threads(2, rank_main):
        assert "memory limit" in message
        assert "rank 0" in message


def test_a_full_dev_shm_is_an_error_on_every_member(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    """Found before anybody maps it: nobody gets a SIGBUS later. No name is left."""

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("COMMRT_SHM", "devshm")
    monkeypatch.setattr(os, "posix_fallocate", full)
    world = ThreadWorld(3)

    def rank_main(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            arena.share(world.bootstrap(rank), [0, 1, 2], "k", PAGE, 10)
        return str(caught.value)

    messages = run_threads(3, rank_main)
    assert messages == [messages[0]] * 3
    assert "No space left on device: unset COMMRT_SHM" in messages[0]
    assert [name for name in os.listdir("/dev/shm") if name.startswith("commrt")] == []


def test_different_sizes_are_an_error_on_every_member(run_threads) -> None:
    world = ThreadWorld(2)

    def rank_main(rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            arena.share(world.bootstrap(rank), [0, 1], "k", PAGE * (rank + 1), 10)
        return str(caught.value)

    first, second = run_threads(2, rank_main)
    assert first == second


def test_a_missing_member_is_named(run_threads) -> None:
    peers = ThreadWorld(2).bootstrap(0)
    with pytest.raises(TimeoutError_, match="rank 1 did not arrive"):
        arena.share(peers, [0, 1], "k", 1, 0.05)


def test_one_member_that_cannot_map_is_an_error_on_every_member(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    def refuse(*args: object) -> int:
        raise OSError("other network namespace")

    monkeypatch.setattr(arena, "_receive_fd", refuse)
    world = ThreadWorld(3)

    def rank_main(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            arena.share(world.bootstrap(rank), [0, 1, 2], "k", 1, 10)
        return str(caught.value)

    messages = run_threads(3, rank_main)
    assert len(set(messages)) == 1
    for part in ("rank 1: other network", "rank 2: other network"):
        assert part in messages[0]
    assert "rank 0:" not in messages[0]


@pytest.mark.parametrize("dies", ["before it is asked", "while it answers"])
def test_an_owner_that_dies_meanwhile_is_named(dies: str, run_threads) -> None:
    world, offer = ThreadWorld(3), arena._Offer(3 * PAGE)

    def rank_main(rank: int) -> str:
        peers = world.bootstrap(rank)
        if rank == 0:
            if dies == "while it answers":
                offer.described["token"] = "00" * 16  # nobody gets an answer
            else:
                offer.close()
            said = {"nbytes": PAGE, **offer.described}
            peers.exchange([0, 1, 2], "k/offer", json.dumps(said).encode(), 10)
            return ""
        peers.gone = lambda other: "" if other else "process 7 has ended"
        with pytest.raises(PeerFailedError) as caught:
            arena.share(peers, [0, 1, 2], "k", PAGE, 10)
        return str(caught.value)

    messages = run_threads(3, rank_main)[1:]
    offer.close()
    for message in messages:
        assert "rank 0" in message
        assert "because process 7 has ended" in message


def test_shm_off_refuses_to_share_but_one_rank_gets_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_SHM", "off")
    peers = ThreadWorld(2).bootstrap(0)
    with pytest.raises(BackendError, match="COMMRT_SHM=off"):
        arena.share(peers, [0, 1], "k", 1, 10)
    with arena.share(peers, [0], "k", 1, 10) as alone:
        assert alone.nbytes == PAGE


def test_a_process_that_does_not_know_the_token_gets_no_descriptor() -> None:
    read_end, write_end = os.pipe()
    server = DescriptorServer(read_end)
    try:
        os.close(receive_descriptor(server.name, server.token, 10))
        with pytest.raises(OSError, match=r"refused|reset"):
            receive_descriptor(server.name, bytes(16).hex(), 10)
    finally:
        server.close()
        os.close(read_end)
        os.close(write_end)


def test_a_stranger_that_hangs_up_does_not_end_the_server() -> None:
    read_end, write_end = os.pipe()
    server = DescriptorServer(read_end)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect("\0" + server.name)
    os.close(receive_descriptor(server.name, server.token, 10))
    server.close()
    os.close(read_end)
    os.close(write_end)


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "commrt-x"
    path.write_bytes(b"planted")
    with pytest.raises(OSError, match="not the file"):
        arena._open_file(str(path), path.stat().st_ino + 1)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match=r".*"):
        arena._open_file(str(link), path.stat().st_ino)


def test_the_shared_file_can_not_be_shrunk() -> None:
    offer = arena._Offer(PAGE)
    try:
        assert offer.described["error"] == ""
        with pytest.raises(PermissionError):
            os.ftruncate(offer.fd, 0)
    finally:
        offer.close()


def test_close_is_idempotent_and_sizes_are_checked() -> None:
    memory = arena.process_arena(3, PAGE + 1)
    assert (memory.region_nbytes, memory.nbytes) == (2 * PAGE, 6 * PAGE)
    memory.view()[-1] = 1
    memory.close()
    memory.close()
    with pytest.raises(UsageError, match="above 0"):
        arena.process_arena(1, 0)


def _nodes(size: int, run_threads, pretended=None) -> list[list[list[int]]]:
    world = ThreadWorld(size)
    return run_threads(
        size, lambda r: arena.discover_nodes(world.bootstrap(r), 10, pretended)
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_that_can_map_are_one_node(source: str, size: int, run_threads) -> None:
    assert _nodes(size, run_threads) == [[list(range(size))]] * size


def test_pretended_nodes_cut_the_ranks(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    expected = [[0, 1], [2, 3, 4]]
    assert _nodes(5, run_threads, (2, 3)) == [expected] * 5
    monkeypatch.setenv("COMMRT_NODES", "2,3")
    assert _nodes(5, run_threads) == [expected] * 5


def test_one_number_of_pretended_nodes_repeats(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    monkeypatch.setenv("COMMRT_NODES", "2")
    assert _nodes(6, run_threads) == [[[0, 1], [2, 3], [4, 5]]] * 6


def test_pretended_nodes_must_add_up(run_threads) -> None:
    with pytest.raises(UsageError, match="describes 5 ranks, but there are 2"):
        _nodes(2, run_threads, (2, 3))
    with pytest.raises(UsageError, match=r"=2 means nodes of 2 ranks, but the 3"):
        _nodes(3, run_threads, (2,))
    with pytest.raises(UsageError, match=r"=4 means nodes of 4 ranks, but the 2"):
        _nodes(2, run_threads, (4,))


def test_without_shared_memory_every_rank_is_a_node(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    monkeypatch.setenv("COMMRT_SHM", "off")
    assert _nodes(3, run_threads) == [[[0], [1], [2]]] * 3


def test_ranks_that_look_alike_but_cannot_map_are_other_nodes(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    """Ranks 2 and 3 fail to reach rank 0's memory, and then share among themselves."""
    receive, refused = arena._receive_fd, set()

    def receive_unless_far(described: dict, timeout_s: float) -> int:
        name = threading.current_thread().name
        if name in ("rank 2", "rank 3") and name not in refused:
            refused.add(name)
            raise OSError("not on this node")
        return receive(described, timeout_s)

    monkeypatch.setattr(arena, "_receive_fd", receive_unless_far)
    assert _nodes(4, run_threads) == [[[0, 1], [2, 3]]] * 4


def test_other_boots_are_other_nodes(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    look = arena._look
    monkeypatch.setattr(
        arena, "_look", lambda: look() + str(threading.current_thread().name[-1] > "1")
    )
    assert _nodes(4, run_threads) == [[[0, 1], [2, 3]]] * 4


def test_each_member_maps_the_parts_alone(source: str, run_threads) -> None:
    world, mapped = ThreadWorld(2), threading.Barrier(2)
    sizes = [1, 3 * PAGE, 5]

    def rank_main(rank: int) -> list[list[int]]:
        peers, found = world.bootstrap(rank), []
        with arena.share(peers, [0, 1], "test", 2 * PAGE, 10, sizes) as shared:
            shared.view()[rank * shared.region_nbytes] = 9
            # In another order on each, and nobody waits before all have them.
            order = [0, 1, 2] if rank else [2, 1, 0]
            parts = {number: shared.part(number) for number in order}
            for number, part in parts.items():
                assert part.region_nbytes == max(PAGE, sizes[number])
                assert not any(part.view()[:: PAGE // 2])
            mapped.wait(300)
            for number, part in parts.items():
                part.view()[rank * part.region_nbytes] = 10 * number + rank + 1
                part.view()[(rank + 1) * part.region_nbytes - 1] = 7
            mapped.wait(300)
            for number in range(3):
                part = parts[number]
                view = part.view()
                found.append([view[r * part.region_nbytes] for r in range(2)])
                assert [i for i in range(part.nbytes) if view[i] == 7] == [
                    part.region_nbytes - 1,
                    part.nbytes - 1,
                ]
            mapped.wait(300)
            assert bytes(shared.view()).count(9) == 2
        for part in parts.values():  # they outlive what they lie behind
            assert part.view()[0] in (1, 11, 21)
            part.close()
        return found

    assert run_threads(2, rank_main) == [[[1, 2], [11, 12], [21, 22]]] * 2


def test_parts_take_no_memory_before_they_are_written(run_threads) -> None:
    world = ThreadWorld(2)
    before = _resident_shared_kib()

    def rank_main(rank: int) -> None:
        peers, parts = world.bootstrap(rank), [256 << 20] * 3
        with arena.share(peers, [0, 1], "big", PAGE, 10, parts) as shared:
            with shared.part(2) as part:
                assert part.view()[part.nbytes - 1] == 0
            assert _resident_shared_kib() - before < 1024

    run_threads(2, rank_main)


def test_a_part_that_cannot_be_mapped_is_an_error(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    world = ThreadWorld(2)

    def rank_main(rank: int) -> None:
        peers = world.bootstrap(rank)
        with arena.share(peers, [0, 1], "k", PAGE, 10, [PAGE]) as shared:
            monkeypatch.setattr(arena, "_remap", refuse)
            with pytest.raises(BackendError, match=r"Cannot allocate memory.*ulimit"):
                shared.part(0)

    run_threads(2, rank_main)


def test_a_full_dev_shm_is_an_error_of_a_part(
    monkeypatch: pytest.MonkeyPatch, run_threads
) -> None:
    """It is found as the part is mapped: nobody gets a SIGBUS later."""

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(libc, name)

        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            ctypes.set_errno(errno.EFAULT)
            return -1

    libc = arena._libc
    monkeypatch.setenv("COMMRT_SHM", "devshm")
    monkeypatch.setattr(arena, "_libc", Full())
    world = ThreadWorld(2)

    def rank_main(rank: int) -> None:
        peers = world.bootstrap(rank)
        shared = arena.share(peers, [0, 1], "k", PAGE, 10, [PAGE])
        with shared, pytest.raises(BackendError, match="unset COMMRT_SHM"):
            shared.part(0)

    run_threads(2, rank_main)


def test_memory_without_parts_has_none() -> None:
    with (
        arena.process_arena(1, PAGE) as alone,
        pytest.raises(BackendError, match="no part 0"),
    ):
        alone.part(0)
