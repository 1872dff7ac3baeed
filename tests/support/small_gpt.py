# SPDX-License-Identifier: Apache-2.0
"""A small GPT of torch's own layers, and text of Python's library to train it on."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SYMBOLS = 96
"""Printable characters, and one for all others."""


class SelfAttention(nn.Module):
    """Causal attention, of layers that a program may have written itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        """Return the attention's output."""
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = SelfAttention(width, heads)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Any) -> Any:
        """Return the block's output."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class SmallGpt(nn.Module):
    """A GPT for characters, whose last layer shares the table of the first."""

    def __init__(
        self, width: int = 24, heads: int = 3, depth: int = 2, length: int = 16
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, text: Any) -> Any:
        """Return the loss of each next character of some lines of text."""
        given, expected = text[:, :-1], text[:, 1:]
        x = self.table(given) + self.places(torch.arange(given.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), expected.flatten())


@cache
def text() -> Any:
    """Return the characters of some modules of Python's library, as numbers."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py")
    written = "".join((folder / name).read_text() for name in names)
    codes = [ord(c) - 32 if 32 <= ord(c) < 127 else SYMBOLS - 1 for c in written]
    return torch.tensor(codes)


def lines(step: int, number: int, length: int = 16) -> Any:
    """Return some lines of text, the same for each step."""
    draws = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - length - 1, (number,), generator=draws)
    return torch.stack([text()[at : at + length + 1] for at in starts.tolist()])


def trained(
    model: nn.Module, optimizer: Any, batches: list[Any], after_backward: Any
) -> list[float]:
    """Return the losses of some steps; ``after_backward`` gets each one's loss."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        losses.append(after_backward(loss.detach()))
        optimizer.step()
    return losses
