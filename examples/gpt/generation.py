"""New text from a trained model, through a paged cache: each token's keys and values are computed once."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import octavo
from octavo.serving import Sampling, sample

from .model import GPT
from .training import autocast


class Paged:
    """Attention of new tokens to all of their sequence, whose keys and values lie in pages."""

    def __init__(self, model: GPT, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        config, weight = model.config, model.embedding.weight
        self.allocator = octavo.PageAllocator(num_pages, page_size)
        self._device = weight.device
        # A number means the same page in every layer, so one allocator serves them all.
        self._layers = [
            octavo.empty_cache(
                num_pages, page_size, config.num_heads, config.head_dim, dtype, like=weight.detach()
            )
            for _ in range(config.num_layers)
        ]
        self._step: dict[str, Any] = {}

    def extend(self, sequences: Sequence[Any], num_tokens: Sequence[int]) -> Tensor:
        """Take pages for the next tokens of some sequences; the tokens' positions, one after another."""
        for sequence, number in zip(sequences, num_tokens, strict=True):
            self.allocator.extend(sequence, number)
        page_table, seq_lens = self.allocator.page_table(sequences)
        cu_seqlens = np.cumsum([0, *num_tokens], dtype=np.int32)
        self._step = {
            "page_table": self._on_device(page_table),
            "seq_lens": self._on_device(seq_lens),
            "cu_seqlens": self._on_device(cu_seqlens),
            "max_seqlen": max(num_tokens),
        }
        positions = [
            np.arange(end - number, end) for end, number in zip(seq_lens.tolist(), num_tokens, strict=True)
        ]
        return self._on_device(np.concatenate(positions))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        step = self._step
        cache = self._layers[layer].arguments
        where = {"page_table": step["page_table"], "seq_lens": step["seq_lens"], **cache}
        octavo.append_kv(k, v, cu_seqlens=step["cu_seqlens"], **where)
        return octavo.paged_attention(
            q, cu_seqlens_q=step["cu_seqlens"], max_seqlen_q=step["max_seqlen"], **where, **options
        )

    def _on_device(self, host: np.ndarray) -> Tensor:
        return torch.from_numpy(host).to(self._device)


def check_context(model: GPT, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """ValueError where a text would need more positions than the model has learned."""
    longest, context = max(map(len, prompts)) + max_tokens, model.config.context
    if model.positions is not None and longest > context:
        raise ValueError(f"a prompt and its new tokens ({longest}) exceed the model's context ({context})")


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    stop_token: int | None = None,
    sampling: Sampling = Sampling(seed=0),  # noqa: B008 - frozen
    dtype: str = "float32",
    page_size: int = 16,
) -> list[list[int]]:
    """New tokens for each prompt, up to the stop token or `max_tokens`. All prompts run as one batch."""
    check_context(model, prompts, max_tokens)
    num_pages = len(prompts) * -(-(max(map(len, prompts)) + max_tokens) // page_size)
    paged = Paged(model, num_pages, page_size, getattr(torch, dtype))
    handles = [paged.allocator.create() for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    generators = [np.random.default_rng([seed, index]) for index in range(len(prompts))]
    was_training = model.training
    model.eval()
    running = list(range(len(prompts)))
    while running:
        new = [texts[i][paged.allocator.length(handles[i]) :] for i in running]  # whole prompts at first
        lengths = list(map(len, new))
        positions = paged.extend([handles[i] for i in running], lengths)
        with autocast(positions.device, dtype):
            tokens = torch.tensor(list(itertools.chain(*new)), device=positions.device)
            logits = model(tokens, positions, paged)
        last = logits[np.cumsum(lengths) - 1].float().cpu().numpy()
        unfinished = []
        for i, row in zip(running, last, strict=True):
            texts[i].append(sample(row, sampling, generators[i]))
            if texts[i][-1] == stop_token or len(texts[i]) == len(prompts[i]) + max_tokens:
                paged.allocator.free(handles[i])
            else:
                unfinished.append(i)
        running = unfinished
    model.train(was_training)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
