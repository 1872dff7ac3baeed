# SPDX-License-Identifier: Apache-2.0
"""Node-shared memory for a group of ranks, and which ranks share a node.

The first member of a group creates the memory, as a memfd: it has no name, no size
limit of a container's /dev/shm, and is gone with the last process that maps it. The
others get its file descriptor (``passed_descriptors.py``).

Two ranks share a node when the mapping succeeds, not when host names agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from commrt import env
from commrt.bootstrap.base import Bootstrap, poll_until
from commrt.errors import BackendError, MismatchError, PeerFailedError, UsageError
from commrt.job.memory_limit import check_fits
from commrt.job.passed_descriptors import DescriptorServer, receive_descriptor

__all__ = [
    "Arena",
    "discover_nodes",
    "machine_identity",
    "network_identity",
    "pretended_nodes",
    "process_arena",
    "share",
]

_PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # equal on x86-64 and arm64; not in the mmap module
_HEARD_S = 0.5
"""Seconds in which it is heard that a rank has ended whose memory cannot be had."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_POPULATE_WRITE = 23


class Arena:
    """A mapped block of memory: one region per member, zero until touched.

    The mapping lives until ``close``; merely dropping the object does not unmap it,
    because the engine holds its address.
    """

    def __init__(self, address: int, members: int, region_nbytes: int) -> None:
        self._members = members
        self.address = address
        """Start of the mapping in this process."""
        self.region_nbytes = region_nbytes
        """Bytes of one member's region, a multiple of the page size."""
        self.nbytes = members * region_nbytes
        """Bytes of the whole mapping."""

    def view(self) -> memoryview:
        """Return the bytes of the arena; they must not be used after ``close``."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        return memoryview(array).cast("B")

    def part(self, number: int) -> Arena:
        """Map one of the blocks behind this one, which ``share`` was asked for.

        Each member does it alone, at most once, and closes it. BackendError where it
        cannot be mapped, and where this arena has no such block.
        """
        raise BackendError(f"this memory has no part {number}")

    def close(self) -> None:
        """Unmap; idempotent. Nothing may use the address afterwards."""
        if self.address:
            _libc.munmap(self.address, self.nbytes)
            self.address = 0

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _SharedArena(Arena):
    """Memory of a file, which goes on behind it.

    No descriptor is kept for what lies there, as a process has few and may have many
    communicators. The kernel maps the pages of a shared mapping once more, and those
    that follow in their file, too (mremap(2) with no old length).
    """

    def __init__(
        self, address: int, members: int, region_nbytes: int, parts: Sequence[int]
    ) -> None:
        super().__init__(address, members, region_nbytes)
        self._parts = [_whole_pages(nbytes) for nbytes in parts]

    def part(self, number: int) -> Arena:
        before_nbytes = self._members * sum(self._parts[:number])
        region_nbytes = self._parts[number]
        nbytes = self._members * region_nbytes
        last_page = self.address + self.nbytes - _PAGE
        try:
            mapped = _remap(last_page, 0, _PAGE + before_nbytes + nbytes)
        except OSError as error:
            raise BackendError(
                f"{nbytes} bytes of shared memory cannot be mapped: {error}; raise the "
                f"limit of this process's address space (ulimit -v)"
            ) from error
        _libc.munmap(mapped, _PAGE + before_nbytes)
        made = Arena(mapped + _PAGE + before_nbytes, self._members, region_nbytes)
        if env.read_str("COMMRT_SHM") == "devshm":
            _take_pages(made)
        return made


class Mirror:
    """Shared memory that is mapped a second time, at an address of its own.

    Ends by ``place_over``, which gives the mapping away, or by ``close``. OSError where
    the memory is not shared: pages of one mapping alone can have no other.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = _whole_pages(nbytes)
        # No old length, which mremap(2) takes for "map these pages once more".
        self.address = _remap(address, 0, self.nbytes)

    def place_over(self, address: int) -> None:
        """Move it to where other pages are mapped, which go."""
        self.address = _remap(self.address, self.nbytes, self.nbytes, at=address)

    def close(self) -> None:
        """Unmap."""
        _libc.munmap(self.address, self.nbytes)


