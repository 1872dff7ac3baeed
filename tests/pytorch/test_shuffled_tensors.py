# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch as samples: types, layouts, and training by uneven batches."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import operator
from typing import Any

import numpy as np
import pytest
import torch
from shuffle_cases import exchanged, ids_of
from torch import nn

from commrt.errors import BufferError_, UsageError
from commrt.examples import shuffled_digits
from commrt.layers.samples import BatchLoader, PartialShuffle
from commrt.local import run

DEADLINE_S = 300.0
NEAR = 1e-12


def tensors_of(ids: list[int]) -> dict[str, Any]:
    number = torch.tensor(ids, dtype=torch.int64)
    plane = number[:, None, None] + torch.arange(6.0, dtype=torch.float64).view(2, 3)
    return {
        "id": number,
        "half": plane.bfloat16(),
        "turned": plane.transpose(1, 2).float(),
        "flag": number % 2 == 0,
        "complex": torch.complex(plane, -plane).conj(),
        "empty": torch.zeros((len(ids), 0)),
        "array": number.numpy().astype("i2"),
    }


def check_tensors(found: dict[str, Any]) -> list[int]:
    wanted = tensors_of(found["id"].tolist())
    for name, each in wanted.items():
        assert type(found[name]) is type(each)
        assert found[name].dtype == each.dtype
        if name == "array":
            np.testing.assert_array_equal(found[name], each)
        else:
            assert torch.equal(found[name], each.resolve_conj())
            assert found[name].is_contiguous()
            assert not found[name].requires_grad
    numbers: list[int] = found["id"].tolist()
    return numbers


@pytest.mark.parametrize("counts", [(5,), (4, 7), (0, 6, 3), (2, 0, 9, 1)])
def test_tensors_are_exchanged_as_arrays_are(counts: tuple[int, ...]) -> None:
    def main(comm: Any) -> list[list[int]]:
        own = tensors_of(ids_of(counts)[comm.rank])
        found = []
        with PartialShuffle(own, comm, 0.5, 3) as shuffle:
            for _ in range(3):
                shuffle.next_epoch()
                found.append(check_tensors(shuffle.samples))
        return found

    ranks, ids = run(len(counts), main), ids_of(counts)
    for epoch in range(3):
        ids = exchanged(ids, 0.5, 3, epoch + 1)
        assert [found[epoch] for found in ranks] == ids


def test_a_tensor_alone_is_a_batch_alone() -> None:
    def main(comm: Any) -> None:
        x = nn.Parameter(torch.arange(6.0).view(3, 2))
        with PartialShuffle(x, comm) as shuffle:
            found = shuffle.samples
            assert type(found) is torch.Tensor
            assert torch.equal(found, x)
            found.zero_()
            assert torch.equal(shuffle.samples, x)

    run(1, main)


def freed() -> Any:
    x = torch.zeros((2, 3))
    x.untyped_storage().resize_(0)
    return x


def nested(layout: Any) -> Any:
    rows = [torch.zeros(3), torch.zeros(2)]
    return torch.nested.nested_tensor(rows, layout=layout)


