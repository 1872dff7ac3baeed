# SPDX-License-Identifier: Apache-2.0
"""Writing files: what stands at a name keeps being what it is.

Devices here are nodes of a test's own: never a device that the machine uses.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commrt.files.write import (
    check_writable,
    is_replaceable,
    open_stream,
    write_file,
)

DISCARDS = os.makedev(1, 3)
"""The device whose node /dev/null is, on every Linux."""
FULL = os.makedev(1, 7)
"""The device that has no space left, /dev/full's."""


@pytest.fixture
def node(tmp_path: Path) -> Callable[[int], Path]:
    """Give a function that makes a node of a device in the test's own folder."""

    def make(device: int) -> Path:
        path = tmp_path / f"node-{os.minor(device)}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, device)
            os.close(os.open(path, os.O_WRONLY))
        except OSError as error:
            pytest.skip(f"no node of a device can be made and used here: {error}")
        return path

    return make


@contextmanager
def read_by_thread(fifo: Path) -> Iterator[list[bytes]]:
    """Read a FIFO to its end beside the block; the list has the content after it."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(fifo.read_bytes()))
    thread.start()
    yield found
    thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "made" / "x", "text", parents=True)
        write_file(tmp_path / "secret", b"raw", mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "x").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "made" / "x").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert names(tmp_path) == ["made", "secret"]


def test_a_regular_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o664)
    with path.open() as reader:
        write_file(path, "new")
        assert reader.read() == "old"  # whoever has it open sees no half
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert names(tmp_path) == ["x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_regular_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    os.chown(path, 65534, 65533)
    path.chmod(0o640)
    write_file(path, "new")
    seen = path.stat()
    assert (seen.st_uid, seen.st_gid) == (65534, 65533)
    assert stat.S_IMODE(seen.st_mode) == 0o640


def test_a_device_stays_a_device(node: Callable[[int], Path]) -> None:
    path = node(DISCARDS)
    for _ in range(2):
        write_file(path, "gone" * 100_000)
    check_writable(path)
    assert not is_replaceable(path)
    seen = path.lstat()
    assert stat.S_ISCHR(seen.st_mode)
    assert seen.st_rdev == DISCARDS
    assert names(path.parent) == [path.name]


def test_a_link_to_a_device_stays_a_link(
    node: Callable[[int], Path], tmp_path: Path
) -> None:
    path = node(DISCARDS)
    link = tmp_path / "link"
    link.symlink_to(path.name)
    write_file(link, "gone")
    assert link.is_symlink()
    assert path.is_char_device()


def test_a_full_device_is_an_error(node: Callable[[int], Path]) -> None:
    path = node(FULL)
    with pytest.raises(OSError, match="No space left") as raised:
        write_file(path, "text")
    assert raised.value.errno == errno.ENOSPC
    assert path.is_char_device()


def test_a_fifo_hands_the_content_on(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with read_by_thread(fifo) as found:
        write_file(fifo, b"x" * 300_000)
    assert found == [b"x" * 300_000]
    assert fifo.is_fifo()
    check_writable(fifo)
    assert not is_replaceable(fifo)
    assert names(tmp_path) == ["fifo"]


def test_links_stay_links_and_their_files_are_replaced(tmp_path: Path) -> None:
    real, link, again = (tmp_path / name for name in ("real", "link", "again"))
    real.write_text("old")
    inode = real.stat().st_ino
    link.symlink_to("real")
    again.symlink_to(link)
    write_file(again, "new")
    assert again.is_symlink()
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_ino != inode  # renamed onto, so never half


def test_a_dangling_link_stays_and_its_file_is_made(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target")
    write_file(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_no_folder_is_made_unless_asked_for(tmp_path: Path) -> None:
    """Nor one where a link leads to: it may be a disk that is not mounted."""
    link = tmp_path / "link"
    link.symlink_to("not mounted/target")
    for path, parents in ((tmp_path / "no" / "x", False), (link, True)):
        with pytest.raises(FileNotFoundError, match=str(path)):
            write_file(path, "text", parents=parents)
        with pytest.raises(FileNotFoundError):
            check_writable(path, parents=parents)
    assert names(tmp_path) == ["link"]


def test_a_link_that_leads_to_itself_is_an_error(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    for refused in (lambda: write_file(link, "text"), lambda: check_writable(link)):
        with pytest.raises(OSError, match="Too many levels"):
            refused()
    assert link.is_symlink()


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    for refused in (lambda: write_file(tmp_path, ""), lambda: check_writable(tmp_path)):
        with pytest.raises(IsADirectoryError):
            refused()


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    check_writable(path)
    write_file(path, "text")
    assert path.read_text() == "text"


def test_text_with_what_is_no_character(tmp_path: Path) -> None:
    write_file(tmp_path / "x", "a\udcff")
    assert (tmp_path / "x").read_bytes() == b"a\\udcff"


def test_standard_output_is_written_where_it_stands(tmp_path: Path) -> None:
    """Also where it is a file or a socket: neither is replaced, nor begun again."""
    code = (
        "from commrt.files.write import *; print('before'); check_writable(%r); "
        "write_file(%r, 'text\\n'); print('after')"
    )
    path = tmp_path / "out"
    mine, theirs = socket.socketpair()
    with mine, theirs, path.open("wb") as file:
        for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
            for to in (file, theirs):
                run = [sys.executable, "-c", code % (name, name)]
                subprocess.run(run, stdout=to, check=True, timeout=300, cwd=tmp_path)
            assert mine.recv(1000) == b"before\ntext\nafter\n"
    assert path.read_text() == 3 * "before\ntext\nafter\n"
    assert names(tmp_path) == ["out"]


def test_a_link_to_standard_output(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/stdout")
    code = f"from commrt.files.write import write_file; write_file({str(link)!r}, 'x')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=300, cwd=tmp_path
    )
    assert done.stdout == b"x", done.stderr
    assert link.is_symlink()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user without rights for the block; files' rights do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder that a user without rights can reach."""
    folder = tmp_path_factory.mktemp("open")
    above = [each for each in (folder, *folder.parents) if not each.stat().st_mode & 1]
    before = [each.stat().st_mode for each in above]
    for each in above:
        each.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    yield folder
    for each, mode in zip(above, before, strict=True):
        each.chmod(mode)


