# SPDX-License-Identifier: Apache-2.0
"""What every test of ``tests/clients`` begins with: a program from PyPI, and its marks.

PROGRAM = Program("DeepSpeed", "deepspeed")
pytestmark = PROGRAM.marks
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import pytest

__all__ = ["DEADLINE_S", "Program"]

DEADLINE_S = 240.0
"""Of a launch of ranks: importing alone takes some of these programs half a minute."""


@dataclass(frozen=True)
class Program:
    """A program from PyPI, which is installed in an environment of its own."""

    shown: str
    """Its name in what the tests say."""
    distribution: str
    """Its name on PyPI."""
    module: str = ""
    """What it is imported by, if by another name."""

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Marks of its tests: a time limit, and a reason where it is not installed."""
        missing = importlib.util.find_spec(self.module or self.distribution) is None
        reason = f"{self.distribution} is not installed; make test-clients installs it"
        return [
            pytest.mark.timeout(DEADLINE_S + 60),
            pytest.mark.skipif(missing, reason=reason),
        ]

    def __str__(self) -> str:
        return f"{self.shown} {importlib.metadata.version(self.distribution)}"
