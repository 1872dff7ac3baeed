# SPDX-License-Identifier: Apache-2.0
"""Packages for CUDA that do not fit are named with the cure; ``info`` tells of all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_nvrtc
import pytest
from test_cuda_device import Fake, built

from commrt.devices import packages, report
from commrt.devices.cuda import CudaDevice, open_device
from commrt.errors import BackendError
from commrt.kernels import nvrtc
from commrt.mpi import cuda_aware

ROOT = Path(__file__).parents[3]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return what pretends that a package is installed, and nothing else of CUDA."""
    site = tmp_path / "site"
    site.mkdir()
    real = packages._distribution
    monkeypatch.syspath_prepend(str(site))

    def only_here(name: str) -> Any:
        found = real(name)
        here = found is not None and Path(str(found.locate_file(""))) == site
        return found if here else None

    monkeypatch.setattr(packages, "_distribution", only_here)

    def add(name: str, version: str, **files: str) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        record = ""
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
            record += f"{path},,\n"
        (info / "RECORD").write_text(record)

    return add


def test_what_fits_is_no_problem(install: Install) -> None:
    assert packages.installed() == []
    install("cupy-cuda12x", "14.2.0")
    install("nvidia-nccl-cu12", "2.27.3")
    assert [str(one) for one in packages.installed()] == [
        "cupy-cuda12x 14.2.0",
        "nvidia-nccl-cu12 2.27.3",
    ]
    for driver in (None, 12000, 12080, 13010):  # newer drivers run older packages
        packages.check(driver)


@pytest.mark.parametrize(
    ("first", "second"),
    [("cupy-cuda12x", "cupy-cuda13x"), ("nvidia-nccl-cu12", "nvidia-nccl-cu13")],
)
def test_both_at_once_is_an_error_with_the_cure(
    first: str, second: str, install: Install
) -> None:
    install(first, "1.0")
    install(second, "2.0")
    with pytest.raises(BackendError, match="overwrite each other's files") as caught:
        packages.check(13000)
    text = str(caught.value)
    assert f"{first} 1.0 and {second} 2.0 are both installed" in text
    assert f"pip uninstall {first} {second}" in text
    assert "pip install 'commrt[cuda13]'" in text
    assert len(list(packages.problems(12040))) == 2, "and the driver takes one of them"
    (without_driver,) = packages.problems()
    assert "'commrt[cuda12]' or 'commrt[cuda13]'" in without_driver


@pytest.mark.parametrize("name", ["cupy-cuda13x", "nvidia-nccl-cu13"])
def test_a_driver_that_is_too_old_is_an_error_with_the_cure(
    name: str, install: Install
) -> None:
    install(name, "14.2.0")
    with pytest.raises(BackendError, match=r"the driver is of CUDA 12\.4") as caught:
        packages.check(12040)
    text = str(caught.value)
    assert f"{name} 14.2.0 is for CUDA 13" in text
    assert f"pip uninstall {name}, then pip install 'commrt[cuda12]'" in text
    assert "the driver 580 or newer" in text


def test_torch_says_its_cuda_without_being_imported(install: Install) -> None:
    assert packages.torch_cuda() is None
    text = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    install("torch", "2.13.0", **{"torch/version.py": text})
    assert packages.torch_cuda() == ("2.13.0", "13.0")


def test_torch_without_cuda_says_that(install: Install) -> None:
    text = "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip = None\n"
    install("torch", "2.13.0+cpu", **{"torch/version.py": text})
    assert packages.torch_cuda() == ("2.13.0+cpu", None)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda environ: iter(()))


