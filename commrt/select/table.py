# SPDX-License-Identifier: Apache-2.0
"""A selection table: load and look up; ``write.dump`` is the inverse of ``load``.

The digest is what ranks compare at
``init``: two ranks with different tables could choose differently and deadlock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from commrt.select import schema
from commrt.select.facts import CommFacts, Query
from commrt.select.fingerprint import Machine
from commrt.select.match import Hit, best_rule
from commrt.select.plain import plain_machine, plain_rule
from commrt.select.rules import Rule
from commrt.select.schema import Catalog
from commrt.select.text_file import read_text

__all__ = ["Catalog", "Edge", "Table", "load", "load_file"]


class Edge(NamedTuple):
    """A length at which a rule begins, or ends."""

    op: str
    """Operation."""
    nbytes: int
    """First rule byte count of the one rule, and the first beyond the other."""


@dataclass(frozen=True)
class Table:
    """Measured choices for one machine."""

    machine: Machine
    """The machine that was measured."""
    rules: tuple[Rule, ...]
    """The choices; the byte ranges of each cell tile [0, ∞)."""
    software: Mapping[str, object] = field(default_factory=dict)
    """Versions it was measured with; recorded."""
    method: Mapping[str, object] = field(default_factory=dict)
    """Method of the measurement; recorded only."""
    tie_margin: float = schema.DEFAULT_TIE_MARGIN
    """Relative difference below which the simpler candidate was kept."""
    name: str = field(default="", compare=False)
    """File it came from, for messages."""
    tested_together: tuple[tuple[str, ...], ...] = ()
    """Engines that may be at work at the same time on a device, as somebody tested."""
    _picks: dict[tuple[CommFacts, str], bool] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def digest(self) -> str:
        """sha256 of the content; independent of layout, comments and key order."""
        text = json.dumps(self.plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Return the table as the mappings and lists of its schema."""
        plain: dict[str, Any] = {"schema": schema.SCHEMA}
        plain["machine"] = plain_machine(self.machine)
        if self.software:
            plain["software"] = dict(self.software)
        if self.method:
            plain["method"] = dict(self.method)
        plain["defaults"] = {
            "unmatched": "model",
            "tie": "keep_simpler",
            "tie_margin": self.tie_margin,
        }
        if self.tested_together:
            plain["defaults"]["tested_together"] = [*map(list, self.tested_together)]
        plain["rules"] = [plain_rule(rule) for rule in self.rules]
        return plain

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Lengths at which rules begin or end, each once for an operation."""
        found = {
            Edge(rule.op, nbytes)
            for rule in self.rules
            for nbytes in (rule.match.lo, rule.match.hi)
            if nbytes
        }
        return tuple(sorted(found))

    def lookup(self, facts: CommFacts, query: Query) -> Hit | None:
        """Return the rule that applies, or None where the model has to decide."""
        return best_rule(self.rules, facts, query)

    def why_none(self, facts: CommFacts, query: Query) -> str:
        """Return why ``lookup`` has found nothing."""
        elsewhere = best_rule(self.rules, replace(facts, network=None), query)
        if elsewhere is None or elsewhere.rule.match.network is None:
            return "the table has no rule for this"
        network = elsewhere.rule.match.network
        return f"the table's rule is for {network}, and here is {facts.network}"

    @cached_property
    def names_networks(self) -> bool:
        """True if some rule holds for networks that are like its own only."""
        return any(rule.match.network is not None for rule in self.rules)

    def may_pick(self, facts: CommFacts, name: str) -> bool:
        """Return whether any call could find a rule that uses candidate ``name``."""
        picks = self._picks.get((facts, name))
        if picks is None:
            picks = self._picks[facts, name] = any(
                self._applies(index, facts)
                for index, rule in enumerate(self.rules)
                if rule.use.name == name
            )
        return picks

    def applies_to(self, facts: CommFacts) -> bool:
        """Return whether any call could find a rule on such ranks."""
        return any(self._applies(index, facts) for index in range(len(self.rules)))

    def _applies(self, index: int, facts: CommFacts) -> bool:
        # The ranges of a cell tile all lengths: the closest cell is so at any of them.
        match = self.rules[index].match
        hit = self.lookup(
            facts,
            Query(
                coll=self.rules[index].op,
                nbytes=match.lo,
                dtype=match.dtype or "any",
                device=match.device or "host",
                op=match.redop,
            ),
        )
        return hit is not None and hit.index == index


def load(text: str, name: str, known: Catalog) -> Table:
    """Return the checked table in ``text``.

    Args:
        text: YAML, schema ``commrt-tune/1``.
        name: file name for messages.
        known: the backends and algorithms that exist.

    Raises:
        TableError: anything is malformed, unknown or inconsistent; the message names
            file, line and path.
    """
    # Imported where a table exists: without one nobody should pay for the YAML parser.
    from commrt.select.yaml_tree import read_tree

    keys = schema.take(
        read_tree(text, name),
        ["schema", "machine", "rules"],
        ["software", "method", "defaults"],
    )
    schema.read_schema(keys["schema"])
    sections = {
        section: schema.read_info(keys[section], allowed)
        for section, allowed in (
            ("software", schema.SOFTWARE_KEYS),
            ("method", schema.METHOD_KEYS),
        )
        if section in keys
    }
    margin = schema.DEFAULT_TIE_MARGIN
    together: tuple[tuple[str, ...], ...] = ()
    if "defaults" in keys:
        margin, together = schema.read_defaults(keys["defaults"])
    return Table(
        machine=schema.read_machine(keys["machine"]),
        rules=schema.read_rules(keys["rules"], known),
        software=sections.get("software", {}),
        method=sections.get("method", {}),
        tie_margin=margin,
        tested_together=together,
        name=name,
    )


def load_file(path: Path, known: Catalog) -> Table:
    """Return the checked table in the file ``path``."""
    return load(read_text(path), str(path), known)
