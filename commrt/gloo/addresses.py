# SPDX-License-Identifier: Apache-2.0
"""The address by which other nodes reach this rank, for gloo.

gloo takes the address of the host's own name. Debian and others let that name mean
127.0.1.1, which no other host reaches. Then a rank takes the address by which it has
reached the rendezvous. On the rendezvous' own host that may be 127.0.0.1, too: there it
takes the address by which the other ranks have reached it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from ipaddress import ip_address

__all__ = ["chosen_address", "own_addresses"]

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


def own_addresses() -> bytes:
    """Return what this rank tells the others for ``chosen_address``."""
    own, rendezvous = _route()
    return json.dumps({"own": own, "rendezvous": rendezvous}).encode()


def chosen_address(mine: bytes, said: Sequence[bytes]) -> str:
    """Return the address that gloo is to take; empty: the one that it chooses itself.

    Args:
        mine: what this rank has said, by ``own_addresses``.
        said: what all ranks have said.
    """
    if os.environ.get(_INTERFACE) or not _is_loopback(_of_own_name()):
        return ""
    own: str = json.loads(mine)["own"]
    if not _is_loopback(own):
        return own
    for blob in said:
        address: str = json.loads(blob)["rendezvous"]
        if not _is_loopback(address) and _is_of_this_host(address):
            return address
    return ""


def _route() -> tuple[str, str]:
    """Return this host's address on the way to the rendezvous, and the rendezvous'."""
    host, port = os.environ.get(_ADDRESS), os.environ.get(_PORT, "")
    if not host or not port.isdecimal():
        return "", ""
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0], probe.getpeername()[0]
    except (OSError, OverflowError, UnicodeError):
        return "", ""


def _of_own_name() -> str:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
        return str(found[0][4][0])
    except (OSError, UnicodeError):
        return ""


def _is_loopback(address: str) -> bool:
    """Return whether other hosts cannot reach an address; an empty one is none."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _is_of_this_host(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
