"""Every named case."""

from __future__ import annotations

from support.case import Case

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
    Case("softcap", (71,), (113,), softcap=5.0, q_gain=4.0),
    Case("softcap_high", (71,), (113,), softcap=50.0, num_kv_heads=1),
    Case("alibi", (71,), (113,), alibi="head", num_kv_heads=2),
    Case("alibi_batch", (40, 40, 40), (90, 90, 90), alibi="batch", num_kv_heads=2),
    Case("alibi_not_causal", (47,), (83,), alibi="head", causal=False),
    Case("alibi_long", (307,), (1021,), alibi="head", num_q_heads=2, num_kv_heads=2),
    Case("scale", (47,), (83,), softmax_scale=0.3, head_dim=16),
    Case("scale_0", (47,), (83,), softmax_scale=0.0, head_dim=16),
    Case("scale_negative", (47,), (83,), softmax_scale=-0.2, head_dim=16),
    Case("peaked", (83,), (307,), q_gain=12.0, num_kv_heads=2),
    Case("prefix", (83, 83, 83), (83, 83, 83), prefix_lens=(0, 29, 83), num_kv_heads=2),
    Case("prefix_past_the_end", (19, 19), (31, 31), prefix_lens=(500, 31)),
    Case("prefix_and_window", (131,), (257,), prefix_lens=(40,), window_left=16, num_kv_heads=2),
    Case("prefix_inside_window", (60,), (90,), prefix_lens=(45,), window_left=70),
    Case(
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
    ),
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
    Case("alibi_packed", (50, 1, 33), (250, 90, 33), alibi="batch", num_kv_heads=2),
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

# Only where keys lie in pages: page sizes, many pages, scales, a right window that packed queries lack.
PAGED = (
    Case("page_size_1", (5, 1, 17), (67, 130, 17), page_size=1, num_kv_heads=2),
    Case("page_size_17", (5, 1, 17), (67, 530, 17), page_size=17, num_kv_heads=2),
    Case("page_size_256", (300, 1, 5), (300, 513, 255), page_size=256, num_kv_heads=1, num_q_heads=2),
    Case("page_size_24", (33, 3), (240, 71), page_size=24, num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("scales_packed", (33, 3), (240, 71), k_scale=0.5, v_scale=1.75, num_kv_heads=2),
    Case("pages_2000_chunk", (7,), (31_990,), num_q_heads=3, num_kv_heads=1),
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
    Case("decode_window", (1,) * 3, (20, 211, 1500), window_left=100, num_kv_heads=2),
    Case("decode_window_0", (1,) * 2, (20, 211), window_left=0),
    Case("decode_window_prefix", (1,) * 3, (20, 211, 1500), window_left=100, prefix_lens=(4, 4, 130)),
    Case("decode_softcap", (1,) * 2, (41, 500), softcap=8.0, q_gain=4.0),
    Case("decode_alibi", (1,) * 2, (41, 500), alibi="head", num_kv_heads=2),
    Case("decode_alibi_batch", (1,) * 3, (41, 500, 0), alibi="batch", num_kv_heads=2),
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
        softmax_scale=0.2,
        k_scale=0.5,
        v_scale=1.5,
    ),
    Case("decode_batch_64", (1,) * 64, tuple(range(3, 67)), num_q_heads=2, num_kv_heads=1),
    Case("decode_pages_2000", (1,) * 3, (31_990, 257, 3), num_kv_heads=2),
)

ALL = (*DENSE, *PACKED, *PAGED, *DECODE)
_BY_NAME = {case.name: case for case in ALL}


def named(*names: str) -> list[Case]:
    return [_BY_NAME[name] for name in names]
