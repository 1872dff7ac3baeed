# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program a call stands: file, line and function.

Between the program and commrt lie frames of torch, of Python's own library and of
commrt's layers, which are passed over. A place is a code object and an instruction in
it, so it is found again by two numbers; which line that is, is read when it is shown.
"""

from __future__ import annotations

import sys
from enum import Enum, auto
from types import CodeType, FrameType
from typing import Final

__all__ = ["CORE", "CallSites", "Site"]

_MOST_SITES = 1 << 16
"""Programs that compile code for ever would otherwise keep it for ever."""
_OWN = "commrt"
_PASSED = frozenset(("layers",))
"""Parts of commrt that call it as a program does, on behalf of one."""
_PROGRAMS = frozenset(("bench", "tuning", "examples"))
"""Parts of commrt that are programs."""
_LIBRARIES = (
    frozenset(("torch", "functorch", "typing_extensions")) | sys.stdlib_module_names
)
_WRAPPERS = ("deepspeed.comm.", "deepspeed.runtime.pipe.p2p.", "deepspeed.utils.nvtx.")
"""Parts of programs through which all of their calls go, so that they tell nothing."""


class Site:
    """One place in a program."""

    __slots__ = ("_at", "_code")

    def __init__(self, code: CodeType | None, at: int) -> None:
        self._code = code
        self._at = at

    @property
    def file(self) -> str:
        """Path of the file; empty where no Python called."""
        return "" if self._code is None else self._code.co_filename

    @property
    def line(self) -> int:
        """Line in the file; 0 where it is not known."""
        if self._code is None:
            return 0
        for begin, end, line in self._code.co_lines():
            if begin <= self._at < end:
                return line or 0
        return self._code.co_firstlineno

    @property
    def function(self) -> str:
        """Name of the function."""
        return "" if self._code is None else _name_of(self._code)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(no Python)"


CORE: Final = Site(None, -2)
"""Stands for calls that commrt itself makes, which are parts of a user's call."""
_NOWHERE: Final = Site(None, -1)


class CallSites:
    """Places that calls have come from."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Site] = {}
        """Places in the program, and CORE, by code and instruction."""
        self._passed: set[int] = set()
        """Codes whose frames are passed over."""
        # The codes are kept, so that no other one can get their addresses.
        self._codes: dict[int, CodeType] = {}

    def of_caller(self, frame: FrameType) -> Site:
        """Return where the user's program called; CORE for calls of commrt's own."""
        known, passed = self.known, self._passed
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            if id(code) not in passed:
                site = known.get((id(code), at.f_lasti)) or self._look(at)
                if site is not None and (site is not CORE or at is frame):
                    return site
            at = at.f_back
        return Site(frame.f_code, frame.f_lasti)

    @staticmethod
    def nowhere() -> Site:
        """Return the place of a call that no Python made."""
        return _NOWHERE

    def _look(self, frame: FrameType) -> Site | None:
        """Classify a frame that was not met before; None: it is passed over."""
        if len(self._codes) >= _MOST_SITES or len(self.known) >= _MOST_SITES:
            self.known.clear()
            self._passed.clear()
            self._codes.clear()
        code = frame.f_code
        self._codes[id(code)] = code
        kind = _kind(str(frame.f_globals.get("__name__", "")))
        if kind is _Kind.PASSED:
            self._passed.add(id(code))
            return None
        site = CORE if kind is _Kind.CORE else Site(code, frame.f_lasti)
        self.known[id(code), frame.f_lasti] = site
        return site


class _Kind(Enum):
    USER = auto()
    PASSED = auto()
    CORE = auto()


def _kind(module: str) -> _Kind:
    """Return whose frames those of a module are."""
    top, _, rest = module.partition(".")
    if top == _OWN:
        part = rest.partition(".")[0]
        if part in _PROGRAMS:
            return _Kind.USER
        return _Kind.PASSED if part in _PASSED else _Kind.CORE
    if top in _LIBRARIES and module != "__main__":
        return _Kind.PASSED
    if f"{module}.".startswith(_WRAPPERS):
        return _Kind.PASSED
    return _Kind.USER


def _name_of(code: CodeType) -> str:
    """Return a function's name, with its class where Python tells."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name
