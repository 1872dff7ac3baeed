# SPDX-License-Identifier: Apache-2.0
"""NVRTC compiles every GPU kernel for every card, without a GPU."""

from __future__ import annotations

import random
import re

import pytest

from commrt.errors import KernelsMissingError
from commrt.kernels import OPTIONS
from commrt.kernels.nvrtc import Nvrtc, find
from commrt.kernels.source import BYTES, Module, modules

CARDS = (75, 80, 86, 89, 90, 100, 120)
BY_NAME = {module.name: module for module in modules()}
LINE = re.compile(r"(ld|st)\.global\.(?:v4\.[bfu]32|v2\.[bfu]64)")


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return find()
    except KernelsMissingError as error:
        pytest.skip(str(error))


def cards(nvrtc: Nvrtc) -> tuple[int, ...]:
    found = tuple(card for card in CARDS if card in nvrtc.archs())
    assert len(found) >= 5, f"{nvrtc} knows {nvrtc.archs()}"
    return found


def check_cubin(nvrtc: Nvrtc, module: Module, card: int) -> None:
    cubin = nvrtc.compile(module.source, module.name, f"sm_{card}", OPTIONS)
    assert cubin[:4] == b"\x7fELF"
    for name in module.kernels:
        assert f".text.{name}\0".encode() in cubin, (name, card)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_module_compiles_for_every_card(
    name: str, nvrtc: Nvrtc, full: bool, seed: int
) -> None:
    """An ordinary run has one card for each module that it draws, another each time."""
    rng = random.Random(f"cards {name} {seed}")
    for card in cards(nvrtc) if full else [rng.choice(cards(nvrtc))]:
        check_cubin(nvrtc, BY_NAME[name], card)


def ptx_of(nvrtc: Nvrtc, name: str) -> dict[str, str]:
    """Return the text of each kernel, for the newest card that NVRTC knows."""
    target = f"compute_{nvrtc.archs()[-1]}"
    text = nvrtc.compile(BY_NAME[name].source, name, target, OPTIONS)
    assert text.endswith(b"\0"), "the driver takes PTX up to its 0"
    parts = re.split(r"\.entry (commrt_\w+)\(", text.rstrip(b"\0").decode())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_newer_cards_get_ptx(nvrtc: Nvrtc) -> None:
    kernels = ptx_of(nvrtc, BYTES)
    assert tuple(kernels) == BY_NAME[BYTES].kernels


@pytest.mark.parametrize("name", BY_NAME)
def test_threads_share_nothing_and_read_no_stale_memory(
    name: str, nvrtc: Nvrtc
) -> None:
    """So running them one after the other, as tests do, is all that they do.

    What orders them among GPUs are the streams' flags alone. A load through the cache
    that is not kept coherent might see what a peer had before; the compiler takes it
    for what it knows nobody writes.
    """
    never = (".shared", "bar.", "atom.", "red.", "fence", "membar", ".volatile", ".nc.")
    for kernel, text in ptx_of(nvrtc, name).items():
        assert not [word for word in (*never, ".local") if word in text], kernel
        assert ".maxntid 256" in text, kernel


@pytest.mark.parametrize("name", ["float16", "float64", "complex64", "int8"])
def test_reductions_move_whole_lines_and_do_not_spill(name: str, nvrtc: Nvrtc) -> None:
    kernels = ptx_of(nvrtc, name)
    for kernel in (f"commrt_sum_{name}", f"commrt_prod_{name}"):
        lines = LINE.findall(kernels[kernel])
        assert lines.count("st") >= 1, "some NVRTCs unroll the loop"
        assert lines.count("ld") == 2 * lines.count("st")
        assert ".local" not in kernels[kernel]


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_products_and_sums_round_one_by_one(name: str, nvrtc: Nvrtc) -> None:
    """A fused one rounds once: the result would differ from the host's."""
    for kernel in ptx_of(nvrtc, name).values():
        assert "fma." not in kernel
    fused = nvrtc.compile(BY_NAME[name].source, name, "compute_80", ("--std=c++17",))
    assert b"fma." in fused


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_no_byte_is_stored_from_a_register_that_holds_a_float16(
    name: str, nvrtc: Nvrtc
) -> None:
    """ptxas would convert the number to u8: sums at odd addresses were wrong."""
    for kernel, text in ptx_of(nvrtc, name).items():
        halves = set(re.findall(r"cvt\.rn\.f16\.f32\s+(%\w+)", text))
        stored = re.findall(r"st\.\S*[ub]8\s+\[[^\]]+\],\s*(%\w+)", text)
        assert not halves & set(stored), kernel
