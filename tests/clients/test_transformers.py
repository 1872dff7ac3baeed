# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer on commrt: a small Llama, evaluation, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_programs import DEADLINE_S, Program
from client_training import STEPS, alone, optimizer_of
from torch import nn

PROGRAM = Program("transformers", "transformers")
pytestmark = PROGRAM.marks
WORDS, LENGTH, SEQUENCES = 24, 8, 8
"""Of a batch of all ranks; 1, 2 and 4 ranks share them evenly."""
JUDGED = 11
"""Sequences of the evaluation, which no number of ranks divides."""


def text(first: int, count: int) -> torch.Tensor:
    """Return sequences in which each word follows from the one before it."""
    generator = torch.Generator().manual_seed(500)
    words = torch.randint(0, WORDS, (first + count, 1), generator=generator)[first:]
    found = [words]
    for _ in range(LENGTH - 1):
        found.append((found[-1] * 5 + 3) % WORDS)
    return torch.cat(found, dim=1)


def llama() -> Any:
    """Return the model as every process begins with it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows(words: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return sequences as the Trainer takes them."""
    return [{"input_ids": each, "labels": each} for each in words]


def trainer(folder: str, accumulated: int, **more: Any) -> tuple[Any, list[float]]:
    """Return a Trainer over commrt's group, and the losses that it will have seen."""
    from transformers import Trainer, TrainingArguments

    seen: list[float] = []

    class Noting(Trainer):  # type: ignore[misc]  # mypy does not look into it
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            if self.model.training:
                seen.append(found.item())
            return found

    model = llama()
    optimizer = optimizer_of(model.parameters())
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=SEQUENCES // dist.get_world_size() // accumulated,
        # Else the loss of a batch that is filled up counts rows twice.
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=accumulated,
        max_steps=STEPS,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    found = Noting(
        model=model,
        args=arguments,
        train_dataset=rows(text(0, STEPS * SEQUENCES)),
        eval_dataset=rows(text(1000, JUDGED)),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        compute_metrics=lambda judged: {"rows": len(judged.label_ids)},
    )
    assert found.args.world_size == dist.get_world_size()
    assert dist.get_backend() == "commrt"
    return found, seen


def train(folder: str, accumulated: int) -> list[Any]:
    """Train, evaluate, and go on from the checkpoint of half way."""
    # Before TrainingArguments: accelerate takes no name of a backend for CPUs.
    dist.init_process_group("commrt")
    first, seen = trainer(folder, accumulated, save_steps=STEPS // 2)
    first.train()
    judged = first.evaluate()
    half = Path(folder) / f"checkpoint-{STEPS // 2}"
    again, rest = trainer(folder, accumulated, save_strategy="no")
    again.train(resume_from_checkpoint=str(half))
    pieces = [seen[at : at + accumulated] for at in range(0, len(seen), accumulated)]
    return [
        [sum(piece) for piece in pieces],
        seen[-len(rest) :] == rest,
        judged["eval_rows"],
        judged["eval_loss"],
    ]


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    words = text(step * SEQUENCES, SEQUENCES)
    loss: torch.Tensor = model(input_ids=words, labels=words).loss
    return loss


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer(
    torchrun: Any, compare: Any, tmp_path: Path, accumulated: int, size: int
) -> None:
    got = torchrun(
        *(size, train),
        deadline_s=DEADLINE_S,
        folder=str(tmp_path / "out"),
        accumulated=accumulated,
    )
    model = llama()
    want = alone(model, plain_loss)
    words = text(1000, JUDGED)
    with torch.no_grad():
        judged = model(input_ids=words, labels=words).loss.item()
    for _, is_resumed, count, loss in got:
        assert is_resumed
        assert count == JUDGED
        assert loss == pytest.approx(judged, rel=1e-5)
    how = f"Trainer, gradients of {accumulated} batches"
    compare(f"{PROGRAM}, {how}", want, [each[0] for each in got])


def refused() -> str:
    """Return what TrainingArguments says to the name of a backend for CPUs."""
    from transformers import TrainingArguments

    with pytest.raises(ValueError, match="backend commrt") as raised:
        TrainingArguments(use_cpu=True, ddp_backend="commrt", report_to=[])
    return str(raised.value)


def test_why_the_group_is_made_before(torchrun: Any) -> None:
    """Should it take the name some day, docs/internals/clients.md has to say so."""
    said = torchrun(2, refused, deadline_s=DEADLINE_S)
    words = "Your assigned backend commrt is not available, please use gloo"
    assert said == [words] * 2
