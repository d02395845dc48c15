"""Decoding step by step, each step one CUDA graph where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import octavo

from .model import Llama


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """A CUDA graph of a step. The step runs once beforehand, and finds `state` as it was when it runs next.

    What a library compiles or allocates at its first call stays out of the graph that way.
    """
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    for x, value in zip(state, before, strict=True):
        x.copy_(value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


class DecodeStep:
    """Takes every sequence one token further, in tensors that stay where they are.

    `tokens`, int64 [batch], are the newest ones, which have no keys and values yet; a step puts the likeliest
    next ones in their place. `logits`, [batch, vocabulary], are those of the last step. `seq_lens`, int32
    [batch], count what the cache holds; a step counts them up. The pages of the page table must suffice for
    all the steps.
    """

    logits: Tensor

    def __init__(
        self,
        model: Llama,
        caches: Sequence[octavo.PagedCache],
        page_table: Tensor,
        seq_lens: Tensor,
        tokens: Tensor,
    ) -> None:
        self._model, self._caches, self._page_table = model, caches, page_table
        self.seq_lens, self.tokens = seq_lens, tokens
        self._step = captured(self._run, (seq_lens, tokens)) if tokens.is_cuda else self._run

    def __call__(self) -> None:
        self._step()

    def _run(self) -> None:
        self.seq_lens += 1
        self.logits = self._model.logits(self.tokens, self._caches, self._page_table, self.seq_lens)
        self.tokens.copy_(self.logits.argmax(-1))


class Generation:
    """The greedy continuations of a batch of prompts, all as long as one another."""

    def __init__(
        self, model: Llama, prompts: Sequence[Sequence[int]], num_new_tokens: int, page_size: int = 16
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        num_pages = sum(-(-(length + num_new_tokens) // page_size) for length in lengths)
        self._caches = model.empty_caches(num_pages, page_size)
        allocator = octavo.PageAllocator(num_pages, page_size)
        sequences = [allocator.create() for _ in prompts]
        for sequence, length in zip(sequences, lengths, strict=True):
            allocator.extend(sequence, length + num_new_tokens)  # the host hands out no page while it decodes
        device = model.weights.embedding.device
        page_table = torch.from_numpy(allocator.page_table(sequences)[0]).to(device)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        first = []
        for b, prompt in enumerate(prompts):  # one at a time: activations of one prompt are enough
            cu_seqlens = torch.tensor([0, len(prompt)], dtype=torch.int32, device=device)
            tokens = torch.tensor(prompt, device=device)
            tables = (page_table[b : b + 1], seq_lens[b : b + 1])
            logits = model.logits(tokens, self._caches, *tables, cu_seqlens, len(prompt))
            first.append(logits.argmax(-1))
        tokens = torch.cat(first)
        self._generated = [tokens.clone()]
        self._num_new_tokens = num_new_tokens
        self.step = DecodeStep(model, self._caches, page_table, seq_lens, tokens)

    def run(self) -> Tensor:
        """The new tokens, int64 [batch, num_new_tokens]. The first of them came with the prompts."""
        while len(self._generated) < self._num_new_tokens:
            self.step()
            self._generated.append(self.step.tokens.clone())
        return torch.stack(self._generated, dim=1)
