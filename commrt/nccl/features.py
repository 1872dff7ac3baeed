# SPDX-License-Identifier: Apache-2.0
"""Features of NCCL by version: asked at run time, never at build time.

Versions are taken from nccl.h of each release. If a library lacks a feature, an error
names the version found and the version needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.errors import BackendError, suggest

__all__ = [
    "FEATURES",
    "NEWEST_KNOWN",
    "OLDEST",
    "Feature",
    "feature",
    "features_table",
    "require",
    "version_text",
]

OLDEST = 21800
"""Oldest version that commrt uses; older ones have no split."""
NEWEST_KNOWN = 23203
"""The newest release that was looked at. Newer ones are used: the ABI only grows."""


@dataclass(frozen=True)
class Feature:
    """Something that not every NCCL has."""

    name: str
    """Its name here."""
    since: int
    """The first version with it, as ``ncclGetVersion`` counts."""
    doc: str
    """A description in one line."""
    used: bool = True
    """True if commrt uses it; the others are listed for their versions."""


FEATURES: tuple[Feature, ...] = (
    Feature("split", 21800, "ncclCommSplit"),
    Feature("register", 21900, "ncclCommRegister, ncclMemAlloc", used=False),
    Feature("float8", 22400, "reductions of float8, from compute capability 9.0 on"),
    Feature("traffic_class", 22600, "ncclConfig_t.trafficClass"),
    Feature("comm_name", 22700, "ncclConfig_t.commName"),
    Feature("cta_policy", 22700, "ncclConfig_t.CTAPolicy"),
    Feature("nvls_ctas", 22700, "ncclConfig_t.nvlsCTAs"),
    Feature("window", 22700, "symmetric memory windows", used=False),
    Feature("shrink", 22700, "ncclCommShrink", used=False),
    Feature("alltoall", 22800, "ncclAlltoAll, ncclGather, ncclScatter"),
    Feature("revoke", 22807, "ncclCommRevoke", used=False),
    Feature("grow", 22902, "ncclCommGrow", used=False),
    Feature("max_p2p_peers", 23000, "ncclConfig_t.maxP2pPeers"),
    Feature(
        "multi_rank_gpu",
        23000,
        "NCCL_MULTI_RANK_GPU_ENABLE: ranks that share a GPU",
        used=False,
    ),
    Feature("call_config", 23100, "configurations of single calls", used=False),
    Feature("launch_completion", 23200, "launch completion events", used=False),
)

_BY_NAME = {one.name: one for one in FEATURES}


def feature(name: str) -> Feature:
    """Return the feature called ``name``, or raise BackendError with a suggestion."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise BackendError(
            f"unknown feature of NCCL {name!r}{suggest(name, _BY_NAME)}"
        ) from None


def version_text(version: int) -> str:
    """Return a version as people write it: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def require(name: str, version: int, what: str) -> None:
    """Raise BackendError unless NCCL ``version`` has what ``what`` needs."""
    one = feature(name)
    if version < one.since:
        raise BackendError(
            f"{what} needs NCCL {version_text(one.since)} or newer ({one.doc}), and "
            f"this process has {version_text(version)}: install a newer "
            f"nvidia-nccl-cu12 or -cu13, or point COMMRT_NCCL_LIB at one"
        )


def features_table() -> str:
    """Return the features for docs/reference/nccl.md."""
    rows = ["| from | what | used |", "|---|---|---|"]
    for one in FEATURES:
        rows.append(
            f"| {version_text(one.since)} | {one.doc} | {'yes' if one.used else ''} |"
        )
    return "\n".join(rows) + "\n"
