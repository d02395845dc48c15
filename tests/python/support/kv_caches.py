"""Small caches for the tests of octavo.KVCache."""

from __future__ import annotations

from typing import Any

import octavo
from support.libraries import ArrayLibrary

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 16


def make_cache(library: ArrayLibrary | None = None, **options: Any) -> octavo.KVCache:
    arguments: dict[str, Any] = {"page_size": 4, "max_batch": 4, "max_tokens": 64}
    if not {"memory", "memory_fraction"} & set(options):
        arguments["num_pages"] = 32
    if library is not None:
        arguments["like"] = library.float32([])
    return octavo.KVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, **{**arguments, **options})
