# SPDX-License-Identifier: Apache-2.0
"""Blocks of a lesson: what a program changed in a function, and what a command printed.

A block marked ``diff`` shows how one function became another one. A block marked
``text`` stands behind a block ``sh`` of one command, whose output it is.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["changed_lines", "function_lines", "printed_by_commands"]

_COMMAND = re.compile(r"^```sh\n([^\n]*)\n```\n\n```text\n(.*?)^```$", re.S | re.M)


def changed_lines(before: Callable[..., Any], after: Callable[..., Any]) -> str:
    """Return the lines of both functions without docstrings, with ``+`` and ``-``.

    A line that only moved to the right is none that changed.
    """
    old, new = function_lines(before), function_lines(after)
    plain = [[line.strip() for line in lines] for lines in (old, new)]
    lines: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *plain, False).get_opcodes():
        if kind == "equal":
            lines += [f"  {line}".rstrip() for line in new[c:d]]
        else:
            lines += [f"- {line}".rstrip() for line in old[a:b]]
            lines += [f"+ {line}".rstrip() for line in new[c:d]]
    return "\n".join([*lines, ""])


def printed_by_commands(page: Path) -> dict[str, str]:
    """Return the output that a page shows of each command."""
    return dict(_COMMAND.findall(page.read_text()))


def function_lines(function: Callable[..., Any]) -> list[str]:
    """Return the lines of a function without its docstring."""
    text = inspect.getsource(function)
    found = ast.parse(text).body[0]
    assert isinstance(found, ast.FunctionDef)
    docstring = found.body[0]
    lines = text.splitlines()
    assert docstring.end_lineno is not None
    return lines[: docstring.lineno - 1] + lines[docstring.end_lineno :]
