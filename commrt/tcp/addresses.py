# SPDX-License-Identifier: Apache-2.0
"""The address by which other nodes reach this rank.

A rank takes the address by which it has reached the rendezvous. On the rendezvous' own
host that may be 127.0.0.1: there it takes the address by which the other ranks have
reached it. Where there is no rendezvous, as under MPI, it takes the address from which
it reaches other ranks' addresses, the one most like theirs. GLOO_SOCKET_IFNAME names
another interface.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from ipaddress import ip_address

from commrt import _native
from commrt.errors import BackendError

__all__ = [
    "address_for_gloo",
    "address_of_interface",
    "have_torch",
    "listening_address",
    "own_addresses",
]

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"
_SIOCGIFADDR = 0x8915
_MOST_TRIED = 64
"""Addresses of other hosts that are asked for the way, which takes 10 us each."""


def own_addresses() -> bytes:
    """Return what this rank tells the others for the functions below."""
    own, rendezvous = _route()
    # Whoever uses torch has imported it by now. Others need not wait for that.
    facts = {
        "own": own,
        "rendezvous": rendezvous,
        "torch": "torch" in sys.modules,
        "all": _native.own_addresses(),
    }
    return json.dumps(facts).encode()


def have_torch(said: Sequence[bytes]) -> bool:
    """Return whether all ranks have said that they use torch."""
    return all(json.loads(blob)["torch"] for blob in said)


def listening_address(mine: bytes, said: Sequence[bytes]) -> str:
    """Return the address at which this rank is to listen.

    Args:
        mine: what this rank has said, by ``own_addresses``.
        said: what all ranks have said.

    Raises BackendError where the interface that the user names has no address.
    """
    if name := os.environ.get(_INTERFACE, "").partition(",")[0].strip():
        return address_of_interface(name, _INTERFACE)
    own = _of_own_name()
    # Names of one machine alone, as where it pretends several nodes.
    is_own = own != "" and _is_of_this_host(own)
    found = _reachable(mine, said) or _nearest(mine, said)
    return found or (own if is_own else "127.0.0.1")


def address_for_gloo(mine: bytes, said: Sequence[bytes]) -> str:
    """Return the address that gloo is to take; empty: the one that it chooses itself.

    gloo takes the address of the host's own name. Debian and others let that name mean
    127.0.1.1, which no other host reaches. The arguments are as above.
    """
    if os.environ.get(_INTERFACE) or not _is_loopback(_of_own_name()):
        return ""
    return _reachable(mine, said)


def _reachable(mine: bytes, said: Sequence[bytes]) -> str:
    """Return an address of this host that other ranks reach, or an empty text."""
    own: str = json.loads(mine)["own"]
    if not _is_loopback(own):
        return own
    for blob in said:
        address: str = json.loads(blob)["rendezvous"]
        if not _is_loopback(address) and _is_of_this_host(address):
            return address
    return ""


def _nearest(mine: bytes, said: Sequence[bytes]) -> str:
    """Return the address that reaches one most like it of another host, or "".

    An address that several hosts have, as those of bridges for containers, leads to
    none of them.
    """
    own = {*json.loads(mine)["all"]}
    others = dict.fromkeys(each for blob in said for each in json.loads(blob)["all"])
    away = [each for each in others if each not in own][:_MOST_TRIED]
    sources = [(_source_towards(each), each) for each in away]
    likest = max(
        (each for each in sources if each[0] in own),
        key=lambda each: _part_in_common(*each),
        default=("", ""),
    )
    return likest[0]


def _source_towards(address: str) -> str:
    """Return this host's address on the way to another; empty: there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _part_in_common(one: str, other: str) -> float:
    """Return which part of two addresses of a family is equal, from the beginning."""
    a, b = ip_address(one), ip_address(other)
    return 1.0 - (int(a) ^ int(b)).bit_length() / a.max_prefixlen


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


def address_of_interface(name: str, source: str = "the user") -> str:
    """Return the IPv4 address of a network interface of this host.

    Raises BackendError, which says that ``source`` has named it, where it has none.
    """
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(each for _, each in socket.if_nameindex())
            raise BackendError(
                f"{source} names the network interface {name!r}, which has no "
                f"address here: {error.strerror}; there are {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
