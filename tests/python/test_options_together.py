"""Options of attention and paged_attention that are refused together: those of a table in conventions.md."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import octavo

PAGE = Path(__file__).parents[2] / "docs" / "conventions.md"
RANGES = np.array([[[3, 9]]], np.int32)
OF_BOTH: dict[str, Any] = {
    "alibi_slopes": np.ones(4, np.float32),
    "attention_chunk": 8,
    "bidirectional_ranges": RANGES,
    "causal=False": False,
    "prefix_lens": [3],
    "sinks": np.ones(4, np.float32),
    "softcap": 3.0,
    "softmax_phi": 1.0,
    "window_left": 4,
    "window_right": 4,
}
OF_ATTENTION: dict[str, Any] = {
    "block_mask": np.ones((1, 1, 1), bool),
    "dropout_p": 0.1,
}
OF_PAGED_ATTENTION: dict[str, Any] = {
    "batch_invariant": True,
    "chosen_pages": np.array([[0, 1]], np.int32),
    "k_channel_offset": np.ones((2, 16), np.float32),
    "k_channel_scale": np.ones((2, 16), np.float32),
    "num_splits": 2,
    "rotate_keys": True,
    "shared_prefix_len": 16,
    "static_past": True,
    "tree_mask": np.array([-1], np.int64),
}


def attention(**options: Any) -> None:
    q, k = np.ones((1, 20, 4, 16), np.float32), np.ones((1, 20, 2, 16), np.float32)
    if "dropout_p" in options:
        options["dropout_seed"] = 1
    octavo.attention(q, k, k, **{"causal": True, **options})


def paged_attention(**options: Any) -> None:
    pages = np.ones((4, 16, 2, 16), np.int8)
    octavo.paged_attention(
        np.ones((1, 4, 16), np.float32), pages, pages, [[0, 1]], [20], k_scale=0.1, v_scale=0.1, **options
    )


def refused_pairs(call: Callable[..., None], options: dict[str, Any]) -> set[frozenset[str]]:
    refused = set()
    for pair in itertools.combinations(options, 2):
        try:
            call(**{name.split("=")[0]: options[name] for name in pair})
        except ValueError:
            refused.add(frozenset(pair))
    return refused


def documented_pairs() -> set[frozenset[str]]:
    table = PAGE.read_text(encoding="utf-8").split("| option | not with |\n|---|---|\n")[1].split("\n\n")[0]
    pairs = []
    for line in table.splitlines():
        option, *others = re.findall("`(.*?)`", line)
        pairs += [frozenset((option, other)) for other in others]
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def test_options_that_are_refused_together_are_documented() -> None:
    for call, options in (
        (attention, OF_BOTH | OF_ATTENTION),
        (paged_attention, OF_BOTH | OF_PAGED_ATTENTION),
    ):
        for name, value in options.items():  # each alone is served
            call(**{name.split("=")[0]: value})
        names = set(options)
        assert refused_pairs(call, options) == {pair for pair in documented_pairs() if pair <= names}
    every = set(OF_BOTH | OF_ATTENTION | OF_PAGED_ATTENTION)
    assert all(pair <= every for pair in documented_pairs())
