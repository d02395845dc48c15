"""octavo.latent_attention: attention over a paged cache of latents, as models with MLA decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.calls import GuardedArray
from support.targets import Target, cpu_target, every_target, writable_target

SCALE = 192**-0.5
QK_DIM, V_DIM = 576, 512  # DeepSeek's, for which there are CUDA kernels


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
fp8_target = pytest.mark.parametrize(
    "target",
    [
        *(pytest.param(t, id=str(t)) for t in (Target("numpy", "cpu", x) for x in ("float32", "bfloat16"))),
        *(
            pytest.param(t, id=str(t), marks=pytest.mark.gpu)
            for t in (Target("torch", "cuda", x) for x in ("float16", "bfloat16"))
        ),
    ],
)


def fp8_array(target: Target, values: NDArray) -> Any:
    codes = values.astype(FP8)
    if target.library_name == "numpy":
        return codes
    import torch

    return target.library.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)


def fp8_numbers(target: Target, array: Any) -> NDArray[np.float64]:
    if target.library_name != "numpy":
        import torch

        array = target.library.to_numpy(array.view(torch.uint8)).view(FP8)
    return np.asarray(array).astype(np.float64)


@dataclass
class Problem:
    """Sequences over shuffled pages, among which others hold NaN, as slots past the lengths do."""

    target: Target
    lengths: tuple[int, ...]
    num_q_heads: int = 16
    page_size: int = 64
    softmax_scale: float = SCALE
    queries: tuple[int, ...] = ()  # of each sequence; default: one each
    qk_dim: int = QK_DIM
    v_dim: int = V_DIM
    is_fp8: bool = False
    kv_scale: float | None = None
    causal: bool = True
    has_head_axis: bool = False
    gap: int = 0  # elements between the rows of queries and of the cache
    seed: int = 0
    q: NDArray[np.float64] = field(init=False)
    keys: list[NDArray[np.float64]] = field(init=False)
    cu_seqlens_q: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng([self.seed, *self.lengths])
        queries = self.queries or (1,) * len(self.lengths)
        self.cu_seqlens_q = [0, *np.cumsum(queries).tolist()]
        shape = (self.cu_seqlens_q[-1], self.num_q_heads, self.qk_dim)
        self.q = oracle.round_to(self.random.standard_normal(shape), self.target.dtype)
        self.keys = [self._round(self.random.standard_normal((n, self.qk_dim))) for n in self.lengths]

    def _round(self, values: NDArray) -> NDArray[np.float64]:
        if self.is_fp8:
            return values.astype(FP8).astype(np.float64)
        return oracle.round_to(values, self.target.dtype)

    def arrays(self) -> tuple[Any, Any, Any, Any]:
        num_pages = [-(-n // self.page_size) for n in self.lengths]
        total = sum(num_pages) + 2
        order = self.random.permutation(total)
        table = np.full((len(self.lengths), max(num_pages, default=0) + 1), 2**30, np.int32)
        pages = np.full((total, self.page_size, self.qk_dim + self.gap), np.nan)
        first = 0
        for b, count in enumerate(num_pages):
            table[b, :count] = order[first : first + count]
            first += count
            for i, key in enumerate(self.keys[b]):
                slot = table[b, i // self.page_size], i % self.page_size
                pages[(*slot, slice(self.qk_dim))] = key
        q = np.full((*self.q.shape[:2], self.qk_dim + self.gap), np.nan)
        q[..., : self.qk_dim] = self.q
        kv = fp8_array(self.target, pages) if self.is_fp8 else self.target.array(pages)
        if self.has_head_axis:
            kv = kv.reshape(total, self.page_size, 1, -1)
        lengths = self.target.int32(self.lengths)
        return (
            self.target.array(q)[..., : self.qk_dim],
            kv[..., : self.qk_dim],
            self.target.int32(table),
            lengths,
        )

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "v_dim": self.v_dim,
        }
        if self.queries:
            options["cu_seqlens_q"] = self.target.int32(self.cu_seqlens_q)
            options["max_seqlen_q"] = max(self.queries)
        if self.kv_scale is not None:
            options["kv_scale"] = self.kv_scale
        return options

    def check(self, **options: Any) -> None:
        out, lse = octavo.latent_attention(*self.arrays(), **self.options(), return_lse=True, **options)
        self.check_results(out, lse)

    def check_results(self, out: Any, lse: Any) -> None:
        """Weights are float32 on a CPU, and of the dtype on a GPU; the result is rounded once."""
        library, dtype = self.target.library, self.target.dtype
        assert isinstance(out, library.array_type) and dtype in str(out.dtype)
        scale = self.kv_scale or 1.0
        expected, expected_lse, sizes = oracle.latent_attention(
            self.q, [scale * keys for keys in self.keys], self.cu_seqlens_q,
            self.softmax_scale, self.v_dim,
            causal=self.causal,
        )  # fmt: skip
        empty = np.isneginf(expected_lse)
        scores = np.abs(expected_lse, where=~empty, out=np.ones_like(expected_lse)).max(initial=1.0)
        weights = scores * 2.0**-19 + (0.0 if self.target.on_cpu else 0.5 * oracle.SPACING[dtype])
        tolerance = 1.01 * (0.5 * oracle.SPACING[dtype] * np.abs(expected) + weights * sizes) + 2.0**-24
        found = library.to_float64(out)
        assert found.shape == expected.shape
        assert (np.abs(found - expected) <= tolerance).all(), np.abs(found - expected).max()
        found_lse = library.to_float64(lse)
        np.testing.assert_array_equal(np.isneginf(found_lse), empty)
        np.testing.assert_allclose(found_lse[~empty], expected_lse[~empty], rtol=2e-5, atol=2e-5)
        assert not found[empty].any()


@every_target
@pytest.mark.parametrize("num_q_heads", [16, 32])
@pytest.mark.parametrize("softmax_scale", [0.0, -0.2])
def test_scales_that_are_not_positive(target: Target, softmax_scale: float, num_q_heads: int) -> None:
    Problem(target, (70, 128), num_q_heads, softmax_scale=softmax_scale).check()


@every_target
@pytest.mark.parametrize("num_q_heads", [1, 7, 16, 20, 64, 128])
def test_heads(target: Target, num_q_heads: int) -> None:
    Problem(target, (100, 1, 33), num_q_heads).check()


@every_target
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 100])
def test_page_sizes(target: Target, page_size: int) -> None:
    Problem(target, (130, 64, 63, 65, 1), page_size=page_size).check()


@every_target
@pytest.mark.parametrize("num_splits", [None, 1, 2, 5, 64, 1024])
def test_splits(target: Target, num_splits: int | None) -> None:
    Problem(target, (700, 3, 0, 64, 129)).check(num_splits=num_splits)


# With a schedule there are fewer runs of keys than CTAs. Those without one waited for keys that nobody loads.
MANY_SHORT = tuple(1 + 37 * i % 200 for i in range(64))


@every_target
@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
def test_many_short_sequences(target: Target, num_q_heads: int) -> None:
    Problem(target, MANY_SHORT, num_q_heads, 64).check()


@fp8_target
@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
def test_many_short_sequences_of_fp8(target: Target, num_q_heads: int) -> None:
    Problem(target, MANY_SHORT, num_q_heads, 64, is_fp8=True).check()


@every_target
@pytest.mark.parametrize("causal", [True, False])
def test_packed(target: Target, causal: bool) -> None:
    """Any number of queries a sequence, and sequences without queries or keys."""
    problem = Problem(target, (90, 7, 0, 5, 200), 5, queries=(3, 7, 0, 1, 20), causal=causal)
    problem.check()
    problem.check(num_splits=3)


@every_target
def test_padding(target: Target) -> None:
    """A sequence of length 0, and rows past the last query."""
    Problem(target, (0, 20, 0)).check()
    problem = Problem(target, (40, 9), queries=(2, 1))
    q, *arrays = problem.arrays()
    rows = np.concatenate([target.library.to_float64(q), np.ones((2, 16, QK_DIM))])
    out, lse = octavo.latent_attention(target.array(rows), *arrays, **problem.options(), return_lse=True)
    assert not target.library.to_float64(out)[3:].any()
    assert np.isneginf(target.library.to_float64(lse)[3:]).all()
    problem.check_results(out[:3], lse[:3])


@fp8_target
@pytest.mark.parametrize("num_splits", [None, 4])
@pytest.mark.parametrize("page_size", [1, 64])
def test_fp8(target: Target, page_size: int, num_splits: int | None) -> None:
    problem = Problem(target, (300, 2, 64), 20, page_size, is_fp8=True, kv_scale=0.25)
    problem.check(num_splits=num_splits)


@fp8_target
def test_every_fp8_code(target: Target) -> None:
    """Each code but NaN's as a key of one sequence, so that the output is its value."""
    codes = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float64)
    codes = codes[~np.isnan(codes)]
    out = octavo.latent_attention(
        target.array(np.zeros((len(codes), 1, QK_DIM))),
        fp8_array(target, np.repeat(codes[:, None, None], QK_DIM, axis=2)),
        target.int32(np.arange(len(codes))[:, None]),
        target.int32(np.ones(len(codes))),
        softmax_scale=1.0,
    )
    expected = np.broadcast_to(codes[:, None, None], (len(codes), 1, V_DIM))
    np.testing.assert_array_equal(target.library.to_float64(out), expected)


