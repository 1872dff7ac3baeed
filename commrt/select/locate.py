# SPDX-License-Identifier: Apache-2.0
"""Finds the selection table: rank 0 locates, every rank parses the same text.

``COMMRT_TABLE``, else the user's folder, else a shipped table, both under this
machine's fingerprint, else none. ``locate`` never raises for a bad file: the failure
travels in the LocatedTable, so that all ranks raise the same error from ``parse``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from commrt import env
from commrt.errors import TableError, UsageError
from commrt.select.fingerprint import Machine, this_machine
from commrt.select.schema import Catalog
from commrt.select.table import Table, load
from commrt.select.text_file import read_text

__all__ = ["LocatedTable", "locate", "parse", "read_named", "user_table_path"]


@dataclass(frozen=True)
class LocatedTable:
    """The table in force, as rank 0 found it."""

    path: str | None
    """File, None without a table."""
    text: str | None
    """Its content, None without a table or where reading failed."""
    why: str
    """Way in which it was found, or the reason why there is none."""
    fingerprint: str
    """Machine of rank 0."""
    any_machine: bool = False
    """True if a table of another machine is allowed."""
    error: str | None = None
    """Reason why the file could not be read."""

    def encode(self) -> bytes:
        """Return the bytes that rank 0 sends."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, blob: bytes) -> LocatedTable:
        """Return what ``encode`` was given."""
        return cls(**json.loads(blob))

    def parse(self, known: Catalog) -> Table | None:
        """Return the checked table, None without one; TableError alike on all ranks."""
        if self.error is not None:
            raise TableError(self.error)
        if self.text is None:
            return None
        return _PARSED.of(self, self.text, known)


class _Parsed:
    """The table that was checked last: a world that replaces another has the same."""

    def __init__(self) -> None:
        self._last: tuple[LocatedTable, Catalog, Table] | None = None

    def of(self, located: LocatedTable, text: str, known: Catalog) -> Table:
        """Return the checked table: the same again while the same names exist."""
        last = self._last
        if last is not None and last[:2] == (located, known):
            return last[2]
        table = parse(located, text, known)
        self._last = located, known, table
        return table


_PARSED = _Parsed()


def locate(
    machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> LocatedTable:
    """Return the location of this machine's table; for rank 0.

    Args:
        machine: this machine; for tests.
        environ: the environment; for tests.
    """
    machine = machine or this_machine()
    named = env.read_str("COMMRT_TABLE", environ)
    if named is not None:
        return read_named(Path(named), "COMMRT_TABLE", machine, environ)
    mine = _users_table(machine, environ)
    if mine is not None:
        return _read(mine, "written here by commrt-tune", machine)
    for shipped, text in _shipped():
        if machine.fingerprint in text:
            why = "shipped for this kind of machine"
            return LocatedTable(shipped, text, why, machine.fingerprint)
    why = "no table for this machine: commrt-tune run writes one"
    return LocatedTable(None, None, why, machine.fingerprint)


def read_named(
    path: Path,
    why: str,
    machine: Machine | None = None,
    environ: Mapping[str, str] | None = None,
) -> LocatedTable:
    """Return a table that somebody asks for by its path; for rank 0."""
    allowed = env.read_bool("COMMRT_TABLE_ANY_MACHINE", environ)
    return _read(path, why, machine or this_machine(), allowed)


def parse(located: LocatedTable, text: str, known: Catalog) -> Table:
    """Return the checked table in ``text``; TableError if it is another machine's."""
    name = located.path or "table"
    table = load(text, name, known)
    if table.machine.fingerprint != located.fingerprint and not located.any_machine:
        raise TableError(
            f"{name} was measured on another machine ({table.machine.cpu.model}, "
            f"fingerprint {table.machine.fingerprint[:12]}) than this one "
            f"({located.fingerprint[:12]}). Measure here with commrt-tune run, or set "
            f"COMMRT_TABLE_ANY_MACHINE=1 to use it all the same."
        )
    return table


def user_table_path(
    machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> Path:
    """Return where ``commrt-tune`` writes this machine's table.

    Raises UsageError where this user has no home folder.
    """
    environ = os.environ if environ is None else environ
    base = Path(environ.get("XDG_CONFIG_HOME") or "~/.config")
    try:
        base = base.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"there is no folder for this user's tables ({error}): set HOME or "
            f"XDG_CONFIG_HOME, or name a table by COMMRT_TABLE"
        ) from error
    fingerprint = (machine or this_machine()).fingerprint
    return base / "commrt" / "tables" / f"{fingerprint}.yaml"


def _users_table(machine: Machine, environ: Mapping[str, str] | None) -> Path | None:
    """Return the user's table of this machine; None where nothing is to be found.

    In a container the user may have no home, or one that another user owns. Raising
    here, on rank 0 alone, would leave the other ranks waiting.
    """
    try:
        path = user_table_path(machine, environ)
    except UsageError:
        return None
    return path if os.path.exists(path) else None


def _read(
    path: Path, why: str, machine: Machine, any_machine: bool = False
) -> LocatedTable:
    try:
        text = read_text(path)
    except TableError as error:
        found = LocatedTable(str(path), None, why, machine.fingerprint)
        return LocatedTable(**{**asdict(found), "error": f"{error} ({why})"})
    return LocatedTable(str(path), text, why, machine.fingerprint, any_machine)


def _shipped() -> list[tuple[str, str]]:
    """Return name and text of every table in the package."""
    # Costs milliseconds of import, and most programs find a table before they get here.
    from importlib import resources

    try:
        folder = resources.files("commrt.tables")
    except ModuleNotFoundError:
        return []
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return [
        (f"commrt/tables/{file.name}", file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".yaml")
    ]
