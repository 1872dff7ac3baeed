# SPDX-License-Identifier: Apache-2.0
"""Files are written by ``commrt.files.write`` alone, which never replaces a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from parsed_sources import ROOT, files_of, parsed

WRITER = "commrt/files/write.py"
OTHERS = {
    # Run by path, in interpreters without commrt, in a folder that the launcher made.
    ("bench/halo_worker.py", "Path(job['result']).write_text(json.dumps(result))"),
    (
        "bench/wrong_calls_worker.py",
        "Path(folder / f'{rank}.json').write_text(json.dumps(found))",
    ),
    ("bench/timing_loop.py", "open(path + '.part', 'w', encoding='utf-8')"),
    ("bench/timing_loop.py", "json.dump(result, file)"),
    ("bench/timing_loop.py", "os.replace(path + '.part', path)"),
    ("bench/link_probe.py", "open(path, 'wb')"),
    # No file: bytes in memory.
    (
        "bench/figure.py",
        "figure.savefig(drawn, format=out.suffix.lstrip('.'), metadata={'Date': None})",
    ),
    (
        "commrt/oracle/plot.py",
        "figure.savefig(drawn, format=path.suffix.lstrip('.'), **extra)",
    ),
    # It calls the writer.
    ("commrt/kernels/__init__.py", "cache.save(where, name, content)"),
    # Held as a lock, never written.
    ("commrt/bootstrap/directory.py", "open(self._folder / 'lock', 'wb')"),
    # Far memory: locked, and looked at before anything is written.
    ("commrt/layers/out_of_core/file_far.py", "os.open(path, flags, 384)"),
    # Shared memory under a name that nobody else has; standard output given away.
    ("commrt/job/arena.py", "os.open(path, flags, 384)"),
    (
        "commrt/job/arena.py",
        "os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)",
    ),
    ("commrt/commands/console.py", "os.open(os.devnull, os.O_WRONLY)"),
}
"""Calls that may write in another way, with the reason."""
METHODS = {
    *("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "rename"),
    *("renames", "link", "symlink", "mkfifo", "mknod", "truncate"),
    *("savefig", "savez", "savez_compressed", "savetxt", "tofile"),
    *("mkstemp", "NamedTemporaryFile", "copyfile", "copy2", "copytree", "move"),
}
"""Names of methods and functions that make a file with a name."""
TO_A_FILE = {"dump", "save"}
"""Names of functions that write where they are given a file."""
WRITING = {"O_WRONLY", "O_CREAT", "O_TRUNC", "O_APPEND"}


def name_of(call: ast.Call) -> str:
    """Return the last name of what is called."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def is_writing_mode(call: ast.Call) -> bool:
    """Return whether a call of ``open`` names a mode that writes or makes a file."""
    named = [each.value for each in call.keywords if each.arg == "mode"]
    modes = [each for each in (*call.args, *named) if isinstance(each, ast.Constant)]
    texts = [each.value for each in modes if isinstance(each.value, str)]
    return any(len(text) <= 3 and {*text} & {*"wax"} for text in texts)


def writes(call: ast.Call) -> bool:
    """Return whether a call makes or replaces a file with a name."""
    name = name_of(call)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in ("open", "fdopen"):
        flags = {getattr(node, "attr", "") for node in ast.walk(call)}
        return is_writing_mode(call) or bool(flags & WRITING)
    if name == "replace":  # of a path, not of a text or of fields
        is_os = owner is not None and ast.unparse(owner) == "os"
        one = owner is not None and len(call.args) == 1 and not call.keywords
        return is_os or one
    if name in TO_A_FILE:
        return owner is not None and len(call.args) >= 2
    return name in METHODS


def written_in(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of a file that write files."""
    flags = any(
        isinstance(node, ast.Attribute) and node.attr in WRITING
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        of_os = ast.unparse(node.func) == "os.open"
        if writes(node) or (of_os and flags):
            yield ast.unparse(node)


def test_files_are_written_in_one_way_only() -> None:
    paths = files_of("commrt", "tuning", "bench", "tables")
    found = {
        (name, call)
        for path in paths
        if (name := path.relative_to(ROOT).as_posix()) != WRITER
        for call in written_in(parsed(path))
    }
    assert found - OTHERS == set(), "write it by commrt.files.write"
    assert OTHERS - found == set(), "these are no longer there"


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "path.open('xb')",
        "open(path, mode='a')",
        "gzip.open(path, 'wt')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.replace(part, path)",
        "part.replace(path)",
        "part.rename(path)",
        "path.write_text(text)",
        "json.dump(data, file)",
        "np.save(path, array)",
        "torch.save(state, path)",
        "figure.savefig(path)",
        "tempfile.mkstemp(dir=folder)",
    ],
)
def test_the_scan_sees_what_writes(source: str) -> None:
    assert [*written_in(ast.parse(source))] == [source]


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'r+b')",
        "gzip.open(path, 'rt')",
        "os.open(path, os.O_RDONLY)",
        "text.replace('a', 'b')",
        "replace(rule, name='x')",
        "yaml.dump(value, Dumper=Dumper)",
        "json.dumps(data)",
    ],
)
def test_the_scan_lets_reading_pass(source: str) -> None:
    assert [*written_in(ast.parse(source))] == []
