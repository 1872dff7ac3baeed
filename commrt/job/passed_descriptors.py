# SPDX-License-Identifier: Apache-2.0
"""Descriptors that a rank hands to others of its node: memory, and its own process.

They go over an abstract Unix socket with a random name. Both sides check the other's
user by SO_PEERCRED, and the receiver shows a random token that came through the
bootstrap.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time

from commrt.vocabulary.limits import deadline_after, socket_seconds

__all__ = ["DescriptorServer", "receive_descriptor"]

_TOKEN_NBYTES = 16
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class DescriptorServer:
    """Hands a file descriptor to processes of this user that know the token.

    A thread accepts, because the first member meanwhile waits in the bootstrap for
    everybody's report, also for those that cannot reach the socket at all.
    """

    def __init__(self, fd: int) -> None:
        self.name = f"commrt-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(_TOKEN_NBYTES)
        self._fd = fd
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(socket.SOMAXCONN)
        self._thread = threading.Thread(
            target=self._serve, name="commrt-fd-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop accepting."""
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with peer:
                peer.settimeout(5.0)
                try:
                    self._answer(peer)
                except OSError:
                    continue  # a stranger, or a peer that died; its report is missed

    def _answer(self, peer: socket.socket) -> None:
        if _peer_uid(peer) != os.geteuid():
            return
        token = peer.recv(_TOKEN_NBYTES)
        if hmac.compare_digest(token, bytes.fromhex(self.token)):
            socket.send_fds(peer, [b"\0"], [self._fd])


def receive_descriptor(name: str, token: str, timeout_s: float) -> int:
    """Return what a DescriptorServer of that name hands out, in this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(socket_seconds(timeout_s))
        _connect(peer, "\0" + name, timeout_s)
        if _peer_uid(peer) != os.geteuid():
            raise OSError("the socket belongs to another user")
        peer.sendall(bytes.fromhex(token))
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if len(fds) != 1:
        raise OSError("the other rank refused to pass its descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _connect(peer: socket.socket, name: str, timeout_s: float) -> None:
    deadline = deadline_after(timeout_s)
    while True:
        try:
            peer.connect(name)
            return
        except BlockingIOError:  # more ranks at once than the server's backlog
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _peer_uid(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(raw)[1])
