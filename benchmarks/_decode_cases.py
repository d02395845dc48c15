"""The rows of the decode benchmark: shapes, and how many bytes each must move. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Case:
    """One call of paged attention: `query_len` new tokens of every sequence, the last of its `seq_lens`."""

    name: str
    seq_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"  # of queries and output
    kv_dtype: str = ""  # of the cache; empty: dtype
    page_size: int = 16
    query_len: int = 1
    window_left: int = -1
    softcap: float = 0.0
    alibi: bool = False
    return_lse: bool = False
    shared_prefix: int = 0  # the first tokens of every sequence, in the same pages
    cascade: bool = False  # whether Octavo is told
    head_major: bool = False  # the cache in memory: [num_pages, num_kv_heads, page_size, head_dim]

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def tokens_read(self) -> int:
        """Keys that some query sees; a shared one counts once."""
        if self.window_left < 0:
            return sum(self.seq_lens) - (self.batch - 1) * self.shared_prefix
        return sum(min(length, self.window_left + self.query_len) for length in self.seq_lens)

    @property
    def num_bytes(self) -> int:
        """Keys and values read, queries read, results written."""
        rows = self.batch * self.query_len * self.num_q_heads
        cache = 2 * self.tokens_read * self.num_kv_heads * self.head_dim * ITEMSIZE[self.cache_dtype]
        return cache + 2 * rows * self.head_dim * ITEMSIZE[self.dtype] + 4 * rows * self.return_lse

    @property
    def lengths(self) -> str:
        if min(self.seq_lens) == max(self.seq_lens):
            return f"{self.batch} x {self.seq_lens[0]}"
        return f"{self.batch} x {min(self.seq_lens)}..{max(self.seq_lens)}, {sum(self.seq_lens)} in all"

    @property
    def kind(self) -> str:
        """Head dim, dtypes and whatever is not plain decoding on pages of 16."""
        parts = {
            f"{self.head_dim}": True,
            self.dtype: True,
            f"KV {self.cache_dtype}": self.cache_dtype != self.dtype,
            f"page {self.page_size}": self.page_size != 16,
            "head-major": self.head_major,
            f"prefix {self.shared_prefix}": self.shared_prefix > 0,
            "cascade": self.cascade,
            f"{self.query_len} queries": self.query_len > 1,
            f"window {self.window_left}": self.window_left >= 0,
            f"softcap {self.softcap:g}": self.softcap > 0,
            "ALiBi": self.alibi,
            "lse": self.return_lse,
        }
        return ", ".join(part for part, shown in parts.items() if shown)

    @property
    def shape(self) -> dict[str, object]:
        """As a row of the results has it."""
        return {
            "lengths": self.lengths,
            "batch": self.batch,
            "min_seqlen": min(self.seq_lens),
            "max_seqlen": max(self.seq_lens),
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "kind": self.kind,
        }


def ragged(seed: int, sigma: float, batch: int, total: int) -> tuple[int, ...]:
    """Log-normal lengths that sum to about `total`."""
    weights = np.random.default_rng(seed).lognormal(0.0, sigma, batch)
    return tuple(max(1, round(total * w / weights.sum())) for w in weights)


def heavy_tailed(seed: int, batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, log-uniform, in random order."""
    lengths = np.geomspace(1, longest, batch).round().astype(int)
    return tuple(np.random.default_rng(seed).permutation(lengths).tolist())


def _seed(name: str, batch: int, length: int, **kind: Any) -> Case:
    """The shapes of Decoding Attention's benchmark: 32 heads of their own keys, float16."""
    return Case(name, (length,) * batch, num_kv_heads=32, dtype="float16", **kind)


def _8b(name: str, batch: int, length: int, **kind: Any) -> Case:
    return Case(name, (length,) * batch, **kind)


def _70b_tp8(name: str, batch: int, length: int) -> Case:
    return Case(name, (length,) * batch, num_q_heads=8, num_kv_heads=1)


