# SPDX-License-Identifier: Apache-2.0
"""Trainers that train a model each, and now and then play for the better one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator, core_of
from commrt.errors import CommError, UsageError, shown
from commrt.layers.all_or_none import check_equal, meet, number_of
from commrt.layers.tournament.candidate import Candidate, Contestant, Sizes
from commrt.layers.tournament.draws import Draws
from commrt.layers.tournament.mutation import Mutation, settings_of
from commrt.layers.tournament.outcome import Outcome
from commrt.layers.tournament.selection import Pairwise, Selection
from commrt.layers.tournament.standing import MODES, Judgement, Standing, mean_score
from commrt.layers.tournament.transfer import Transfer
from commrt.vocabulary.checks import as_integer

__all__ = ["Evaluate", "Optimizers", "Tournament"]

Evaluate: TypeAlias = Callable[[nn.Module], float]
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_KEYS = ("trainers", "seed", "round_number")
"""Entries of a tournament's state."""


class Tournament:
    """A tournament of trainers, which are equal groups of ranks.

        tournament = Tournament(comm, trainers=4, mode="max")
        for step in range(1000):
            train_step(model, optimizer, tournament.trainer_comm)
            if step % 50 == 49:
                outcome = tournament.step(model, accuracy, optimizer)

    Each trainer trains a model of its own on data of its own. A round compares models
    and lets good ones spread, by a rule. So a model sees the data of several trainers,
    and only whole models travel, once a round (Jacobs et al. 2019, arXiv 1910.02270).

    Args:
        comm: the ranks; it stays the caller's. Calls of the tournament meet no call of
            it.
        trainers: their number, which divides the number of ranks. Trainer t of n has
            ranks from t * size // n on.
        selection: the rule: ``Pairwise()``, ``Consensus()``, ``Truncation()``,
            ``Evolution()``, or one of the program's own. None: ``Pairwise()``.
        mode: "min" if a smaller score is better, or "max".
        seed: of all random choices.
        mutate: changes the optimizers of a trainer that has taken another one's model,
            such as ``Perturb()``; None: nothing does.

    Collective over ``comm``. Raises UsageError on a rank whose arguments are wrong, and
    RefusedError on the others; UsageError on all where they differ.

    Pattern of a round, on p ranks, for a rank whose model and optimizers have S bytes:

    - five ``allgather`` over all ranks, of 120 p bytes together;
    - ``Pairwise`` and ``Consensus``: a rank with a partner sends S bytes to the rank of
      the same place there, and gets its state. It judges its own model meanwhile;
    - ``Truncation`` and ``Evolution``: ranks of a trainer whose model is taken send S
      bytes to ranks of the one that takes it.

    One trainer keeps its model, and judges nothing. During a round a rank keeps S bytes
    of its own, and the partner's.
    """

    def __init__(
        self,
        comm: Communicator,
        trainers: int = 4,
        *,
        selection: Selection | None = None,
        mode: str = "min",
        seed: int = 0,
        mutate: Mutation | None = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"Tournament: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it"
            )
        self._rule: Selection = Pairwise() if selection is None else selection
        error: Exception | None = None
        settings = 0
        try:
            _check(comm.size, trainers, self._rule, mode, seed, mutate)
            numbers = as_integer(trainers), as_integer(seed)
            mutation = settings_of(mutate)
            settings = number_of((numbers, repr(self._rule), mode, mutation))
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        every = meet(comm, "Tournament", error, [settings])
        check_equal(
            *("Tournament", every[:, 0].tolist(), [0] * comm.size, "arguments"),
            advice="pass the same on all ranks",
        )
        self._num_trainers, self._mode = int(trainers), mode
        self._seed, self._round, self._mutate = int(seed), 0, mutate
        self._comm = comm.dup(name=f"{comm.name}.tournament")
        self._width = comm.size // self._num_trainers
        try:
            made = comm.split(self.trainer, name=f"{comm.name}.trainer{self.trainer}")
        except BaseException:
            self._comm.free()
            raise
        assert made is not None  # each rank has a trainer
        self._trainer_comm = made

    # -- places ------------------------------------------------------------------------

    @property
    def trainer_comm(self) -> Communicator:
        """The ranks of this rank's trainer, for the program's use."""
        return self._trainer_comm

    @property
    def trainer(self) -> int:
        """The number of this rank's trainer."""
        return self._comm.rank // self._width

    @property
    def num_trainers(self) -> int:
        """Trainers of the tournament."""
        return self._num_trainers

    @property
    def round_number(self) -> int:
        """The number of the next round, from 0 on."""
        return self._round

    # -- rounds ------------------------------------------------------------------------

    def step(
        self, model: nn.Module, evaluate: Evaluate, optimizers: Optimizers = ()
    ) -> Outcome:
        """Play a round; return its outcome. Collective over all ranks.

        Args:
            model: this trainer's. Its parameters and persistent buffers are replaced in
                place where it takes another one's model.
            evaluate: returns the score of a model. A trainer's score is the mean of its
                ranks'. It is called for ``model`` with this trainer's values, and with
                the partner's, on all ranks of a trainer alike; it may use
                ``trainer_comm``. Values that move are restored, and ``training`` of
                each module.
            optimizers: of the model's parameters: one, or a list. Their states and
                hyperparameters move with the model; without any, each trainer keeps
                its own. A tournament with ``mutate`` needs one.

        A NaN is worse than any number. A model on a grid of ``trainer_comm`` moves part
        by part. Gradients stay: call ``zero_grad()`` before the next backward pass.

        A round happens on all ranks or on none. Where one rank raises an error, such as
        its ``evaluate``'s, the others raise RefusedError. All have the states then that
        they came with, and the call may be made again. Raises UsageError on all ranks
        where models, optimizers, rounds or seeds do not fit each other, and where a
        rule returns different things on two ranks.

        Where a rank of a trainer of several fails while models are evaluated, the step
        revokes ``trainer_comm``, for others may wait there. All that was made from it
        ends with it: make a new tournament, and load this one's state.
        """
        try:
            return self._step(model, evaluate, optimizers)
        except BaseException as wrong:
            if not isinstance(wrong, Exception):  # the other ranks wait for this one
                self._end_trainer(wrong)
                with suppress(CommError):
                    self._comm.revoke(f"{type(wrong).__name__} in Tournament.step")
            raise

    def _step(
        self, model: nn.Module, evaluate: Evaluate, optimizers: Optimizers
    ) -> Outcome:
        """Play a round, which raises errors of any rank on all ranks; collective."""
        what = "Tournament.step"
        error, contestant, mine = None, None, Candidate(b"", {})
        numbers = [0] * 5
        try:
            if not callable(evaluate):
                raise UsageError(f"{what}: evaluate={shown(evaluate)} must be callable")
            ranks = core_of(self._trainer_comm).world_ranks
            contestant = Contestant(model, optimizers, ranks)
            if self._mutate is not None and not contestant.optimizers:
                raise UsageError(
                    f"{what}: the tournament has mutate={shown(self._mutate)}, and the "
                    f"call has no optimizer to change; pass the optimizer, too"
                )
            mine = contestant.packed()
            ours = number_of((self._seed, self._round))
            numbers = [ours, number_of(contestant.facts), *mine.sizes()]
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        every = meet(self._comm, what, error, numbers).tolist()
        assert contestant is not None  # or there is an error, which has been raised
        self._check_fit(what, every)
        sizes = [Sizes(*row[2:]) for row in every]
        try:
            outcome = self._played(contestant, mine, sizes, model, evaluate)
        except BaseException:
            contestant.take(mine)
            raise
        self._round += 1
        return outcome

    def _check_fit(self, what: str, every: Sequence[Sequence[int]]) -> None:
        size, width = self._comm.size, self._width
        rounds, models = ([row[at] for row in every] for at in (0, 1))
        check_equal(
            *(what, rounds, [0] * size, "seed or round"),
            advice="load the same state of the tournament on all ranks",
        )
        check_equal(
            *(what, models, [rank % width for rank in range(size)]),
            name="model and optimizers",
            advice="ranks of the same place in their trainers must have equal names, "
            "shapes and types of tensors, on equal kinds of devices",
        )

    def _played(
        self,
        contestant: Contestant,
        mine: Candidate,
        sizes: Sequence[Sizes],
        model: nn.Module,
        evaluate: Evaluate,
    ) -> Outcome:
        """Return the outcome of a round; the contestant has its new state."""
        draws = Draws(self._seed, self._round)
        device = contestant.device
        error, coming = None, None
        partners: tuple[int | None, ...] = (None,) * self._num_trainers
        offered: list[int] = []
        try:
            if self._num_trainers > 1:
                found = self._rule.partners(draws, self._num_trainers)
                partners = self._checked("partners", found)
            offered = [at if each is None else each for at, each in enumerate(partners)]
            coming = Transfer(self._comm, mine, offered, sizes, device)
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        self._agree(error, "partners", partners)
        assert coming is not None  # or there is an error, which has been raised
        error, other, judgement = None, mine, Judgement()
        try:
            coming.start()
            try:
                if partners[self.trainer] is not None:
                    judgement = Judgement(_score(evaluate, model))
            finally:
                other = coming.wait()
            if offered[self.trainer] != self.trainer:
                contestant.take_model(other)
                judgement = judgement._replace(other=_score(evaluate, model))
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            self._end_trainer(wrong)
            error = wrong
        standing = self._met(error, judgement)
        sources = self._change(contestant, mine, other, offered, standing, sizes)
        return Outcome(
            self._round, self.trainer, partners, standing.judgements, sources
        )

    def _end_trainer(self, error: BaseException) -> None:
        """End the communicators of this rank's trainer; local.

        Its other ranks may wait for this one in ``evaluate``.
        """
        if self._width > 1:
            with suppress(CommError):  # the program may have freed it
                self._trainer_comm.revoke(
                    f"{type(error).__name__} on rank {self._comm.rank} of "
                    f"{self._comm.name}, while models were evaluated"
                )

    def _checked(self, method: str, found: Any) -> tuple[Any, ...]:
        """Return the trainers that a rule names; UsageError where it names others."""
        given = tuple(found)
        named = tuple(as_integer(each) for each in given)
        may_idle = method == "partners"
        is_known = [
            number in range(self._num_trainers) or (each is None and may_idle)
            for number, each in zip(named, given, strict=True)
        ]
        if len(given) != self._num_trainers or not all(is_known):
            raise UsageError(
                f"Tournament.step: {method}() of {self._rule!r} returned "
                f"{shown(given)}; expected the number of a trainer for each of "
                f"{self._num_trainers}"
            )
        return named

    def _agree(
        self, error: Exception | None, method: str, named: Sequence[int | None]
    ) -> None:
        """Raise an error of any rank, and UsageError where a rule differs; collective.

        Ranks whose rules differ would wait for messages that nobody sends.
        """
        numbers = [number_of(tuple(named))]
        every = meet(self._comm, "Tournament.step", error, numbers)[:, 0].tolist()
        check_equal(
            *("Tournament.step", every, [0] * self._comm.size),
            name=f"results of {method}()",
            advice="a rule must return the same on all ranks",
        )

    def _met(self, error: Exception | None, judgement: Judgement) -> Standing:
        """Return the scores of all trainers; collective."""
        is_there = sum((each is not None) << at for at, each in enumerate(judgement))
        said = [is_there, *(_bits_of(each) for each in judgement)]
        hint = ""
        if self._width > 1:
            hint = (
                ". The trainer_comm of that rank has ended, for others may have waited "
                "there: make a new tournament, and load the state of this one"
            )
        every = meet(self._comm, "Tournament.step", error, said, hint).tolist()
        found = []
        for trainer in range(self._num_trainers):
            rows = every[trainer * self._width :][: self._width]
            means = [
                mean_score([_score_of(row[1 + at]) for row in rows])
                if rows[0][0] >> at & 1
                else None
                for at in range(2)
            ]
            found.append(Judgement(*means))
        return Standing(tuple(found), self._mode)

    def _change(
        self,
        contestant: Contestant,
        mine: Candidate,
        other: Candidate,
        offered: Sequence[int],
        standing: Standing,
        sizes: Sequence[Sizes],
    ) -> tuple[int, ...]:
        """Give this rank the state that its trainer goes on with; collective.

        Returns for each trainer whose model it goes on with.
        """
        draws = Draws(self._seed, self._round)
        error, coming = None, None
        sources = (*range(self._num_trainers),)
        missing: list[int] = []
        try:
            if self._num_trainers > 1:
                sources = self._checked("sources", self._rule.sources(draws, standing))
            # A partner's state is here already.
            missing = [
                trainer if source == there else source
                for trainer, (source, there) in enumerate(
                    zip(sources, offered, strict=True)
                )
            ]
            device = contestant.device
            coming = Transfer(self._comm, mine, missing, sizes, device)
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        self._agree(error, "sources", sources)
        assert coming is not None  # or there is an error, which has been raised
        error = None
        try:
            coming.start()
            arrived = coming.wait()
            if sources[self.trainer] == self.trainer:
                contestant.take_model(mine)  # evaluate may have changed it
            else:
                is_here = missing[self.trainer] == self.trainer
                contestant.take(other if is_here else arrived)
                generator = draws.generator(self.trainer)
                for optimizer in contestant.optimizers:
                    if self._mutate is not None:
                        self._mutate(optimizer, generator)
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        meet(self._comm, "Tournament.step", error, [])
        return sources

    # -- state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return the state: number of trainers, seed and round; local.

        Random choices depend on seed and round alone, so this is all that a run needs
        to go on with the same ones.
        """
        values = self._num_trainers, self._seed, self._round
        return dict(zip(_KEYS, values, strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state; local, and the same on all ranks.

        Raises UsageError for another number of trainers, and for what is no state.
        """
        what = "Tournament.load_state_dict"
        if not isinstance(state, Mapping) or {*state} != {*_KEYS}:
            raise UsageError(
                f"{what}: state={shown(state)} must have the keys {', '.join(_KEYS)}"
            )
        numbers = [as_integer(state[key]) for key in _KEYS]
        trainers, seed, round_number = numbers
        if seed is None or round_number is None or round_number < 0:
            raise UsageError(
                f"{what}: {shown(dict(state))} must have integers, round_number from 0"
            )
        if trainers != self._num_trainers:
            raise UsageError(
                f"{what}: the state is of {trainers} trainers, and this tournament has "
                f"{self._num_trainers}; make one with as many"
            )
        self._seed, self._round = seed, round_number

    # -- the end -----------------------------------------------------------------------

    def free(self) -> None:
        """Release the communicators of the tournament; local, idempotent."""
        self._trainer_comm.free()
        self._comm.free()

    def __enter__(self) -> Tournament:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()

    def __repr__(self) -> str:
        return (
            f"<Tournament of {self._num_trainers} trainers by {self._rule!r}, "
            f"trainer {self.trainer}, before round {self._round}>"
        )


