# SPDX-License-Identifier: Apache-2.0
"""The policy: who decides, in which order, and what it says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stated_offers import StatedOffers

from commrt.errors import UsageError
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.policy import Policy
from commrt.select.rules import Evidence, Match, Point, Rule, RunnerUp
from commrt.select.table import Table
from commrt.select.wishes import Wish, Wishes, parse_wishes

NATIVE = Candidate("mpi", "native")
DIRECT = Candidate("shm", "direct")
RING = Candidate("shm", "ring")
COSTS = {"mpi/native": 3.0, "shm/direct": 2.0, "shm/ring": 4.0}
NEAR2 = CommFacts(size=2, nodes=1, ppn=2, cores=2, link_class="near")
MACHINE = Machine(Cpu("cpu", 1, 2))


def _cost(query: Query, candidate: Candidate) -> float:
    return COSTS[candidate.name]


def _rule(lo: int, hi: int | None, use: Candidate, **match: object) -> Rule:
    base = Match(lo, hi, ranks=2, nodes=1, ppn=2, link_class="near")
    return Rule("allreduce", replace(base, **match), use)  # type: ignore[arg-type]


TABLE = Table(
    MACHINE,
    (_rule(0, 1000, NATIVE), _rule(1000, None, Candidate("shm", "ring", {"f": 2}))),
)


def _policy(
    table: Table | None = TABLE,
    facts: CommFacts = NEAR2,
    found: tuple[Candidate, ...] = (NATIVE, DIRECT, RING),
    wishes: tuple[Wishes, ...] = (),
) -> Policy:
    return Policy(facts, table, StatedOffers(found, _cost), wishes)


def _small(nbytes: int = 8) -> Query:
    return Query("allreduce", nbytes, op="sum")


@pytest.mark.parametrize("table", [None, TABLE])
def test_a_span_has_the_choice_of_each_of_its_lengths(table: Table | None) -> None:
    """And nothing but the length decides which span it is."""
    slopes = {"mpi/native": (3.0, 1e-3), "shm/direct": (1.0, 4e-3), "shm/ring": (9, 0)}

    def cost(query: Query, candidate: Candidate) -> float:
        alpha, beta = slopes[candidate.name]
        return alpha + beta * query.nbytes

    policy = Policy(NEAR2, table, StatedOffers((NATIVE, DIRECT, RING), cost))
    spans = {policy.span(_small(nbytes)) for nbytes in range(9000)}
    covered: list[int] = []
    for span in sorted(spans, key=lambda one: one.lo):
        assert span.hi is not None
        covered += range(span.lo, span.hi)
        for nbytes in {span.lo, (span.lo + span.hi) // 2, span.hi - 1}:
            alone = Policy(NEAR2, table, StatedOffers((NATIVE, DIRECT, RING), cost))
            assert alone.span(_small(nbytes)) == span
            assert policy.choose(_small(nbytes)).candidate == span.candidate
    assert covered == [*range(len(covered))]
    crossovers = {span.lo for span in spans} - {1 << bits for bits in range(14)}
    assert (1000 if table else 667) in crossovers
    assert len(spans) < 60


def test_a_span_says_what_explanations_say() -> None:
    def cost(query: Query, candidate: Candidate) -> float:
        bump = 700 <= query.nbytes < 800 and candidate == DIRECT
        return COSTS[candidate.name] + 9 * bump

    policy = Policy(NEAR2, None, StatedOffers((NATIVE, DIRECT), cost))
    query = _small(750)
    assert policy.explain(query).choice.candidate == policy.span(query).candidate


def test_what_has_one_rule_has_one_span() -> None:
    span = _policy().span(Query("alltoallv", 0))
    assert (span.lo, span.hi) == (0, None)


def test_the_table_decides_with_half_open_ranges_and_its_parameters() -> None:
    policy = _policy()
    below, above = policy.choose(_small(999)), policy.choose(_small(1000))
    assert (below.candidate, below.source, below.rule) == (NATIVE, "table", 0)
    assert above.candidate == Candidate("shm", "ring", {"f": 2})
    assert policy.choose(_small(2**62)).rule == 1


def test_without_table_or_rule_the_model_decides() -> None:
    assert _policy(table=None).choose(_small()).candidate == DIRECT
    choice = _policy().choose(Query("bcast", 8))
    assert choice.source == "model"
    assert "no rule" in choice.reason


def test_a_single_candidate_needs_no_reason_to_win() -> None:
    assert _policy(found=(RING,)).choose(_small()).source == "only"


def test_call_beats_variable_beats_table() -> None:
    policy = _policy(wishes=(parse_wishes("allreduce:shm/ring{f=4}"),))
    choice = policy.choose(_small())
    assert (str(choice.candidate), choice.source) == ("shm/ring{f=4}", "override")
    assert policy.choose(_small(), algorithm="mpi/native").source == "call"


@pytest.mark.parametrize(
    ("backend", "algorithm", "expected"),
    [
        (None, "ring", "shm/ring{f=2}"),
        ("shm", None, "shm/direct"),
        ("shm", "ring", "shm/ring{f=2}"),
        (None, "shm/ring{f=8}", "shm/ring{f=8}"),
        (None, "ring{f=8}", "shm/ring{f=8}"),
    ],
)
def test_a_call_may_name_a_part(
    backend: str | None, algorithm: str | None, expected: str
) -> None:
    nbytes = 8 if algorithm is None else 4096
    choice = _policy().choose(_small(nbytes), backend=backend, algorithm=algorithm)
    assert str(choice.candidate) == expected


def test_parameters_of_the_call_replace_those_of_the_rule() -> None:
    choice = _policy().choose(_small(4096), params={"f": 3, "chunk": 64})
    assert str(choice.candidate) == "shm/ring{chunk=64,f=3}"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"algorithm": "shm/rin"}, "did you mean 'shm/ring'"),
        ({"algorithm": "direkt"}, "did you mean 'direct'"),
        ({"backend": "mpx"}, "did you mean 'mpi'"),
        ({"backend": "mpi", "algorithm": "shm/ring"}, "contradicts"),
    ],
)
def test_what_does_not_exist_is_refused_with_a_guess(
    asked: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        _policy().choose(_small(), **asked)


def test_an_override_that_cannot_run_is_an_error_not_a_fallback() -> None:
    policy = _policy(
        found=(DIRECT, RING), wishes=(parse_wishes("allreduce:mpi/native"),)
    )
    with pytest.raises(UsageError, match="COMMRT_ALGORITHM asks for 'mpi/native'"):
        policy.choose(_small())


def test_call_beats_group_beats_variable() -> None:
    group = parse_wishes("allreduce:direct", "group g")
    policy = _policy(wishes=(group, parse_wishes("allreduce:mpi/native,bcast:ring")))
    choice = policy.choose(_small(4096))
    assert (choice.candidate, choice.source) == (DIRECT, "group")
    assert choice.reason == "group g asks for direct"
    assert policy.choose(_small(), algorithm="ring").source == "call"
    other = policy.choose(Query("bcast", 8))  # of which the group says nothing
    assert (other.candidate.name, other.source) == ("shm/ring", "override")


@pytest.mark.parametrize(
    ("asked", "nbytes", "expected"),
    [
        ("ring", 8, "shm/ring{f=8}"),
        ("ring", 4096, "shm/ring{f=2}"),  # the rule knows the parameters
        ("shm/ring{f=4}", 8, "shm/ring{f=4}"),
        ("swing", 8, "mpi/native"),  # which is not here: the table decides
        ("mpi/ring", 8, "mpi/native"),
        ("swing,allreduce:direct", 8, "shm/direct"),
        ("direct,bcast:ring", 8, "shm/direct"),
    ],
)
def test_what_is_asked_of_all_operations_holds_where_there_is_such(
    asked: str, nbytes: int, expected: str
) -> None:
    choice = _policy(wishes=(parse_wishes(asked),)).choose(_small(nbytes))
    assert choice.candidate.name == expected.partition("{")[0]
    if "=4" in expected or "=2" in expected:
        assert str(choice.candidate) == expected


def test_a_backend_alone_leaves_the_algorithm_open() -> None:
    wishes = Wishes("group g", others=Wish("shm"))
    choice = _policy(wishes=(wishes,)).choose(_small(4096))
    assert str(choice.candidate) == "shm/ring{f=2}"
    assert choice.reason.startswith("group g asks for shm/*; of these, rule 1")


def test_a_group_that_speaks_of_other_memory_leaves_it_to_the_variable() -> None:
    group = parse_wishes("allreduce:shm/direct", "group g")
    offers = StatedOffers(
        (NATIVE, DIRECT, RING),
        _cost,
        speaks_of=lambda query, wish: wish.algorithm != "direct",
    )
    wishes = group, parse_wishes("allreduce:shm/ring")
    policy = Policy(NEAR2, None, offers, wishes)
    assert policy.choose(_small()).candidate.name == "shm/ring"


def test_explain_answers_for_a_call_with_wishes_of_its_own() -> None:
    said = str(_policy().explain(_small(), algorithm="ring{f=8}"))
    assert "shm/ring{f=8}" in said.splitlines()[0]
    assert "the call asked for it" in said
    assert "rule 0 of the table, overruled" in said


def test_no_candidate_at_all_points_to_info() -> None:
    with pytest.raises(UsageError, match="commrt info"):
        _policy(found=()).choose(_small())


def test_a_rule_that_cannot_run_here_falls_back_and_says_so() -> None:
    policy = _policy(found=(DIRECT, RING))
    choice = policy.choose(_small())
    assert (choice.candidate, choice.source) == (DIRECT, "model")
    assert "rule 0 asks for mpi/native, which cannot run this here" in choice.reason
    assert "rule 0 of the table, cannot run this here" in str(policy.explain(_small()))


def test_a_rule_whose_parameter_does_not_exist_on_these_ranks_falls_back() -> None:
    """The values of an algorithm's parameter may depend on the number of ranks."""
    here = tuple(Candidate("shm", "ring", {"k": k}) for k in (1, 2))
    use = Candidate("shm", "ring", {"k": 4, "chunk": 64})
    table = Table(MACHINE, (_rule(0, None, use),))
    choice = _policy(table, found=(*here, DIRECT)).choose(_small())
    assert (choice.candidate, choice.source) == (DIRECT, "model")
    fits = Table(MACHINE, (_rule(0, None, Candidate("shm", "ring", {"k": 2, "c": 1})),))
    assert _policy(fits, found=(*here, DIRECT)).choose(_small()).source == "table"
    omits = Table(MACHINE, (_rule(0, None, RING),))
    assert _policy(omits, found=(*here, DIRECT)).choose(_small()).source == "table"


