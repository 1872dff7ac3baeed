# SPDX-License-Identifier: Apache-2.0
"""Tests that need torch are skipped, with the reason, where it cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pytorch"
HIDDEN = """
import sys
sys.modules["torch"] = None
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_every_file_says_that_torch_is_not_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, str(FOLDER)],
        cwd=tmp_path,  # the checkout's commrt has no engine
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    files = len([*FOLDER.glob("test_*.py")])
    assert "torch is not installed: make test-torch makes" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{files} skipped in"), done.stdout
