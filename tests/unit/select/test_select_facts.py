# SPDX-License-Identifier: Apache-2.0
"""Candidates, fingerprints: the words of selection."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.select.facts import Candidate, Query
from commrt.select.fingerprint import available_cores, this_machine

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.one_of(st.integers(-(10**18), 10**18), WORDS)
CANDIDATES = st.builds(
    Candidate, WORDS, WORDS, st.dictionaries(WORDS, VALUES, max_size=3)
)


@given(CANDIDATES)
def test_candidate_text_reads_back_equal(candidate: Candidate) -> None:
    again = Candidate.parse(str(candidate))
    assert again == candidate
    assert hash(again) == hash(candidate)
    assert pickle.loads(pickle.dumps(candidate)) == candidate


def test_candidate_text_is_sorted_and_params_are_read_only() -> None:
    candidate = Candidate("shm", "ring", {"store": "stream", "chunk": 131072})
    assert str(candidate) == "shm/ring{chunk=131072,store=stream}"
    with pytest.raises(TypeError):
        candidate.params["chunk"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    ["ring", "", "a/b/c", "shm/ring{chunk}", "shm/ring{a=1,a=2}", "shm/ring{", "/"],
)
def test_malformed_candidates_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Candidate.parse(text)


def test_query_text_names_what_was_asked() -> None:
    query = Query("reduce", 64, op="sum", root=0)
    assert str(query) == "reduce(64 B, float32, host, op=sum, root=0)"


def _machine_root(root: Path) -> Path:
    (root / "proc").mkdir()
    blocks = [
        f"processor : {n}\nmodel name : ACME  9000\nphysical id : {n // 4}\n"
        f"core id : {n // 2 % 2}\n"
        for n in range(8)
    ]
    (root / "proc/cpuinfo").write_text("\n".join(blocks))
    gpu = root / "proc/driver/nvidia/gpus"
    for n in range(2):
        (gpu / str(n)).mkdir(parents=True)
        (gpu / str(n) / "information").write_text("Model: \t NVIDIA X\nIRQ: 3\n")
    for port, speed in (("eth0", "25000"), ("eth1", "-1")):
        device = root / "sys/class/net" / port / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x15b3\n")
        (device.parent / "speed").write_text(speed)
    (root / "sys/class/net/lo").mkdir()
    return root


def test_machine_facts_are_read_from_proc_and_sys(tmp_path: Path) -> None:
    machine = this_machine(_machine_root(tmp_path))
    cpu = machine.cpu
    assert (cpu.model, cpu.sockets, cpu.cores) == ("ACME 9000", 2, 4)
    assert [(gpu.model, gpu.count) for gpu in machine.gpus] == [("NVIDIA X", 2)]
    assert [(nic.count, nic.gbps) for nic in machine.nics] == [(2, 25.0)]


def test_fingerprint_ignores_what_is_only_recorded(tmp_path: Path) -> None:
    root = _machine_root(tmp_path)
    before = this_machine(root).fingerprint
    (root / "sys/class/net/eth0/speed").write_text("10000")
    assert this_machine(root).fingerprint == before
    (root / "proc/driver/nvidia/gpus/1/information").write_text("Model: other\n")
    assert this_machine(root).fingerprint != before


def test_an_empty_machine_still_has_a_fingerprint(tmp_path: Path) -> None:
    assert len(this_machine(tmp_path).fingerprint) == 64


def test_available_cores_respect_every_enclosing_quota(tmp_path: Path) -> None:
    everything = available_cores(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    inner = tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == everything
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert available_cores(tmp_path) == 1