def process_arena(nranks: int, region_nbytes: int) -> Arena:
    """Return memory for ranks that are threads of this process, or for one alone."""
    region_nbytes = _whole_pages(region_nbytes)
    check_fits(nranks * region_nbytes)
    return Arena(_map(-1, nranks * region_nbytes), nranks, region_nbytes)


def share(
    bootstrap: Bootstrap,
    members: Sequence[int],
    key: str,
    region_nbytes: int,
    timeout_s: float,
    parts: Sequence[int] = (),
) -> Arena:
    """Return one block of memory that all ``members`` map, a region for each.

    Collective over ``members``, which must lie on one node; ``key``, ``region_nbytes``
    and ``parts`` are the same on all. ``parts`` are the bytes for each member of more
    blocks, which ``Arena.part`` maps. Raises BackendError on every member where the
    memory cannot be had or cannot be mapped by one of them.
    """
    if len(members) == 1:
        return process_arena(1, region_nbytes)
    if env.read_str("COMMRT_SHM") == "off":
        raise BackendError(
            f"COMMRT_SHM=off, but ranks {list(members)} are to share memory; unset it"
        )
    arena, failures = _try_share(
        bootstrap, members, key, region_nbytes, timeout_s, parts
    )
    if not failures and arena is not None:
        return arena
    if arena is not None:
        arena.close()
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
    raise BackendError(
        f"ranks {list(members)} cannot share {len(members)} x {region_nbytes} bytes "
        f"({key}): {reasons}"
    )


