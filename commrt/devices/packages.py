# SPDX-License-Identifier: Apache-2.0
"""Check of the installed packages for CUDA: do they fit each other and the driver?

pip cannot say that two packages exclude each other. Packages for CUDA 12 and for CUDA
13 unpack into the same folders. If both are installed, the later one has overwritten
parts of the other, and the order of installation decides which library is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from commrt.errors import BackendError

__all__ = ["Installed", "check", "installed", "problems", "torch_cuda"]

_FAMILIES: dict[str, dict[str, int | None]] = {
    "cupy": {
        "cupy-cuda11x": 11,
        "cupy-cuda12x": 12,
        "cupy-cuda13x": 13,
        "cupy": None,  # built on this machine
    },
    "NCCL": {"nvidia-nccl-cu11": 11, "nvidia-nccl-cu12": 12, "nvidia-nccl-cu13": 13},
}
"""Packages that unpack into one folder, and the CUDA that they are for."""
_DRIVERS = {12: "525", 13: "580"}
"""The first driver of each CUDA."""
_TORCH_CUDA = re.compile(rb"^cuda\b[^=]*= *'([\d.]+)'", re.MULTILINE)


@dataclass(frozen=True)
class Installed:
    """One package."""

    family: str
    name: str
    version: str
    cuda: int | None
    """CUDA's major version; None where the name does not say it."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed() -> list[Installed]:
    """Return the packages of CUDA that are there; nothing is imported."""
    found = []
    for family, names in _FAMILIES.items():
        for name, cuda in names.items():
            package = _distribution(name)
            if package is not None:
                found.append(Installed(family, name, package.version, cuda))
    return found


def torch_cuda() -> tuple[str, str | None] | None:
    """Return torch's version and its CUDA's, or None; torch is not imported."""
    package = _distribution("torch")
    if package is None:
        return None
    for file in package.files or ():
        if file.as_posix() == "torch/version.py":
            try:
                text = file.read_binary()
            except OSError:
                break
            cuda = _TORCH_CUDA.search(text)
            return package.version, cuda and cuda[1].decode()
    return package.version, None


def problems(driver: int | None = None) -> Iterator[str]:
    """Yield the packages that do not fit, with the cure.

    ``driver`` is the CUDA version of the driver: 12040 is 12.4.
    """
    found = installed()
    cure = 12 if driver is None or driver < 13000 else 13
    for family in _FAMILIES:
        same = [one for one in found if one.family == family]
        if len(same) > 1:
            names = " ".join(one.name for one in same)
            yield (
                f"{' and '.join(map(str, same))} are both installed and overwrite each "
                f"other's files: pip uninstall {names}, then pip install "
                f"'commrt[cuda{cure}]'"
                + (" or 'commrt[cuda13]', the one for your driver" * (driver is None))
            )
    if driver is None:
        return
    shown = f"{driver // 1000}.{driver % 1000 // 10}"
    for one in found:
        if one.cuda is not None and one.cuda > driver // 1000:
            yield (
                f"{one} is for CUDA {one.cuda}, and the driver is of CUDA {shown}: "
                f"pip uninstall {one.name}, then pip install 'commrt[cuda{cure}]'; or "
                f"install the driver {_DRIVERS.get(one.cuda, 'of its CUDA')} or newer"
            )


def check(driver: int | None = None) -> None:
    """Raise BackendError with all ``problems``."""
    found = list(problems(driver))
    if found:
        raise BackendError(f"the packages for CUDA do not fit: {'; '.join(found)}")


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