NO_SAMPLES: dict[str, Any] = {
    "meta": lambda: torch.zeros((2, 3), device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.zeros((2, 3)).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(
        torch.zeros((2, 3)), 0.1, 0, torch.quint8
    ),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(3), torch.eye(3)[0] > 0),
    "freed": freed,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of its prototypes
@pytest.mark.parametrize("kind", NO_SAMPLES)
def test_tensors_that_are_no_samples_are_refused_by_all(kind: str) -> None:
    wrong = NO_SAMPLES[kind]()

    def main(comm: Any) -> None:
        x = wrong if comm.rank == 1 else torch.zeros((2, 3))
        kind = BufferError_ if comm.rank == 1 else UsageError
        with pytest.raises(kind, match="samples" if comm.rank == 1 else "rank 1"):
            PartialShuffle(x, comm)

    run(2, main)


@pytest.mark.parametrize(
    "name", ["int4", "uint3", "bits8", "float8_e5m2", "float8_e8m0fnu", "bits16"]
)
def test_tensors_of_types_that_torch_hardly_knows_are_samples(name: str) -> None:
    dtype = getattr(torch, name)
    width = dtype.itemsize
    memory = torch.arange(24 * width, dtype=torch.uint8)

    def main(comm: Any) -> None:
        x = memory.view(dtype).view(6, 4)
        x = x.t() if width == 1 else x
        with PartialShuffle(x, comm, seed=2) as shuffle:
            found = shuffle.read(slice(None))
            assert found.dtype == dtype
            rows = memory.view(6, 4 * width)
            rows = rows.t() if width == 1 else rows
            assert torch.equal(found.view(torch.uint8), rows)

    run(1, main)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_may_be_changed_before_the_backward_pass_of_another(
    prefetch: bool,
) -> None:
    """Both are of one block; as views of one tensor they would have one version."""

    def main(comm: Any) -> None:
        with PartialShuffle(torch.arange(6.0).view(6, 1), comm) as shuffle:
            weight = torch.ones(1, requires_grad=True)
            first, second, third = BatchLoader(shuffle, 2, prefetch=prefetch)
            loss = (first.samples * weight).sum()
            wanted = first.samples.sum()
            second.samples.zero_()
            loss.backward()
            assert weight.grad == wanted
            third.samples.add_(1)
            for each in (first, second, third):
                assert each.samples._version <= 1
                assert each.samples.untyped_storage().nbytes() == 8

    run(1, main)


def test_an_array_is_no_tensor_on_another_rank() -> None:
    def main(comm: Any) -> None:
        x = torch.zeros((2, 3))
        with pytest.raises(UsageError, match=r"rank 1 has one array .*: array"):
            PartialShuffle(x.numpy() if comm.rank else x, comm)

    run(2, main)


@pytest.mark.parametrize("counts", [(6, 6), (7, 3), (1, 9, 0), (4, 2, 8, 3)])
def test_a_network_learns_from_uneven_batches_as_in_one_process(
    counts: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(sum(counts), 3, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()

    def learn(network: Any, inputs: Any, targets: Any, total: int) -> None:
        network.zero_grad()
        ((network(inputs) - targets).square().sum() / total).backward()

    def step(network: Any) -> None:
        with torch.no_grad():
            for each in network.parameters():
                each -= 0.1 * each.grad

    def main(comm: Any) -> tuple[list[Any], list[list[int]]]:
        network, seen = copy.deepcopy(first), []
        own = torch.tensor(ids_of(counts)[comm.rank], dtype=torch.int64)
        samples = {"x": x[own], "y": y[own], "id": own}
        with PartialShuffle(samples, comm, 0.4) as shuffle:
            loader = BatchLoader(shuffle, 2, num_epochs=3)
            for _ in range(3):
                for batch in loader:
                    inputs, targets = batch.samples["x"], batch.samples["y"]
                    learn(network, inputs, targets, batch.total)
                    for each in network.parameters():
                        comm.allreduce(each.grad)
                    step(network)
                    seen.append(batch.samples["id"].tolist())
        return [each.detach() for each in network.parameters()], seen

    ranks = run(len(counts), main)
    serial = copy.deepcopy(first)
    for ids in zip(*(seen for _, seen in ranks), strict=True):
        whole = torch.tensor(functools.reduce(operator.iadd, ids, []))
        learn(serial, x[whole], y[whole], len(whole))
        step(serial)
    for found, _ in ranks:
        for mine, right in zip(found, serial.parameters(), strict=True):
            assert (mine - right).abs().max() <= NEAR * right.abs().max()


def program(arguments: list[str]) -> list[Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = shuffled_digits.main(arguments)
    return [status, said.getvalue()]


def test_the_example_of_shuffling_on_ranks_of_torchrun(torchrun: Any) -> None:
    """With enough epochs that local shuffling is seen to be worse, as the page says."""
    arguments = ["--epochs", "8", "--seeds", "2", "--fractions", "0,0.3,1", "--check"]
    first, *others = torchrun(4, program, arguments=arguments, deadline_s=DEADLINE_S)
    assert first[0] == 0
    lines = first[1].splitlines()
    assert lines[0].startswith("1437 images sorted by digit on 4 ranks, 8 epochs")
    accuracies = [float(line.split()[3]) for line in lines[1:4]]
    local, partial, everything = accuracies
    assert local < everything - 0.02
    assert abs(partial - everything) < 0.02
    assert lines[4] == "each image on one rank in each epoch: yes"
    assert others == [[0, ""]] * 3


def test_the_command_line_of_shuffling_refuses_no_epochs() -> None:
    with pytest.raises(SystemExit):
        shuffled_digits.main(["--epochs", "0"])
