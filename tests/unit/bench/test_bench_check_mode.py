# SPDX-License-Identifier: Apache-2.0
"""The benchmark of check mode compares each kind of call with itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commrt.bench.check_mode import measure


def test_pairs_of_blocks_follow_one_another_and_the_first_is_left_out() -> None:
    made: list[str] = []
    row = measure(
        lambda: made.append("plain"), lambda: made.append("checked"), calls=3, blocks=2
    )
    assert made == (["plain"] * 3 + ["checked"] * 3) * 3
    assert len(row["pairs_us"]) == 2
    added = [checked - plain for plain, checked in row["pairs_us"]]
    assert min(added) <= row["added_us"] <= max(added)


def test_a_line_for_each_kind_of_call_and_raw_data(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "commrt.run", "-n", "2", "-m"]
    run += ["commrt.bench.check_mode", "--blocks", "2", "--calls", "5"]
    out = tmp_path / "raw.json"
    done = subprocess.run(
        [*run, "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(out.read_text())
    assert found["ranks"] == 2
    assert len(lines) == 1 + len(found["calls"])
    for name, line in zip(found["calls"], lines[1:], strict=True):
        assert line.startswith(name)
        assert len(found["calls"][name]["pairs_us"]) == 2
