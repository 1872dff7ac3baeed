# SPDX-License-Identifier: Apache-2.0
"""``profile``: the table of a torch module's layers, with sizes and measured times.

    table = profile(resnet50(), torch.randn(16, 3, 224, 224))

Hooks see each call of a module without children: shapes of its input and output, and
its parameters. Each call is then timed by itself, forward and backward, for the whole
example and for a part of its samples. A line through the two times gives what a call
takes for each sample, and what it takes in any case. The whole model is timed as well:
the time that is in no module stands in a row of its own.

Ranks that share cores slow each other down. With ``comm``, all ranks measure at one
time, and the table has the mean of their times: what a layer takes while the others
compute, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.cnn.layer_facts import facts_of_call
from commrt.oracle.clocks import ClockName, Stopwatch
from commrt.oracle.layer_table import Layer, LayerTable, Piece
from commrt.oracle.torch_pieces import PieceSeconds, seconds_of_pieces

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["layer_sizes", "profile"]

_ATOMS = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that compute with their children's weights and do not call them."""
REST = "between modules"
"""The row of what the model computes outside of its modules."""


@dataclass(frozen=True)
class _Call:
    """One call of a module without children."""

    layer: Layer
    module: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    has_gradient: bool
    """True if the backward pass needs the input's gradient."""


def layer_sizes(
    model: nn.Module,
    example: Any,
    *,
    experts: Mapping[str, int] | None = None,
    name: str = "",
) -> LayerTable:
    """Return the table of a model's layers without times.

    Args:
        model: any module; it is not changed.
        example: its input, or a tuple of inputs; their first dimension is the samples.
        experts: experts by paths of modules; such a module is one layer, and its
            parameters are those of its experts.
        name: what messages call it; the class, if left out.

    Raises:
        UsageError: the example has no samples, or a path of ``experts`` is unknown.
    """
    inputs = _inputs(example)
    calls = _calls(copy.deepcopy(model), inputs, experts or {})
    layers = tuple(call.layer for call in calls)
    return LayerTable(name or type(model).__name__, layers, "no times")


