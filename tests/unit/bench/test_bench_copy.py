# SPDX-License-Identifier: Apache-2.0
"""The copy peer: what it copies, and that no result of a collective is asked of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.bench import compare
from commrt.bench.cli import main
from commrt.bench.launch import parse_peer
from commrt.bench.peer_copy import CopyPeer
from commrt.local import run


@pytest.mark.parametrize("lengths", [(6, 6), (3, 12), (8, 2), (6, None), (0, None)])
def test_the_input_is_copied_to_every_part_of_the_result(
    lengths: tuple[int, int | None],
) -> None:
    given, wanted = lengths

    def rank_main(comm: Any) -> None:
        x = np.empty(given, np.float32)
        out = None if wanted is None else np.full(wanted, -1, np.float32)
        call = CopyPeer(comm).bind("any", x, out, 0)
        x[:] = np.arange(given) + comm.rank
        call()
        if out is not None:
            np.testing.assert_array_equal(out, np.resize(x, wanted))

    run(2, rank_main)


def test_compare_checks_libraries_and_not_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: dict[str, bool] = {}

    def launch(peer: Any, ranks: int, job: Any, *, timeout_s: float) -> dict[str, Any]:
        checked[peer.name] = job["check"]
        row = {"nbytes": 8, "median_us": 1.0, "link_class": "near"}
        about = {"peer": peer.name, "ranks": ranks, "library": peer.name}
        return {**about, "elapsed_s": 0.0, "rows": [row]}

    monkeypatch.setattr(compare, "launch", launch)
    monkeypatch.setattr(compare, "torch_is_installed", lambda: False)
    assert main(["compare", "--peer", "copy", "--sizes", "8", "--launches", "1"]) == 0
    assert checked == {"commrt": True, "mpi4py": True, "copy": False}
    assert "commrt / copy" in capsys.readouterr().out


def test_the_bound_is_a_peer_by_name() -> None:
    assert (parse_peer("copy").kind, parse_peer("copy").name) == ("copy", "copy")
