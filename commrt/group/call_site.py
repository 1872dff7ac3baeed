# SPDX-License-Identifier: Apache-2.0
"""The line of the program that makes a call, for messages about it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

__all__ = ["OWN", "PROGRAMS", "call_site", "is_library"]

OWN = "commrt"
PROGRAMS = frozenset(("bench", "tuning", "examples"))
"""Parts of commrt that are programs."""
_LIBRARIES = (
    frozenset(("torch", "functorch", "typing_extensions")) | sys.stdlib_module_names
)
_WRAPPERS = ("deepspeed.comm.", "deepspeed.runtime.pipe.p2p.", "deepspeed.utils.nvtx.")
"""Parts of programs through which all of their calls go, so that they tell nothing."""
_NOWHERE = "no line of Python's"
_NAME_NBYTES = 40
"""Messages of check mode have little room, and file names may be of any letters."""


def call_site() -> str:
    """Return file and line of the innermost frame that is the program's.

    So none of commrt, of torch, through which process groups are called, or of Python's
    own library.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_programs(str(frame.f_globals.get("__name__", ""))):
            return f"{_end_of(Path(frame.f_code.co_filename).name)}:{frame.f_lineno}"
        frame = frame.f_back
    return _NOWHERE


def _end_of(name: str) -> str:
    plain = "".join(
        each if each.isprintable() and each not in '"\\' else "?" for each in name
    )
    return plain.encode("utf-8")[-_NAME_NBYTES:].decode("utf-8", "ignore")


def is_library(module: str) -> bool:
    """Return whether a frame of this module is between the program and commrt."""
    if module == "__main__":
        return False
    return module.partition(".")[0] in _LIBRARIES or f"{module}.".startswith(_WRAPPERS)


def _is_programs(module: str) -> bool:
    """Return whether a frame of this module belongs to the program."""
    top, _, rest = module.partition(".")
    if top == OWN:
        return rest.partition(".")[0] in PROGRAMS
    return not is_library(module)
