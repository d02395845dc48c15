"""The rows of the benchmarks, each a named case, which tests run too.

Needs NumPy alone, and no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from support.case import Case


def _ragged(seed: int, sigma: float, batch: int, total: int) -> tuple[int, ...]:
    """Log-normal lengths that sum to about `total`."""
    weights = np.random.default_rng(seed).lognormal(0.0, sigma, batch)
    return tuple(max(1, round(total * w / weights.sum())) for w in weights)


def _heavy_tailed(seed: int, batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, log-uniform, in random order."""
    lengths = np.geomspace(1, longest, batch).round().astype(int)
    return tuple(np.random.default_rng(seed).permutation(lengths).tolist())


def _8b(name: str, seqlens_k: tuple[int, ...], query_len: int = 1, **kind: Any) -> Case:
    """The heads of Llama 3 8B, over pages: the last `query_len` tokens of every sequence are new."""
    kind = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **kind}
    return Case(name, (query_len,) * len(seqlens_k), seqlens_k, **kind)


def _decode(name: str, batch: int, length: int, query_len: int = 1, **kind: Any) -> Case:
    return _8b(name, (length,) * batch, query_len, **kind)


def _seed(name: str, batch: int, length: int, **kind: Any) -> Case:
    """The shapes of Decoding Attention's benchmark: 32 heads of their own keys, float16."""
    return _decode(name, batch, length, num_kv_heads=32, dtype="float16", **kind)


def _70b_tp8(name: str, batch: int, length: int) -> Case:
    """The heads of Llama 3 70B that each of eight GPUs has."""
    return _decode(name, batch, length, num_q_heads=8, num_kv_heads=1)


UNIFORM64: tuple[int, ...] = tuple(np.random.default_rng(1).integers(1, 4097, 64).tolist())
RAGGED64 = _ragged(seed=222, sigma=0.8, batch=64, total=108637)


def _with_room(kind: str, **options: Any) -> tuple[Case, ...]:
    """Page tables with room for 128 Ki keys, of which the host knows no more, as where steps are captured."""
    options |= {"room": 131072}
    return (
        _decode(f"{kind}room_b8_s4096", 8, 4096, **options),
        _decode(f"{kind}room_b32_s2048", 32, 2048, **options),
        _8b(f"{kind}room_uniform64", UNIFORM64, **options),
        _8b(f"{kind}room_heavy_tail64", _heavy_tailed(seed=0, batch=64, longest=32768), **options),
    )


DECODE_TABLE = (
    _seed("seed_seq128", 1, 128),
    _seed("seed_seq1024", 1, 1024),
    _seed("seed_seq4096", 1, 4096),
    _seed("seed_batch8", 8, 128),
    _seed("seed_batch32", 32, 128),
    _seed("seed_batch512", 512, 128),
    _decode("8b_b1_s1024", 1, 1024),
    _decode("8b_b1_s8192", 1, 8192),
    _decode("8b_b8_s4096", 8, 4096),
    _decode("8b_b32_s2048", 32, 2048),
    _decode("8b_b64_s4096", 64, 4096),
    _decode("8b_b128_s1024", 128, 1024),
    _70b_tp8("70btp8_b1_s8192", 1, 8192),
    _70b_tp8("70btp8_b64_s8192", 64, 8192),
    _70b_tp8("70btp8_b256_s1024", 256, 1024),
    _8b("8b_ragged64", RAGGED64),
    _decode("8b_fp8_b1_s8192", 1, 8192, kv_dtype="float8_e4m3fn"),
    _decode("8b_fp8_b32_s2048", 32, 2048, kv_dtype="float8_e4m3fn"),
    _decode("8b_fp8_b64_s4096", 64, 4096, kv_dtype="float8_e4m3fn"),
    _seed("bloom_b1_s2048", 1, 2048, alibi="head"),
    _seed("bloom_b32_s2048", 32, 2048, alibi="head"),
)

