"""The rows of the prefill benchmark: shapes, and how many operations each must do. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = 2048  # query heads times head dim, in the rows that compare head dims


@dataclass(frozen=True)
class Case:
    """One call of attention in bfloat16: sequences of equal lengths dense, others packed; or paged."""

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    alibi: bool = False
    page_size: int = 0  # 0: not paged

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @property
    def dense(self) -> bool:
        return self.page_size == 0 and len({*self.seqlens_q, *self.seqlens_k}) == 1

    @property
    def lengths(self) -> str:
        if len(set(self.seqlens_q)) == 1:
            return f"{self.batch} x {self.seqlens_q[0]}"
        return f"{self.batch}, {sum(self.seqlens_q)} in all"

    def keys_seen(self, seqlen_q: int, seqlen_k: int) -> int:
        """Over all queries of one sequence."""
        if not self.causal:
            return seqlen_q * seqlen_k
        if self.window_left < 0:  # half of a square, as everyone counts it
            return seqlen_q * (seqlen_k - seqlen_q) + seqlen_q * seqlen_q // 2
        last = range(seqlen_k - seqlen_q, seqlen_k)
        return sum(min(position, self.window_left) + 1 for position in last)

    @property
    def flops(self) -> int:
        pairs = sum(map(self.keys_seen, self.seqlens_q, self.seqlens_k))
        return 4 * pairs * self.num_q_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Of all arrays, each moved once."""
        heads = 2 * sum(self.seqlens_q) * self.num_q_heads + 2 * sum(self.seqlens_k) * self.num_kv_heads
        return 2 * heads * self.head_dim


def _dense(
    batch: int,
    seqlen: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    **options: float,
) -> Case:
    kind = "causal" if causal else "full"
    suffix = "".join(f"_{name}" for name in options)
    name = f"d{head_dim}_{kind}_{batch}x{seqlen}{suffix}"
    if num_q_heads != num_kv_heads:
        name += f"_gqa{num_q_heads // num_kv_heads}"
    lengths = (seqlen,) * batch
    return Case(name, lengths, lengths, num_q_heads, num_kv_heads, head_dim, causal, **options)  # type: ignore[arg-type]


def _paged(name: str, seqlens_q: list[int], seqlens_k: list[int], page_size: int = 16) -> Case:
    return Case(name, tuple(seqlens_q), tuple(seqlens_k), 32, 8, 128, page_size=page_size)


_RAGGED = [1 + 37 * i % 1500 for i in range(100)]

TABLE = (
    *(
        _dense(batch, seqlen, HIDDEN // head_dim, HIDDEN // head_dim, head_dim, causal)
        for head_dim in (64, 128, 256)
        for causal in (True, False)
        for batch, seqlen in ((32, 512), (8, 2048), (2, 8192), (1, 16384))
    ),
    _dense(4, 4096, 32, 8, 128, True),
    _paged("chunk512_ctx8k", [512] * 4, [8192] * 4),
    _paged("mixed", [1] * 60 + [512] * 4, [2048] * 60 + [4096] * 4),
    _paged("prefill4k", [4096] * 4, [4096] * 4),
    _paged("spec8", [8] * 32, [4096] * 32),
)

EXTRA = (
    _dense(2, 8192, 16, 16, 96, True),
    _dense(2, 8192, 8, 8, 192, True),
    _dense(1, 4097, 32, 8, 128, True),
    _dense(16, 1000, 28, 4, 128, True),
    _dense(2, 8192, 32, 32, 64, True, alibi=True),
    _dense(2, 8192, 16, 16, 128, True, alibi=True),
    _dense(2, 8192, 16, 16, 128, True, softcap=30.0),
    _dense(2, 8192, 16, 16, 128, True, window_left=1024),
    Case("ragged100", tuple(_RAGGED), tuple(_RAGGED), 32, 8, 128),
    _paged("chunk512_ctx8k_page64", [512] * 4, [8192] * 4, 64),
    _paged("prefill4k_page256", [4096] * 4, [4096] * 4, 256),
)
