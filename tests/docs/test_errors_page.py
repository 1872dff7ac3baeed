# SPDX-License-Identifier: Apache-2.0
"""docs/reference/errors.md has an entry with a message for every error class."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import commrt.errors

pytestmark = pytest.mark.whole
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
ENTRIES = {
    name: text
    for name, text in re.findall(
        r"^## `(\w+)`\n(.*?)(?=^## |^<!-- end)", PAGE, re.S | re.M
    )
}
NEVER_RAISED = {"CommError"}


def error_classes() -> list[str]:
    """Return the classes of the sources that derive from an error of commrt."""
    bases: dict[str, set[str]] = {}
    for folder in ("commrt", "bench", "tuning"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"^class \w+\(.*Error", text, re.M):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    names = {ast.unparse(base).split(".")[-1] for base in node.bases}
                    bases.setdefault(node.name, set()).update(names)
    found = {"CommError"}
    while more := {name for name in bases if bases[name] & found} - found:
        found |= more
    return sorted(found)


def test_the_sources_have_the_classes_of_the_package() -> None:
    public = {
        name for name in commrt.errors.__all__ if name not in ("shown", "suggest")
    }
    others = {"RequestErrors", "LaunchError", "ClusterError"}
    assert public | others == set(error_classes())


@pytest.mark.parametrize("name", error_classes())
def test_every_error_class_has_an_entry(name: str) -> None:
    entry = ENTRIES[name]
    assert f".{name}`, subclass of " in entry
    assert re.search(r"^\*\*What to do:\*\* [A-Z]", entry, re.M)
    found = re.search(r"^```text\n(.+?)^```$", entry, re.S | re.M)
    if name in NEVER_RAISED:
        assert found is None
        return
    assert found is not None, "no message"


def test_the_page_has_no_entry_of_a_class_that_is_gone() -> None:
    assert sorted(ENTRIES) == error_classes()


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - NEVER_RAISED))
def test_a_message_is_the_same_in_every_run(name: str) -> None:
    """No addresses, process numbers, or paths of one machine."""
    entry = ENTRIES[name]
    (message,) = re.findall(r"^```text\n(.+?)^```$", entry, re.S | re.M)
    assert re.findall(r"0x[0-9a-f]+|/home/|/root/|/tmp/|site-packages", message) == []
