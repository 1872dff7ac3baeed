# SPDX-License-Identifier: Apache-2.0
"""Command lines whose reader leaves early."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COMMANDS = {
    "info": ["-m", "commrt", "info"],
    "verify": ["-m", "commrt", "verify", "ring", "--ranks", "1..5"],
    "tune": [
        "-c",
        "from commrt.tuning import cli; cli.main(['explain', 'bcast', '8'])",
    ],
}


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_reader_that_has_left_is_no_traceback(name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, *_COMMANDS[name]],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=os.sep,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writing)
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr
