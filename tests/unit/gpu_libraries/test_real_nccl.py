# SPDX-License-Identifier: Apache-2.0
"""An installed NCCL, its nccl.h and its functions, against what commrt knows of them.

Without a GPU: what can be asked there is asked. ``make test-gpu-libraries`` installs a
wheel.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import real_nccl

from commrt.nccl import libnccl
from commrt.nccl.features import OLDEST, version_text

_JOIN = """
import sys
from commrt import _native
from commrt.bootstrap import ThreadWorld
from commrt.errors import BackendError
from commrt.nccl import Library, NcclComm
opened, problem = _native.nccl_open(sys.argv[1], only_loaded=False)
assert opened is not None, problem
code, unique_id = opened.unique_id()
print(opened.version, opened.has_alltoall, code, len(unique_id), opened._describe(7))
try:
    world = ThreadWorld(1)
    NcclComm.create(world.bootstrap(0), taken=Library(opened, "test"), timeout_s=300)
except BackendError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Return the folder of an installed wheel."""
    found = [path for _, path in libnccl.wheel_files()]
    if not found:
        pytest.skip("no nvidia-nccl wheel is installed here: make test-gpu-libraries")
    return found[0].parents[1]


@pytest.fixture(scope="module")
def header(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> real_nccl.Header:
    return real_nccl.compare(wheel / "include", tmp_path_factory.mktemp("nccl"))


def test_numbers_and_the_configuration_are_those_of_nccl_h(
    header: real_nccl.Header,
) -> None:
    assert header.facts["header_version"] >= OLDEST
    assert real_nccl.differences(header) == []


def test_functions_are_there_from_the_versions_on_that_are_said(
    wheel: Path, header: real_nccl.Header
) -> None:
    version = header.facts["header_version"]
    library = wheel / "lib" / libnccl.SONAME
    assert real_nccl.functions_that_differ(library, version) == []


def test_the_library_is_of_the_header_and_says_what_is_missing_without_a_driver(
    wheel: Path, header: real_nccl.Header
) -> None:
    if libnccl.why_missing() is None:
        pytest.skip("there is a GPU: tests/gpu runs NCCL on it")
    library = str(wheel / "lib" / libnccl.SONAME)
    done = subprocess.run(
        [sys.executable, "-I", "-c", _JOIN, library],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    facts, error = done.stdout.splitlines()
    version, has_alltoall, code, id_nbytes, seven = facts.split(maxsplit=4)
    assert int(version) == header.facts["header_version"], version_text(int(version))
    assert (has_alltoall == "True") == (int(version) >= 22800)
    assert (code, id_nbytes) == ("0", "128")
    assert seven.startswith("NCCL operation in progress (7)")
    assert "joining on nccl, rank 0 of 1: NCCL failed: unhandled cuda error" in error


# What finds a difference is tried on an nccl.h that has one.
_CHANGES = {
    "a type": ("ncclBfloat16   = 9", "ncclBfloat16   = 12", "type bfloat16 is 12"),
    "a result": ("ncclInProgress              =  7", "ncclInProgress = 70", "is 70"),
    "a field": ("int minCTAs;", "alignas(16) int minCTAs;", "min_ctas lies at"),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_difference_is_found(what: str, wheel: Path, tmp_path: Path) -> None:
    before, after, said = _CHANGES[what]
    found = real_nccl.differences(_changed(wheel, tmp_path, before, after))
    assert any(said in each for each in found), found


def test_a_prototype_that_differs_does_not_compile(wheel: Path, tmp_path: Path) -> None:
    call = "ncclSend(const void* sendbuff, size_t count"
    with pytest.raises(subprocess.CalledProcessError) as error:
        _changed(wheel, tmp_path, call, call.replace("size_t", "int"))
    assert "ncclSend takes other arguments than send" in error.value.stderr


def _changed(wheel: Path, place: Path, before: str, after: str) -> real_nccl.Header:
    text = (wheel / "include" / "nccl.h").read_text()
    assert before in text
    include = place / "include"
    include.mkdir()
    (include / "nccl.h").write_text(text.replace(before, after))
    return real_nccl.compare(include, place)
