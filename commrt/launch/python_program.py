# SPDX-License-Identifier: Apache-2.0
"""The Python program of a process, and how another process runs the same one."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from commrt.errors import UsageError

__all__ = ["PythonProgram", "own_program", "program_of", "run_program"]

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python whose value may be the next word."""
_CODE, _MODULE = "-c", "-m"


@dataclass(frozen=True)
class PythonProgram:
    """The words behind ``python`` on a command line, in their two parts."""

    options: tuple[str, ...]
    """Python's own options, such as ``-u``."""
    words: tuple[str, ...]
    """A script, or ``-m`` and a module, or ``-c`` and code; then their arguments."""


_RUN_HERE: list[PythonProgram] = []
"""The program that another one has run in this process."""


def own_program() -> PythonProgram:
    """Return the program of this process; UsageError where it cannot be run again.

    One that Python read from a terminal or a pipe is not there any more.
    """
    return _RUN_HERE[0] if _RUN_HERE else program_of(sys.orig_argv[1:])


def program_of(arguments: Sequence[str]) -> PythonProgram:
    """Return the program that Python finds in its arguments.

    Raises UsageError where they name none.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        word = arguments[at]
        if word == "-":
            break
        kind, letters, value = _kind_in(word)
        if kind:
            first = [value] if value else []
            words = (kind, *first, *arguments[at + 1 :])
            if len(words) == 1:
                break
            options = [*arguments[:at], *([letters] if letters != "-" else [])]
            return PythonProgram(tuple(options), words)
        at += 2 if word in _WITH_VALUE else 1
    if at >= len(arguments) or arguments[at].startswith("-"):
        raise UsageError(
            f"the arguments {[*arguments]} of Python name no script, no -m and no -c: "
            f"name the program of the newcomers, as in "
            f'grow(1, program=["train.py", "--steps", "100"])'
        )
    return PythonProgram(tuple(arguments[:at]), tuple(arguments[at:]))


def _kind_in(word: str) -> tuple[str, str, str]:
    """Return ``-c`` or ``-m`` if a word of options has it, and what stands around it.

    As in ``-um``, ``-mtrain``: options before it, and its value behind it.
    """
    if not word.startswith("--"):
        for at, letter in enumerate(word[1:], 1):
            if letter in "WX":  # the rest is a value
                break
            if letter in "cm":
                return f"-{letter}", word[:at], word[at + 1 :]
    return "", "", ""


def run_program(program: PythonProgram) -> None:
    """Run a program in this process, as ``python`` would that has its options."""
    _RUN_HERE[:] = [program]
    words = program.words
    if words[0] == _CODE:
        sys.argv[:] = [_CODE, *words[2:]]
        _begin_path("")
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == _MODULE:
        sys.argv[:] = words[1:]
        _begin_path(os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        _begin_path(os.path.dirname(os.path.realpath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def _begin_path(folder: str) -> None:
    """Let imports look into a program's folder first, unless Python was told not to."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[:1] = [folder]
