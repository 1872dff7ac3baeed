# SPDX-License-Identifier: Apache-2.0
"""The memory a process may use: physical, or what its cgroups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from commrt.errors import BackendError
from commrt.job.memory_limit import check_fits, memory_limit_nbytes


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _limit(tmp_path: Path, line: str) -> int:
    proc = tmp_path / "cgroup"
    proc.write_text(line)
    return memory_limit_nbytes(proc, tmp_path / "fs")


def test_version_2_takes_the_smallest_limit_up_to_the_root(tmp_path: Path) -> None:
    _write(tmp_path / "fs/job/step/memory.max", "max\n")
    _write(tmp_path / "fs/job/memory.max", "4096\n")
    _write(tmp_path / "fs/memory.max", "8192\n")
    assert _limit(tmp_path, "0::/job/step\n") == 4096


def test_version_1_reads_the_memory_controller(tmp_path: Path) -> None:
    _write(tmp_path / "fs/memory/job/memory.limit_in_bytes", "12345\n")
    assert _limit(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/job\n") == 12345


def test_without_a_limit_it_is_the_physical_memory(tmp_path: Path) -> None:
    unlimited = _limit(tmp_path, "0::/\n")
    assert unlimited > 1 << 20
    assert memory_limit_nbytes(tmp_path / "absent", tmp_path) == unlimited


def test_too_much_names_both_sizes_and_the_cure() -> None:
    check_fits(100, 100)
    with pytest.raises(BackendError, match=r"101 bytes.*100 in all.*fewer ranks"):
        check_fits(101, 100)
