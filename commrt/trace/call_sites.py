# SPDX-License-Identifier: Apache-2.0
"""The place of a call in the user's program: file, line and function.

Between the program and commrt lie frames of torch, of Python's own library and of
commrt's layers and methods of science, which are passed over. A place is a code object
and an instruction in it, so it is found again by two numbers
(``recording/call_sites.cpp``); which line that is, is read when it is shown.
"""

from __future__ import annotations

from enum import Enum, auto
from types import CodeType, FrameType
from typing import Final

from commrt import _native
from commrt.group.call_site import OWN, PROGRAMS, is_library

__all__ = ["CORE", "NOWHERE", "Site", "call_sites"]

_PASSED = frozenset(("hvd", "layers", "science"))
"""Parts of commrt that call it as a program does, on behalf of one."""


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
NOWHERE: Final = Site(None, -1)
"""Stands for calls that no Python made."""


def call_sites() -> _native.CallSites:
    """Return a finder of the places that calls come from; it remembers them."""
    return _native.CallSites(_classified, _beyond, CORE, NOWHERE)


def _classified(frame: FrameType) -> Site | None:
    """Return the place of a new frame; None if it is passed over."""
    kind = _kind(str(frame.f_globals.get("__name__", "")))
    if kind is _Kind.PASSED:
        return None
    return CORE if kind is _Kind.CORE else Site(frame.f_code, frame.f_lasti)


def _beyond(frame: FrameType) -> Site:
    """Return the place of a call that nothing but passed frames have led to."""
    return Site(frame.f_code, frame.f_lasti)


class _Kind(Enum):
    USER = auto()
    PASSED = auto()
    CORE = auto()


def _kind(module: str) -> _Kind:
    """Return whose frames those of a module are."""
    top, _, rest = module.partition(".")
    if top == OWN:
        part = rest.partition(".")[0]
        if part in PROGRAMS:
            return _Kind.USER
        return _Kind.PASSED if part in _PASSED else _Kind.CORE
    return _Kind.PASSED if is_library(module) else _Kind.USER


def _name_of(code: CodeType) -> str:
    """Return a function's name, with its class where Python tells."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name
