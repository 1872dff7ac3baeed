# SPDX-License-Identifier: Apache-2.0
"""Writes a table as YAML for people: ``table.load`` reads it back equal."""

from __future__ import annotations

from typing import Any

import yaml

from commrt.select.table import Table
from commrt.select.yaml_tree import is_plain_text

__all__ = ["dump"]


def dump(table: Table) -> str:
    """Return the table as YAML that ``load`` reads back equal."""
    plain = table.plain()
    rules = plain.pop("rules")
    text = _yaml(plain)
    if not rules:
        return f"{text}rules: []\n"
    return text + "rules:\n" + "".join(_yaml([rule]) for rule in rules)


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=88)


_BASE: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's emitter where PyYAML has it: several times faster."""


class _Dumper(_BASE):  # type: ignore[misc]  # one of two classes
    """Block style outside, flow style for whatever holds no further structure."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes by YAML 1.1, where 1e3 is a word; the reader follows 1.2.
        style = None if is_plain_text(data) else "'"
        made: yaml.ScalarNode = self.represent_scalar(
            "tag:yaml.org,2002:str", data, style=style
        )
        return made

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        made: yaml.SequenceNode = super().represent_sequence(
            tag, sequence, _is_flat(sequence)
        )
        return made

    def represent_mapping(
        self, tag: str, mapping: Any, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        flat = _is_flat(list(mapping.values()))
        made: yaml.MappingNode = super().represent_mapping(tag, mapping, flat)
        return made


def _is_flat(values: list[Any]) -> bool:
    """Return whether one line is enough: scalars and short lists of scalars only."""
    return not any(
        isinstance(value, dict)
        or (isinstance(value, list) and not all(_is_scalar(item) for item in value))
        for value in values
    )


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list)


_Dumper.add_representer(str, _Dumper.represent_str)
