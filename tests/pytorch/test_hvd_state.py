# SPDX-License-Identifier: Apache-2.0
"""commrt.hvd sends objects, parameters and the state of optimizers to all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hvd_cases import on_ranks
from tensor3d_cases import drawn_in
from torch import nn

import commrt.hvd as hvd
from commrt.errors import UsageError

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "betas": (0.5, 0.75)}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1}),
}


def flat(value: Any) -> Any:
    """Return a state with lists of numbers in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(key): flat(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return value


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_an_optimizer_is_the_roots(kind: str, size: int) -> None:
    """Root has taken steps, and the others none: they take none for a state."""
    make, options = KINDS[kind]
    root = size - 1

    def main() -> Any:
        rank = hvd.rank()
        model = nn.Linear(3, 2)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(drawn_in(number, *parameter.shape))
        own = {**options, "lr": options["lr"] + rank}
        optimizer = make(model.parameters(), **own)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        if rank == root:
            optimizer.step(closure)
            optimizer.step(closure)
        before = [each.detach().clone() for each in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root)
        for each, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(each, was)
        assert optimizer.param_groups[0]["lr"] == options["lr"] + root
        told = flat(optimizer.state_dict())
        hvd.broadcast_parameters([*model.named_parameters()], root)
        optimizer.step(closure)  # the state is in use
        return told, flat(model.state_dict())

    found = on_ranks(size, main)
    assert all(each == found[root] for each in found)


def test_parameters_come_from_the_root() -> None:
    def main() -> None:
        rank = hvd.rank()

        def of(number: int) -> Any:
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            with torch.no_grad():
                for value in model.state_dict().values():
                    value.fill_(number + 1)
            return model

        right = flat(of(1).state_dict())
        for given in (
            lambda model: model.state_dict(),
            lambda model: list(model.state_dict().items()),
            lambda model: [*model.named_parameters(), *model.named_buffers()],
            lambda model: [*model.parameters(), *model.buffers()],
            lambda model: iter([*model.parameters(), *model.buffers()]),
        ):
            model = of(rank)
            hvd.broadcast_parameters(given(model), root_rank=1)
            assert flat(model.state_dict()) == right
        with pytest.raises(UsageError, match="must be a state_dict"):
            hvd.broadcast_parameters(3)  # type: ignore[arg-type]

    on_ranks(3, main)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_travel(size: int) -> None:
    def main() -> None:
        rank, root = hvd.rank(), size - 1
        mine = {"rank": rank, "text": "x" * (100 * rank)}
        of_root = {"rank": root, "text": "x" * (100 * root)}
        assert hvd.broadcast_object(mine, root) == of_root
        assert hvd.broadcast_object(mine, root, name="named") == of_root
        everything = hvd.allgather_object(mine, name="named")
        assert [each["rank"] for each in everything] == [*range(size)]
        with pytest.raises(UsageError, match="cannot be pickled"):
            hvd.allgather_object(lambda: None)

    on_ranks(size, main)
