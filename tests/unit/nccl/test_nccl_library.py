# SPDX-License-Identifier: Apache-2.0
"""Which libnccl is taken, and what is said where none will do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fake_nccl
import pytest

from commrt import _native
from commrt.errors import BackendError
from commrt.nccl import libnccl as search
from commrt.nccl.features import FEATURES, OLDEST, require, version_text


@pytest.fixture
def stub() -> Path:
    return fake_nccl.build()


def _in_new_process(code: str, **environ: str) -> str:
    """Run where nothing is loaded yet; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k != "COMMRT_NCCL_LIB"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_FIND = (
    "from commrt.nccl.libnccl import find\n"
    "taken = find()\n"
    "print(taken.why, taken.path, taken.version, sep='|')\n"
)


def test_the_variable_names_the_library(stub: Path) -> None:
    said = _in_new_process(_FIND, COMMRT_NCCL_LIB=str(stub))
    assert said.split("|") == ["COMMRT_NCCL_LIB", str(stub), "22809"]


def test_what_is_loaded_comes_before_the_variable(stub: Path) -> None:
    load = f"import ctypes; ctypes.CDLL({str(stub)!r})\n"
    said = _in_new_process(load + _FIND, COMMRT_NCCL_LIB="/nowhere/libnccl.so.2")
    assert said.split("|")[:2] == ["loaded already in this process", str(stub)]


def test_a_wheel_comes_before_the_system(stub: Path, tmp_path: Path) -> None:
    """As pip unpacks it; nothing of the package is imported."""
    info = tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Name: nvidia-nccl-cu13\nVersion: 2.28.9\n")
    inside = "nvidia/nccl/lib/libnccl.so.2"
    info.joinpath("RECORD").write_text(f"{inside},,\n")
    tmp_path.joinpath(inside).parent.mkdir(parents=True)
    tmp_path.joinpath(inside).symlink_to(stub)
    said = _in_new_process(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{_FIND}"
        "assert 'nvidia' not in sys.modules"
    )
    assert said.startswith(f"wheel nvidia-nccl-cu13|{tmp_path}")


def test_a_named_library_that_is_not_there_is_an_error() -> None:
    code = (
        "from commrt.errors import BackendError\n"
        "from commrt.nccl.libnccl import find\n"
        "try: find()\n"
        "except BackendError as error: print(error)\n"
    )
    said = _in_new_process(code, COMMRT_NCCL_LIB="/nowhere/libnccl.so.2")
    assert "COMMRT_NCCL_LIB is /nowhere/libnccl.so.2" in said
    assert "No such file" in said


def test_where_there_is_none_all_that_was_tried_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(path: str, *, only_loaded: bool) -> tuple[None, str]:
        return None, "not here" if only_loaded else "cannot open"

    monkeypatch.setattr(search._native, "nccl_open", nothing)
    monkeypatch.setattr(search, "wheel_files", lambda: [("a-wheel", Path("/x"))])
    with pytest.raises(BackendError) as error:
        search.find({})
    for words in ("loaded already", "not here", "a-wheel", "system", "cuda12"):
        assert words in str(error.value)


def test_a_library_that_is_too_old_is_named_with_both_versions(stub: Path) -> None:
    code = (
        f"import ctypes; ctypes.CDLL({str(stub)!r}).stub_reset(21703)\n"
        "from commrt.errors import BackendError\n"
        "from commrt.nccl.libnccl import find\n"
        "try: find()\n"
        "except BackendError as error: print(error)\n"
    )
    said = _in_new_process(code)
    assert "2.17.3" in said
    assert f"needs {version_text(OLDEST)}" in said


def test_what_is_no_nccl_is_refused() -> None:
    opened, problem = _native.nccl_open("libc.so.6", only_loaded=False)
    assert opened is None
    assert "has no function nccl" in problem


def test_describe_tells_what_was_taken(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = _native.nccl_open(str(stub), only_loaded=False)
    assert opened is not None
    monkeypatch.setattr(search, "_found", [search.Library(opened, "a test")])
    lines = list(search.describe())
    assert lines[0].endswith("taken because: a test")
    assert str(stub) in lines[1]


def test_describe_says_where_two_wheels_overwrite_each_other(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = _native.nccl_open(str(stub), only_loaded=False)
    assert opened is not None
    monkeypatch.setattr(search, "_found", [search.Library(opened, "a test")])
    both = [(wheel, stub) for wheel in search.WHEELS]
    monkeypatch.setattr(search, "wheel_files", lambda: iter(both))
    assert "overwrite each other" in list(search.describe())[-1]


@pytest.mark.parametrize("one", FEATURES, ids=lambda one: one.name)
def test_a_missing_feature_names_the_version_found_and_the_one_needed(one) -> None:
    require(one.name, one.since, "a call")
    if one.since == OLDEST:
        return
    with pytest.raises(BackendError) as error:
        require(one.name, one.since - 1, "a call")
    assert version_text(one.since) in str(error.value)
    assert f"has {version_text(one.since - 1)}" in str(error.value)


def test_versions_are_written_as_people_do() -> None:
    assert [version_text(v) for v in (21800, 22809, 23203)] == [
        "2.18.0",
        "2.28.9",
        "2.32.3",
    ]