def test_rank_counts_not_measured_use_the_nearest_smaller_one() -> None:
    table = Table(
        MACHINE,
        (
            _rule(0, None, NATIVE),
            _rule(0, None, DIRECT, ranks=4, ppn=4),
            _rule(0, None, RING, ranks=16, ppn=16),
        ),
    )
    facts = CommFacts(8, 1, 8, 8, "near")
    choice = _policy(table, facts).choose(_small())
    assert choice.candidate == DIRECT
    assert "measured with 4 ranks, here are 8" in choice.reason


def test_the_other_placement_stands_in_but_oversubscription_does_not() -> None:
    far = _policy(facts=replace(NEAR2, link_class="far")).choose(_small())
    assert far.source == "table"
    assert "measured on near links, here they are far" in far.reason
    over = _policy(facts=replace(NEAR2, link_class="oversubscribed")).choose(_small())
    assert over.source == "model"


def test_one_node_does_not_stand_in_for_two() -> None:
    facts = CommFacts(size=4, nodes=2, ppn=2, cores=2, link_class="near")
    assert _policy(facts=facts).choose(_small()).source == "model"


def test_exact_keys_beat_any_whatever_their_order() -> None:
    general = _rule(0, None, NATIVE)
    special = _rule(0, None, RING, dtype="bfloat16")
    for rules in ((general, special), (special, general)):
        policy = _policy(Table(MACHINE, rules))
        query = Query("allreduce", 8, dtype="bfloat16")
        assert policy.choose(query).candidate == RING
        assert policy.choose(_small()).candidate == NATIVE


