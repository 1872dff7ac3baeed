# SPDX-License-Identifier: Apache-2.0
"""Lists of nodes as Slurm writes them, and where rank 0 waits."""

from __future__ import annotations

import socket

import pytest

from commrt.errors import UsageError
from commrt.launch.slurm import check_host, hosts, rendezvous, tasks_on_node


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("gpu7", ["gpu7"]),
        ("node-1.example.org", ["node-1.example.org"]),
        ("a,b,c", ["a", "b", "c"]),
        ("gpu[3-5]", ["gpu3", "gpu4", "gpu5"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("gpu[01,07-08],login2", ["gpu01", "gpu07", "gpu08", "login2"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("r[1-2]x,s[3]-ib", ["r1x", "r2x", "s3-ib"]),
        ("n[099-101,0998]", ["n099", "n100", "n101", "n0998"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("c[0-1]b[0-1]n[00]", ["c0b0n00", "c0b1n00", "c1b0n00", "c1b1n00"]),
        ("[1-2]", ["1", "2"]),
        ("a1, b[2-3]", ["a1", "b2", "b3"]),
    ],
)
def test_lists_of_nodes(nodelist: str, expected: list[str]) -> None:
    assert list(hosts(nodelist)) == expected


@pytest.mark.parametrize(
    "nodelist",
    [
        *(
            "",
            ",",
            "a,,b",
            "gpu[1",
            "gpu1]",
            "gpu[]",
            "gpu[1-]",
            "gpu[a-b]",
            "gpu[5-3]",
        ),
        *("gpu[[1-2]]", "gpu[1-2[3]]", "gpu[1,,2]", "gpu[1-2-3]", "gpu[-1]"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(nodelist: str) -> None:
    with pytest.raises(UsageError, match="set MASTER_ADDR to the host of rank 0"):
        list(hosts(nodelist))


STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_NODELIST": "z[8-9]"}


def test_the_first_node_of_the_step_and_a_port_of_job_and_step() -> None:
    host, port = rendezvous({**STEP, "SLURM_STEP_NODELIST": "gpu[02-04]"})
    assert host == "gpu02"
    assert 20000 <= port < 32000
    assert rendezvous(STEP) == ("z8", port)
    assert rendezvous({**STEP, "SLURM_STEP_ID": "3"}) == ("z8", port + 1)
    assert rendezvous({**STEP, "SLURM_JOB_ID": "4712"})[1] != port


def test_reserved_ports_and_masters_variables_come_first() -> None:
    assert rendezvous({**STEP, "SLURM_STEP_RESV_PORTS": "12017-12019"})[1] == 12017
    both = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert rendezvous(both) == ("10.0.0.1", 29500)


def test_what_is_missing_or_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="set MASTER_ADDR and MASTER_PORT"):
        rendezvous({"SLURM_JOB_ID": "1"})
    with pytest.raises(UsageError, match="MASTER_PORT is 'http', not a number"):
        rendezvous({**STEP, "MASTER_PORT": "http"})
    with pytest.raises(UsageError, match="SLURM_JOB_ID is 'x', not a number"):
        rendezvous({**STEP, "SLURM_JOB_ID": "x"})


def test_a_step_of_one_node_needs_no_name() -> None:
    here = {**STEP, "SLURM_STEP_NODELIST": "z8", "SLURM_STEP_NUM_NODES": "1"}
    assert rendezvous(here)[0] == "127.0.0.1"
    assert rendezvous({**here, "MASTER_ADDR": "z8-ib"})[0] == "z8-ib"
    assert rendezvous({**here, "SLURM_STEP_NUM_NODES": "2"})[0] == "z8"


def test_a_host_that_nobody_knows_is_named() -> None:
    check_host("127.0.0.1", 1)
    with pytest.raises(
        UsageError, match=r"rank 0 is on 'z8\.invalid'.*set MASTER_ADDR"
    ):
        check_host("z8.invalid", 1)


def test_what_a_resolver_may_know_later_is_left_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*where: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    check_host("z8", 1)


@pytest.mark.parametrize(
    ("counts", "node", "found"),
    [
        ("2(x2)", "1", "2"),
        ("2,1", "1", "1"),
        ("4(x3),2,1(x2)", "3", "2"),
        ("4(x3),2,1(x2)", "5", "1"),
        ("4", "0", "4"),
        ("4", "1", None),
        ("4", "", None),
        ("", "0", None),
        ("four", "0", None),
    ],
)
def test_tasks_of_a_node(counts: str, node: str, found: str | None) -> None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    assert tasks_on_node(environ) == found
