# SPDX-License-Identifier: Apache-2.0
"""The newcomers' tour is short, and every file that it names exists."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT

pytestmark = pytest.mark.whole
PAGE = (ROOT / "docs" / "internals" / "tour.md").read_text()
EXAMPLE = "commrt/algorithms/halves.py"
"""The file that the reader is to write."""


def test_every_file_that_the_tour_names_exists() -> None:
    named = set(re.findall(r"`((?:commrt|tests)/[\w./]+)`", PAGE)) - {EXAMPLE}
    assert len(named) > 30
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []
    assert not (ROOT / EXAMPLE).exists()


def test_the_tour_is_short() -> None:
    assert len(PAGE.splitlines()) <= 200
