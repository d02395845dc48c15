"""Chunks of prompts beside sequences that decode, over caches of codes on a GPU.

On Hopper the codes of long chunks become numbers once, and the other sequences keep theirs: attention in
three parts, by the number of queries that a sequence has (docs/kernels/quantised_prefill.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support.quantised import KINDS, filled, spoil_unused_scales
from support.quantised_gpu import TOLERANCE, check_attention, explanation, is_hopper, on_gpu, queries, to_gpu

pytestmark = pytest.mark.gpu

CHUNKS = (300, 1, 500, 4, *[1] * 40)
"""Queries of each sequence: two chunks, a draft, and what decodes."""
NUM_TOKENS = [900, 731, 1300, 40, *range(1, 1600, 40)]


def check_parts(found: octavo.Explanation, between: str = "sm90_attention<") -> None:
    assert found.kernel.startswith("expand_codes<")
    assert found.plan["few"].startswith(("stream_k_decode<", "split_kv_decode<"))
    assert found.plan["between"].startswith(between)


def random_trees(counts: tuple[int, ...]) -> NDArray[np.uint64]:
    """Each query of a sequence sees itself and the ancestors of a random earlier one."""
    rng = np.random.default_rng(7)
    words: list[int] = []
    for count in counts:
        of_sequence: list[int] = []
        for i in range(count):
            parent = int(rng.integers(-1, i)) if 0 < i < 64 else -1
            of_sequence.append((1 << min(i, 63)) | (of_sequence[parent] if parent >= 0 else 0))
        words += of_sequence
    return np.array(words, np.uint64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax_scale": 0.3, "softcap": 3.0},
        {"alibi_slopes": np.linspace(0.01, 0.3, 16, dtype=np.float32)},
        {"window_left": 100, "prefix_lens": np.array([0, 60, 1300, 20], np.int32)},
        {"window_left": 300, "sinks": np.linspace(-3.0, 6.0, 16, dtype=np.float32)},
        {"sinks": np.ones(16, np.float32), "alibi_slopes": np.linspace(0.01, 0.3, 16, dtype=np.float32)},
        {"causal": False},
        {"tree_mask": random_trees(CHUNKS)},
        {"softmax_phi": 2.0},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (96, "bfloat16"), (128, "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_options(torch: Any, kind: str, head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    """In slots that are not used, scales are NaN."""
    cache, table, lengths = filled(kind, NUM_TOKENS, head_dim=head_dim)
    if "prefix_lens" in options:
        options = options | {"prefix_lens": np.resize(options["prefix_lens"], len(CHUNKS))}
    spoil_unused_scales(cache, table, lengths)
    q = queries(sum(CHUNKS), 16, head_dim, dtype)
    given: dict[str, Any] = {"cu_seqlens_q": np.cumsum([0, *CHUNKS], dtype=np.int32), **options}
    check_attention(torch, cache, q, table, lengths, **given)
    if is_hopper(torch):
        check_parts(explanation(torch, cache, q, table, lengths, **given))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 100, "softcap": 3.0},
        {"alibi_slopes": np.linspace(0.01, 0.3, 32, dtype=np.float32)},
        {"sinks": np.linspace(-3.0, 6.0, 32, dtype=np.float32), "causal": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_wide_heads(torch: Any, kind: str, group_size: int, options: dict[str, Any]) -> None:
    """Above head dim 128 no kernel of Hopper's reads the codes of sequences between few and many queries."""
    counts = (300, 1, 70, 12, *[1] * 20)
    num_heads = 2 * group_size
    cache, table, lengths = filled(kind, NUM_TOKENS[: len(counts)], head_dim=256)
    spoil_unused_scales(cache, table, lengths)
    given = {name: x[:num_heads] if np.size(x) == 32 else x for name, x in options.items()}
    given["cu_seqlens_q"] = np.cumsum([0, *counts], dtype=np.int32)
    q = queries(sum(counts), num_heads, 256, "bfloat16")
    check_attention(torch, cache, q, table, lengths, **given)
    # With ALiBi, keys are not cut into splits, and the chunks of some have too few rows for all SMs.
    if is_hopper(torch) and "alibi_slopes" not in options:
        check_parts(explanation(torch, cache, q, table, lengths, **given), "sm80_attention<")


