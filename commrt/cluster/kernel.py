# SPDX-License-Identifier: Apache-2.0
"""Calls of the Linux kernel that make namespaces and enter them."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import struct
import time
from functools import lru_cache

__all__ = [
    "KINDS_OF_HOST",
    "NEW_IPC",
    "NEW_MOUNT",
    "NEW_NETWORK",
    "NEW_PID",
    "NEW_UTS",
    "Timer",
    "adopt_orphans",
    "bind",
    "end_with_parent",
    "enter",
    "make_mounts_private",
    "mount",
    "move_mount",
    "set_hostname",
    "unmount",
    "unshare",
]

NEW_MOUNT, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_PID, NEW_NETWORK = 0x20000000, 0x40000000
KINDS_OF_HOST = {"net": NEW_NETWORK, "uts": NEW_UTS, "ipc": NEW_IPC, "mnt": NEW_MOUNT}
"""Namespaces that each host has of its own, by their names in /proc/PID/ns."""

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PR_SET_TIMERSLACK = 29
_TFD_ABSTIME = 1
_NS_PER_S = 1_000_000_000


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        if number == errno.EPERM:
            what += " (the process needs the rights of root)"
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Give this process new namespaces; new PID namespaces are for its children."""
    _check(_libc().unshare(kinds), f"unshare({kinds:#x})")


def enter(descriptor: int, kind: int) -> None:
    """Enter the namespace that a descriptor is open on; for PIDs, its children do."""
    _check(_libc().setns(descriptor, kind), f"setns({kind:#x})")


def set_hostname(name: str) -> None:
    """Set the host's name in this UTS namespace."""
    raw = name.encode()
    _check(_libc().sethostname(raw, len(raw)), f"sethostname({name})")


def make_mounts_private() -> None:
    """Let no later mount of this namespace reach another one."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def mount(kind: str, target: str, options: str = "", *, can_run: bool = False) -> None:
    """Mount a new file system of a kind; devices and set-uid mean nothing there."""
    flags = _MS_NOSUID | _MS_NODEV | (0 if can_run else _MS_NOEXEC)
    _mount(kind, target, kind, flags, options)


def bind(source: str, target: str) -> None:
    """Let a file or a folder, with what is mounted in it, be seen at another name."""
    _mount(source, target, None, _MS_BIND | _MS_REC)


def move_mount(source: str, target: str) -> None:
    """Move a mount to another name."""
    _mount(source, target, None, _MS_MOVE)


def unmount(target: str) -> None:
    """Take a mount away from its name; what is open of it goes on."""
    _check(_libc().umount2(target.encode(), _MNT_DETACH), f"umount({target})")


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    words = (source.encode(), target.encode(), kind.encode() if kind else None)
    data = options.encode() or None
    _check(
        _libc().mount(*words, ctypes.c_ulong(flags), data), f"mount({source}, {target})"
    )


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(SUBREAPER)")


def end_with_parent(alive: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        alive: the end for reading of a pipe whose other end the parent alone holds. If
            the parent has ended before this call, this process ends here.
        number: the signal.
    """
    _check(_libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0), "prctl(PDEATHSIG)")
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    if poll.poll(0):
        os._exit(1)


class Timer:
    """A descriptor that can be read from a time on, by ``time.monotonic_ns``."""

    def __init__(self) -> None:
        _check(_libc().prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0), "prctl(TIMERSLACK)")
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, flags)
        _check(min(self.descriptor, 0), "timerfd_create")

    def set(self, at_ns: int) -> None:
        """Let the descriptor be read from a time on."""
        spec = struct.pack("qqqq", 0, 0, *divmod(at_ns, _NS_PER_S))
        _check(
            _libc().timerfd_settime(self.descriptor, _TFD_ABSTIME, spec, None),
            "timerfd_settime",
        )

    def clear(self) -> None:
        """Let it be read no more, until it is set again."""
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            return
