# SPDX-License-Identifier: Apache-2.0
"""The line of the program that makes a call, for messages about it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

__all__ = ["call_site"]

_OWN = "commrt"
_PROGRAMS = frozenset(("bench", "tuning", "examples"))
"""Parts of commrt that are programs."""
_LIBRARIES = (
    frozenset(("torch", "functorch", "typing_extensions")) | sys.stdlib_module_names
)
_NOWHERE = "no line of Python's"
_NAME_LENGTH = 40


def call_site() -> str:
    """Return file and line of the innermost frame that is the program's.

    So none of commrt, of torch, through which process groups are called, or of Python's
    own library.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_programs(str(frame.f_globals.get("__name__", ""))):
            name = Path(frame.f_code.co_filename).name[-_NAME_LENGTH:]
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return _NOWHERE


def _is_programs(module: str) -> bool:
    """Whether a frame of this module belongs to the program."""
    top, _, rest = module.partition(".")
    if top == _OWN:
        return rest.partition(".")[0] in _PROGRAMS
    return module == "__main__" or top not in _LIBRARIES