def test_explain_prints_choice_evidence_and_the_rejected() -> None:
    point = Point(512, 4.5, (4.4, 4.75), 90, 3, native_us=9.0)
    evidence = Evidence("win", (point,), RunnerUp(RING, 512, 6.5, (6.0, 7.0)), "fitted")
    rule = Rule("allreduce", Match(0, None, ranks=2), DIRECT, evidence)
    text = str(_policy(Table(MACHINE, (rule,), name="t.yaml")).explain(_small()))
    for part in (
        "allreduce(8 B, float32, host, op=sum): shm/direct",
        "rule 0: [0, infinity) bytes, win",
        "t.yaml (digest ",
        "512 B: 4.5 us [4.4, 4.75], n=90 in 3 launches, mpi/native 9 us",
        "runner-up shm/ring at 512 B: 6.5 us [6, 7]",
        "not    mpi/native: model 3 us",
    ):
        assert part in text


def test_the_model_keeps_the_simpler_of_equals() -> None:
    found = [RING, DIRECT, NATIVE]
    policy = Policy(NEAR2, None, StatedOffers(found, lambda query, one: 1.0))
    assert policy.choose(_small()).candidate == RING


def test_the_model_costs_nothing_that_cannot_win() -> None:
    costed = []

    def cost(query: Query, one: Candidate) -> float:
        costed.append(one)
        return _cost(query, one)

    found = [RING, DIRECT, NATIVE]
    floor = {RING: 3.5, DIRECT: 1.5, NATIVE: 1.0}
    offers = StatedOffers(found, cost, floor_us=lambda query, one: floor[one])
    policy = Policy(NEAR2, None, offers)
    choice = policy.choose(Query("alltoallv", 0))
    assert (choice.candidate, costed[:2]) == (DIRECT, [NATIVE, DIRECT])
    assert RING not in costed
    assert "the model expects 2 us" in choice.reason