@pytest.mark.usefixtures("no_nvrtc")
def test_a_device_is_not_opened_with_packages_that_do_not_fit(
    install: Install, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(driver).reset(version=12040)

    def fake_device(*arguments: Any, **options: Any) -> CudaDevice:
        return CudaDevice(*arguments, library=str(driver), **options)

    monkeypatch.setattr("commrt.devices.cuda.CudaDevice", fake_device)
    assert open_device().driver_version == 12040
    install("cupy-cuda13x", "14.2.0")
    with pytest.raises(BackendError, match="cupy-cuda13x 14"):
        open_device()


def _told(library: Path | str) -> dict[str, str]:
    return dict(report.describe(str(library)))


def test_info_tells_of_driver_devices_and_kernels(
    install: Install, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(driver)
    fake.reset(version=12040, devices=2, flags=0)
    monkeypatch.setattr(nvrtc, "_loaded", lambda: iter(()))
    monkeypatch.setenv(
        "COMMRT_NVRTC_LIB", str(fake_nvrtc.build(tmp_path, name=fake_nvrtc.HIDDEN))
    )
    monkeypatch.setenv("COMMRT_KERNEL_CACHE", str(tmp_path / "kept"))
    told = _told(driver)
    assert told["driver"] == f"CUDA 12.4, {driver}"
    assert told["device 1"] == ("Fake, compute 9.0, no memory flags: events are polled")
    assert told["NVRTC"] == "12.9, COMMRT_NVRTC_LIB"
    assert told["kernels"] == f"for sm_90, kept in {tmp_path / 'kept'}"
    assert told["cupy"] == told["torch"] == "not installed"
    assert not any("PrimaryCtx" in call for call in fake.calls), "opened a device"
    install("cupy-cuda13x", "14.2.0")
    assert _told(driver)["problem"].startswith("cupy-cuda13x 14.2.0 is for CUDA 13")


@pytest.mark.usefixtures("no_nvrtc")
def test_info_tells_what_is_missing(install: Install) -> None:
    told = _told("libnowhere.so")
    assert told["driver"].startswith("not available: there is no CUDA driver")
    assert "driver 525" in told["driver"]
    assert told["NVRTC"].startswith("not available: NVRTC, which compiles")
    assert "kernels" not in told
    install("cupy-cuda12x", "14.2.0")
    assert _told("libnowhere.so")["cupy"] == "cupy-cuda12x 14.2.0"


def test_info_tells_that_a_card_is_too_old_for_nvrtc(tmp_path: Path) -> None:
    found = nvrtc.Nvrtc(str(fake_nvrtc.build(tmp_path, name=fake_nvrtc.HIDDEN)), "test")
    assert report._targets(found, [70, 120]).startswith("not for 7.0 (NVRTC 12.9")
    assert report._targets(found, [70, 120]).endswith(", for compute_90")


def test_the_report_has_a_section_of_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commrt", "info"],
        env={k: v for k, v in os.environ.items() if not k.startswith("COMMRT_")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    section = done.stdout.split("\nCUDA\n")[1].split("\n\n")[0]
    for label in ("driver", "NVRTC", "cupy", "torch"):
        assert f"\n  {label} " in f"\n{section}"


def test_extras_keep_cuda_12_and_13_apart() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for number, other in ((12, 13), (13, 12)):
        line = next(t for t in text.splitlines() if t.startswith(f"cuda{number} = "))
        assert f"cupy-cuda{number}x" in line
        assert f"nvidia-nccl-cu{number}" in line
        assert "nvidia-cuda-nvrtc" in line
        assert f"cu{other}" not in line
        assert f"cuda{other}" not in line


class Library:
    """Functions as an MPI library exports them; what is None is not there."""

    def __init__(self, gpu: int | None = None, cuda: int | None = None) -> None:
        if gpu is not None:
            self.MPIX_GPU_query_support = lambda kind, out: self._gpu(gpu, kind, out)
        if cuda is not None:
            self.MPIX_Query_cuda_support = lambda: cuda

    def _gpu(self, answer: int, kind: Any, out: Any) -> int:
        assert kind.value == 0, "asked for another kind than CUDA"
        if answer < 0:
            return 13
        out._obj.value = answer
        return 0


@pytest.mark.parametrize(
    ("library", "kinds", "proved", "why"),
    [
        (Library(), None, False, "the library cannot be asked"),
        (Library(cuda=0), None, False, "MPIX_Query_cuda_support() says no"),
        (Library(cuda=1), None, True, "MPIX_Query_cuda_support() says yes"),
        (Library(gpu=1, cuda=0), None, True, "MPIX_GPU_query_support() says yes"),
        (Library(gpu=0, cuda=1), None, True, "MPIX_Query_cuda_support() says yes"),
        (Library(gpu=-1), None, False, "the library cannot be asked"),
        (
            Library(cuda=0),
            "mpi,system",
            False,
            "MPIX_Query_cuda_support() says no; mpi_memory_alloc_kinds is 'mpi,system'",
        ),
        (
            Library(),
            "system,mpi,cuda:device",
            True,
            "mpi_memory_alloc_kinds is 'system,mpi,cuda:device'",
        ),
        (
            Library(),
            "system,notcuda",
            False,
            "mpi_memory_alloc_kinds is 'system,notcuda'",
        ),
    ],
)
def test_only_an_mpi_that_says_so_takes_cuda_memory(
    library: Library, kinds: str | None, proved: bool, why: str
) -> None:
    found = cuda_aware._weigh(library, kinds)
    assert found == cuda_aware.Awareness(proved, why)
