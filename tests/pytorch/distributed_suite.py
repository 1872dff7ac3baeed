# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of a backend, from the installed wheel, on commrt and on gloo.

    python tests/pytorch/distributed_suite.py                 all of them, on commrt
    python tests/pytorch/distributed_suite.py -k all_gather   those so named
    python tests/pytorch/distributed_suite.py --backend gloo --write gloo.json
    python tests/pytorch/distributed_suite.py --compare gloo.json

The tests are those of ``torch.testing._internal.distributed.distributed_test``, with
two ranks. Many of them are for one backend by its name: those for gloo run on commrt,
too. They run in chunks, each in a process of its own with a deadline: a test that hangs
costs its chunk the rest, which runs again without it. With ``--compare`` the exit
status says whether all pass that passed there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

CHUNK = 12
PER_TEST_S = 120.0
RANKS = "2"
HANGS, ENDED = "hangs", "ended its process"


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="commrt", help="whose tests run")
    parser.add_argument("-k", dest="pattern", default="", help="part of the name")
    parser.add_argument("--write", type=Path, help="where results go, as JSON")
    parser.add_argument("--compare", type=Path, help="results of another backend")
    parser.add_argument("--chunk", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.chunk is not None:
        return _run_chunk(asked.chunk.split(","), Path(asked.results))
    known = {} if asked.compare is None else json.loads(asked.compare.read_text())
    found = run(asked.backend, asked.pattern, known)
    if asked.write is not None:
        asked.write.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return report(found, known)


def run(backend: str, pattern: str, known: dict[str, str]) -> dict[str, str]:
    """Return how each test ended: passed, skipped, or why it did not pass.

    Of ``known`` results of another backend only tests run that passed there.
    """
    names = [name for name in _names(backend) if pattern in name]
    if known:
        names = [name for name in names if known.get(name) == "passed"]
    return run_names(backend, names)


def run_names(backend: str, names: list[str]) -> dict[str, str]:
    """Return how each of these tests ended."""
    found: dict[str, str] = {}
    chunks = [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]
    for chunk in chunks:
        while todo := [name for name in chunk if name not in found]:
            found.update(_chunk_of(backend, todo))
        print(f"{len(found)} of {len(names)}", flush=True)
    return found


def report(found: dict[str, str], known: dict[str, str]) -> int:
    """Print what did not pass, and how many did."""
    bad = {name: how for name, how in found.items() if how not in ("passed", "skipped")}
    for name, how in sorted(bad.items()):
        print(f"FAILS {name}: {how}")
    passed = sum(how == "passed" for how in found.values())
    skipped = sum(how == "skipped" for how in found.values())
    print(f"{passed} passed, {skipped} skipped, {len(bad)} failed")
    worse = [
        name
        for name, how in known.items()
        if how == "passed" and name in found and found[name] != "passed"
    ]
    if known:
        print(f"{len(worse)} that pass there do not here: {', '.join(worse) or 'none'}")
    return 1 if (worse if known else bad) else 0


def _environment(backend: str, folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": RANKS,
        "TEMP_DIR": folder,
        "OMP_NUM_THREADS": "1",
        # One test makes its group of it, after it has ended the one that it was given.
        "INIT_METHOD": f"file://{folder}/init",
    }


def _names(backend: str) -> list[str]:
    code = "import json, distributed_suite as s; print(json.dumps(s.all_names()))"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=_environment(backend, folder),
            capture_output=True,
            text=True,
            check=True,
        )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _chunk_of(backend: str, names: list[str]) -> dict[str, str]:
    """Return how tests ended; at least one of them is among the results."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        argv = [sys.executable, __file__, "--chunk", ",".join(names)]
        process = subprocess.Popen(
            [*argv, "--results", str(results)],
            env=_environment(backend, folder),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        how = _watch(process, results)
        _end(process)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    found = dict(lines)
    begun = [name for name, how_ in found.items() if how_ == "begun"]
    for name in begun:
        found[name] = how
    missing = [name for name in names if name not in found]
    if missing and not found:
        found[missing[0]] = how
    return found


def _watch(process: subprocess.Popen[bytes], results: Path) -> str:
    """Wait until the process ends, or no test has ended for too long."""
    size = -1
    while True:
        try:
            process.wait(timeout=PER_TEST_S)
        except subprocess.TimeoutExpired:
            before, size = size, results.stat().st_size
            if size == before:
                return HANGS
        else:
            return ENDED


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a chunk's process and the ranks it has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


class _AlsoGloo(str):
    """A backend's name, which is gloo's, too, where a test asks whether it is."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def test_case() -> Any:
    """Return torch's tests as a class, whose ranks are forked from this process.

    torch starts each rank as a new process that imports torch: most of a test's time.
    """
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in DistTestCases.backend_feature.values():
        if "gloo" in feature:
            feature.add("commrt")
    # What is for gloo alone is settled by a name as the module is imported, and some
    # tests ask again as they run; groups are made by the real name.
    backend = os.environ["BACKEND"]
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test

    os.environ["BACKEND"] = backend
    distributed_test.BACKEND = _AlsoGloo(backend)

    class Suite(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            proc = torch.multiprocessing.get_context("fork").Process
            self._start_processes(proc)

    return Suite


def all_names() -> list[str]:
    """Return the names of all tests."""
    return list(unittest.TestLoader().getTestCaseNames(test_case()))


class _Results(unittest.TestResult):
    """Writes each result when it is there: the process may not come to the end."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def startTest(self, test: Any) -> None:  # noqa: N802
        super().startTest(test)
        self._say(test, "begun")

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._say(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._say(test, "skipped")

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._say(test, _last_line(err))

    addError = addFailure  # noqa: N815

    def _say(self, test: Any, how: str) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([test._testMethodName, how]) + "\n")


def _last_line(err: Any) -> str:
    lines = [line.strip() for line in str(err[1]).splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line and "exit code" not in line]
    return (said or lines or [repr(err[1])])[-1][:300]


def _run_chunk(names: list[str], results: Path) -> int:
    suite = unittest.TestSuite(map(test_case(), names))
    suite.run(_Results(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
