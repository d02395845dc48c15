"""A model whose logits tell all that its attention sees apart, and depend on nothing else.

Its keys are equal, so that attention gives the mean of the values that a query sees. These are small
integers, which depend on the token, its position and, but in the first layer, on what the layer below saw
there. The sums of those, which rounding makes exact, choose the logits from a table. So a cache that holds
anything but the right values gives other text, and no rounding in a batch does.
"""

from __future__ import annotations

import numpy as np

HEAD_DIM = 8


class ExactModel:
    def __init__(self, vocabulary=11, windows=(None, None), seed=0):
        self.windows = windows
        self.vocabulary = vocabulary
        rng = np.random.default_rng(seed)
        self._values = rng.integers(0, 16, (len(windows), 1009, HEAD_DIM))
        self._weights = rng.integers(1, 1000, (len(windows), HEAD_DIM))
        self._table = rng.standard_normal((1009, vocabulary)).astype(np.float32) * 3
        self.calls = 0

    def values(self, layer, tokens, positions, below):
        """int64 [tokens, HEAD_DIM]."""
        return self._values[layer, (tokens + 31 * positions + below) % 1009]

    def num_seen(self, layer, positions):
        window = self.windows[layer]
        return positions + 1 if window is None else np.minimum(positions, window) + 1

    def forward(self, step, tokens):
        """Through an octavo.KVCache of NumPy arrays; float32 [batch, vocabulary]."""
        self.calls += 1
        positions = np.asarray(step.positions, np.int64)
        below = np.zeros(len(tokens), np.int64)
        for layer in range(len(self.windows)):
            v = self.values(layer, tokens, positions, below)[:, None].astype(np.float32)
            mean = step.attend(layer, np.zeros_like(v), np.zeros_like(v), v)[:, 0]
            exact = mean.astype(np.float64) * self.num_seen(layer, positions)[:, None]
            assert np.abs(exact - np.rint(exact)).max() < 0.1
            below = below + np.rint(exact).astype(np.int64) @ self._weights[layer]
        rows = np.asarray(step.last_rows)
        return self._table[(below + tokens)[rows] % 1009]

    def logits(self, tokens):
        """The logits of all tokens of a text, without a cache; float32 [tokens, vocabulary]."""
        tokens = np.asarray(tokens)
        positions = np.arange(len(tokens))
        below = np.zeros(len(tokens), np.int64)
        for layer in range(len(self.windows)):
            sums = np.cumsum(self.values(layer, tokens, positions, below), axis=0)
            before = np.concatenate((np.zeros((1, HEAD_DIM), np.int64), sums))
            seen = sums - before[positions + 1 - self.num_seen(layer, positions)]
            below = below + seen @ self._weights[layer]
        return self._table[(below + tokens) % 1009]

    def greedy(self, prompt, num_tokens):
        """The likeliest tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]
