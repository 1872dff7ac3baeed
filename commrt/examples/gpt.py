# SPDX-License-Identifier: Apache-2.0
"""A small GPT over bytes, and how it is trained; the examples ``gpt_*`` distribute it.

The projections of attention are apart, and heads are counted from what a projection
gives, so that tensor parallelism may cut them by heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from commrt.examples.documents import VOCABULARY, windows

__all__ = ["BATCH", "LENGTH", "Block", "Gpt", "alone", "made", "trained"]

WIDTH, HEADS, BLOCKS, LENGTH = 128, 4, 3, 64
BATCH = 16
"""Windows of a step, over all ranks."""
STEPS = 40
SEED = 2


class Attention(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each place takes from those before it."""
        batch, length, _ = x.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.query(x)),
            heads(self.key(x)),
            heads(self.value(x)),
            is_causal=True,
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        found: torch.Tensor = self.out(joined)
        return found


class Block(nn.Module):  # type: ignore[misc]
    """Attention and two linear layers, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with what the block adds."""
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return found


class Gpt(nn.Module):  # type: ignore[misc]
    """Some 670,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean surprise at each row's bytes but the first."""
        tokens, expected = rows[:, :-1], rows[:, 1:]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, expected.flatten())


def made() -> Gpt:
    """Return the model that all processes begin with."""
    torch.manual_seed(SEED)
    return Gpt()


def trained(
    model: nn.Module, text: bytes, steps: int, part: int, parts: int
) -> list[torch.Tensor]:
    """Train on one of so many equal parts of each batch; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = windows(text, BATCH, LENGTH, step)[part::parts]
        optimizer.zero_grad()
        loss = model(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def alone(text: bytes, steps: int) -> list[float]:
    """Return the losses of one process that has all."""
    return [float(loss) for loss in trained(made(), text, steps, 0, 1)]
