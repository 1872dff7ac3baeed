# SPDX-License-Identifier: Apache-2.0
"""Pinned memory is taken from the machine's node that a GPU is connected to.

The driver and ``/sys`` are pretended, the calls of the system are real. Where pages
come to lie on a machine with several nodes is seen there only.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from test_cuda_device import Fake, built

from commrt.devices import CudaDevice

T = TypeVar("T")

NO_SUCH_NODE = 1000
"""The system refuses it, as it refuses all in a container."""
DEFAULT, PREFERRED, BIND = 0, 1, 2
GET_MEMPOLICY, SET_MEMPOLICY = (
    (239, 238) if os.uname().machine == "x86_64" else (236, 237)
)
BUS_ID = "0000:1a:00.0"
"""As the system writes what the pretended driver says."""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    fake = Fake(built(tmp_path_factory.mktemp("cuda")))
    fake.library.fake_place.restype = ctypes.c_char_p
    fake.reset()
    return fake


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """What a machine with two nodes shows of them, and of the GPU."""
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text("0-1\n")
    (tmp_path / "bus/pci/devices" / BUS_ID).mkdir(parents=True)
    return tmp_path


def put(sysfs: Path, node: int, cpus: str = "") -> None:
    """Connect the GPU to a node, and say which CPUs that has."""
    (sysfs / "bus/pci/devices" / BUS_ID / "numa_node").write_text(f"{node}\n")
    if cpus:
        folder = sysfs / f"devices/system/node/node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")


def set_policy(mode: int, nodes: int = 0) -> bool:
    """Say where this thread's memory is to be; False where nobody may."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    mask = ctypes.c_ulong(nodes)
    given = ctypes.byref(mask) if nodes else None
    return bool(call(SET_MEMPOLICY, mode, given, ctypes.c_ulong(64)) == 0)


def policy() -> int | None:
    call = ctypes.CDLL(None, use_errno=True).syscall
    mode = ctypes.c_int(-1)
    done = call(GET_MEMPOLICY, ctypes.byref(mode), None, ctypes.c_ulong(0), None, 0)
    return mode.value if done == 0 else None


def in_thread(function: Callable[[], T]) -> T:
    """Run it in a thread of its own, whose policy goes with it."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(300)
    [value] = found
    return value


def place_of(fake: Fake, sysfs: Path) -> tuple[str, set[int]]:
    """Return the policy and the CPUs with which memory was asked for."""

    def main() -> tuple[str, set[int]]:
        before = policy(), os.sched_getaffinity(0)
        device = CudaDevice(library=fake.path, sysfs=str(sysfs))
        address = device.pinned_alloc(1000)
        said, *cpus = fake.library.fake_place().decode().split(",")
        device.pinned_free(address)
        assert (policy(), os.sched_getaffinity(0)) == before, "not as it was"
        return said, {int(cpu) for cpu in cpus}

    return in_thread(main)


def may_say() -> bool:
    """Whether a thread may have a policy for its memory here."""
    return in_thread(lambda: set_policy(PREFERRED, 1))


def test_memory_is_asked_for_from_the_gpus_own_node(fake: Fake, sysfs: Path) -> None:
    mine = os.sched_getaffinity(0)
    put(sysfs, 0, str(min(mine)))
    assert CudaDevice(library=fake.path, sysfs=str(sysfs)).node == 0
    said, cpus = place_of(fake, sysfs)
    if may_say():
        assert (said, cpus) == (f"{PREFERRED} 1", mine)
    else:
        assert cpus == {min(mine)}


@pytest.mark.parametrize("cpus", ["{}", "{}-{}", "9000,{},7000-7003"])
def test_where_no_policy_may_be_said_the_thread_goes_there(
    cpus: str, fake: Fake, sysfs: Path
) -> None:
    last = max(os.sched_getaffinity(0))
    put(sysfs, NO_SUCH_NODE, cpus.format(last, last))
    said, found = place_of(fake, sysfs)
    assert found == {last}
    assert said in ("unknown", f"{DEFAULT} 0")


def test_what_the_program_has_said_takes_precedence(fake: Fake, sysfs: Path) -> None:
    put(sysfs, 0, str(min(os.sched_getaffinity(0))))
    if not may_say():
        pytest.skip("here nobody may say where memory is to be")

    def main() -> str:
        assert set_policy(BIND, 1)
        device = CudaDevice(library=fake.path, sysfs=str(sysfs))
        device.pinned_free(device.pinned_alloc(1000))
        assert policy() == BIND
        place: bytes = fake.library.fake_place()
        return place.decode().partition(",")[0]

    assert in_thread(main) == f"{BIND} 1"


@pytest.mark.parametrize(
    "what", ["one node", "no node", "no file", "other CPUs", "no list", "no number"]
)
def test_elsewhere_all_is_as_ever(what: str, fake: Fake, sysfs: Path) -> None:
    last = max(os.sched_getaffinity(0))
    if what != "no file":
        put(sysfs, NO_SUCH_NODE, str(last))
    lists = sysfs / f"devices/system/node/node{NO_SUCH_NODE}/cpulist"
    number = sysfs / "bus/pci/devices" / BUS_ID / "numa_node"
    if what == "one node":
        (sysfs / "devices/system/node/online").write_text("0\n")
    elif what == "no node":
        number.write_text("-1\n")
    elif what == "no number":
        number.write_text("\n")
    elif what == "other CPUs":
        lists.write_text("8000-8191,100000-100001\n")
    elif what == "no list":
        lists.unlink()
    device = CudaDevice(library=fake.path, sysfs=str(sysfs))
    known = what in ("other CPUs", "no list")
    assert device.node == (NO_SUCH_NODE if known else -1)
    said, cpus = place_of(fake, sysfs)
    assert cpus == os.sched_getaffinity(0)
    assert said in ("unknown", f"{DEFAULT} 0")
