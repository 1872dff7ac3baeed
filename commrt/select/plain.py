# SPDX-License-Identifier: Apache-2.0
"""Machines and rules as the mappings and lists of schema ``commrt-tune/1``."""

from __future__ import annotations

from typing import Any

from commrt.select.facts import Candidate
from commrt.select.fingerprint import Machine
from commrt.select.rules import Evidence, Point, Rule

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
        "match": {
            "ranks": _or_any(match.ranks),
            "nodes": _or_any(match.nodes),
            "ppn": _or_any(match.ppn),
            "link_class": _or_any(match.link_class),
            "device": _or_any(match.device),
            "dtype": _or_any(match.dtype),
            "redop": _or_any(match.redop),
            "bytes": [match.lo, match.hi],
        },
        "use": _plain_candidate(rule.use),
    }
    if rule.evidence is not None:
        plain["evidence"] = _plain_evidence(rule.evidence)
    return plain


def _or_any(value: int | str | None) -> int | str:
    return "any" if value is None else value


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
