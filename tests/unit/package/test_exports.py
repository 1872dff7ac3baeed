# SPDX-License-Identifier: Apache-2.0
"""What `import commrt` gives, and what it must not do."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import commrt

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def test_public_names_are_sorted_and_exist() -> None:
    assert list(commrt.__all__) == sorted(commrt.__all__)
    assert [name for name in commrt.__all__ if not hasattr(commrt, name)] == []


def test_nothing_else_looks_public() -> None:
    loose = {
        name
        for name, value in vars(commrt).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert (
        loose - set(commrt.__all__) - {"annotations", "Any", "TYPE_CHECKING"} == set()
    )


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in sorted(REFERENCE.glob("*.md")))
    written = set(re.findall(r"`(?:@?commrt\.)?(\w+)\b", text))
    assert set(commrt.__all__) - written == set()


def test_import_starts_nothing_and_loads_no_big_library() -> None:
    code = (
        "import sys, threading, commrt;"
        "loaded = {'mpi4py', 'torch', 'cupy', 'ml_dtypes'} & set(sys.modules);"
        "assert not loaded, loaded;"
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
