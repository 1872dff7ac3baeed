# SPDX-License-Identifier: Apache-2.0
"""Machines and rules as the mappings and lists of schema ``commrt-tune/1``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from commrt.select.facts import Candidate
from commrt.select.fingerprint import Machine
from commrt.select.rules import Evidence, Match, Point, Rule

__all__ = ["plain_machine", "plain_rule"]


def plain_machine(machine: Machine) -> dict[str, Any]:
    plain: dict[str, Any] = {"fingerprint": machine.fingerprint}
    plain["cpu"] = {
        "model": machine.cpu.model,
        "sockets": machine.cpu.sockets,
        "cores": machine.cpu.cores,
    }
    plain["gpus"] = [{"model": gpu.model, "count": gpu.count} for gpu in machine.gpus]
    plain["nics"] = [
        {"model": nic.model, "count": nic.count}
        | ({} if nic.gbps is None else {"gbps": nic.gbps})
        for nic in machine.nics
    ]
    return plain | {"kernel": machine.kernel, "host": machine.host}


def plain_rule(rule: Rule) -> dict[str, Any]:
    match = rule.match
    plain: dict[str, Any] = {
        "op": rule.op,
        "match": {**_plain_match(match), "bytes": [match.lo, match.hi]},
        "use": _plain_candidate(rule.use),
    }
    if rule.evidence is not None:
        plain["evidence"] = _plain_evidence(rule.evidence)
    return plain


def _plain_match(match: Match) -> dict[str, Any]:
    """Return what calls must have; what may be anything is left out."""
    keys = ("ranks", "nodes", "ppn", "link_class", "device", "dtype", "redop")
    said = {key: getattr(match, key) for key in keys}
    if match.network is not None:
        said["network"] = asdict(match.network)
    return {key: value for key, value in said.items() if value is not None}


def _plain_candidate(candidate: Candidate) -> dict[str, Any]:
    plain: dict[str, Any] = {"backend": candidate.backend, "alg": candidate.algorithm}
    return plain | ({"params": dict(candidate.params)} if candidate.params else {})


def _plain_evidence(evidence: Evidence) -> dict[str, Any]:
    plain: dict[str, Any] = {"verdict": evidence.verdict}
    if evidence.points:
        plain["points"] = [_plain_point(point) for point in evidence.points]
    second = evidence.runner_up
    if second is not None:
        plain["runner_up"] = _plain_candidate(second.candidate) | {
            "bytes": second.nbytes,
            "us": second.us,
            "ci": list(second.ci),
        }
    for key in ("crossover", "date", "quality"):
        if getattr(evidence, key) is not None:
            plain[key] = getattr(evidence, key)
    return plain


def _plain_point(point: Point) -> dict[str, Any]:
    plain = {
        "bytes": point.nbytes,
        "us": point.us,
        "ci": list(point.ci),
        "n": point.n,
        "launches": point.launches,
    }
    if point.native_us is not None:
        plain["native_us"] = point.native_us
    if point.disturbed:
        plain["disturbed"] = point.disturbed
    return plain
