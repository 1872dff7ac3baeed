# SPDX-License-Identifier: Apache-2.0
"""Find NVRTC, NVIDIA's compiler as a library, and call it.

It is wanted once, when a device is first used, and for ten functions: so they are
declared here for ctypes. The package cuda-bindings has the same and more, but comes in
one version for each of CUDA's, and would be one more thing to match.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from commrt import env
from commrt.errors import KernelsMissingError

__all__ = ["OLDEST", "Nvrtc", "find", "wheel_files"]

OLDEST = (12, 0)
"""Oldest version, the same as the driver's; CUDA 11 does not know sm_90."""
WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
"""Newest first; the one without a number is that of CUDA 13 and later."""
_MAJORS = (13, 12)
_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
_FILE = re.compile(r"libnvrtc\.so\.(\d+)(\.\d+)*")
_INSTALL = (
    "pip install 'commrt[cuda12]' or 'commrt[cuda13]', the one for your driver, or set "
    "COMMRT_NVRTC_LIB to the path of a libnvrtc.so"
)
_lock = threading.Lock()
_opened: dict[str, Nvrtc] = {}


class Nvrtc:
    """One NVRTC library; ``why`` says how it was found."""

    def __init__(self, path: str, why: str) -> None:
        """Open it. Raises OSError where it is no NVRTC, or cannot be loaded."""
        self._library = ctypes.CDLL(path)
        self.path, self.why = path, why
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except (AttributeError, KernelsMissingError) as error:
            raise OSError(f"{path} is no NVRTC: {error}") from None
        self.version = major.value, minor.value
        self._builtins = self._open_builtins()

    def _open_builtins(self) -> ctypes.CDLL | None:
        """Open the library that NVRTC opens by its name alone as it compiles.

        In a wheel (seen with 13.0) that lies beside it, where the loader does not look.
        """
        name = "libnvrtc-builtins.so.{}.{}".format(*self.version)
        beside = Path(self.path).resolve().with_name(name)
        return ctypes.CDLL(str(beside)) if beside.exists() else None

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}, {self.path} ({self.why})"

    def archs(self) -> tuple[int, ...]:
        """Return the compute capabilities it compiles for: 90 is 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return tuple(sorted(archs))

    def compile(
        self, source: str, name: str, target: str, options: Sequence[str] = ()
    ) -> bytes:
        """Return the cubin for a target like ``sm_90``, or the PTX for ``compute_90``.

        Raises KernelsMissingError with what the compiler says.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            f"{name}.cu".encode(),
            0,
            None,
            None,
        )
        try:
            words = [f"--gpu-architecture={target}", *options]
            given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
            try:
                self._call("nvrtcCompileProgram", program, len(words), given)
            except KernelsMissingError as error:
                said = self._text(program, "ProgramLog").rstrip(b"\0").decode()
                raise KernelsMissingError(
                    f"{self} cannot compile commrt's kernels for {name} and {target}: "
                    f"{error}\n{said.strip()[:4000]}"
                ) from None
            return self._text(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        result: int = getattr(self._library, function)(*arguments)
        if result:
            text = self._library.nvrtcGetErrorString
            text.restype = ctypes.c_char_p
            raise KernelsMissingError(
                f"{function}: {text(result).decode()}, from {self.path}; expected no "
                f"error: name another NVRTC with COMMRT_NVRTC_LIB"
            )


@dataclass(frozen=True)
class _Candidate:
    path: str
    why: str
    must_do: bool = False
    """The user named it: an error where it does not do."""


def find(driver: int | None = None, environ: Mapping[str, str] | None = None) -> Nvrtc:
    """Open the first NVRTC of: loaded already, COMMRT_NVRTC_LIB, a wheel, the system.

    ``driver`` is the CUDA version of the driver, 12040 for 12.4: what a newer major
    version compiles, it may not take. Raises KernelsMissingError with what was tried.
    """
    environ = os.environ if environ is None else environ
    tried = []
    for candidate in _candidates(environ):
        problem = None
        try:
            nvrtc = _open(candidate)
        except OSError as error:
            problem = str(error)
        else:
            problem = _unfit(nvrtc, driver)
            if problem is None:
                return nvrtc
        if candidate.must_do:
            raise KernelsMissingError(
                f"NVRTC: {candidate.why} is {candidate.path}, which cannot be used: "
                f"{problem}. Correct it, or unset it for the usual search"
            )
        tried.append(f"{candidate.why}: {problem}")
    raise KernelsMissingError(
        f"NVRTC, which compiles commrt's GPU kernels, is not to be found. Tried: "
        f"{'; '.join(tried)}. To install it: {_INSTALL}"
    )


def _open(candidate: _Candidate) -> Nvrtc:
    with _lock:
        found = _opened.get(candidate.path)
        if found is None:
            found = _opened[candidate.path] = Nvrtc(candidate.path, candidate.why)
        return found


def _unfit(nvrtc: Nvrtc, driver: int | None) -> str | None:
    """Return why what it compiles cannot be used; None where it can."""
    shown = f"{nvrtc.path} is NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"
    if nvrtc.version < OLDEST:
        return f"{shown}, and commrt needs {OLDEST[0]}.{OLDEST[1]} or newer"
    if driver is not None and nvrtc.version[0] > driver // 1000:
        major = driver // 1000
        return (
            f"{shown}, and the driver is of CUDA {major}.{driver % 1000 // 10}: take "
            f"the packages of CUDA {major} (commrt[cuda{major}]), or a newer driver"
        )
    return None


def _candidates(environ: Mapping[str, str]) -> Iterator[_Candidate]:
    for path in _loaded():
        yield _Candidate(path, "loaded already in this process")
    named = env.value("COMMRT_NVRTC_LIB", environ)
    if named is not None:
        yield _Candidate(named, "COMMRT_NVRTC_LIB", must_do=True)
    for wheel, found in wheel_files():
        yield _Candidate(str(found), f"wheel {wheel}")
    for variable in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if environ.get(variable):
            yield from _in_toolkit(Path(environ[variable]), variable)
    yield from _in_toolkit(Path("/usr/local/cuda"), "toolkit")
    for major in _MAJORS:
        yield _Candidate(f"libnvrtc.so.{major}", "system")


def _in_toolkit(root: Path, why: str) -> Iterator[_Candidate]:
    for folder, major in ((f, m) for f in _FOLDERS for m in _MAJORS):
        file = root / folder / f"libnvrtc.so.{major}"
        if file.exists():
            yield _Candidate(str(file), why)


def _loaded() -> Iterator[str]:
    """Yield the files of NVRTC that this process has mapped, as torch does."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libnvrtc.so" in line}
    yield from sorted(path for path in paths if _FILE.fullmatch(Path(path).name))


def wheel_files() -> Iterator[tuple[str, Path]]:
    """Yield the installed NVRTC wheels and their library, without importing any."""
    for wheel in WHEELS:
        try:
            files = importlib.metadata.distribution(wheel).files or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if _FILE.fullmatch(file.name):
                yield wheel, Path(os.fspath(file.locate()))