@every_target
def test_scale_of_a_16_bit_cache(target: Target) -> None:
    Problem(target, (70,), kv_scale=2.0).check()


@every_target
def test_head_axis(target: Target) -> None:
    Problem(target, (70, 10), has_head_axis=True).check()


@every_target
@pytest.mark.parametrize("gap", [1, 8, 64])
def test_strides(target: Target, gap: int) -> None:
    """Rows that cannot move 16 bytes at a time, and rows that can."""
    Problem(target, (70, 10), 20, 16, gap=gap).check()


@fp8_target
@pytest.mark.parametrize("gap", [1, 16])
def test_strides_of_fp8(target: Target, gap: int) -> None:
    Problem(target, (70, 10), 20, 16, gap=gap, is_fp8=True).check()


@cpu_target
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(8, 8), (40, 24), (192, 128), (576, 576), (1024, 1000)])
def test_other_dims(target: Target, qk_dim: int, v_dim: int) -> None:
    Problem(target, (70, 3, 1100), 5, 16, qk_dim=qk_dim, v_dim=v_dim).check()


@writable_target
@pytest.mark.parametrize("num_splits", [1, 3])
def test_out(target: Target, num_splits: int) -> None:
    """Unread, however full of NaN, and nothing is written around it."""
    problem = Problem(target, (200, 5), 20)
    guarded = GuardedArray(target, 2, 20, V_DIM)
    options = {**problem.options(), "num_splits": num_splits, "return_lse": True}
    out, lse = octavo.latent_attention(*problem.arrays(), **options, out=guarded.array)
    assert out is guarded.array
    problem.check_results(out, lse)
    guarded.check_margins()


