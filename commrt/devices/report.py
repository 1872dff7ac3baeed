# SPDX-License-Identifier: Apache-2.0
"""The lines of ``python -m commrt info`` on GPUs: where found, or why not.

No device is opened: that takes memory of it, and a second of each.
"""

from __future__ import annotations

from collections.abc import Iterator

from commrt import _native
from commrt.devices.packages import installed, problems, torch_cuda
from commrt.errors import DeviceMissingError, KernelsMissingError
from commrt.kernels import cache, target_for
from commrt.kernels.nvrtc import Nvrtc, find, wheel_files

__all__ = ["describe"]

_KINDS = ("cupy", "NCCL")


def describe(library: str = "") -> Iterator[tuple[str, str]]:
    """Yield labels and what there is; ``library`` is another driver, for tests."""
    driver = None
    cards: list[tuple[str, int, bool]] = []
    try:
        path, driver, cards = _native.cuda_driver(library)
    except DeviceMissingError as error:
        yield "driver", f"not available: {error}"
    else:
        yield "driver", f"CUDA {_dotted(driver, 1000)}, {path}"
        if not cards:
            yield "devices", "none: look at CUDA_VISIBLE_DEVICES and nvidia-smi"
    for number, (name, capability, has_flags) in enumerate(cards):
        flags = "memory flags" if has_flags else "no memory flags: events are polled"
        yield f"device {number}", f"{name}, compute {capability / 10:.1f}, {flags}"
    yield from _kernels(driver, sorted({capability for _, capability, _ in cards}))
    yield from _packages()
    for problem in problems(driver):
        yield "problem", problem


def _kernels(driver: int | None, capabilities: list[int]) -> Iterator[tuple[str, str]]:
    try:
        nvrtc = find(driver)
    except KernelsMissingError as error:
        yield "NVRTC", f"not available: {error}"
        return
    yield (
        "NVRTC",
        f"{_dotted(nvrtc.version[0] * 10 + nvrtc.version[1], 10)}, {nvrtc.why}",
    )
    yield "", nvrtc.path
    wheels = [wheel for wheel, _ in wheel_files()]
    if len(wheels) > 1:
        yield "", f"installed are {' and '.join(wheels)}: the driver decides"
    yield "kernels", f"{_targets(nvrtc, capabilities)}, kept in {cache.folder()}"


def _targets(nvrtc: Nvrtc, capabilities: list[int]) -> str:
    """Return for which cards kernels are compiled."""
    words = []
    for capability in capabilities:
        try:
            words.append(f"for {target_for(capability, nvrtc)}")
        except KernelsMissingError as error:
            words.append(f"not for {capability / 10:.1f} ({error})")
    return ", ".join(words) or "for the card that will be there"


def _packages() -> Iterator[tuple[str, str]]:
    found = installed()
    for family in _KINDS:
        names = [str(one) for one in found if one.family == family]
        label = family if family == "cupy" else f"{family} wheel"
        yield label, ", ".join(names) or "not installed"
    torch = torch_cuda()
    if torch is None:
        yield "torch", "not installed"
    else:
        version, cuda = torch
        yield "torch", f"{version}, {f'for CUDA {cuda}' if cuda else 'without CUDA'}"


def _dotted(number: int, unit: int) -> str:
    """Return 12040 by 1000 as 12.4, and 129 by 10 as 12.9."""
    minor = number % unit
    return f"{number // unit}.{minor // 10 if unit > 10 else minor}"