DECODE_EXTRA = (
    _decode("group5_b1_s8192", 1, 8192, num_q_heads=40),
    _decode("group5_b32_s2048", 32, 2048, num_q_heads=40),
    _decode("group7_b1_s8192", 1, 8192, num_q_heads=28, num_kv_heads=4),
    _decode("group7_b32_s4096", 32, 4096, num_q_heads=28, num_kv_heads=4),
    _decode("group16_b1_s8192", 1, 8192, num_kv_heads=2),
    _decode("group16_b64_s4096", 64, 4096, num_kv_heads=2),
    _decode("dim64_b32_s4096", 32, 4096, head_dim=64),
    _decode("dim96_b32_s1024", 32, 1024, num_kv_heads=32, head_dim=96),
    _decode("dim256_b32_s2048", 32, 2048, num_q_heads=16, head_dim=256),
    _decode("dim512_b32_s2048", 32, 2048, num_kv_heads=4, head_dim=512),
    _decode("dim512_b1_s8192", 1, 8192, num_kv_heads=4, head_dim=512),
    *(_decode(f"page{n}_b32_s2048", 32, 2048, page_size=n) for n in (1, 8, 32, 64, 256)),
    *(_decode(f"batch{n}_s3001", n, 3001) for n in (3, 17, 100)),
    _decode("long_b1_s262144", 1, 262144),
    _8b("heavy_tail64", _heavy_tailed(seed=0, batch=64, longest=32768)),
    _decode("head_major_b32_s2048", 32, 2048, head_major=True),
    _decode("window512_b32_s2048", 32, 2048, window_left=511),
    _decode("window_all_b32_s2048", 32, 2048, window_left=4095),
    _decode("softcap_b32_s2048", 32, 2048, softcap=30.0),
    _decode("alibi_b32_s2048", 32, 2048, alibi="head"),
    _decode("lse_b32_s2048", 32, 2048, return_lse=True),
    *(_decode(f"queries{n}_b32_s4096", 32, 4096, query_len=n) for n in (2, 4, 8)),
    *_with_room(""),
    *_with_room("fp8_", kv_dtype="float8_e4m3fn", head_major=True),
    *_with_room("int4_", kv_dtype="int4", head_major=True),
)


def _quantised(kind: str, kv_dtype: str) -> tuple[Case, ...]:
    """The shapes for which caches of codes have goals, of 8 bits also with the tokens of a page outside, and
    batches of unlike lengths.
    """

    def row(shape: str, batch: int, length: int, **heads: Any) -> Case:
        return _decode(f"{kind}_{shape}", batch, length, kv_dtype=kv_dtype, **{"head_major": True, **heads})

    rows = (
        row("b1_s8192", 1, 8192),
        row("b32_s2048", 32, 2048),
        row("b64_s4096", 64, 4096),
        row("mha_b32_s2048", 32, 2048, num_kv_heads=32),
        row("mha_b64_s4096", 64, 4096, num_kv_heads=32),
        row("70btp8_b64_s8192", 64, 8192, num_q_heads=8, num_kv_heads=1),
        row("dim64_b32_s4096", 32, 4096, head_dim=64),
        _8b(f"{kind}_uniform64", UNIFORM64, kv_dtype=kv_dtype, head_major=True),
        _8b(f"{kind}_ragged64", RAGGED64, kv_dtype=kv_dtype, head_major=True),
    )
    if kind not in ("fp8", "int8"):
        return rows
    return (
        *rows,
        row("token_major_b32_s2048", 32, 2048, head_major=False),
        row("token_major_b64_s4096", 64, 4096, head_major=False),
    )


KINDS_OF_CODES = {"fp8": "float8_e4m3fn", "int8": "int8", "int8_int4": "int8_int4", "int4": "int4"}
DECODE_QUANTISED = tuple(case for kind in KINDS_OF_CODES.items() for case in _quantised(*kind))


def _shared(
    batch: int, prefix: int, own: int, query_len: int = 1, kind: str = "", **options: Any
) -> tuple[Case, Case]:
    """Sequences that begin with the same pages, without and with a cascade."""
    name = f"{kind}shared_b{batch}_p{prefix}_s{own}" + (f"_q{query_len}" if query_len > 1 else "")
    plain = _decode(name, batch, prefix + own, query_len, shared_prefix=prefix, **options)
    return plain, replace(plain, name=f"{name}_cascade", cascade=True)


DECODE_SHARED_QUANTISED = tuple(
    case
    for kind in ("fp8", "int8")
    for lengths in ((64, 4096, 256), (64, 1024, 1024), (256, 2048, 256), (16, 8192, 512), (8, 4096, 256))
    for case in _shared(*lengths, kind=f"{kind}_", kv_dtype=KINDS_OF_CODES[kind], head_major=True)
)

DECODE_SHARED = (
    *_shared(64, 4096, 256),
    *_shared(64, 1024, 1024),
    *_shared(16, 8192, 512),
    *_shared(256, 512, 128),
    *_shared(256, 2048, 256),
    *_shared(64, 32768, 256),
    *_shared(8, 4096, 256),
    *_shared(16, 1024, 256),
    *_shared(32, 4096, 256, query_len=4),
    *_shared(8, 4096, 512, query_len=256),
)

# Curves over length and over batch, of which the table has some points.
DECODE_SWEEP = (
    *(_seed(f"sweep_seed_s{n}", 1, n) for n in (256, 512, 2048, 8192, 16384, 32768)),
    *(_seed(f"sweep_seed_b{n}", n, 128) for n in (2, 4, 16, 64, 128, 256)),
    *(_decode(f"sweep_8b_s{n}", 1, n) for n in (512, 2048, 4096, 16384, 32768, 65536, 131072)),
    *(_decode(f"sweep_8b_b{n}", n, 1024) for n in (2, 4, 8, 16, 32, 64, 256)),
)

