"""Hypothesis strategies for cases of any shape and mask."""

from __future__ import annotations

from hypothesis import strategies as st

from support.case import Case

HEAD_DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 136, 192, 256)
WIDE_HEAD_DIMS = (*HEAD_DIMS, 264, 320, 512)
PAGE_SIZES = (1, 2, 3, 7, 8, 16, 17, 32, 64, 100, 256)


def _ranges(longest: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Ranges of a sequence that ascend; some of them touch, and some have no key."""
    cuts = st.lists(st.integers(0, longest), max_size=8).map(sorted)
    return cuts.map(lambda x: tuple(zip(x[::2], x[1::2], strict=False)))


@st.composite
def drawn_cases(
    draw: st.DrawFn,
    *,
    dense: bool = False,
    decode: bool = False,
    paged: bool = False,
    max_seqlen_q: int = 50,
    max_seqlen_k: int = 200,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    value_dims: bool = False,  # whether values may have a head dim of their own
    with_ranges: bool = False,  # whether ranges may see in both directions
) -> Case:
    batch = draw(st.integers(1, 4))

    def lengths(one: st.SearchStrategy[int]) -> tuple[int, ...]:
        if dense:
            return (draw(one),) * batch
        return tuple(draw(st.lists(one, min_size=batch, max_size=batch)))

    seqlen_q = st.just(1) if decode else st.integers(0, max_seqlen_q)
    seqlen_k = st.integers(0, max_seqlen_k)
    seqlens_q, seqlens_k = lengths(seqlen_q), lengths(seqlen_k)
    if paged:  # in a cache a sequence is as long as its queries, or empty
        pairs = zip(seqlens_q, seqlens_k, strict=True)
        seqlens_k = tuple(k + q if 0 < k < q else k for q, k in pairs)

    num_kv_heads = draw(st.sampled_from((1, 2, 3)))
    group_size = draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8)))
    window = st.one_of(st.just(-1), st.integers(0, max_seqlen_k))
    causal, window_right = draw(st.booleans()), draw(window)
    chunk = st.one_of(st.just(0), st.integers(1, max_seqlen_k + 50))
    prefix = st.one_of(st.just(0), st.integers(0, max_seqlen_k + 50))
    alibi = draw(st.sampled_from(("", "", "head", "batch")))
    of_sequences = st.lists(_ranges(max_seqlen_k + 50), min_size=batch, max_size=batch).map(tuple)
    ranges = draw(st.one_of(st.none(), of_sequences)) if with_ranges else None
    return Case(
        name=f"drawn {draw(st.integers(0, 2**16))}",
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        num_q_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        value_dim=draw(st.sampled_from((0, *head_dims))) if value_dims else 0,
        page_size=draw(st.sampled_from(PAGE_SIZES)) if paged else 16,
        causal=causal,
        window_left=draw(window),
        window_right=window_right,
        attention_chunk=draw(chunk) if causal or window_right == 0 else 0,
        prefix_lens=draw(st.one_of(st.none(), st.lists(prefix, min_size=batch, max_size=batch).map(tuple))),
        ranges=ranges,
        keep_window_left=ranges is not None and draw(st.booleans()),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0, 30.0))),
        alibi=alibi,
        alibi_symmetric=alibi != "" and draw(st.booleans()),
        sinks=draw(st.sampled_from(("", "", "normal", "extreme"))),
        softmax_scale=draw(st.one_of(st.none(), st.floats(0.01, 0.5))),
        k_scale=draw(st.sampled_from((None, 0.5, 1.25))) if paged else None,
        v_scale=draw(st.sampled_from((None, 0.5, 1.25))) if paged else None,
        q_gain=draw(st.sampled_from((1.0, 1.0, 4.0))),
        spare_pages=draw(st.integers(0, 4)),
    )