def _check(
    size: int, trainers: Any, rule: Any, mode: Any, seed: Any, mutate: Any
) -> None:
    """Raise UsageError for arguments of the constructor that do not fit."""
    if as_integer(trainers) is None or not 1 <= trainers <= size or size % trainers:
        numbers = [each for each in range(1, size + 1) if size % each == 0]
        raise UsageError(
            f"Tournament: trainers={shown(trainers)} must divide the number of ranks, "
            f"{size}; expected one of {', '.join(map(str, numbers))}"
        )
    methods = ("check", "partners", "sources")
    if isinstance(rule, type) or not all(hasattr(rule, each) for each in methods):
        raise UsageError(
            f"Tournament: selection={shown(rule)} must be a rule, such as Pairwise() "
            f"or Truncation()"
        )
    rule.check(trainers)
    if mode not in MODES:
        raise UsageError(f'Tournament: mode={shown(mode)} must be "min" or "max"')
    if as_integer(seed) is None:
        raise UsageError(f"Tournament: seed={shown(seed)} must be an integer")
    if mutate is not None and not callable(mutate):
        raise UsageError(
            f"Tournament: mutate={shown(mutate)} must be callable, such as Perturb()"
        )


def _score(evaluate: Evaluate, model: nn.Module) -> float:
    """Return the score of a model, whose modules keep their modes."""
    modes = [(each, each.training) for each in model.modules()]
    try:
        return _number_in(evaluate(model))
    finally:
        for module, is_training in modes:
            module.training = is_training


def _number_in(value: Any) -> float:
    """Return a score as a number; UsageError where it is none."""
    try:
        if value is None or isinstance(value, bool | str):
            raise TypeError
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"Tournament.step: evaluate returned {shown(value)}; expected one number"
        ) from error


def _bits_of(score: float | None) -> int:
    """Return the 64 bits of a score as an integer."""
    found: int = struct.unpack("<q", struct.pack("<d", score or 0.0))[0]
    return found


def _score_of(bits: int) -> float:
    """Return the score that has these bits."""
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