@pytest.mark.parametrize("kind", KINDS)
def test_replays(torch: Any, kind: str) -> None:
    """Numbers of queries are those at the replay, padding included: another sequence has the long chunk, all
    decode, or a part has no sequence."""
    cache, table, lengths = filled(kind, NUM_TOKENS, head_dim=128)
    total, dtype = sum(CHUNKS), "bfloat16"
    q = queries(total, 16, 128, dtype)
    given = {
        "page_table": table,
        "seq_lens": lengths,
        "cu_seqlens_q": np.cumsum([0, *CHUNKS], dtype=np.int32),
    }
    if is_hopper(torch):
        check_parts(explanation(torch, cache, q, table, lengths, cu_seqlens_q=given["cu_seqlens_q"]))
    arrays = {name: to_gpu(torch, x) for name, x in given.items()} | on_gpu(torch, cache)
    gpu_q = to_gpu(torch, q)
    arrays |= {"max_seqlen_q": max(CHUNKS), "out": torch.empty_like(gpu_q)}
    graph = torch.cuda.CUDAGraph()
    octavo.paged_attention(gpu_q, **arrays)
    with torch.cuda.graph(graph):
        octavo.paged_attention(gpu_q, **arrays)
    others = len(CHUNKS) - 3
    for counts in (
        (4, 1, 300, *[1] * others),
        (1, 499, 200, *[0] * others),
        (*[1] * 3, *[1] * others),
        (9, 17, 12, 5, *[1] * (others - 1)),
        (0, 0, 500, *[0] * others),
        CHUNKS,
    ):
        cu_seqlens_q = np.cumsum([0, *counts], dtype=np.int32)
        arrays["cu_seqlens_q"].copy_(to_gpu(torch, cu_seqlens_q))
        arrays["out"].fill_(np.nan)
        graph.replay()
        num = int(cu_seqlens_q[-1])
        expected = octavo.paged_attention(
            q[:num].astype(np.float32), **(given | {"cu_seqlens_q": cu_seqlens_q}), **cache.arguments
        )
        out = arrays["out"].float().cpu().numpy()
        assert np.isnan(out[num:]).all(), "padding is not touched"
        tolerance, size = TOLERANCE[dtype], np.abs(expected).max()
        np.testing.assert_allclose(
            out[:num],
            expected,
            rtol=tolerance,
            atol=tolerance * size,
            err_msg=str(counts[:4]),
        )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_lengths_past_the_table(torch: Any, kind: str) -> None:
    """They are no valid input, and spoil no other sequence.

    A call with a larger table leaves its numbers where the next one has workspace that it does not write.
    """
    q = to_gpu(torch, queries(sum(CHUNKS), 16, 128, "bfloat16"))

    def arrays_of(first: int) -> dict[str, Any]:
        cache, table, lengths = filled(kind, [first, *NUM_TOKENS[1:]], head_dim=128)
        assert table.shape[1] == -(-first // 16), "as many pages as the first sequence has"
        given = {
            "page_table": table,
            "seq_lens": lengths,
            "cu_seqlens_q": np.cumsum([0, *CHUNKS], dtype=np.int32),
        }
        arrays = {name: to_gpu(torch, x) for name, x in given.items()} | on_gpu(torch, cache)
        return arrays | {"max_seqlen_q": max(CHUNKS)}

    octavo.paged_attention(q, **arrays_of(2600))
    arrays = arrays_of(1600)
    expected = octavo.paged_attention(q, **arrays)
    arrays["seq_lens"][0] = 2600
    out = octavo.paged_attention(q, **arrays)
    assert torch.equal(out[CHUNKS[0] :], expected[CHUNKS[0] :])