@every_target
def test_a_sequence_is_on_its_own(target: Target) -> None:
    """With the splits that a call names, its bits depend neither on its neighbours nor on its pages."""
    problem = Problem(target, (500, 77, 12), 16, 16)
    q, kv, table, lengths = problem.arrays()
    whole = octavo.latent_attention(q, kv, table, lengths, softmax_scale=SCALE, num_splits=2)
    shuffled = octavo.latent_attention(*problem.arrays(), softmax_scale=SCALE, num_splits=2)
    to_float64 = target.library.to_float64
    np.testing.assert_array_equal(to_float64(whole), to_float64(shuffled))
    for b in range(3):
        alone = octavo.latent_attention(
            q[b : b + 1], kv, table[b : b + 1], lengths[b : b + 1], softmax_scale=SCALE, num_splits=2
        )
        np.testing.assert_array_equal(to_float64(alone)[0], to_float64(whole)[b])


@every_target
def test_large_scores(target: Target) -> None:
    """One key has all the weight; exponents of any other overflow without a maximum."""
    problem = Problem(target, (150,))
    problem.q *= 64.0
    problem.check()
    problem.check(num_splits=3)


@cpu_target
def test_no_sequences(target: Target) -> None:
    empty = target.array(np.zeros((0, 4, QK_DIM))), target.array(np.zeros((3, 4, QK_DIM)))
    table = target.int32(np.zeros((0, 2))), target.int32(np.zeros(0))
    assert octavo.latent_attention(*empty, *table, softmax_scale=1.0).shape == (0, 4, V_DIM)


