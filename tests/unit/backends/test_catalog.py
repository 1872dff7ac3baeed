# SPDX-License-Identifier: Apache-2.0
"""What tables and command lines may name: checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

import commrt
from commrt import backends
from commrt.algorithms import _registry
from commrt.backends.base import Capabilities
from commrt.backends.catalog import (
    catalog,
    check_candidate,
    may_run,
    own_variants,
)
from commrt.errors import TableError, UsageError
from commrt.select.facts import Candidate, CommFacts
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.table import Table, load

MACHINE = Machine(Cpu("cpu", 1, 2))
TEXT = f"""\
schema: commrt-tune/1
machine:
  fingerprint: {MACHINE.fingerprint}
  cpu: {{model: cpu, sockets: 1, cores: 2}}
rules:
- op: OP
  match: {{ranks: RANKS, bytes: [0, null]}}
  use: {{USE}}
"""


def _load(use: str, op: str = "allreduce", ranks: object = "any") -> Table:
    text = TEXT.replace("USE", use).replace("OP", op).replace("RANKS", str(ranks))
    return load(text, "t.yaml", catalog())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("chnk: 3", r"params\.chnk: unknown parameter 'chnk' of shm/ring; did you"),
        ("chunk: -1", r"params\.chunk: .*chunk=-1 must be an integer in 1"),
        ("chunk: 0", r"params\.chunk: .*chunk=0 must be"),
        ("chunk: 2147483648", r"params\.chunk: .*chunk=2147483648 must be"),
        ("chunk: big", r"params\.chunk: .*chunk='big' must be an integer .* or auto"),
        ("depth: 0", r"params\.depth: .*depth=0 must be"),
        ("reuse: x", r"params\.reuse: .*reuse='x' must be"),
        ("store: strem", r"params\.store: .*store='strem'; did you mean 'stream'"),
        ("store: 1", r"params\.store: .*store=1 must be like its default, 'auto'"),
        ("inline: 47", r"params\.inline: .*inline=47 must be .* in 48\.\.2096, or"),
        ("inline: 2097", r"params\.inline: .*inline=2097 must be"),
        ("inline: all", r"params\.inline: .*inline='all' must be"),
        (
            "spins: -1",
            r"params\.spins: .*spins=-1 must be an integer in 0\.\.1048576, or",
        ),
        ("spins: 1048577", r"params\.spins: .*spins=1048577 must be"),
        ("spins: never", r"params\.spins: .*spins='never' must be"),
        ("S: 0", r"params\.S: unknown parameter 'S'"),
    ],
)
def test_a_wrong_parameter_is_refused_where_it_stands(params: str, words: str) -> None:
    with pytest.raises(TableError, match=rf"^t\.yaml, line 8, \$\.rules\[0\].*{words}"):
        _load(f"backend: shm, alg: ring, params: {{{params}}}")


@pytest.mark.parametrize(
    ("ranks", "k", "words"),
    [
        (8, 3, r"k=3 is not one of 1, 2, 4, 8$"),
        (8, "x", r"k='x' is not one of 1, 2, 4, 8$"),
        ("any", 0, r"k=0 is not one of 1, 2, 3, .*\.\.\., 128"),
        (2**60, -1, "k=-1 is not one of"),
    ],
)
def test_values_depend_on_the_ranks_of_the_rule(
    ranks: object, k: object, words: str
) -> None:
    use = f"backend: shm, alg: shifted_halving_doubling, params: {{k: {k}}}"
    with pytest.raises(TableError, match=words):
        _load(use, ranks=ranks)


@pytest.mark.parametrize(("ranks", "k"), [(8, 4), ("any", 3), ("any", 500), (2**60, 9)])
def test_values_that_some_ranks_allow_are_accepted(ranks: object, k: int) -> None:
    use = f"backend: shm, alg: shifted_halving_doubling, params: {{k: {k}, chunk: 64}}"
    assert _load(use, ranks=ranks).rules[0].use.params["k"] == k


@pytest.mark.parametrize("spins", [0, 16, 1 << 20, "auto"])
def test_how_long_to_spin_is_a_number_or_follows_the_links(spins: int | str) -> None:
    rule = _load(f"backend: shm, alg: ring, params: {{spins: {spins}}}").rules[0]
    assert rule.use.params["spins"] == spins
    assert Candidate.parse(str(rule.use)) == rule.use
    check_candidate("bcast", Candidate("shm", "direct", {"spins": spins}))


def test_what_is_not_a_schedule_takes_no_parameters() -> None:
    with pytest.raises(TableError, match="'chunk' of mpi/native: it takes none"):
        _load("backend: mpi, alg: native, params: {chunk: 64}")


def test_parameters_of_the_runner_up_are_checked_too() -> None:
    second = "backend: shm, alg: ring, params: {chnk: 1}, bytes: 8, us: 1, ci: [1, 1]"
    use = "backend: mpi, alg: native}\n"
    text = use + f"  evidence: {{verdict: win, runner_up: {{{second}}}"
    with pytest.raises(TableError, match=r"line 9, .*runner_up\.params\.chnk: unknown"):
        _load(text)


@pytest.mark.parametrize(
    ("use", "op", "words"),
    [
        ("shm, alg: pairwise", "allreduce", "unknown shm allreduce algorithm 'pai"),
        ("shm, alg: native", "bcast", "unknown shm bcast algorithm 'native'"),
        ("mpi, alg: rnig", "allgather", "'rnig'; did you mean 'ring'"),
    ],
)
def test_an_algorithm_must_be_one_of_the_operation(
    use: str, op: str, words: str
) -> None:
    with pytest.raises(TableError, match=words):
        _load(f"backend: {use}", op)


def test_a_name_of_another_package_is_refused_with_where_it_may_come_from() -> None:
    with pytest.raises(
        TableError,
        match=r"unknown backend 'ucc'\. Known: gloo, ipc, local, mpi, nccl, shm, "
        r"staged, tcp\. .*entry point group commrt\.backends",
    ):
        _load("backend: ucc, alg: native")
    with pytest.raises(
        TableError, match=r"'my_rign'.*@commrt\.algorithm.*import it before commrt.init"
    ):
        _load("backend: shm, alg: my_rign")


@pytest.fixture
def my_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = dict(_registry._ALGORITHMS)
    monkeypatch.setattr(_registry, "_ALGORITHMS", registered)

    @commrt.algorithm("allreduce", "my_ring", params={"turns": (1, 2)})
    def author(b: Any) -> None:
        """Never run here."""


@pytest.mark.usefixtures("my_ring")
def test_an_algorithm_of_others_is_known_once_it_is_registered() -> None:
    assert _load("backend: shm, alg: my_ring, params: {turns: 2}").rules
    with pytest.raises(TableError, match="'my_rign'; did you mean 'my_ring'"):
        _load("backend: shm, alg: my_rign")
    with pytest.raises(TableError, match="turns=3 is not one of 1, 2"):
        _load("backend: shm, alg: my_ring, params: {turns: 3}")


class _Foreign:
    """A backend of another package, with an algorithm of its own."""

    name = "foreign"
    capabilities = Capabilities(schedules=False, algorithms=("magic",))


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {**backends.all_backends(), "foreign": _Foreign()}
    monkeypatch.setattr(backends, "all_backends", lambda: known)


@pytest.mark.usefixtures("foreign")
def test_a_backend_of_others_names_its_algorithms_and_owns_their_parameters() -> None:
    assert _load("backend: foreign, alg: magic, params: {level: 9}").rules
    with pytest.raises(TableError, match="unknown foreign allreduce algorithm"):
        _load("backend: foreign, alg: ring")


@pytest.mark.usefixtures("foreign")
def test_a_backend_of_others_need_not_say_what_it_may_run_nor_its_variants() -> None:
    facts = CommFacts(4, 2, 2, 1, "network")
    assert may_run("foreign", "magic", facts, by_mpi=True)
    assert own_variants(Candidate("foreign", "magic"), 1 << 20) is None


def test_backends_say_which_ranks_they_serve_and_what_the_tuner_tries() -> None:
    alone, near = CommFacts(1, 1, 1, 1, "single"), CommFacts(2, 1, 2, 2, "near")
    apart = CommFacts(2, 2, 1, 1, "network")
    served = {
        (name, by_mpi): [
            may_run(name, "ring", one, by_mpi=by_mpi) for one in (alone, near, apart)
        ]
        for name in ("local", "shm", "mpi", "gloo", "tcp")
        for by_mpi in (True, False)
    }
    assert served == {
        ("local", True): [True, False, False],
        ("local", False): [True, False, False],
        ("shm", True): [False, True, False],
        ("shm", False): [False, True, False],
        ("mpi", True): [False, False, True],
        ("mpi", False): [False, False, False],
        ("gloo", True): [False, False, False],
        ("gloo", False): [False, False, False],
        ("tcp", True): [False, False, True],
        ("tcp", False): [False, False, True],
    }
    assert may_run("gloo", "native", apart, by_mpi=False)
    tried = own_variants(Candidate("staged", "ring"), 64 << 20) or ()
    assert [set(one.params) for one in tried] == [{"piece"}] * 3
    assert list(own_variants(Candidate("nccl", "ring"), 64 << 20) or ()) == []
    assert own_variants(Candidate("shm", "ring"), 64 << 20) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shn/ring", "unknown backend 'shn'; did you mean 'shm'"),
        ("shm/rng", "shm has no allreduce algorithm 'rng'; did you mean 'ring'"),
        ("shm/native", "shm has no allreduce algorithm 'native'"),
        ("shm/ring{chnk=1}", "unknown parameter 'chnk'; did you mean 'chunk'"),
        ("mpi/native{chunk=1}", "unknown parameter 'chunk'; mpi/native takes none"),
        ("shm/direct{shots=3}", "shots=3 is not one of 1, 2"),
        ("shm/ring{depth=0}", "depth=0 must be"),
    ],
)
def test_a_candidate_that_does_not_exist_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_candidate("allreduce", Candidate.parse(text), 4)


def test_candidates_that_exist_pass() -> None:
    for text in (
        "shm/ring{chunk=64,store=stream}",
        "mpi/native",
        "mpi/direct{shots=2}",
    ):
        check_candidate("allreduce", Candidate.parse(text), 4)
