# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs: their text, and how it is compiled for the card that is there.

Nothing of CUDA is needed to build or install commrt: NVRTC, which compiles the text, is
looked for when a device is opened. docs/internals/devices.md lists the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from commrt.errors import KernelsMissingError
from commrt.kernels import cache
from commrt.kernels.nvrtc import Nvrtc, find
from commrt.kernels.source import Module, modules

__all__ = ["OPTIONS", "Image", "images", "target_for"]

OPTIONS = (
    "--std=c++17",
    # A product and a sum as one instruction would round once; the host rounds twice.
    "--fmad=false",
)
_MOST_THREADS = 8


@dataclass(frozen=True)
class Image:
    """A compiled module, and the functions in it."""

    name: str
    content: bytes
    kernels: tuple[str, ...]


def images(
    capability: int,
    *,
    driver: int | None = None,
    nvrtc: Nvrtc | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Image]:
    """Return all kernels, compiled for a card of that compute capability: 90 is 9.0.

    ``driver`` is the CUDA version of the driver. Raises KernelsMissingError, which says
    what to install, where nothing can compile them.
    """
    nvrtc = nvrtc or find(driver, environ)
    target = target_for(capability, nvrtc)
    where = cache.folder(environ)

    def image(module: Module) -> Image:
        key = cache.key(module.source, target, OPTIONS, nvrtc.version)
        name = f"{module.name}-{target}-{key}"
        content = cache.load(where, name)
        if content is None:
            content = nvrtc.compile(module.source, module.name, target, OPTIONS)
            cache.save(where, name, content)
        return Image(module.name, content, module.kernels)

    # Ranks of a node begin with different modules, and find what others have compiled.
    every = modules()
    first = os.getpid() * 7 % len(every)
    turned = (*every[first:], *every[:first])
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(image, turned))


def target_for(capability: int, nvrtc: Nvrtc) -> str:
    """Return the target to compile for: the card, or PTX if NVRTC is older than it.

    PTX of an older card is compiled by the driver when it is loaded.
    """
    archs = nvrtc.archs()
    if capability in archs:
        return f"sm_{capability}"
    older = [arch for arch in archs if arch < capability]
    if not older:
        raise KernelsMissingError(
            f"{nvrtc} compiles for compute capability {_dotted(archs[0])} or newer, "
            f"and the card has {_dotted(capability)}: install the NVRTC of an older "
            f"CUDA, as by pip install 'commrt[cuda12]'"
        )
    return f"compute_{older[-1]}"


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