def test_where_nothing_is_left_to_choose_nothing_is_costed() -> None:
    def cost(query: Query, one: Candidate) -> float:
        raise AssertionError(f"costed {one}")

    found = [DIRECT, *(Candidate("shm", "ring", {"f": f}) for f in (1, 2, 3))]
    policy = Policy(NEAR2, None, StatedOffers(found, cost))
    for asked, params in (("direct", None), ("ring", {"f": 2}), ("ring{f=2}", None)):
        chosen = policy.choose(_small(), algorithm=asked, params=params).candidate
        assert chosen in found
        assert chosen.algorithm == "direct" or chosen.params == {"f": 2}


def _plain_rule(coll: str, use: Candidate) -> Table:
    return Table(MACHINE, (replace(_rule(0, None, use), op=coll),))


@pytest.mark.parametrize("coll", ["allgather", "gather", "scatter", "reduce_scatter"])
def test_a_vector_operation_without_a_rule_follows_the_plain_one(coll: str) -> None:
    policy = _policy(_plain_rule(coll, RING))
    choice = policy.choose(Query(f"{coll}v", 4096))
    assert (choice.candidate, choice.source) == (RING, "table")
    assert f"of {coll}" in choice.reason


@pytest.mark.parametrize(
    ("coll", "nbytes", "source"),
    [
        ("scatter", 1 << 20, "table"),
        ("gather", 8 << 20, "table"),
        ("scatter", (1 << 20) - 1, "model"),
        ("gather", 8, "model"),
        ("allgather", 8 << 20, "model"),
        ("reduce_scatter", 8 << 20, "model"),
    ],
)
def test_the_librarys_vector_form_is_another_but_for_long_blocks_of_a_root(
    coll: str, nbytes: int, source: str
) -> None:
    choice = _policy(_plain_rule(coll, NATIVE)).choose(Query(f"{coll}v", nbytes))
    assert choice.source == source
    assert (choice.candidate == NATIVE) == (source == "table")


def test_an_alltoallv_whose_lengths_no_rank_knows_follows_no_rule_for_lengths() -> None:
    choice = _policy(_plain_rule("alltoall", RING)).choose(Query("alltoallv", 0))
    assert choice.source == "model"