@fp8_target
@pytest.mark.parametrize("batch", [1, 16, 32])
def test_no_pages(target: Target, batch: int) -> None:
    """Sequences without tokens over a cache without pages, for any number of which kernels differ."""
    q = target.array(np.ones((batch, 16, QK_DIM)))
    table, lengths = target.int32(np.zeros((batch, 64))), target.int32(np.zeros(batch))
    no_pages = np.zeros((0, 64, QK_DIM))
    for pages in (target.array(no_pages), fp8_array(target, no_pages)):
        given = {"softmax_scale": SCALE, "return_lse": True}
        out, lse = map(target.library.to_float64, octavo.latent_attention(q, pages, table, lengths, **given))
        assert not out.any() and np.isneginf(lse).all()


def check_append(problem: Problem) -> None:
    target = problem.target
    _, kv, table, lengths = problem.arrays()

    def numbers() -> NDArray[np.float64]:
        return fp8_numbers(target, kv) if problem.is_fp8 else target.library.to_float64(kv)

    expected = numbers()
    new = np.stack([-keys[-1] for keys in problem.keys])
    for row, length, pages in zip(new, problem.lengths, target.library.to_numpy(table), strict=True):
        expected[pages[(length - 1) // 8], (length - 1) % 8] = row
    scale = 2.0 if problem.is_fp8 else 1.0
    tokens = target.array(scale * new).reshape(-1, 18, 32)
    pages = kv.reshape(kv.shape[0], 8, 18, 32)
    scales = {"k_scale": scale, "v_scale": scale} if problem.is_fp8 else {}
    octavo.append_kv(tokens[:, :9], tokens[:, 9:], pages[:, :, :9], pages[:, :, 9:], table, lengths, **scales)
    np.testing.assert_array_equal(numbers(), expected)


@writable_target
def test_append_kv_writes_such_a_cache(target: Target) -> None:
    """As eighteen heads of 32 numbers, nine of them for keys and nine for values."""
    check_append(Problem(target, (37, 5), page_size=8))


@fp8_target
def test_append_kv_writes_such_a_cache_of_fp8(target: Target) -> None:
    check_append(Problem(target, (37, 5), page_size=8, is_fp8=True))


@pytest.mark.gpu
def test_captured_graph_follows_lengths() -> None:
    torch = pytest.importorskip("torch")
    target = Target("torch", "cuda", "bfloat16")
    problem = Problem(target, (900, 70))
    q, kv, table, lengths = problem.arrays()
    out = torch.empty(2, 16, V_DIM, dtype=torch.bfloat16, device="cuda")
    arguments = (q, kv, table, lengths)

    def call() -> None:
        octavo.latent_attention(*arguments, softmax_scale=SCALE, out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for shorter in ((900, 70), (899, 1), (64, 65), (0, 3)):
        lengths.copy_(torch.tensor(shorter, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = octavo.latent_attention(*arguments, softmax_scale=SCALE)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
