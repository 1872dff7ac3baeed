# SPDX-License-Identifier: Apache-2.0
"""Text of others on a terminal: what controls terminals is shown, and does nothing."""

from __future__ import annotations

import re

__all__ = ["visible", "visible_lines"]

_HIDDEN = (
    "\\x00-\\x1f\\x7f-\\x9f"  # controls of terminals
    "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"  # lines, directions
    "\\ud800-\\udfff"  # what no file can hold as text
)
_CONTROLS = re.compile(f"[{_HIDDEN}]")


def visible(text: str) -> str:
    """Return one line of text, with controls written as ``\\x1b``."""
    return _CONTROLS.sub(_escaped, text)


def visible_lines(text: str) -> str:
    """Return text of several lines; ends of lines and tabs stay what they are."""
    return _CONTROLS.sub(_escaped_in_lines, text)


def _escaped_in_lines(one: re.Match[str]) -> str:
    return one[0] if one[0] in "\n\t" else _escaped(one)


def _escaped(one: re.Match[str]) -> str:
    code = ord(one[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
