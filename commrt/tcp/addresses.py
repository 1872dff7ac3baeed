# SPDX-License-Identifier: Apache-2.0
"""Addresses at which ranks of other nodes reach this process."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from commrt.errors import BackendError

__all__ = ["first_address", "is_loopback", "reachable_address"]

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # to ask for a route sends nothing


def first_address(environ: Mapping[str, str] | None = None) -> str:
    """Return the address from which this process reaches the rendezvous of the job.

    The interface that GLOO_SOCKET_IFNAME names comes first, as with gloo. Without a
    rendezvous by network it is the address of this host's name.
    """
    environ = os.environ if environ is None else environ
    if name := environ.get(_INTERFACE, "").split(",")[0].strip():
        return _address_of_interface(name)
    towards = environ.get("MASTER_ADDR") or socket.gethostname()
    return _source_towards(towards) or "127.0.0.1"


def reachable_address(own: str, others: Sequence[str]) -> str:
    """Return the address that the others can use, once all have told their first ones.

    Some systems give the host's own name an address that only this host can use. Then
    it is the one from which this process reaches the others.
    """
    if not is_loopback(own):
        return own
    elsewhere = [other for other in others if not is_loopback(other)]
    found = [_source_towards(other) for other in elsewhere]
    return next((each for each in found if each and not is_loopback(each)), own)


def is_loopback(address: str) -> bool:
    """Return whether only this host can use an address."""
    return ip_address(address).is_loopback


def _source_towards(host: str) -> str | None:
    """Return the address that packets to a host come from; None: there is no way."""
    try:
        known = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in known:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _address_of_interface(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(each for _, each in socket.if_nameindex())
            raise BackendError(
                f"{_INTERFACE} names the network interface {name!r}, which has no "
                f"address here: {error.strerror}; there are {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