def discover_nodes(
    bootstrap: Bootstrap,
    timeout_s: float,
    pretended: Sequence[int] | None = None,
    parts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the ranks of each node, ordered by first rank; the same on every rank.

    Collective over all ranks. Ranks that look as if they shared a node (boot, user
    and network namespace) prove it by mapping a page; those that cannot are tried
    among themselves. ``pretended`` (COMMRT_NODES unless given) cuts the ranks into
    nodes of that many consecutive ranks, between which nothing is shared; one number
    repeats. ``parts`` says instead of which such node each rank is.
    """
    everybody = range(bootstrap.size)
    looks = bootstrap.exchange(everybody, "nodes/look", _look().encode(), timeout_s)
    if parts is None:
        parts = pretended_nodes(bootstrap.size, pretended)
    mine = looks[bootstrap.rank], parts[bootstrap.rank]
    candidates = [r for r in everybody if (looks[r], parts[r]) == mine]
    if env.read_str("COMMRT_SHM") == "off":
        candidates = [bootstrap.rank]
    leader = candidates[0]
    while len(candidates) > 1:
        leader = candidates[0]
        failed = _cannot_map(bootstrap, candidates, timeout_s)
        if bootstrap.rank not in failed:
            break
        # The first member maps its own memory, so each round settles at least one.
        candidates = [rank for rank in candidates if rank in failed]
        leader = candidates[0]
    said = bootstrap.exchange(
        everybody, "nodes/leader", str(leader).encode(), timeout_s
    )
    nodes: dict[int, list[int]] = {}
    for rank, text in enumerate(said):
        nodes.setdefault(int(text), []).append(rank)
    return [nodes[first] for first in sorted(nodes)]


def _cannot_map(
    bootstrap: Bootstrap, candidates: Sequence[int], timeout_s: float
) -> set[int]:
    """Try to share one page per candidate; return those that could not map it."""
    arena, failures = _try_share(bootstrap, candidates, "nodes/try", _PAGE, timeout_s)
    if arena is not None:
        arena.close()
    # Without any memory from the first one, it is alone, and the others go on.
    return set(failures) if candidates[0] not in failures else set(candidates[1:])


def _look() -> str:
    """Return an identity that processes share if they may be able to share memory."""
    # Where /proc hides the network's, the mapping decides.
    parts = [str(os.geteuid()), machine_identity(), network_identity()]
    return " ".join(filter(None, parts))


def machine_identity() -> str:
    """Return an identity that processes on one machine share, in containers or not."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def network_identity() -> str:
    """Return what names this process's network on its machine; empty: nothing does."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def pretended_nodes(size: int, pretended: Sequence[int] | None = None) -> list[int]:
    """Return the number of each rank's pretended node (COMMRT_NODES unless given)."""
    counts = env.read_nodes() if pretended is None else tuple(pretended)
    if counts is None:
        return [0] * size
    text = ",".join(map(str, counts))
    if len(counts) == 1:
        (ranks,) = counts
        if size % ranks:
            raise UsageError(
                f"COMMRT_NODES={text} means nodes of {ranks} ranks, but the {size} "
                f"ranks there are cannot be divided so; name every node's ranks, with "
                f"commas between, or unset it"
            )
        counts = counts * (size // ranks)
    if sum(counts) != size:
        raise UsageError(
            f"COMMRT_NODES={text} describes {sum(counts)} ranks, but there are {size}; "
            f"name every node's ranks, or unset it"
        )
    return [node for node, count in enumerate(counts) for _ in range(count)]


def _try_share(
    bootstrap: Bootstrap,
    members: Sequence[int],
    key: str,
    region_nbytes: int,
    timeout_s: float,
    parts: Sequence[int] = (),
) -> tuple[Arena | None, dict[int, str]]:
    """Share memory; return this member's mapping, and who failed and why."""
    region_nbytes = _whole_pages(region_nbytes)
    first = bootstrap.rank == members[0]
    behind_nbytes = len(members) * sum(map(_whole_pages, parts))
    offer = _Offer(len(members) * region_nbytes, behind_nbytes) if first else None
    arena = None
    try:
        said = {"nbytes": region_nbytes, **(offer.described if offer else {})}
        answers = _tell(bootstrap, members, f"{key}/offer", said, timeout_s)
        _check_same_size(members, [answer["nbytes"] for answer in answers])
        arena, reason = _map_offer(offer, answers[0], len(members), parts, timeout_s)
        if reason and not answers[0]["error"]:
            _check_offerer(bootstrap, members, key, reason)
        said = {"reason": reason}
        reports = _tell(bootstrap, members, f"{key}/mapped", said, timeout_s)
    except BaseException:
        if arena is not None:
            arena.close()
        raise
    finally:
        if offer is not None:
            offer.close()
    failures = {
        rank: str(report["reason"])
        for rank, report in zip(members, reports, strict=True)
        if report["reason"]
    }
    return arena, failures


def _check_offerer(
    bootstrap: Bootstrap, members: Sequence[int], key: str, reason: str
) -> None:
    """Raise PeerFailedError where memory cannot be had since its owner has died."""
    gone, owner = bootstrap.gone, members[0]
    if gone is None or not poll_until(lambda: bool(gone(owner)), _HEARD_S):
        return
    raise PeerFailedError(
        f"ranks {list(members)} share no memory ({key}): rank {owner}, whose it is, "
        f"does not hand it out ({reason}), because {gone(owner)}"
    )


def _tell(
    bootstrap: Bootstrap,
    members: Sequence[int],
    key: str,
    said: dict[str, Any],
    timeout_s: float,
) -> list[dict[str, Any]]:
    blobs = bootstrap.exchange(members, key, json.dumps(said).encode(), timeout_s)
    return [json.loads(blob) for blob in blobs]


def _check_same_size(members: Sequence[int], sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise MismatchError(
            f"ranks {list(members)} ask for regions of different sizes, {sizes} "
            f"bytes: COMMRT_* variables or arguments differ between ranks; make them "
            f"equal"
        )


def _map_offer(
    offer: _Offer | None,
    described: dict[str, Any],
    members: int,
    parts: Sequence[int],
    timeout_s: float,
) -> tuple[Arena | None, str]:
    """Map what the first member offers; return the mapping, or why there is none."""
    if described["error"]:
        return None, str(described["error"])
    region_nbytes = int(described["nbytes"])
    all_nbytes = members * (region_nbytes + sum(map(_whole_pages, parts)))
    try:
        fd = os.dup(offer.fd) if offer else _receive_fd(described, timeout_s)
        try:
            if os.fstat(fd).st_size != all_nbytes:
                raise OSError("the shared file has another size than agreed")
            address = _map(fd, members * region_nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        return None, str(error)
    return _SharedArena(address, members, region_nbytes, parts), ""


class _Offer:
    """The first member's side: the memory, and how the others get at it."""

    def __init__(self, nbytes: int, behind_nbytes: int = 0) -> None:
        """``behind_nbytes``: of the file behind that, which take no memory yet."""
        self.fd = -1
        self._path = ""
        self._server: DescriptorServer | None = None
        self.described: dict[str, Any] = {"error": ""}
        try:
            check_fits(nbytes)
            if env.read_str("COMMRT_SHM") == "devshm":
                self._create_file(nbytes, behind_nbytes)
            else:
                self._create_memfd(nbytes + behind_nbytes)
        except (OSError, BackendError) as error:
            self.close()
            self.described["error"] = f"no shared memory: {error}"

    def close(self) -> None:
        """Close, and unlink where there is a name; what is mapped stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = ""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _create_memfd(self, nbytes: int) -> None:
        self.fd = os.memfd_create("commrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        # A peer that shrank the file would turn every later access into a SIGBUS.
        _seal_size(self.fd)
        self._server = DescriptorServer(self.fd)
        self.described["socket"] = self._server.name
        self.described["token"] = self._server.token

    def _create_file(self, nbytes: int, behind_nbytes: int) -> None:
        path = f"/dev/shm/commrt-{secrets.token_hex(16)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        self._path = path
        # Unlike ftruncate this fails cleanly where /dev/shm is too small.
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            os.ftruncate(self.fd, nbytes + behind_nbytes)
        except OSError as error:
            raise BackendError(
                f"{nbytes} bytes in /dev/shm: {error.strerror}: unset COMMRT_SHM for "
                f"memory without a name, or make /dev/shm larger"
            ) from error
        self.described["path"] = path
        self.described["inode"] = os.fstat(self.fd).st_ino


def _receive_fd(described: dict[str, Any], timeout_s: float) -> int:
    """Return a descriptor of the first member's memory, in this process."""
    if "path" in described:
        return _open_file(str(described["path"]), int(described["inode"]))
    return receive_descriptor(described["socket"], described["token"], timeout_s)


def _open_file(path: str, inode: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_ino != inode:
        os.close(fd)
        raise OSError(f"{path} is not the file that the first rank made")
    return fd


def _seal_size(fd: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _map(fd: int, nbytes: int) -> int:
    """Map ``fd`` (-1: private anonymous memory); return the address.

    Not by the ``mmap`` module: its objects keep a duplicate of the descriptor open.
    """
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, access, kind | _MAP_NORESERVE, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    return int(address)


def _remap(address: int, old: int, nbytes: int, at: int | None = None) -> int:
    kind = _MREMAP_MAYMOVE | (_MREMAP_FIXED if at is not None else 0)
    found = _libc.mremap(address, old, nbytes, kind, at)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes again: {os.strerror(code)}")
    return int(found)


def _take_pages(arena: Arena) -> None:
    """Write to all pages; where /dev/shm is full, that is an error and no SIGBUS."""
    if _libc.madvise(arena.address, arena.nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return  # a kernel before 5.14 cannot say so
    arena.close()
    raise BackendError(
        f"{arena.nbytes} bytes in /dev/shm: {os.strerror(code)}: unset COMMRT_SHM for "
        f"memory without a name, or make /dev/shm larger"
    )


def _whole_pages(nbytes: int) -> int:
    if nbytes <= 0:
        raise UsageError(f"region_nbytes={nbytes}: must be above 0")
    return -(-nbytes // _PAGE) * _PAGE