HIDDEN = 2048  # query heads times head dim, in the rows that compare head dims


def _dense(
    batch: int, seqlen: int, num_q_heads: int, num_kv_heads: int, head_dim: int, causal: bool, **options: Any
) -> Case:
    kind = "causal" if causal else "full"
    name = f"d{head_dim}_{kind}_{batch}x{seqlen}" + "".join(f"_{option}" for option in options)
    if num_q_heads != num_kv_heads:
        name += f"_gqa{num_q_heads // num_kv_heads}"
    lengths = (seqlen,) * batch
    return Case(name, lengths, lengths, num_q_heads, num_kv_heads, head_dim, 0, causal, **options)


def _paged(
    name: str, seqlens_q: list[int], seqlens_k: list[int], page_size: int = 16, **options: Any
) -> Case:
    return Case(name, tuple(seqlens_q), tuple(seqlens_k), 32, 8, 128, page_size, **options)


_CHUNKS = {  # queries and keys of packed batches
    "chunk512_ctx8k": ([512] * 4, [8192] * 4),
    "mixed": ([1] * 60 + [512] * 4, [2048] * 60 + [4096] * 4),
    "prefill4k": ([4096] * 4, [4096] * 4),
    "spec8": ([8] * 32, [4096] * 32),
}
_RAGGED = tuple(1 + 37 * i % 1500 for i in range(100))

PREFILL_TABLE = (
    *(
        _dense(batch, seqlen, HIDDEN // head_dim, HIDDEN // head_dim, head_dim, causal)
        for head_dim in (64, 128, 256)
        for causal in (True, False)
        for batch, seqlen in ((32, 512), (8, 2048), (2, 8192), (1, 16384))
    ),
    _dense(4, 4096, 32, 8, 128, True),
    *(_paged(name, *lengths) for name, lengths in _CHUNKS.items()),
)

PREFILL_EXTRA = (
    _dense(2, 8192, 16, 16, 96, True),
    _dense(2, 8192, 8, 8, 192, True),
    _dense(2, 8192, 16, 16, 192, True, value_dim=128),
    _dense(2, 8192, 4, 4, 512, True),
    _dense(1, 4097, 32, 8, 128, True),
    _dense(16, 1000, 28, 4, 128, True),
    _dense(2, 8192, 32, 32, 64, True, alibi="head"),
    _dense(2, 8192, 16, 16, 128, True, alibi="head"),
    _dense(2, 8192, 16, 16, 128, True, softcap=30.0),
    _dense(2, 8192, 16, 16, 128, True, window_left=1024),
    Case("ragged100", _RAGGED, _RAGGED, 32, 8, 128, page_size=0),
    _paged("chunk512_ctx8k_page64", [512] * 4, [8192] * 4, 64),
    _paged("prefill4k_page256", [4096] * 4, [4096] * 4, 256),
    *(_paged(f"{name}_page1", *lengths, 1) for name, lengths in _CHUNKS.items()),
    # Lengths so unlike that one sequence is a large part of the batch.
    _paged("spec8_heavy_tail32", [8] * 32, [8 + n for n in _heavy_tailed(seed=0, batch=32, longest=32768)]),
    _paged("mixed_heavy_tail", [512] + [1] * 60, [4096, *_heavy_tailed(seed=1, batch=60, longest=32768)]),
    _paged(
        "chunks_heavy_tail16",
        [64, 512, 128, 300] * 4,
        [512 + n for n in _heavy_tailed(seed=2, batch=16, longest=32768)],
    ),
)

# GPT-2's length and head dim, and one sequence that grows: beside attention that keeps all scores.
TRAINING_EXTRA = (
    _dense(16, 1024, 16, 16, 64, True),
    *(_dense(1, seqlen, 16, 16, 128, True) for seqlen in (4096, 8192, 65536)),
)

PREFILL_QUANTISED = tuple(
    _paged(f"{kind}_{name}", *lengths, kv_dtype=kv_dtype, head_major=True)
    for kind, kv_dtype in KINDS_OF_CODES.items()
    for name, lengths in _CHUNKS.items()
)

CPU_TABLE = (
    _decode("decode 1 x 4096", 1, 4096),
    _decode("decode 16 x 1024", 16, 1024),
    replace(_dense(1, 2048, 32, 8, 128, True), name="prefill 1 x 2048 causal"),
)

ROWS = (
    *DECODE_TABLE,
    *DECODE_EXTRA,
    *DECODE_QUANTISED,
    *DECODE_SHARED,
    *DECODE_SHARED_QUANTISED,
    *DECODE_SWEEP,
    *PREFILL_TABLE,
    *PREFILL_EXTRA,
    *PREFILL_QUANTISED,
    *TRAINING_EXTRA,
    *CPU_TABLE,
)
