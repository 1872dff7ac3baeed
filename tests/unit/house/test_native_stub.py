# SPDX-License-Identifier: Apache-2.0
"""The checked-in types of the native module are those of the module."""

from __future__ import annotations

import ast
import difflib

import native_stub

from commrt import _native


def _plain(text: str) -> str:
    """Return the code without its layout, which ruff decides."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.unparse(tree)


def test_the_stub_says_what_the_module_has() -> None:
    checked_in = _plain(native_stub.STUB.read_text()).splitlines()
    expected = _plain(native_stub.generate()).splitlines()
    differences = list(difflib.unified_diff(checked_in, expected, n=0, lineterm=""))
    assert not differences, "run: python tests/support/native_stub.py"


def test_every_name_of_the_module_is_in_the_stub() -> None:
    body = ast.parse(native_stub.STUB.read_text()).body
    described = {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert described == {name for name in vars(_native) if not name.startswith("__")}
