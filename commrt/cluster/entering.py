# SPDX-License-Identifier: Apache-2.0
"""How a process enters a cluster, and a host of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from commrt.cluster import kernel
from commrt.cluster.failures import ClusterError
from commrt.errors import CommError

__all__ = ["OF_TERMINAL", "SIGNALS", "enter_host", "namespace_of", "run_inside"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OF_TERMINAL = 0x80
"""A signal's ``si_code`` if a terminal sent it, to all processes in its foreground."""


def namespace_of(pid: int, kind: str) -> int:
    """Return the number of a process's namespace; 0 if the process is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return 0


def enter_host(pid: int) -> None:
    """Enter the namespaces of the host that a process holds; its folder stays.

    The process must see the cluster's /proc, and may have one thread only.

    Raises:
        ClusterError: there is no such process, or no such folder on the host.
    """
    _go_into(_opened(pid, kernel.KINDS_OF_HOST))


def run_inside(first: int, function: Callable[[], int]) -> int:
    """Return the status of a function that runs in a new process inside of a cluster.

    The new process is told by SIGTERM, as by any other of ``SIGNALS``, to end. It is
    sent one when this process ends, and gets those that this process gets. They are
    blocked in it: the function takes them by ``signal.sigtimedwait``.

    Args:
        first: the first process of the cluster, by its number here.
        function: what to run. It sees the cluster's processes, by their numbers there.
    """
    watched = {*SIGNALS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    alive, held = os.pipe()
    try:
        return _run(first, function, (alive, held), watched)
    finally:
        os.close(alive)
        os.close(held)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    first: int,
    function: Callable[[], int],
    pipe: tuple[int, int],
    watched: set[signal.Signals],
) -> int:
    opened = _opened(first, {"pid": kernel.NEW_PID})
    for descriptor, kind in opened:
        kernel.enter(descriptor, kind)  # for the child alone
        os.close(descriptor)
    # By its number here: there is no /proc of the cluster yet.
    mounts = _opened(first, {"mnt": kernel.NEW_MOUNT})
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        child = os.fork()
    except OSError as error:
        raise ClusterError("the cluster has ended") from error
    if child == 0:
        os.close(pipe[1])
        _inside(function, mounts, pipe[0])
    for descriptor, _ in mounts:
        os.close(descriptor)
    while True:
        found = signal.sigwaitinfo(watched)
        if found.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return _status(os.waitstatus_to_exitcode(status))
        elif found.si_code != OF_TERMINAL:  # else the child has it, too
            os.kill(child, found.si_signo)


def _inside(
    function: Callable[[], int], mounts: list[tuple[int, int]], alive: int
) -> NoReturn:
    status = 1
    try:
        kernel.end_with_parent(alive, signal.SIGTERM)
        _go_into(mounts)
        status = function()
        sys.stdout.flush()
    except (OSError, CommError) as error:
        print(f"commrt cluster: {error}", file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001 - the process ends here, and says why
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(code: int) -> int:
    """Return a shell's status for the end of a process."""
    if code == -signal.SIGKILL:
        # Nobody but the kernel ends it so, together with the cluster.
        raise ClusterError("the cluster has ended, and what ran in it with it")
    return code if code >= 0 else 128 - code


def _go_into(opened: list[tuple[int, int]]) -> None:
    """Enter namespaces; the working folder is looked up again among the new mounts."""
    here = os.getcwd()
    for descriptor, kind in opened:
        kernel.enter(descriptor, kind)
        os.close(descriptor)
    try:
        os.chdir(here)
    except OSError as error:
        raise ClusterError(
            f"folder {here} does not exist on hosts, whose /var/tmp and /dev/shm are "
            f"their own: start in another folder"
        ) from error


def _opened(pid: int, kinds: dict[str, int]) -> list[tuple[int, int]]:
    opened = []
    try:
        for name, kind in kinds.items():
            path = f"/proc/{pid}/ns/{name}"
            opened.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind))
    except OSError as error:
        for descriptor, _ in opened:
            os.close(descriptor)
        raise ClusterError(f"process {pid} of the cluster has ended") from error
    return opened