def profile(
    model: nn.Module,
    example: Any,
    *,
    part: int | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    comm: Communicator | None = None,
    experts: Mapping[str, int] | None = None,
    pieces: Sequence[int] = (),
    clock: ClockName = "wall",
    window_s: float = 0.02,
    rounds: int = 3,
    name: str = "",
) -> LayerTable:
    """Return the table of a model's layers with measured times.

    Args:
        model: any module; a copy of it is trained, so it is not changed.
        example: its input, or a tuple of inputs; their first dimension is the samples.
        part: samples of the second measurement, fewer than those of the example; a
            quarter of them, if left out.
        loss: of the model's output, a scalar; the mean of its squares, if left out.
        optimizer: of parameters, makes the optimizer; plain SGD, if left out.
        comm: ranks that measure at one time; collective over them.
        experts: as in ``layer_sizes``.
        pieces: numbers of pieces; pieces of convolutions and linear layers are timed,
            which may take more than their part of the whole.
        clock: ``wall``, or ``cores`` where other programs share them.
        window_s: seconds of each measurement, of which there are ``rounds`` for each
            layer, pass and number of samples.
        rounds: measurements, of which the least counts.
        name: as in ``layer_sizes``.

    Raises:
        UsageError: the example has no samples, ``part`` is no smaller number of them,
            or a path of ``experts`` is unknown.
    """
    inputs = _inputs(example)
    whole = len(inputs[0])
    less = max(1, whole // 4) if part is None else part
    if not 0 < less < max(whole, 2):
        raise UsageError(
            f"profile: part is {shown(part)}; expected fewer samples than the "
            f"example's {whole}"
        )
    watch = Stopwatch(comm, clock=clock, window_s=window_s, rounds=rounds)
    mine = copy.deepcopy(model)
    found: dict[int, tuple[list[_Call], _Times]] = {}
    cuts: dict[int, list[PieceSeconds]] = {}
    for samples in sorted({less, whole}):
        some = tuple(each[:samples] for each in inputs)
        calls = _calls(mine, some, experts or {})
        found[samples] = calls, _measured(watch, mine, some, calls, loss, optimizer)
        cuts[samples] = [
            seconds_of_pieces(
                watch, call.module, call.arguments, pieces, call.has_gradient
            )
            for call in calls
        ]
        cuts[samples].append({})
    by_samples = {samples: times for samples, (_, times) in found.items()}
    calls, times = found[whole]
    layers = [call.layer for call in calls]
    weights = sum(layer.weight_elements for layer in layers) or 1.0
    rows = []
    for at, layer in enumerate([*layers, _rest(layers)]):
        forward = _line({n: t.forward[at] for n, t in by_samples.items()})
        backward = _line({n: t.backward[at] for n, t in by_samples.items()})
        rows.append(
            replace(
                layer,
                forward_s=forward[0],
                forward_call_s=forward[1],
                backward_s=backward[0],
                backward_call_s=backward[1],
                update_s=times.update * layer.weight_elements / weights,
                pieces={
                    key: Piece(*_line({n: each[at][key] for n, each in cuts.items()}))
                    for key in cuts[whole][at]
                },
            )
        )
    who = "1 process" if comm is None else f"{comm.size} ranks at one time"
    about = f"measured by {who}, {less} and {whole} samples, clock {clock}"
    return LayerTable(name or type(model).__name__, tuple(rows), about)


def _rest(layers: Sequence[Layer]) -> Layer:
    """Return the row of what is in no module; its space is cut as others' is."""
    extent = next((layer.extent for layer in layers if layer.extent), ())
    return Layer(REST, 0, 0, is_product=False, extent=extent)


# -- calls -----------------------------------------------------------------------------


def _inputs(example: Any) -> tuple[Any, ...]:
    inputs = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not inputs or not all(
        isinstance(each, torch.Tensor) and each.dim() and len(each) for each in inputs
    ):
        raise UsageError(
            "profile: the example has no samples; expected tensors whose first "
            "dimension is the samples"
        )
    return inputs


def _calls(
    model: nn.Module, inputs: tuple[Any, ...], experts: Mapping[str, int]
) -> list[_Call]:
    """Return the calls of the model's leaves, in their order; trains nothing."""
    modules = dict(model.named_modules())
    for path in experts:
        if path not in modules:
            raise UsageError(
                f"profile: experts: the model has no module {shown(path)}; expected a "
                f"path of named_modules()"
            )
    found: list[_Call] = []
    counted: set[int] = set()
    hooks = []

    def keep(path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, y: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            result = y[0] if isinstance(y, tuple | list) else y
            if isinstance(x, torch.Tensor) and isinstance(result, torch.Tensor):
                own = [each for each in module.parameters() if id(each) not in counted]
                counted.update(map(id, own))
                layer = _layer(path, module, x, result, own, experts.get(path, 0))
                found.append(_Call(layer, module, args, kwargs, x.requires_grad))

        return hook

    inside = [path for path, module in modules.items() if _is_atom(module)]
    inside += experts
    for path, module in modules.items():
        if any(path.startswith(f"{each}.") for each in inside if each != path):
            continue
        if not [*module.children()] or path in inside:
            hooks.append(module.register_forward_hook(keep(path), with_kwargs=True))
    try:
        model(*inputs)
    finally:
        for one in hooks:
            one.remove()
    samples = len(inputs[0])
    others = [each for each in model.parameters() if id(each) not in counted]
    if others:
        count = sum(each.numel() for each in others)
        extra = Layer("parameters of no leaf", 0, 0, count, is_product=False)
        found.append(_Call(extra, None, (), {}, False))
    if not found:
        raise UsageError(
            f"profile: {type(model).__name__} calls no module with a tensor for "
            f"{samples} samples; expected one layer at least"
        )
    return found


def _is_atom(module: Any) -> bool:
    return isinstance(module, _ATOMS)


def _layer(
    path: str, module: Any, x: Any, y: Any, own: Sequence[Any], experts: int
) -> Layer:
    """Return the sizes of one call, for each sample."""
    samples = len(x)
    facts = facts_of_call(path, module, x, y)
    channels = filters = 0
    if facts.is_product:
        channels = getattr(module, "in_channels", 0) or module.in_features
        filters = getattr(module, "out_channels", 0) or module.out_features
    reach = facts.reach
    has_space = x.dim() > 3 or bool(reach)
    extent = tuple(x.shape[2:]) if has_space else ()
    if math.prod(extent) == 1:  # behind a global pooling there is no space to cut
        extent = ()
    return Layer(
        path or type(module).__name__,
        x.numel() / samples,
        y.numel() / samples,
        sum(each.numel() for each in own),
        # A product's training step has three of its forward pass; others' one.
        flops=facts.flops / samples / (3 if facts.is_product else 5),
        is_product=facts.is_product,
        channels=channels,
        filters=filters,
        extent=extent,
        halo_rows=tuple(rows / 2 for rows in reach) if extent else (),
        statistic_elements=2 * x.shape[1] + 2 if facts.has_statistics else 0,
        experts=experts,
    )


# -- times -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """Seconds of each layer and of what is in none, for so many samples."""

    forward: Sequence[float]
    backward: Sequence[float]
    update: float


def _measured(
    watch: Stopwatch,
    model: Any,
    inputs: tuple[Any, ...],
    calls: Sequence[_Call],
    loss: Callable[[Any], Any] | None,
    optimizer: Callable[[Any], Any] | None,
) -> _Times:
    """Return the times of all calls, fitted to those of the whole model."""
    forward, backward = [], []
    for call in calls:
        there, both = _times_of_call(watch, call)
        forward.append(there)
        backward.append(max(both - there, 0.0))
    parameters = [each for each in model.parameters() if each.requires_grad]
    lossy = loss or (lambda y: _tensor(y).square().mean())

    def ahead() -> Any:
        return lossy(model(*inputs))

    def step() -> None:
        model.zero_grad()
        result = ahead()
        if result.requires_grad:
            result.backward()

    there, both = watch.mean_s(ahead), watch.mean_s(step)
    update = 0.0
    if parameters:
        state = [each.detach().clone() for each in parameters]
        made = (optimizer or (lambda some: torch.optim.SGD(some, 1e-3)))(parameters)
        update = watch.mean_s(made.step)
        with torch.no_grad():
            for each, old in zip(parameters, state, strict=True):
                each.copy_(old)
    return _Times(_fitted(forward, there), _fitted(backward, both - there), update)


def _fitted(times: Sequence[float], whole: float) -> list[float]:
    """Return times that sum to the whole: what is missing stands at the end."""
    total = sum(times)
    if total > whole > 0:  # alone, layers found nothing in the caches
        return [each * whole / total for each in times] + [0.0]
    return [*times, max(whole - total, 0.0)]


def _times_of_call(watch: Stopwatch, call: _Call) -> tuple[float, float]:
    """Return the seconds of a layer's forward pass, and of both passes."""
    module = call.module
    if module is None:
        return 0.0, 0.0
    given = [_leaf(each, call.has_gradient) for each in call.arguments]
    named = {key: _leaf(each, call.has_gradient) for key, each in call.keywords.items()}
    writes = getattr(module, "inplace", False)
    if writes:
        module.inplace = False
    wanted = [*module.parameters(), *given, *named.values()]
    wanted = [x for x in wanted if isinstance(x, torch.Tensor) and x.requires_grad]

    def ahead() -> Any:
        return _tensor(module(*given, **named))

    one = ahead()
    gradient = torch.ones_like(one)

    def both() -> None:
        y = ahead()
        if y.requires_grad:
            torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    try:
        return watch.mean_s(ahead), watch.mean_s(both)
    finally:
        if writes:
            module.inplace = True


def _leaf(value: Any, has_gradient: bool) -> Any:
    """Return an argument as a tensor that no other call has made."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_(has_gradient and copied.is_floating_point())


def _tensor(value: Any) -> Any:
    """Return the first tensor of a result."""
    if isinstance(value, tuple | list):
        return _tensor(value[0])
    if isinstance(value, Mapping):
        return _tensor(next(iter(value.values())))
    return value


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """Return seconds of a sample, and of a call without any; neither is negative."""
    most = max(times)
    if len(times) == 1:
        return times[most] / most, 0.0
    least = min(times)
    each = (times[most] - times[least]) / (most - least)
    rest = times[most] - most * each
    if each < 0:
        return 0.0, times[most]
    if rest < 0:
        return times[most] / most, 0.0
    return each, rest
