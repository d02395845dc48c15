"""Every named case: those that only tests run, which are here, and the rows of the benchmarks.

Needs NumPy alone, and no GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from support.benchmark_cases import ROWS
from support.case import Case

EVERYTHING = Case(
    "everything",
    (101, 101),
    (303, 303),
    num_q_heads=10,
    num_kv_heads=2,
    head_dim=80,
    window_left=50,
    prefix_lens=(33, 7),
    softcap=20.0,
    alibi="batch",
    softmax_scale=0.15,
)

BOTH_WAYS: dict[str, Any] = {"alibi": "head", "alibi_symmetric": True, "causal": False}
SYMMETRIC = Case("symmetric", (71, 71), (113, 113), num_kv_heads=2, **BOTH_WAYS)

# Sequences of equal lengths: for dense arrays, and as well for packed and paged ones.
DENSE = (
    Case("square", (33, 33), (33, 33)),
    Case("square_not_causal", (64,), (64,), causal=False),
    Case("prefill_gqa_4", (257,), (257,), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("prefill_mqa_8", (131,), (131,), num_q_heads=8, num_kv_heads=1),
    Case("group_3", (61, 61), (61, 61), num_q_heads=9, num_kv_heads=3),
    Case("group_5", (37,), (101,), num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("group_7", (17, 17), (53, 53), num_q_heads=7, num_kv_heads=1, head_dim=112),
    Case("group_64", (9,), (67,), num_q_heads=64, num_kv_heads=1),
    Case("more_queries_than_keys", (67, 67), (29, 29)),
    Case("more_queries_than_keys_not_causal", (67,), (29,), causal=False),
    Case("more_queries_than_keys_alibi_prefix", (31, 31), (7, 7), alibi="head", prefix_lens=(3, 0)),
    Case("no_keys", (5, 5), (0, 0)),
    Case("no_keys_not_causal", (5,), (0,), causal=False, prefix_lens=(4,)),
    Case("no_queries", (0, 0), (5, 5)),
    Case("one_of_each", (1,), (1,), num_q_heads=1, num_kv_heads=1, head_dim=8),
    Case("one_query", (1, 1, 1), (197, 197, 197), num_q_heads=6, num_kv_heads=2),
    Case("one_query_many_keys", (1,), (4099,), num_q_heads=4, num_kv_heads=1, causal=False),
    Case("last_queries_of_many_keys", (5,), (1013,), num_q_heads=8, num_kv_heads=2),
    Case("long", (1201,), (1201,), num_q_heads=2, num_kv_heads=1),
    Case("head_dim_8", (31,), (77,), head_dim=8, num_kv_heads=2),
    Case("head_dim_16", (31,), (77,), head_dim=16, num_kv_heads=1),
    Case("head_dim_24", (31,), (77,), head_dim=24),
    Case("head_dim_96", (65,), (129,), head_dim=96, num_kv_heads=2),
    Case("head_dim_160", (31,), (77,), head_dim=160, num_kv_heads=2),
    Case("head_dim_192", (31,), (77,), head_dim=192, num_kv_heads=2),
    Case("head_dim_256", (65,), (129,), head_dim=256, num_kv_heads=2),
    Case("window_left", (97, 97), (211, 211), window_left=37, num_kv_heads=2),
    Case("window_left_0", (33,), (65,), window_left=0),
    Case("window_right_0", (33,), (65,), window_right=0, causal=False),
    Case("window_both", (97,), (211,), window_left=19, window_right=11, causal=False),
    Case("window_both_queries_outnumber", (211,), (97,), window_left=19, window_right=11, causal=False),
    Case("window_right", (43,), (151,), window_right=5, causal=False),
    Case("window_causal_wins", (41,), (41,), window_left=7, window_right=9),
    Case("window_long", (401,), (1399,), window_left=255, num_q_heads=2, num_kv_heads=1),
    Case("chunks", (97, 97), (211, 211), attention_chunk=64, num_kv_heads=2),
    Case("chunks_of_one", (33,), (65,), attention_chunk=1),
    Case("chunks_of_7", (150,), (150,), attention_chunk=7, num_kv_heads=1),
    Case("chunks_window", (97,), (211,), attention_chunk=50, window_left=30, num_kv_heads=2),
    Case("chunks_window_right_0", (90,), (150,), attention_chunk=37, window_right=0, causal=False),
    Case("chunks_queries_outnumber", (211,), (97,), attention_chunk=40),
    Case("chunks_prefix", (131,), (257,), attention_chunk=100, prefix_lens=(40,), num_kv_heads=2),
    Case("chunks_longer_than_all", (71,), (113,), attention_chunk=200, num_kv_heads=2),
    Case("chunks_sinks", (97,), (211,), attention_chunk=64, sinks="normal", alibi="head", num_kv_heads=1),
    Case("chunks_long", (401,), (1399,), attention_chunk=512, num_q_heads=2, num_kv_heads=1),
    Case("softcap", (71,), (113,), softcap=5.0, q_gain=4.0),
    Case("softcap_high", (71,), (113,), softcap=50.0, num_kv_heads=1),
    Case("softcap_near", (301,), (1021,), softcap=4.0, num_q_heads=2, num_kv_heads=1, head_dim=128),
    Case("alibi", (71,), (113,), alibi="head", num_kv_heads=2),
    Case("alibi_batch", (40, 40, 40), (90, 90, 90), alibi="batch", num_kv_heads=2),
    Case("alibi_not_causal", (47,), (83,), alibi="head", causal=False),
    Case("alibi_long", (307,), (1021,), alibi="head", num_q_heads=2, num_kv_heads=2),
    replace(SYMMETRIC, name="symmetric_causal", causal=True),
    replace(SYMMETRIC, name="symmetric_right_0", window_right=0),
    replace(SYMMETRIC, name="symmetric_window", window_left=19, window_right=30, alibi="batch"),
    replace(SYMMETRIC, name="symmetric_prefix", causal=True, prefix_lens=(29, 83), head_dim=128),
    replace(SYMMETRIC, name="symmetric_prefix_window", window_left=9, window_right=0, prefix_lens=(90, 40)),
    replace(SYMMETRIC, name="symmetric_cap_sinks", softcap=20.0, sinks="normal", head_dim=96),
    Case("symmetric_queries_outnumber", (67, 67), (29, 29), **BOTH_WAYS),
    Case("symmetric_one_query", (1, 1), (197, 197), window_right=4, num_kv_heads=1, **BOTH_WAYS),
    Case("symmetric_long", (1021,), (1021,), num_q_heads=2, num_kv_heads=1, **BOTH_WAYS),
    Case("symmetric_head_dim_8", (31,), (77,), head_dim=8, **BOTH_WAYS),
    Case("symmetric_head_dim_256", (65,), (129,), head_dim=256, num_kv_heads=2, **BOTH_WAYS),
    SYMMETRIC,
    Case("sinks", (71, 71), (113, 113), sinks="normal", num_q_heads=8, num_kv_heads=2),
    Case("sinks_extreme", (71,), (113,), sinks="extreme", num_q_heads=10, num_kv_heads=2, head_dim=128),
    Case("sinks_window", (97,), (211,), sinks="normal", window_left=37, num_q_heads=8, num_kv_heads=1),
    Case("sinks_queries_outnumber", (67, 67), (29, 29), sinks="normal", num_kv_heads=2),
    Case("sinks_no_keys", (5, 5), (0, 0), sinks="extreme", num_q_heads=5, num_kv_heads=5),
    Case("sinks_alibi_cap", (71,), (113,), sinks="normal", alibi="head", softcap=20.0, num_kv_heads=1),
    Case("sinks_alibi", (71,), (113,), sinks="normal", alibi="head", num_kv_heads=2),
    Case("sinks_one_query", (1, 1), (1197, 1197), sinks="normal", num_q_heads=8, num_kv_heads=1),
    Case("scale", (47,), (83,), softmax_scale=0.3, head_dim=16),
    Case("scale_0", (47,), (83,), softmax_scale=0.0, head_dim=16),
    Case("scale_negative", (47,), (83,), softmax_scale=-0.2, head_dim=16),
    Case("peaked", (83,), (307,), q_gain=12.0, num_kv_heads=2),
    Case("prefix", (83, 83, 83), (83, 83, 83), prefix_lens=(0, 29, 83), num_kv_heads=2),
    Case("prefix_past_the_end", (19, 19), (31, 31), prefix_lens=(500, 31)),
    Case("prefix_and_window", (131,), (257,), prefix_lens=(40,), window_left=16, num_kv_heads=2),
    Case("prefix_inside_window", (60,), (90,), prefix_lens=(45,), window_left=70),
    EVERYTHING,
    replace(EVERYTHING, name="everything_sinks", sinks="normal"),
)

# Values with a head dim of their own, in dense and packed arrays.
VALUE_DIMS = (
    Case("dims_192_128", (65,), (129,), head_dim=192, value_dim=128, num_kv_heads=2),
    Case("dims_192_128_full", (200, 200), (331, 331), head_dim=192, value_dim=128, causal=False),
    Case("dims_192_128_long", (301,), (1021,), head_dim=192, value_dim=128, num_q_heads=2, num_kv_heads=1),
    Case("dims_192_128_window", (97,), (211,), head_dim=192, value_dim=128, window_left=37),
    Case(
        "dims_192_128_both",
        (97,),
        (211,),
        head_dim=192,
        value_dim=128,
        window_left=19,
        window_right=4,
        causal=False,
    ),
    Case("dims_192_128_one_query", (1, 1), (1197, 1197), head_dim=192, value_dim=128, num_kv_heads=1),
    Case("dims_192_128_alibi", (71, 71), (113, 113), head_dim=192, value_dim=128, alibi="batch"),
    Case("dims_192_128_symmetric", (71,), (113,), head_dim=192, value_dim=128, **BOTH_WAYS),
    Case("dims_192_128_softcap", (71,), (113,), head_dim=192, value_dim=128, softcap=5.0, q_gain=4.0),
    Case("dims_192_128_sinks", (71,), (113,), head_dim=192, value_dim=128, sinks="extreme", num_kv_heads=1),
    Case("dims_192_128_no_keys", (5, 5), (0, 0), head_dim=192, value_dim=128),
    Case("dims_160_96_prefix", (83, 83), (83, 83), head_dim=160, value_dim=96, prefix_lens=(29, 83)),
    Case("dims_136_72", (131,), (257,), head_dim=136, value_dim=72, num_q_heads=6, num_kv_heads=2),
    Case("dims_72_40", (31,), (77,), head_dim=72, value_dim=40, num_kv_heads=2),
    Case("dims_64_8", (150,), (150,), head_dim=64, value_dim=8, window_right=20, causal=False),
    Case("dims_8_64", (31,), (77,), head_dim=8, value_dim=64, num_kv_heads=1),
    Case("dims_128_120", (131,), (257,), head_dim=128, value_dim=120, num_q_heads=8, num_kv_heads=1),
    Case("dims_64_128", (67, 67), (29, 29), head_dim=64, value_dim=128),
    Case("dims_96_256", (65,), (129,), head_dim=96, value_dim=256, num_kv_heads=2),
    Case("dims_256_16", (41,), (90,), head_dim=256, value_dim=16, alibi="head", sinks="normal"),
    replace(EVERYTHING, name="dims_80_48_everything", value_dim=48, sinks="normal"),
)

# Head dims above 256, of keys or of values, in dense arrays.
WIDE = (
    Case("wide_264", (31,), (77,), head_dim=264, num_kv_heads=2),
    Case("wide_320", (65, 65), (129, 129), head_dim=320, num_kv_heads=1),
    Case("wide_512", (131,), (257,), head_dim=512, num_kv_heads=2),
    Case("wide_512_full", (67,), (190,), head_dim=512, causal=False, num_q_heads=3, num_kv_heads=3),
    Case("wide_512_window", (97,), (211,), head_dim=512, window_left=37, num_kv_heads=2),
    Case("wide_512_queries_outnumber", (67,), (29,), head_dim=512),
    Case("wide_512_no_keys", (5,), (0,), head_dim=512),
    Case("wide_512_peaked", (83,), (307,), head_dim=512, q_gain=6.0, num_q_heads=8, num_kv_heads=1),
    Case("wide_320_64", (65,), (129,), head_dim=320, value_dim=64, num_kv_heads=2),
    Case("wide_64_512", (65,), (129,), head_dim=64, value_dim=512, num_kv_heads=2),
    Case("wide_512_264", (40, 40), (90, 90), head_dim=512, value_dim=264, alibi="batch", num_kv_heads=2),
    Case("wide_512_symmetric", (65,), (129,), head_dim=512, num_kv_heads=2, **BOTH_WAYS),
    replace(EVERYTHING, name="wide_512_everything", head_dim=512, sinks="normal"),
)

# Sequences of any lengths.
PACKED = (
    Case("ragged", (0, 1, 7, 128, 65), (13, 1, 7, 200, 65), num_kv_heads=2),
    Case("ragged_not_causal", (3, 61, 0, 17), (59, 0, 11, 127), causal=False, num_q_heads=6, num_kv_heads=2),
    Case("ragged_empty_keys", (4, 1, 5), (0, 0, 0)),
    Case("all_empty", (0, 0), (0, 0)),
    Case("chunked_prefill", (64, 1, 1, 37, 5), (128, 77, 1, 1009, 5), num_q_heads=8, num_kv_heads=2),
    Case("speculative", (4, 4, 3, 1), (260, 31, 3, 700), num_q_heads=8, num_kv_heads=1, head_dim=128),
    Case("group_7_head_dim_112", (19, 1, 2), (83, 311, 2), num_q_heads=14, num_kv_heads=2, head_dim=112),
    Case("group_64_packed", (3, 1, 11), (41, 97, 11), num_q_heads=64, num_kv_heads=1, head_dim=80),
    Case("more_queries_than_keys_packed", (20, 9), (7, 0), prefix_lens=(2, 0)),
    Case("window_packed", (50, 1, 33), (250, 90, 33), window_left=31, num_kv_heads=1),
    Case("window_right_packed", (50, 1, 33), (250, 90, 33), window_right=9, causal=False, num_kv_heads=1),
    Case(
        "window_both_packed",
        (50, 1, 3, 130, 33),
        (250, 90, 700, 130, 33),
        window_left=31,
        window_right=70,
        causal=False,
        num_q_heads=8,
        num_kv_heads=2,
    ),
    Case(
        "window_both_prefix_packed",
        (50, 4, 130),
        (250, 999, 430),
        window_left=31,
        window_right=2,
        prefix_lens=(5, 100, 0),
        causal=False,
        num_kv_heads=2,
    ),
    Case("chunks_packed", (50, 1, 33, 130), (250, 90, 64, 130), attention_chunk=64, num_kv_heads=1),
    Case(
        "chunks_packed_prefix",
        (50, 1, 3, 130, 33),
        (250, 90, 700, 130, 33),
        attention_chunk=100,
        prefix_lens=(0, 4, 130, 9, 0),
        num_q_heads=8,
        num_kv_heads=2,
    ),
    Case("alibi_packed", (50, 1, 33), (250, 90, 33), alibi="batch", num_kv_heads=2),
    Case("symmetric_packed", (50, 1, 33, 130), (250, 90, 33, 130), num_kv_heads=2, **BOTH_WAYS),
    Case("sinks_packed", (50, 1, 33, 7), (250, 90, 33, 0), sinks="normal", num_q_heads=8, num_kv_heads=2),
    Case(
        "sinks_packed_window",
        (64, 1, 3, 200),
        (999, 1009, 70, 200),
        sinks="extreme",
        window_left=127,
        num_q_heads=8,
        num_kv_heads=1,
    ),
    Case(
        "everything_packed",
        (33, 0, 1, 70),
        (181, 5, 333, 70),
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=96,
        window_left=60,
        prefix_lens=(20, 0, 100, 70),
        softcap=15.0,
        alibi="batch",
    ),
    Case(
        "thirty_sequences", tuple(range(30)), tuple(2 * n for n in range(30)), num_q_heads=2, num_kv_heads=1
    ),
)


def _backward() -> tuple[Case, ...]:
    """Every head dim with every mask; groups and lengths, on all edges of tiles, take turns."""
    masks: dict[str, dict[str, Any]] = {
        "full": {"causal": False},
        "causal": {},
        "left": {"window_left": 40},
        "right": {"window_right": 30, "causal": False},
        "both": {"window_left": 70, "window_right": 3, "causal": False},
        "prefix": {"prefix_lens": (50,)},
        "prefix_window": {"prefix_lens": (20,), "window_left": 30},
        "chunks": {"attention_chunk": 48},
        "chunks_window": {"attention_chunk": 70, "window_left": 40},
    }
    groups = (1, 4, 5, 7)
    lengths = (
        *((1, 1), (63, 64), (64, 63), (65, 129), (129, 65), (127, 127), (500, 129), (33, 500), (1, 1000)),
        *((1000, 1), (96, 256), (24, 257), (200, 193)),
    )
    return tuple(
        Case(
            f"backward_d{head_dim}_{mask}",
            (lengths[i % len(lengths)][0],),
            (lengths[i % len(lengths)][1],),
            num_q_heads=groups[i % len(groups)],
            num_kv_heads=1,
            head_dim=head_dim,
            **options,
        )
        for i, (head_dim, (mask, options)) in enumerate(
            itertools.product((8, 40, 64, 72, 96, 128, 192, 256), masks.items())
        )
    )


BACKWARD = _backward()

# Only where keys lie in pages: page sizes, many pages, scales.
PAGED = (
    Case("page_size_1", (5, 1, 17), (67, 130, 17), page_size=1, num_kv_heads=2),
    Case("page_size_17", (5, 1, 17), (67, 530, 17), page_size=17, num_kv_heads=2),
    Case("page_size_256", (300, 1, 5), (300, 513, 255), page_size=256, num_kv_heads=1, num_q_heads=2),
    Case("page_size_24", (33, 3), (240, 71), page_size=24, num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("scales_packed", (33, 3), (240, 71), k_scale=0.5, v_scale=1.75, num_kv_heads=2),
    Case("pages_2000_chunk", (7,), (31_990,), num_q_heads=3, num_kv_heads=1),
    Case("wide_264_paged", (33, 3, 1), (240, 71, 5), head_dim=264, num_q_heads=6, num_kv_heads=2),
    Case("wide_512_paged", (70, 1, 0, 5), (240, 571, 9, 90), head_dim=512, num_q_heads=8, num_kv_heads=1),
    Case("symmetric_few_queries", (2, 1, 5), (700, 1, 64), num_q_heads=8, num_kv_heads=2, **BOTH_WAYS),
    Case("symmetric_page_size_17", (33, 0, 300), (240, 5, 300), page_size=17, **BOTH_WAYS),
    Case("wide_512_page_size_17", (33, 1), (33, 300), head_dim=512, page_size=17, window_left=50),
)

# Values with a head dim of their own, in pages.
PAGED_VALUE_DIMS = (
    Case("pages_192_128", (65, 1, 0, 300), (129, 700, 9, 300), head_dim=192, value_dim=128, num_kv_heads=2),
    Case("pages_192_128_full", (200, 31), (331, 31), head_dim=192, value_dim=128, causal=False),
    Case("pages_192_128_window", (97, 5), (211, 1500), head_dim=192, value_dim=128, window_left=37),
    Case("pages_192_128_alibi", (71, 1), (113, 90), head_dim=192, value_dim=128, alibi="batch"),
    Case("pages_192_128_symmetric", (71,), (113,), head_dim=192, value_dim=128, **BOTH_WAYS),
    Case("pages_192_128_sinks", (71, 2), (113, 9), head_dim=192, value_dim=128, sinks="extreme"),
    Case("pages_192_128_size_17", (33, 3), (240, 71), head_dim=192, value_dim=128, page_size=17),
    Case("pages_192_128_size_1", (5, 1, 17), (67, 130, 17), head_dim=192, value_dim=128, page_size=1),
    Case("pages_160_72", (83, 9), (483, 9), head_dim=160, value_dim=72, prefix_lens=(29, 83)),
    Case("pages_128_64", (33, 3), (240, 71), head_dim=128, value_dim=64, num_q_heads=8, num_kv_heads=2),
    Case("pages_64_128", (33, 3), (240, 71), head_dim=64, value_dim=128, num_q_heads=8, num_kv_heads=2),
    Case("pages_128_120", (131, 4), (257, 900), head_dim=128, value_dim=120, num_q_heads=8, num_kv_heads=1),
    Case("pages_8_64", (31, 1), (77, 90), head_dim=8, value_dim=64, num_kv_heads=1),
    Case("pages_96_256", (65, 1), (129, 90), head_dim=96, value_dim=256, num_kv_heads=2),
    Case("pages_256_16", (41, 7), (90, 1007), head_dim=256, value_dim=16, softcap=8.0),
    Case("pages_512_264", (70, 1, 5), (240, 571, 90), head_dim=512, value_dim=264, num_kv_heads=1),
    Case("pages_64_512", (40, 1), (90, 311), head_dim=64, value_dim=512, num_kv_heads=2),
    replace(EVERYTHING, name="pages_80_48_everything", value_dim=48, sinks="normal", v_scale=1.5),
)

# One query a sequence.
DECODE = (
    Case("decode", (1,) * 5, (1, 17, 64, 131, 1021), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("decode_mha", (1,) * 3, (7, 97, 300)),
    Case("decode_group_3", (1,) * 3, (5, 66, 311), num_q_heads=9, num_kv_heads=3),
    Case("decode_group_5", (1,) * 3, (5, 66, 311), num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("decode_group_7", (1,) * 3, (5, 66, 311), num_q_heads=14, num_kv_heads=2, head_dim=112),
    Case("decode_group_8", (1,) * 3, (5, 66, 311), num_q_heads=8, num_kv_heads=1, head_dim=256),
    Case("decode_group_64", (1,) * 2, (66, 311), num_q_heads=64, num_kv_heads=1),
    Case("decode_group_17", (1,) * 2, (66, 311), num_q_heads=34, num_kv_heads=2),
    Case("decode_empty", (1,) * 4, (0, 1, 0, 77), num_kv_heads=2),
    Case("decode_all_empty", (1,) * 2, (0, 0)),
    Case("decode_empty_not_causal", (1,) * 3, (0, 5, 0), causal=False, prefix_lens=(3, 2, 0)),
    Case("decode_page_size_1", (1,) * 3, (1, 97, 311), page_size=1, num_kv_heads=2),
    Case("decode_page_size_17", (1,) * 3, (17, 97, 1003), page_size=17, num_kv_heads=2),
    Case("decode_page_size_256", (1,) * 3, (256, 97, 1003), page_size=256, num_kv_heads=2),
    Case("decode_head_dim_8", (1,) * 2, (41, 200), head_dim=8),
    Case("decode_head_dim_16", (1,) * 2, (41, 200), head_dim=16, num_kv_heads=2),
    Case("decode_head_dim_96", (1,) * 2, (41, 200), head_dim=96, num_kv_heads=1),
    Case("decode_head_dim_160", (1,) * 2, (41, 200), head_dim=160, num_kv_heads=2),
    Case("decode_head_dim_192", (1,) * 2, (41, 200), head_dim=192, num_kv_heads=2),
    Case("decode_head_dim_264", (1,) * 2, (41, 200), head_dim=264, num_kv_heads=2),
    Case("decode_head_dim_320", (1,) * 3, (41, 900, 0), head_dim=320, num_q_heads=8, num_kv_heads=1),
    Case("decode_head_dim_512", (1,) * 3, (41, 200, 3001), head_dim=512, num_q_heads=8, num_kv_heads=1),
    Case("decode_head_dim_512_long", (1,), (12_000,), head_dim=512, num_q_heads=4, num_kv_heads=1),
    Case("decode_head_dim_512_batch", (1,) * 40, tuple(range(7, 327, 8)), head_dim=512, num_kv_heads=2),
    Case("decode_head_dim_512_group_16", (1,) * 2, (66, 311), head_dim=512, num_q_heads=16, num_kv_heads=1),
    Case(
        "decode_head_dim_512_everything",
        (1,) * 3,
        (41, 500, 1200),
        num_q_heads=10,
        num_kv_heads=2,
        head_dim=512,
        page_size=16,
        window_left=300,
        softcap=20.0,
        alibi="batch",
        sinks="normal",
        k_scale=0.5,
        v_scale=1.5,
    ),
    Case("decode_window", (1,) * 3, (20, 211, 1500), window_left=100, num_kv_heads=2),
    Case("decode_window_0", (1,) * 2, (20, 211), window_left=0),
    Case("decode_window_both", (1,) * 2, (20, 211), window_left=50, window_right=3, causal=False),
    Case("decode_chunks", (1,) * 5, (64, 65, 200, 256, 1500), attention_chunk=64, num_kv_heads=2),
    Case(
        "decode_chunks_long", (1,) * 3, (20, 511, 1500), attention_chunk=1000, num_q_heads=8, num_kv_heads=1
    ),
    Case("decode_chunks_prefix", (1,) * 3, (20, 211, 1500), attention_chunk=100, prefix_lens=(4, 4, 130)),
    Case("decode_window_prefix", (1,) * 3, (20, 211, 1500), window_left=100, prefix_lens=(4, 4, 130)),
    Case("decode_softcap", (1,) * 2, (41, 500), softcap=8.0, q_gain=4.0),
    Case("decode_alibi", (1,) * 2, (41, 500), alibi="head", num_kv_heads=2),
    Case("decode_alibi_batch", (1,) * 3, (41, 500, 0), alibi="batch", num_kv_heads=2),
    Case("decode_symmetric", (1,) * 3, (41, 500, 0), num_kv_heads=2, **BOTH_WAYS),
    Case("decode_sinks", (1,) * 3, (41, 1500, 0), sinks="normal", num_q_heads=8, num_kv_heads=1),
    Case("decode_sinks_extreme", (1,) * 3, (1, 700, 0), sinks="extreme", num_q_heads=10, num_kv_heads=2),
    Case("decode_sinks_window", (1,) * 3, (20, 211, 1500), sinks="normal", window_left=100, num_kv_heads=2),
    Case("decode_sinks_alibi", (1,) * 2, (41, 500), sinks="normal", alibi="head", num_kv_heads=2),
    Case("decode_sinks_batch_64", (1,) * 64, tuple(range(3, 1603, 25)), sinks="normal", num_kv_heads=2),
    Case("decode_peaked", (1,) * 2, (41, 1500), q_gain=12.0, num_kv_heads=2),
    Case("decode_scales", (1,) * 2, (41, 500), k_scale=0.125, v_scale=3.0, num_kv_heads=2),
    Case(
        "decode_everything",
        (1,) * 4,
        (41, 500, 0, 1200),
        num_q_heads=10,
        num_kv_heads=2,
        head_dim=80,
        page_size=17,
        window_left=300,
        prefix_lens=(5, 100, 0, 64),
        softcap=20.0,
        alibi="batch",
        sinks="normal",
        softmax_scale=0.2,
        k_scale=0.5,
        v_scale=1.5,
    ),
    Case("decode_batch_64", (1,) * 64, tuple(range(3, 67)), num_q_heads=2, num_kv_heads=1),
    Case("decode_pages_2000", (1,) * 3, (31_990, 257, 3), num_kv_heads=2),
    *(
        Case(
            f"decode_dims_{head_dim}_{value_dim}{suffix}",
            (1,) * 4,
            (41, 3000, 0, 511),
            head_dim=head_dim,
            value_dim=value_dim,
            num_kv_heads=2,
            **options,
        )
        for head_dim, value_dim in ((192, 128), (128, 64), (64, 128), (72, 40), (8, 256), (512, 64))
        for suffix, options in {
            "": {"num_q_heads": 8},
            "_group_16": {"num_q_heads": 32},
            "_group_64": {"num_q_heads": 128},
            "_masks": {"window_left": 900, "sinks": "normal", "alibi": "batch", "softcap": 20.0},
            "_scales": {"k_scale": 0.5, "v_scale": 1.5, "page_size": 17, "prefix_lens": (3, 100, 0, 600)},
        }.items()
    ),
    Case(
        "decode_dims_192_128_batch",
        (1,) * 40,
        tuple(range(7, 327, 8)),
        head_dim=192,
        value_dim=128,
        num_kv_heads=2,
    ),
    Case("decode_dims_192_128_long", (1,), (12_000,), head_dim=192, value_dim=128, num_kv_heads=1),
    Case(
        "decode_dims_128_64_many",
        (1,) * 64,
        tuple(range(900, 2500, 25)),
        head_dim=128,
        value_dim=64,
        num_q_heads=8,
        num_kv_heads=2,
    ),
)

ALL = (*DENSE, *VALUE_DIMS, *WIDE, *PACKED, *BACKWARD, *PAGED, *PAGED_VALUE_DIMS, *DECODE, *ROWS)
_BY_NAME = {case.name: case for case in ALL}


def named(*names: str) -> list[Case]:
    return [_BY_NAME[name] for name in names]