TABLE = (
    _seed("seed_seq128", 1, 128),
    _seed("seed_seq1024", 1, 1024),
    _seed("seed_seq4096", 1, 4096),
    _seed("seed_batch8", 8, 128),
    _seed("seed_batch32", 32, 128),
    _seed("seed_batch512", 512, 128),
    _8b("8b_b1_s1024", 1, 1024),
    _8b("8b_b1_s8192", 1, 8192),
    _8b("8b_b8_s4096", 8, 4096),
    _8b("8b_b32_s2048", 32, 2048),
    _8b("8b_b64_s4096", 64, 4096),
    _8b("8b_b128_s1024", 128, 1024),
    _70b_tp8("70btp8_b1_s8192", 1, 8192),
    _70b_tp8("70btp8_b64_s8192", 64, 8192),
    _70b_tp8("70btp8_b256_s1024", 256, 1024),
    Case("8b_ragged64", ragged(seed=222, sigma=0.8, batch=64, total=108637)),
    _8b("8b_fp8_b1_s8192", 1, 8192, kv_dtype="float8_e4m3fn"),
    _8b("8b_fp8_b32_s2048", 32, 2048, kv_dtype="float8_e4m3fn"),
    _8b("8b_fp8_b64_s4096", 64, 4096, kv_dtype="float8_e4m3fn"),
    _seed("bloom_b1_s2048", 1, 2048, alibi=True),
    _seed("bloom_b32_s2048", 32, 2048, alibi=True),
)

EXTRA = (
    _8b("group5_b1_s8192", 1, 8192, num_q_heads=40),
    _8b("group5_b32_s2048", 32, 2048, num_q_heads=40),
    _8b("group7_b1_s8192", 1, 8192, num_q_heads=28, num_kv_heads=4),
    _8b("group7_b32_s4096", 32, 4096, num_q_heads=28, num_kv_heads=4),
    _8b("group16_b1_s8192", 1, 8192, num_kv_heads=2),
    _8b("group16_b64_s4096", 64, 4096, num_kv_heads=2),
    _8b("dim64_b32_s4096", 32, 4096, head_dim=64),
    _8b("dim96_b32_s1024", 32, 1024, num_kv_heads=32, head_dim=96),
    _8b("dim256_b32_s2048", 32, 2048, num_q_heads=16, head_dim=256),
    *(_8b(f"page{n}_b32_s2048", 32, 2048, page_size=n) for n in (1, 8, 32, 64, 256)),
    *(_8b(f"batch{n}_s3001", n, 3001) for n in (3, 17, 100)),
    _8b("long_b1_s262144", 1, 262144),
    Case("heavy_tail64", heavy_tailed(seed=0, batch=64, longest=32768)),
    _8b("head_major_b32_s2048", 32, 2048, head_major=True),
    _8b("window512_b32_s2048", 32, 2048, window_left=511),
    _8b("window_all_b32_s2048", 32, 2048, window_left=4095),
    _8b("softcap_b32_s2048", 32, 2048, softcap=30.0),
    _8b("alibi_b32_s2048", 32, 2048, alibi=True),
    _8b("lse_b32_s2048", 32, 2048, return_lse=True),
    *(_8b(f"queries{n}_b32_s4096", 32, 4096, query_len=n) for n in (2, 4, 8)),
)


def _shared(batch: int, prefix: int, own: int, **kind: Any) -> tuple[Case, Case]:
    """Sequences that begin with the same pages, without and with a cascade."""
    name = f"shared_b{batch}_p{prefix}_s{own}" + "".join(f"_{key[0]}{value}" for key, value in kind.items())
    plain = _8b(name, batch, prefix + own, shared_prefix=prefix, **kind)
    return plain, replace(plain, name=f"{name}_cascade", cascade=True)


SHARED = (
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
SWEEP = (
    *(_seed(f"sweep_seed_s{n}", 1, n) for n in (256, 512, 2048, 8192, 16384, 32768)),
    *(_seed(f"sweep_seed_b{n}", n, 128) for n in (2, 4, 16, 64, 128, 256)),
    *(_8b(f"sweep_8b_s{n}", 1, n) for n in (512, 2048, 4096, 16384, 32768, 65536, 131072)),
    *(_8b(f"sweep_8b_b{n}", n, 1024) for n in (2, 4, 8, 16, 32, 64, 256)),
)
