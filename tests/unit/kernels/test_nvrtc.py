# SPDX-License-Identifier: Apache-2.0
"""Which NVRTC is taken, what is kept of what it compiles, what is said otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import fake_nvrtc
import pytest

from commrt import kernels
from commrt.errors import DeviceError, KernelsMissingError
from commrt.kernels import cache, target_for
from commrt.kernels import nvrtc as search
from commrt.kernels.nvrtc import Nvrtc, find
from commrt.kernels.source import modules

_FIND = (
    "from commrt.kernels.nvrtc import find\n"
    "taken = find({driver})\n"
    "print(taken.why, taken.path, taken.version, sep='|')\n"
)

_ONLY_13 = (
    "import commrt.kernels.nvrtc as search\nsearch._MAJORS, search.WHEELS = (13,), ()\n"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvrtc.build(tmp_path_factory.mktemp("nvrtc"))


@pytest.fixture
def nvrtc(library: Path) -> Nvrtc:
    ctypes.CDLL(str(library)).fake_fail(0)
    return Nvrtc(str(library), "test")


def _in_new_process(code: str, **environ: str) -> str:
    """Run where nothing is loaded yet; return what it printed."""
    hidden = ("COMMRT_NVRTC_LIB", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
    clean = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout.strip() + done.stderr.strip()


def _wheel(folder: Path, name: str, version: str, library: Path, where: str) -> None:
    """As pip unpacks it; nothing of the package is imported."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (info / "RECORD").write_text(f"{where},,\n{where}.alt,,\n")
    (folder / where).parent.mkdir(parents=True, exist_ok=True)
    (folder / where).symlink_to(library)


def test_the_variable_names_the_library(library: Path) -> None:
    said = _in_new_process(_FIND.format(driver=None), COMMRT_NVRTC_LIB=str(library))
    assert said.split("|") == ["COMMRT_NVRTC_LIB", str(library), "(12, 9)"]


def test_a_variable_that_names_no_nvrtc_is_an_error(library: Path) -> None:
    for path, why in (("/nowhere/libnvrtc.so", "No such file"), ("libc.so.6", "no NV")):
        said = _in_new_process(_FIND.format(driver=None), COMMRT_NVRTC_LIB=path)
        assert f"COMMRT_NVRTC_LIB is {path}, which cannot be used: " in said
        assert why in said
        assert "Correct it, or unset it" in said


def test_what_is_loaded_comes_before_the_variable(library: Path) -> None:
    load = f"import ctypes; ctypes.CDLL({str(library)!r})\n"
    find_it = load + _FIND.format(driver=None)
    said = _in_new_process(find_it, COMMRT_NVRTC_LIB="/nowhere/libnvrtc.so")
    assert said.split("|")[:2] == ["loaded already in this process", str(library)]


def test_a_wheel_is_found_without_importing_it(library: Path, tmp_path: Path) -> None:
    where = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    _wheel(tmp_path, "nvidia-cuda-nvrtc-cu12", "12.9", library, where)
    # A newer one may be installed where the tests run.
    said = _in_new_process(_FIND.format(driver=12040), PYTHONPATH=str(tmp_path))
    why, path, _ = said.split("|")
    assert why == "wheel nvidia-cuda-nvrtc-cu12"
    assert path == str(tmp_path / where)


def test_one_newer_than_the_driver_is_passed_over(
    library: Path, tmp_path: Path
) -> None:
    """Both installed at once: what is compiled must fit the driver."""
    newer = fake_nvrtc.build(tmp_path, "13.1", "libnvrtc.so.13")
    site = tmp_path / "site"
    where = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    _wheel(site, "nvidia-cuda-nvrtc-cu12", "12.9", library, where)
    where = "nvidia/cu13/lib/libnvrtc.so.13"
    _wheel(site, "nvidia-cuda-nvrtc", "13.1", newer, where)
    for driver, version in ((13000, "(13, 1)"), (12040, "(12, 9)")):
        said = _in_new_process(_FIND.format(driver=driver), PYTHONPATH=str(site))
        assert said.split("|")[2] == version


def test_a_driver_that_is_too_old_for_it_is_said_with_the_cure(tmp_path: Path) -> None:
    newer = fake_nvrtc.build(tmp_path, "13.1", "libnvrtc.so.13")
    for variable in ("COMMRT_NVRTC_LIB", None):
        environ = {"COMMRT_NVRTC_LIB": str(newer)}
        if variable is None:
            environ = {"CUDA_HOME": str(tmp_path / "toolkit")}
            (tmp_path / "toolkit/lib64").mkdir(parents=True)
            (tmp_path / "toolkit/lib64/libnvrtc.so.13").symlink_to(newer)
        said = _in_new_process(_ONLY_13 + _FIND.format(driver=12040), **environ)
        assert "KernelsMissingError" in said
        assert "is NVRTC 13.1, and the driver is of CUDA 12.4: take the pack" in said
        assert "(commrt[cuda12]), or a newer driver" in said


def test_one_before_cuda_12_is_too_old(tmp_path: Path) -> None:
    old = fake_nvrtc.build(tmp_path, "11.8", "libnvrtc.so.11")
    said = _in_new_process(_FIND.format(driver=12040), COMMRT_NVRTC_LIB=str(old))
    assert "is NVRTC 11.8, and commrt needs 12.0 or newer" in said


