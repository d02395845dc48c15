"""GPT-2's architecture, written without attention: whoever calls the model says how its tokens attend.

Training attends to packed sequences and sampling to a paged cache, with the same weights and the same code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Attend(Protocol):
    """How the tokens of one call see each other: gpt.attention.Packed, Eager, or gpt.generation.Paged."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        """q, k, v and the result: [tokens, heads, head_dim]. The options have octavo.attention's names."""
        ...


@dataclass(frozen=True)
class GPTConfig:
    num_layers: int
    num_heads: int
    hidden_size: int
    context: int  # tokens of the longest sequence in training; ALiBi can go beyond it when sampling
    vocabulary: int
    alibi: bool = False  # in place of learned positions
    dropout: float = 0.0  # of softmax weights, of what a block adds, and of the embeddings

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = 3, config.num_heads, config.head_dim
        self.attention_norm, self.ffn_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.attention_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attend: functools.partial[Tensor]) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, self.heads).unbind(-3)
        x = x + self.dropout(self.attention_out(attend(q, k, v).flatten(-2)))
        hidden = nn.functional.gelu(self.up(self.ffn_norm(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))


class GPT(nn.Module):
    alibi_slopes: Tensor | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)  # tied: it also makes the logits
        self.positions = None if config.alibi else nn.Embedding(config.context, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        heads = torch.arange(1, config.num_heads + 1)
        slopes = torch.exp2(-8.0 * heads / config.num_heads) if config.alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        self.apply(self._initialise)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [tokens, vocabulary] from int64 tokens and their positions in their sequences, [tokens]."""
        options: dict[str, Any] = {}
        if self.alibi_slopes is not None:
            options["alibi_slopes"] = self.alibi_slopes
        if self.training and self.config.dropout > 0:
            options["dropout_p"] = self.config.dropout
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, functools.partial(attend, layer, **options))
        return nn.functional.linear(self.norm(x), self.embedding.weight)

    def _initialise(self, module: nn.Module) -> None:
        """As GPT-2, with 0.02 at its width. What a block adds is smaller, the more blocks add to it."""
        std = 0.02 * (768 / self.config.hidden_size) ** 0.5
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention_out, module.down):
                nn.init.normal_(linear.weight, std=std * (2 * self.config.num_layers) ** -0.5)
