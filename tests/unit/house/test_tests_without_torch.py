# SPDX-License-Identifier: Apache-2.0
"""Where torch cannot be had, tests that need it are skipped, and commrt says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "pytorch"
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
        timeout=300,
        check=False,
    )
    files = len([*FOLDER.glob("test_*.py")])
    assert "torch is not installed: make test-torch makes" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{files} skipped in"), done.stdout


def test_what_needs_torch_says_how_to_get_it(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
import commrt.torch
try:
    from commrt.torch import explain
except ImportError as error:
    print(error)
with commrt.torch.using("ring"):
    print(commrt.torch.Options(algorithm="ring").algorithm)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    said, algorithm = done.stdout.splitlines()
    assert said == (
        "commrt.torch.explain needs torch, which is not installed here: pip install "
        "'commrt[torch]'; commrt itself works without"
    )
    assert algorithm == "ring"