def test_without_any_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_candidates", lambda environ: iter(()))
    with pytest.raises(KernelsMissingError, match=r"commrt\[cuda12\]") as caught:
        find()
    assert isinstance(caught.value, DeviceError)
    assert caught.value.status == "no_kernels"
    with pytest.raises(KernelsMissingError, match="COMMRT_NVRTC_LIB"):
        kernels.images(90)


def test_the_card_itself_is_compiled_for_or_what_it_can_take(nvrtc: Nvrtc) -> None:
    assert nvrtc.archs() == (75, 80, 90)
    assert target_for(80, nvrtc) == "sm_80"
    assert target_for(89, nvrtc) == "compute_80"
    assert target_for(120, nvrtc) == "compute_90"
    with pytest.raises(KernelsMissingError, match=r"7\.5 or newer, and the card has 7"):
        target_for(70, nvrtc)


def _compiled(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).fake_compiled())


def test_all_is_compiled_once_and_then_kept(
    nvrtc: Nvrtc, library: Path, tmp_path: Path
) -> None:
    environ = {"COMMRT_KERNEL_CACHE": str(tmp_path / "cache")}
    before = _compiled(library)
    first = kernels.images(90, nvrtc=nvrtc, environ=environ)
    assert _compiled(library) - before == len(modules())
    assert {one.name for one in first} == {module.name for module in modules()}
    by_name = {one.name: one for one in first}
    made = by_name["float32"]
    assert made.content == (
        b"cubin float32.cu --gpu-architecture=sm_90 --std=c++17 --fmad=false\0"
    )
    assert "commrt_sum_float32" in made.kernels
    again = kernels.images(90, nvrtc=nvrtc, environ=environ)
    assert _compiled(library) - before == len(modules())
    assert again == first
    newer = kernels.images(100, nvrtc=nvrtc, environ=environ)
    assert {one.content.split()[0] for one in newer} == {b"ptx"}
    assert _compiled(library) - before == 2 * len(modules())


def test_broken_files_are_compiled_again(
    nvrtc: Nvrtc, library: Path, tmp_path: Path
) -> None:
    environ = {"COMMRT_KERNEL_CACHE": str(tmp_path)}
    whole = kernels.images(90, nvrtc=nvrtc, environ=environ)
    files = sorted(tmp_path.iterdir())
    assert len(files) == len(modules())
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].write_bytes(files[2].read_bytes().replace(b"cubin", b"cubim"))
    files[3].unlink()
    files[4].write_bytes(b"something else, of the length of a header of this kind")
    before = _compiled(library)
    assert kernels.images(90, nvrtc=nvrtc, environ=environ) == whole
    assert _compiled(library) - before == 5
    assert kernels.images(90, nvrtc=nvrtc, environ=environ) == whole
    assert _compiled(library) - before == 5
    assert sorted(tmp_path.iterdir()) == files, "nothing partial is left"


def test_another_text_or_version_has_another_key() -> None:
    assert cache.key("a", "sm_90", (12, 9)) == cache.key("a", "sm_90", (12, 9))
    others = [("b", "sm_90", (12, 9)), ("a", "sm_80", (12, 9)), ("a", "sm_90", (12, 8))]
    assert len({cache.key(*parts) for parts in others}) == 3


def test_where_nothing_can_be_kept_it_compiles_all_the_same(
    nvrtc: Nvrtc, library: Path, tmp_path: Path
) -> None:
    """A file where the folder should be; and a user without a home."""
    (tmp_path / "file").write_text("")
    environ = {"COMMRT_KERNEL_CACHE": str(tmp_path / "file" / "kernels")}
    before = _compiled(library)
    for _ in range(2):
        assert len(kernels.images(90, nvrtc=nvrtc, environ=environ)) == len(modules())
    assert _compiled(library) - before == 2 * len(modules())
    assert cache.load(None, "name") is None
    cache.save(None, "name", b"")


def test_the_cache_is_in_the_users_folder(tmp_path: Path) -> None:
    found = cache.folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert found == tmp_path / "commrt" / "kernels"
    assert cache.folder({}) == Path("~/.cache/commrt/kernels").expanduser()


def test_what_does_not_compile_is_said_with_the_log(
    nvrtc: Nvrtc, library: Path, tmp_path: Path
) -> None:
    ctypes.CDLL(str(library)).fake_fail(1)
    environ = {"COMMRT_KERNEL_CACHE": str(tmp_path)}
    with pytest.raises(KernelsMissingError, match="line 7: it was told") as caught:
        kernels.images(90, nvrtc=nvrtc, environ=environ)
    assert "NVRTC 12.9" in str(caught.value)
    assert "sm_90: nvrtcCompileProgram: NVRTC_ERROR_COMPILATION" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_nvrtc_opens_by_its_name_is_opened_where_it_lies(tmp_path: Path) -> None:
    """As in the wheel of 13.0, where the loader looks nowhere near it."""
    library = fake_nvrtc.build(tmp_path, name=fake_nvrtc.HIDDEN)
    code = (
        "import ctypes, sys\n"
        "from commrt.kernels.nvrtc import Nvrtc\n"
        "ctypes.CDLL(sys.argv[1]).fake_need_builtins(1)\n"
        "taken = Nvrtc(sys.argv[1], 'test')\n"
        "print(taken.compile('__global__', 'a', 'sm_90'))\n"
    ).replace("sys.argv[1]", repr(str(library)))
    assert "failed to open libnvrtc-builtins.so.12.9" in _in_new_process(code)
    fake_nvrtc.build(tmp_path, name="libnvrtc-builtins.so.12.9", soname=True)
    assert "cubin a.cu" in _in_new_process(code)
