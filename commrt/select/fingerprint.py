# SPDX-License-Identifier: Apache-2.0
"""Identity of the machine, which decides if a measured table applies here.

Matched: CPU model, sockets, cores, GPU models and counts, NIC models and counts.
Recorded but not matched: kernel, host name, link speeds, versions; they change without
changing which algorithm is fastest, or change while the machine runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cpu", "Gpu", "Machine", "Nic", "available_cores", "this_machine"]

_ROOT = Path("/")


@dataclass(frozen=True)
class Cpu:
    """The processors of one machine."""

    model: str
    """Model, as the kernel prints it."""
    sockets: int
    """Physical packages."""
    cores: int
    """Physical cores of all sockets; logical ones where the kernel hides them."""


@dataclass(frozen=True)
class Gpu:
    """GPUs of one model."""

    model: str
    """Model, as the driver prints it."""
    count: int
    """Number of them."""


@dataclass(frozen=True)
class Nic:
    """Physical network ports of one model."""

    model: str
    """Driver and, where the bus tells, vendor and device number."""
    count: int
    """Number of them."""
    gbps: float | None = None
    """Link speed in Gbit/s; recorded, not matched."""


@dataclass(frozen=True)
class Machine:
    """One machine, as far as it decides which algorithm is fastest."""

    cpu: Cpu
    """Processors."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs."""
    nics: tuple[Nic, ...] = ()
    """Network ports."""
    kernel: str = ""
    """Kernel release; recorded."""
    host: str = ""
    """Host name; recorded."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the matched facts, as 64 hexadecimal digits."""
        facts = {
            "cpu": [self.cpu.model, self.cpu.sockets, self.cpu.cores],
            "gpus": sorted([gpu.model, gpu.count] for gpu in self.gpus),
            "nics": sorted([nic.model, nic.count] for nic in self.nics),
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def this_machine(root: Path = _ROOT) -> Machine:
    """Return the machine this process runs on.

    Args:
        root: where ``proc`` and ``sys`` are; for tests.
    """
    return Machine(
        cpu=_cpu(root),
        gpus=_gpus(root),
        nics=_nics(root),
        kernel=platform.release(),
        host=platform.node(),
    )


def available_cores(root: Path = _ROOT) -> int:
    """Return the cores this process may use: affinity, cut by the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _read(path: Path) -> str:
    """Return the file's text, empty where it is missing or refuses to be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpu(root: Path) -> Cpu:
    model, package, packages, cores, logical = "", "0", set(), set(), 0
    arm = ""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            logical += 1
        elif key == "model name":
            model = model or value
        elif key in ("CPU implementer", "CPU part") and len(arm.split()) < 2:
            arm = f"{arm} {value}".strip()
        elif key == "physical id":
            package = value
            packages.add(value)
        elif key == "core id":
            cores.add((package, value))
    name = " ".join((model or arm or platform.machine()).split())
    return Cpu(name, max(1, len(packages)), len(cores) or max(1, logical))


def _gpus(root: Path) -> tuple[Gpu, ...]:
    models: Counter[str] = Counter()
    for info in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        for line in _read(info).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                models[" ".join(value.split())] += 1
    return tuple(Gpu(model, count) for model, count in sorted(models.items()))


def _nics(root: Path) -> tuple[Nic, ...]:
    """Return the physical ports: those that a bus device stands behind."""
    speeds: dict[str, list[float]] = {}
    for port in sorted(root.glob("sys/class/net/*")):
        device = port / "device"
        if not device.exists():
            continue
        driver = (device / "driver").resolve().name
        ids = [_read(device / name) for name in ("vendor", "device")]
        model = ":".join([driver, *filter(None, ids)])
        speed = _read(port / "speed")
        gbps = int(speed) / 1000 if speed.isdigit() else 0.0
        speeds.setdefault(model, []).append(gbps)
    return tuple(
        Nic(model, len(gbps), max(gbps) or None)
        for model, gbps in sorted(speeds.items())
    )


def _cgroup_quota(root: Path) -> float | None:
    """Return the CPUs' worth of time that the tightest enclosing cgroup allows."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += _quotas_v2(root / "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_v1(root / "sys/fs/cgroup/cpu", path)
    return min(quotas, default=None)


def _chain(base: Path, path: str) -> list[Path]:
    """Return ``base`` and every folder on the way down to ``path`` below it.

    Inside a container the path may be the host's and not exist below ``base``; the
    limits of the container are then those of ``base`` itself.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _quotas_v2(base: Path, path: str) -> list[float]:
    quotas = []
    for folder in _chain(base, path):
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return quotas


def _quotas_v1(base: Path, path: str) -> list[float]:
    quotas = []
    for folder in _chain(base, path):
        limit = _read(folder / "cpu.cfs_quota_us")
        period = _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return quotas
