# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program a call stands: file, line and function.

Between the program and commrt lie frames of torch, of Python's own library and of
commrt's layers, which are passed over. A place is a code object and an instruction in
it, so it is found again by two numbers; which line that is, is read when it is shown.
"""

from __future__ import annotations

import sys
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
_LIBRARIES = frozenset(("torch", "functorch")) | sys.stdlib_module_names


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
_PASS: Final = Site(None, -3)
"""Stands for frames that are passed over."""
_NOWHERE: Final = Site(None, -1)


class CallSites:
    """Places that calls have come from."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Site] = {}
        # The codes are kept, so that no other one can get their addresses.
        self._codes: dict[int, CodeType] = {}

    def of_caller(self, frame: FrameType) -> Site:
        """Return where the user's program called; CORE for calls of commrt's own."""
        known = self._known
        site = known.get((id(frame.f_code), frame.f_lasti))
        if site is None:
            site = self._look(frame)
        if site is not _PASS:
            return site
        nearest = frame
        at: FrameType | None = frame.f_back
        while at is not None:
            site = known.get((id(at.f_code), at.f_lasti))
            if site is None:
                site = self._look(at)
            if site is not _PASS and site is not CORE:
                return site
            at = at.f_back
        return Site(nearest.f_code, nearest.f_lasti)

    @staticmethod
    def nowhere() -> Site:
        """Return the place of a call that no Python made."""
        return _NOWHERE

    def _look(self, frame: FrameType) -> Site:
        """Classify a frame that was not met before."""
        if len(self._known) >= _MOST_SITES:
            self._known.clear()
            self._codes.clear()
        code = frame.f_code
        self._codes[id(code)] = code
        found = _kind(str(frame.f_globals.get("__name__", "")))
        if found is None:
            found = Site(code, frame.f_lasti)
        self._known[id(code), frame.f_lasti] = found
        return found


def _kind(module: str) -> Site | None:
    """Return what stands for frames of a module; None for the user's own."""
    top, _, rest = module.partition(".")
    if top == _OWN:
        part = rest.partition(".")[0]
        if part in _PROGRAMS:
            return None
        return _PASS if part in _PASSED else CORE
    if top in _LIBRARIES and module != "__main__":
        return _PASS
    return None


def _name_of(code: CodeType) -> str:
    """Return a function's name, with its class where Python tells."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name
