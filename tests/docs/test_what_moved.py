# SPDX-License-Identifier: Apache-2.0
"""The page of moved modules names places that exist, and no old one that still does."""

from __future__ import annotations

import pkgutil
import re

import pytest
from doc_blocks import ROOT

pytestmark = pytest.mark.whole
PAGE = ROOT / "docs" / "internals" / "what-moved.md"
ROW = re.compile(r"^\| `(commrt[\w.]+)` \| `(commrt[\w.]+)` \|$", re.M)
MOVED = ROW.findall(PAGE.read_text())


def test_the_page_has_its_tables() -> None:
    assert len(MOVED) > 100
    assert len({old for old, _ in MOVED}) == len(MOVED)


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_what_moved_is_where_the_page_says(old: str, new: str) -> None:
    pkgutil.resolve_name(new)
    assert not (ROOT / old.replace(".", "/")).with_suffix(".py").exists()
