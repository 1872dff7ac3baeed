# SPDX-License-Identifier: Apache-2.0
"""The addresses that ranks take where their hosts' own names are of loopback."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

import pytest

from commrt import _native
from commrt.errors import BackendError
from commrt.tcp.addresses import address_for_gloo, listening_address, own_addresses


def said(own: str, rendezvous: str, every: Sequence[str] | None = None) -> bytes:
    """Return what a rank tells; ``every`` are all addresses of its host."""
    facts = {
        "own": own,
        "rendezvous": rendezvous,
        "torch": "torch" in sys.modules,
        "all": _native.own_addresses() if every is None else [*every],
    }
    return json.dumps(facts).encode()


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let this host's own name be found at 127.0.1.1, and set no variable."""
    known = socket.getaddrinfo

    def found(host: str, port: int | None, **how: int) -> object:
        if host == "this-host":
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
        return known(host, port, **how)

    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    monkeypatch.setattr(socket, "getaddrinfo", found)
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_rank_takes_the_address_by_which_it_reached_the_rendezvous(
    named: pytest.MonkeyPatch,
) -> None:
    mine = said("192.0.2.7", "192.0.2.1")
    assert address_for_gloo(mine, [mine]) == "192.0.2.7"
    assert listening_address(mine, [mine]) == "192.0.2.7"


def test_the_rendezvous_host_takes_the_address_by_which_others_reached_it(
    named: pytest.MonkeyPatch,
) -> None:
    named.setattr("commrt.tcp.addresses._is_of_this_host", "192.0.2.1".__eq__)
    mine = said("127.0.0.1", "127.0.1.1")
    others = [said("192.0.2.7", "192.0.2.9"), said("192.0.2.7", "192.0.2.1")]
    assert address_for_gloo(mine, [mine, *others]) == "192.0.2.1"
    assert listening_address(mine, [mine, *others]) == "192.0.2.1"
    assert address_for_gloo(mine, [mine, others[0]]) == ""


def test_an_interface_that_the_user_names_is_left_to_gloo(
    named: pytest.MonkeyPatch,
) -> None:
    named.setenv("GLOO_SOCKET_IFNAME", "eth0")
    mine = said("192.0.2.7", "192.0.2.1")
    assert address_for_gloo(mine, [mine]) == ""


def test_a_host_whose_name_others_reach_is_left_to_gloo(
    named: pytest.MonkeyPatch,
) -> None:
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "192.0.2.7")
    mine = said("198.51.100.7", "192.0.2.1")
    assert address_for_gloo(mine, [mine]) == ""


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("127.0.0.1", "29500", said("127.0.0.1", "127.0.0.1")),
        ("", "29500", said("", "")),
        ("127.0.0.1", "", said("", "")),
        ("127.0.0.1", "none", said("", "")),
        ("no such host", "29500", said("", "")),
    ],
)
def test_what_ranks_tell_each_other(
    named: pytest.MonkeyPatch, host: str, port: str, expected: bytes
) -> None:
    named.setenv("MASTER_ADDR", host)
    named.setenv("MASTER_PORT", port)
    assert own_addresses() == expected


def test_an_address_of_another_host_is_not_taken(named: pytest.MonkeyPatch) -> None:
    mine = said("", "")
    assert address_for_gloo(mine, [mine, said("192.0.2.7", "192.0.2.1")]) == ""


def test_own_connections_use_the_way_to_the_rendezvous_whatever_the_name(
    named: pytest.MonkeyPatch,
) -> None:
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "192.0.2.7")
    mine = said("198.51.100.7", "192.0.2.1")
    assert listening_address(mine, [mine]) == "198.51.100.7"


def test_one_machine_needs_no_network(named: pytest.MonkeyPatch) -> None:
    mine = said("", "")
    assert listening_address(mine, [mine]) == "127.0.1.1"
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "")
    assert listening_address(mine, [mine]) == "127.0.0.1"
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "192.0.2.7")
    assert listening_address(mine, [mine]) == "127.0.0.1"


def test_an_interface_that_the_user_names_is_listened_at(
    named: pytest.MonkeyPatch,
) -> None:
    mine = said("192.0.2.7", "192.0.2.1")
    named.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert listening_address(mine, [mine]) == "127.0.0.1"
    named.setenv("GLOO_SOCKET_IFNAME", "none7")
    with pytest.raises(BackendError, match=r"'none7'.*there are .*lo"):
        listening_address(mine, [mine])


SOURCES = {
    "192.0.2.9": "192.0.2.7",
    "198.51.100.9": "192.0.2.7",
    "10.1.2.9": "10.1.2.7",
    "10.200.0.9": "10.1.2.7",
    "2001:db8::9": "2001:db8::7",
}
"""Own addresses from which packets to others go."""
BRIDGE = "172.17.0.1"


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ([["192.0.2.9"]], "192.0.2.7"),
        ([["198.51.100.9"]], "192.0.2.7"),
        ([["198.51.100.9"], ["10.1.2.9"]], "10.1.2.7"),
        ([["10.200.0.9", "192.0.2.9"]], "192.0.2.7"),
        ([[BRIDGE, "10.200.0.9"]], "10.1.2.7"),
        ([["2001:db8::9"]], "2001:db8::7"),
        ([["203.0.113.5"]], "127.0.0.1"),
        ([[BRIDGE]], "127.0.0.1"),
        ([[]], "127.0.0.1"),
    ],
    ids=str,
)
def test_without_a_rendezvous_the_address_nearest_to_others_is_taken(
    named: pytest.MonkeyPatch, others: list[list[str]], taken: str
) -> None:
    """A bridge's address, which every host has, leads to none of them."""
    named.setattr(
        "commrt.tcp.addresses._source_towards", lambda each: SOURCES.get(each, "")
    )
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "")
    own = [BRIDGE, "192.0.2.7", "10.1.2.7", "2001:db8::7"]
    mine = said("", "", own)
    assert listening_address(mine, [mine, *(said("", "", e) for e in others)]) == taken


def test_the_way_to_an_address_is_the_kernels(named: pytest.MonkeyPatch) -> None:
    """Sent from 127.0.0.1, packets to 127.0.0.2 stay here: so ranks tell no such one.

    A network that does not exist has no way to it.
    """
    named.setattr("commrt.tcp.addresses._of_own_name", lambda: "")
    mine = said("", "", ["127.0.0.1"])
    away = said("", "", ["127.0.0.2", "no address"])
    assert listening_address(mine, [mine, away]) == "127.0.0.1"
