# SPDX-License-Identifier: Apache-2.0
"""The optimizer: gradients, factors and inverses of a step, and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import (
    ClosedError,
    NotFiniteError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
    shown,
)
from commrt.layers.all_or_none import check_same, exchange, meet, number_of
from commrt.layers.autocast import without_autocast
from commrt.layers.kfac.agreement import Agreed, Facts, check_facts, started_in
from commrt.layers.kfac.capture import Capture
from commrt.layers.kfac.choices import GRADIENTS, check_choices
from commrt.layers.kfac.factors import Averages, averaged
from commrt.layers.kfac.gradients import Gradients, bits_of
from commrt.layers.kfac.inverses import GROUP, RECEIVERS, Inverses, Task
from commrt.layers.kfac.memory import Memory
from commrt.layers.kfac.model_layers import layers_of, trained_parameters
from commrt.layers.kfac.placement import Placement, place
from commrt.layers.kfac.scalars import on_host
from commrt.layers.kfac.scaled_loss import ScaledLoss
from commrt.layers.kfac.settings import Settings
from commrt.layers.kfac.state import (
    averages_in,
    check_state,
    inverted_in,
    keep_types,
    write_factors,
)
from commrt.layers.kfac.sums_comm import SumsComm
from commrt.layers.kfac.triangles import unpacked
from commrt.layers.process_grid import ProcessGrid

__all__ = ["KFAC"]

Tensor: TypeAlias = torch.Tensor


class KFAC(torch.optim.Optimizer):  # type: ignore[misc]
    """Gradient descent along gradients that are multiplied by an inverse Fisher matrix.

        optimizer = KFAC(model, comm, lr=0.1)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    Linear layers and convolutions are preconditioned, each with two factors (Martens
    and Grosse 2015, arXiv 1503.05671). Ranks sum factors, share the work of inverting
    them, and end with the same parameters as one process with all samples. All other
    parameters take steps of SGD with the same momentum. So does a layer that no sum of
    factors has had yet, in steps that ``kl_clip`` does not limit.

    Args:
        model: all parameters that need a gradient are trained. Equal on all ranks.
        comm: the ranks; it stays the caller's.
        lr: the step size.
        damping: is added to the diagonal of each layer's Fisher matrix.
        momentum: as SGD of torch has it.
        weight_decay: multiples of parameters that are added to preconditioned
            gradients.
        factor_decay: the weight of earlier steps in the averages of factors.
        factor_every: steps from one sum of factors to the next.
        inverse_every: steps from one inversion to the next.
        kl_clip: the largest squared norm, by the Fisher matrix, of lr times the
            preconditioned gradients; longer ones become shorter. Momentum comes after
            it: with 0.9, steps of one direction add up to ten times as much. Steps of
            SGD have no limit. None: there is none at all.
        gradient_workers: ranks that keep a layer's inverses, a divisor of their number.
            None: all of them.
        gradients: "local": each rank has gradients of its own samples, and ``step``
            sums them. "synchronised": they are means over all ranks already, as DDP
            leaves them.
        loss: of a rank: "mean": over its samples; "sum": over them; "global_mean": the
            sum over its samples, divided by the number of all ranks' samples.
        skip: names of modules whose layers take steps of SGD.
        samples_of: returns the number of samples of a call of the model, from the
            call's arguments. None: the first dimension of the first tensor in them.
        grad_scaler: the GradScaler that multiplies the loss.

    Collective. Raises UsageError on all ranks for arguments that do not fit, or that
    differ between ranks.
    """

    # GradScaler then leaves it to step() to unscale gradients and to skip steps.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        lr: float | Tensor = 0.1,
        *,
        damping: float = 0.003,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        factor_every: int = 1,
        inverse_every: int = 10,
        kl_clip: float | None = 0.001,
        gradient_workers: int | None = None,
        gradients: str = "local",
        loss: str = "mean",
        skip: Collection[str] = (),
        samples_of: Callable[..., int] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"KFAC: comm={shown(comm)} must be a communicator, as commrt.init() "
                f"returns it"
            )
        values = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "factor_decay": factor_decay,
            "factor_every": factor_every,
            "inverse_every": inverse_every,
            "kl_clip": kl_clip,
        }
        self._is_made = False
        self._resources = contextlib.ExitStack()
        error: Exception | None = None
        facts: list[object] = [None] * 4
        try:
            check_choices(model, gradients, loss, samples_of, grad_scaler)
            settings = Settings.of("KFAC", values)
            self._named = trained_parameters(model)
            self._layers = layers_of(model, skip)
            sides = [each.rows.sides for each in self._layers]
            self._placement = place(sides, comm.size, gradient_workers)
            super().__init__([each for _, each in self._named], values)
            shapes = [(n, p.dtype, tuple(p.shape)) for n, p in self._named]
            facts = [
                [*shapes, *(each.name for each in self._layers)],
                tuple(settings),
                (gradients, loss, gradient_workers, grad_scaler is None),
                [each.rows.sides for each in self._layers],
            ]
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        said = meet(comm, "KFAC", error, [number_of(each) for each in facts])
        for which, name in enumerate(("parameters", "settings", "choices", "layers")):
            check_same("KFAC", said[:, which].tolist(), name)
        self._scaled = ScaledLoss(self, grad_scaler)
        self._device_types = {each.device.type for _, each in self._named}
        self._loss, self._are_local = loss, GRADIENTS[gradients]
        workers = self._placement.gradient_workers
        with contextlib.ExitStack() as made:
            axes = {RECEIVERS: comm.size // workers, GROUP: workers}
            self._grid = ProcessGrid(comm, axes)
            made.callback(self._grid.free)
            sums = SumsComm(self._grid.comm, f"{comm.name}.factors")
            made.callback(sums.free)
            self._gradients = Gradients(comm, self._named, self._are_local, loss)
            made.callback(self._gradients.close)
            self._inverses = Inverses(self._grid, self._layers, self._placement)
            self._capture = Capture(
                *(model, self._layers, sums, samples_of, loss, self._scaled.scale)
            )
            made.callback(self._capture.close)
            self._resources = made.pop_all()
        self._is_first = self._is_made = True
        self._is_loaded = False
        self.param_groups[0]["steps"] = 0
        self._begin()

    # -- a step ------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; collective. Returns what ``closure`` returns, if there is one.

        Call it once after the backward passes of a step. It happens on all ranks or on
        none: a rank with an error raises it, and all others raise RefusedError. It
        raises UsageError, on all ranks, where gradients seem to have been summed
        before, where those of "synchronised" differ between ranks, and where ranks have
        other settings. NotFiniteError: factors have NaN or infinity. A closure's errors
        are told as others are, but for lost peers, revoked communicators and timeouts.
        """
        try:
            self._check_open("step")
            found, error = None, None
            if closure is not None:
                try:
                    with torch.enable_grad():
                        found = closure()
                except (PeerFailedError, RevokedError, TimeoutError_):
                    raise  # other ranks cannot answer, or hear of it anyway
                except Exception as wrong:  # noqa: BLE001  the others must hear of it
                    error = wrong
            with without_autocast(self._device_types):
                self._step(error)
        except BaseException:
            self._scaled.forget()
            raise
        return found

    def _check_open(self, method: str) -> None:
        if not self._is_made:
            raise ClosedError(f"KFAC.{method}: the optimizer was freed")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _step(self, error: Exception | None) -> None:
        agreed = self._agreed(error)
        try:
            self._capture.wait()
            # After an overflow somewhere, or without samples anywhere, nothing moves.
            if agreed.samples and not agreed.is_overflow:
                new: dict[int, Averages] = {}
                failed: Exception | None = None
                try:
                    new = self._averaged(agreed)
                except NotFiniteError:
                    raise  # on all ranks
                except Exception as wrong:  # noqa: BLE001  the others must hear of it
                    failed = wrong
                own = self._capture.samples
                self._gradients.finish(own, agreed.samples, self._scaled.unscale())
                if failed is not None:  # the others meet in _move
                    meet(self._grid.comm, "KFAC.step", failed, [])
                self._move(agreed, new)
                self.param_groups[0]["steps"] += 1
                self._is_first = self._is_loaded = False
        finally:
            self._begin()

    def _agreed(self, error: Exception | None) -> Agreed:
        """Return what all ranks know of a step; collective. All sums have started then.

        Raises this rank's error, RefusedError where another one has any, and UsageError
        or MismatchError where ranks do not fit together.
        """
        settings, facts = None, Facts()
        try:
            if error is not None:
                raise error
            self._capture.check()
            settings = Settings.of("KFAC.step", self.param_groups[0])
            self._scaled.check()
            self._gradients.check()
            facts = self._facts(settings)
            self._capture.start()
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        said = facts.numbers(self._capture.num_started)
        every, raised = exchange(self._grid.comm, "KFAC.step", error, said)
        try:
            if raised is not None:
                raise raised
            assert settings is not None  # or there is an error
            return check_facts(every, settings, self._are_local)
        except Exception:
            self._capture.forget(started_in(every))
            self._begin()
            raise

    def _facts(self, settings: Settings) -> Facts:
        """Return what this rank tells the others before a step."""
        steps = self.param_groups[0]["steps"]
        is_inverting = steps % settings.inverse_every == 0
        present = self._gradients.present()
        parameters = [parameter for _, parameter in self._named]
        return Facts(
            steps,
            number_of(tuple(settings)),
            present=0 if self._are_local else number_of(present),
            gradients=self._gradients.bits() if is_inverting else 0,
            parameters=bits_of(parameters) if self._is_first else 0,
            samples=self._capture.samples,
            has_overflow=self._scaled.has_overflow(),
            has_gradients=any(present),
        )

    def _averaged(self, agreed: Agreed) -> dict[int, Averages]:
        """Return the averages with this step in them, by layer; NotFiniteError."""
        samples, decay = agreed.samples, agreed.settings.factor_decay
        scale = float(samples) ** 2 if self._loss == "global_mean" else 1.0
        new: dict[int, Averages] = {}
        for number, each in enumerate(self._capture.sums()):
            before = averages_in(self._state_of(number))
            found = averaged(before, each, samples, scale, decay)
            if found is not None and found is not before:
                new[number] = found
        factors = [(at, each) for at, found in new.items() for each in found.factors]
        are_finite = on_host([torch.isfinite(each).all() for _, each in factors])
        for (number, _), is_finite in zip(factors, are_finite, strict=True):
            if not is_finite:
                raise NotFiniteError(
                    f"KFAC.step: factors of {self._layers[number].name} have NaN or "
                    f"infinity in step {self.param_groups[0]['steps']}; nothing has "
                    f"changed. Lower lr, or pass grad_scaler where a loss is scaled"
                )
        return new

    def _move(self, agreed: Agreed, new: Mapping[int, Averages]) -> None:
        """Change averages, inverses and parameters: all, or none."""
        settings = agreed.settings
        tasks: dict[int, Task] = {}
        known: dict[int, Averages] = {}
        for number in range(len(self._layers)):
            state = self._state_of(number)
            averages = new.get(number) or averages_in(state)
            if averages is None:
                continue
            known[number] = averages
            inverted = inverted_in(state)
            if agreed.is_inverting or inverted is None:
                tasks[number] = Task(averages.factors, settings.damping)
            elif self._is_loaded:
                tasks[number] = inverted
        before = {**self._inverses.held}
        error: Exception | None = None
        try:
            if tasks:
                self._inverses.refresh(tasks)
            moves: dict[int, Tensor] = {}
            try:
                matrices = {at: self._matrix(at) for at in known if self._has(at)}
                moves = self._inverses.precondition(matrices)
                self._make_room(settings)
            except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
                error = wrong
            meet(self._grid.comm, "KFAC.step", error, [])
            self._inverses.share(moves)
        except Exception:
            self._inverses.held = before
            raise
        for number, averages in known.items():
            write_factors(self._state_of(number), averages, tasks.get(number))
        self._take(settings, matrices, moves)

    def _take(
        self,
        settings: Settings,
        matrices: Mapping[int, Tensor],
        moves: Mapping[int, Tensor],
    ) -> None:
        """Move all parameters; local."""
        clip = 1.0
        if settings.kl_clip is not None:
            # Ba et al., ICLR 2017; Pauloski et al. 2020, arXiv 2007.00784
            parts = [(moves[at].double() * matrices[at]).sum() for at in moves]
            norm = settings.lr**2 * sum(on_host(parts))
            if norm > settings.kl_clip:
                clip = (settings.kl_clip / norm) ** 0.5
        found: dict[int, Tensor] = {}
        for number, move in moves.items():
            layer = self._layers[number]
            weight, bias = layer.rows.parts(move * clip, layer.weight)
            found[id(layer.weight)] = weight
            if bias is not None and layer.bias is not None:
                found[id(layer.bias)] = bias
        for _, parameter in self._named:
            if parameter.grad is None:
                continue
            step = found.get(id(parameter), parameter.grad).to(parameter.dtype)
            if settings.weight_decay:
                step = step + parameter * settings.weight_decay
            if settings.momentum:
                buffer = self.state[parameter]["momentum_buffer"]
                step = buffer.mul_(settings.momentum).add_(step)
            parameter.sub_(step, alpha=settings.lr)

    def _make_room(self, settings: Settings) -> None:
        for _, parameter in self._named:
            has_step = settings.momentum and parameter.grad is not None
            if has_step and "momentum_buffer" not in self.state[parameter]:
                made = torch.zeros_like(parameter)
                self.state[parameter]["momentum_buffer"] = made

    # -- parts of a step ---------------------------------------------------------------

    def _begin(self) -> None:
        group = self.param_groups[0]
        every = group["factor_every"]
        fits = type(every) is int and every > 0  # step() refuses others
        self._capture.begin(fits and group["steps"] % every == 0)

    def _state_of(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.state[self._layers[number].weight]
        return found

    def _has(self, number: int) -> bool:
        return self._layers[number].weight.grad is not None

    def _matrix(self, number: int) -> Tensor:
        layer = self._layers[number]
        assert layer.weight.grad is not None
        bias = None if layer.bias is None else layer.bias.grad
        return layer.rows.matrix(layer.weight.grad, bias)

    # -- several passes ----------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward passes only add up; for all of a step but the last."""
        before = self._capture.is_synchronising
        self._capture.is_synchronising = False
        try:
            yield
        finally:
            self._capture.is_synchronising = before

    def discard(self) -> None:
        """Forget the backward passes since the last step; collective.

        For programs that leave a step out, on all ranks. Gradients stay. Bytes: an
        ``allgather`` of 16 for each rank.
        """
        self._check_open("discard")
        started = [self._capture.num_started]
        every = meet(self._grid.comm, "KFAC.discard", None, started)
        self._capture.forget(every[:, 0].tolist())
        self._begin()

    # -- what it is --------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """The ranks that invert each factor, and those that keep the inverses."""
        return self._placement

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that are preconditioned, in the order of the placement."""
        return tuple(each.name for each in self._layers)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the averages A and G of each layer that has any, whole; local."""
        found = {}
        for number, layer in enumerate(self._layers):
            averages = averages_in(self._state_of(number))
            if averages is not None:
                inner, outer = map(unpacked, averages.factors)
                found[layer.name] = inner, outer
        return found

    def memory(self) -> Memory:
        """Return the bytes that this rank holds between two steps; local."""
        states = [self._state_of(number) for number in range(len(self._layers))]
        return Memory.of(states, self._inverses.held.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of the model; UsageError for any others."""
        if self._is_made:
            raise UsageError(
                "KFAC.add_param_group: the parameters are those of the model; make a "
                "new KFAC of a model with more"
            )
        super().add_param_group(param_group)

    # -- state -------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; local, and the same on all ranks.

        It may come from any number of ranks. Raises UsageError for factors of another
        model, and between a backward pass and its step.
        """
        if self._capture.is_under_way:
            raise UsageError(
                "KFAC.load_state_dict: sums of factors are under way; call it before "
                "the backward pass, or after step()"
            )
        weights = {id(each.weight): each for each in self._layers}
        layers = [weights.get(id(p)) for p in self.param_groups[0]["params"]]
        check_state(state_dict, layers)
        super().load_state_dict(state_dict)
        parameters = self.param_groups[0]["params"]
        keep_types([self.state[p] for p in parameters], state_dict)
        self._inverses.held.clear()
        self._is_first = self._is_loaded = True
        self._begin()

    # -- the end -----------------------------------------------------------------------

    def free(self) -> None:
        """Remove the hooks and release the communicators; local, idempotent."""
        self._is_made = False
        self._resources.close()

    def __enter__(self) -> KFAC:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()