def test_a_folder_that_takes_no_new_file(open_folder: Path) -> None:
    """What is there is written in place; what is not is an error."""
    with as_nobody():
        there = open_folder / "there"
        there.write_text("old and longer")
        inode = there.stat().st_ino
        open_folder.chmod(0o555)
        check_writable(there)
        write_file(there, "new")
        assert there.read_text() == "new"
        assert there.stat().st_ino == inode
        missing = open_folder / "missing"
        refused: tuple[Callable[[], None], ...] = (
            lambda: write_file(missing, "text"),
            lambda: check_writable(missing),
        )
        for each in refused:
            with pytest.raises(PermissionError):
                each()
        open_folder.chmod(0o755)
        assert names(open_folder) == ["there"]


def test_a_protected_file_stays_as_it_is(open_folder: Path) -> None:
    with as_nobody():
        path = open_folder / "x"
        path.write_text("old")
        path.chmod(0o444)
        for refused in (lambda: write_file(path, "n"), lambda: check_writable(path)):
            with pytest.raises(PermissionError):
                refused()
        assert path.read_text() == "old"


def test_a_file_that_is_a_mount_point_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers mount single files: nothing can be renamed onto one."""

    def busy(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), target)

    path = tmp_path / "x"
    path.write_text("old and longer")
    monkeypatch.setattr(os, "replace", busy)
    write_file(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_written_in_place(open_folder: Path) -> None:
    """Renamed onto, it would change its owner."""
    path = open_folder / "x"
    path.write_text("old")
    path.chmod(0o666)
    with as_nobody():
        write_file(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_uid == 0
    assert names(open_folder) == ["x"]


def test_a_disk_that_becomes_full_leaves_the_old_file(tmp_path: Path) -> None:
    """The limit for files stands for a full disk: the write ends early, too."""
    path = tmp_path / "x"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        for place in (path, tmp_path / "new"):
            with pytest.raises(OSError, match=f"File too large: '{place}'"):
                write_file(place, b"x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system_is_named_by_the_file_alone(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "none", str(full)]
    if subprocess.run(mount, check=False, timeout=240).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        with pytest.raises(OSError, match="No space left") as raised:
            write_file(full / "x", "text")
        assert str(raised.value).endswith(f"No space left on device: '{full / 'x'}'")
    finally:
        subprocess.run(["umount", str(full)], check=True, timeout=240)


def test_a_check_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    check_writable(path)
    assert names(tmp_path) == []
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]
    assert is_replaceable(path)
    assert is_replaceable(tmp_path / "new")


def test_a_stream_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in (b"first", b"2nd"):
        with open_stream(path) as file:
            file.write(text)
    assert path.read_bytes() == b"2nd"
