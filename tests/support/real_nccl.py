# SPDX-License-Identifier: Apache-2.0
"""What an installed libnccl and its nccl.h say, without a GPU.

    python tests/support/real_nccl.py FOLDER...

says of each, which has include/nccl.h and lib/libnccl.so.2, whether commrt's own table
fits it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from stub_library import ENGINE

from commrt.nccl.abilities import NCCL_REDUCTIONS, NCCL_TYPES
from commrt.nccl.config import NcclConfig
from commrt.nccl.features import FEATURES
from commrt.nccl.outcomes import IN_PROGRESS, REMOTE_ERROR, SUCCESS

__all__ = ["Header", "compare", "differences", "functions_that_differ"]

_SOURCE = Path(__file__).parent / "nccl_header" / "compare.cpp"
_CUDA = """\
#pragma once
#include <stddef.h>
#define CUDART_VERSION 13000
#define __CUDA_BF16_TYPES_EXIST__
#define __CUDA_FP8_TYPES_EXIST__
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
"""
"""What nccl.h wants of CUDA's headers."""
_FUNCTIONS = {
    "split": ["ncclCommSplit"],
    "register": ["ncclCommRegister", "ncclMemAlloc"],
    "window": ["ncclCommWindowRegister"],
    "shrink": ["ncclCommShrink"],
    "alltoall": ["ncclAlltoAll", "ncclGather", "ncclScatter"],
    "revoke": ["ncclCommRevoke"],
    "grow": ["ncclCommGrow"],
}
"""Which functions a feature stands for."""
_FIELDS = ("traffic_class", "comm_name", "cta_policy", "nvls_ctas", "max_p2p_peers")
"""Features that are fields of ``ncclConfig_t``."""


@dataclass
class Header:
    """What the program that includes an nccl.h has printed."""

    facts: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each field, as nccl.h has it (-1: not at all) and as commrt has it."""


def compare(include: Path, build: Path) -> Header:
    """Compile ``nccl_header/compare.cpp`` with this folder's nccl.h, and run it.

    Raises CalledProcessError, with what the compiler said, where a prototype differs.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("g++ is not installed")
    for name in ("cuda_runtime", "cuda_fp16", "cuda_bf16", "cuda_fp8"):
        (build / f"{name}.h").write_text(_CUDA)
    program = build / "compare"
    flags = ["-std=c++17", f"-I{build}", f"-I{include}", f"-I{ENGINE}"]
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(
        [compiler, *flags, str(_SOURCE), "-o", str(program)],
        check=True,
        env=environ,
        capture_output=True,
        text=True,
    )
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    header = Header()
    for line in said.stdout.splitlines():
        name, *values = line.rsplit(maxsplit=2 if line.startswith("field ") else 1)
        if name.startswith("field "):
            header.offsets[name.split()[1]] = int(values[0]), int(values[1])
        else:
            header.facts[name] = int(values[0])
    return header


def differences(header: Header) -> list[str]:
    """Return what of commrt's table does not fit an nccl.h."""
    facts, version = header.facts, header.facts["header_version"]
    expected = {
        "magic": 0xCAFEBEEF,
        "undefined": -(2**31),
        "is_unset": 1,
        "sizeof_id": 128,
        "success": SUCCESS,
        "invalid_usage": 5,
        "in_progress": IN_PROGRESS,
        "host_immediate": 1,
        "no_color": -1,
    }
    expected |= {f"type {name}": code for name, code in NCCL_TYPES.items()}
    expected |= {f"op {op.name}": code for op, code in NCCL_REDUCTIONS.items()}
    found = [
        f"{name} is {facts[name]}, and commrt takes it to be {value}"
        for name, value in expected.items()
        if facts.get(name, value) != value
    ]
    if facts["results"] <= REMOTE_ERROR:
        found.append("there are fewer results than commrt knows")
    for name, (theirs, ours) in header.offsets.items():
        if theirs not in (-1, ours):
            found.append(f"ncclConfig_t.{name} lies at {theirs}, and here at {ours}")
    since = {each.name: each.since for each in FEATURES}
    for name in _FIELDS:
        there = header.offsets[name][0] != -1
        if there != (version >= since[name]):
            found.append(f"{name}: in nccl.h {there}, and here since {since[name]}")
    if ("type float8_e5m2" in facts) != (version >= since["float8"]):
        found.append("float8 types are not there from the version on that is said")
    found += _sizes_that_differ(header)
    return found


def _sizes_that_differ(header: Header) -> list[str]:
    """Of what commrt gives the library, each field that it sets is to be covered."""
    version, whole = header.facts["header_version"], header.facts["sizeof_config"]
    set_one: dict[str, NcclConfig] = {"split_share": NcclConfig(split_share=True)}
    values = {"comm_name": "a name"}
    for each in FEATURES:
        if each.name in _FIELDS and version >= each.since:
            name = each.name
            set_one[name] = NcclConfig(**{name: values.get(name, 1)})  # type: ignore[arg-type]
    found = []
    for name, config in set_one.items():
        size, said = config.options(version).size_and_version(version)
        if size > whole or size <= header.offsets[name][0] or said > version:
            found.append(
                f"NcclConfig({name}=...) says {size} bytes of {said}, and {name} lies "
                f"at {header.offsets[name][0]} of {whole} in {version}"
            )
    return found


def functions_that_differ(library: Path, version: int) -> list[str]:
    """Return which features' functions are not there from their versions on."""
    opened = ctypes.CDLL(str(library))
    found = []
    for each in FEATURES:
        for name in _FUNCTIONS.get(each.name, ()):
            there = hasattr(opened, name)
            if there != (version >= each.since):
                found.append(f"{name}: there {there}, and here since {each.since}")
    return found


def _main(folders: list[str]) -> None:
    for folder in map(Path, folders):
        with tempfile.TemporaryDirectory() as build:
            try:
                header = compare(folder / "include", Path(build))
            except subprocess.CalledProcessError as error:
                print(folder, "does not compile:", error.stderr)
                continue
        version = header.facts["header_version"]
        library = folder / "lib" / "libnccl.so.2"
        found = differences(header) + functions_that_differ(library, version)
        print(version, "; ".join(found) or "fits")


if __name__ == "__main__":
    _main(sys.argv[1:])
