"""octavo.KVCache, behaviour by behaviour, on NumPy's and PyTorch's arrays on the CPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

import octavo
from support import oracle
from support.kv_caches import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, NUM_Q_HEADS, make_cache
from support.libraries import ArrayLibrary, get_library


@pytest.fixture(params=["numpy", "torch"])
def on_cpu(request: pytest.FixtureRequest) -> ArrayLibrary:
    pytest.importorskip(request.param)
    return get_library(request.param, "cpu")


def random_tokens(library: ArrayLibrary, total: int) -> list[Any]:
    rng = np.random.default_rng(total)
    heads = (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [library.float32(rng.standard_normal((total, n, HEAD_DIM), np.float32)) for n in heads]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "int8_int4"])
def test_a_step_is_that_of_the_operators(on_cpu: ArrayLibrary, dtype: str) -> None:
    cache = make_cache(on_cpu, dtype=dtype)
    other = [
        octavo.empty_cache(32, 4, NUM_KV_HEADS, HEAD_DIM, dtype, like=on_cpu.float32([])) for _ in range(2)
    ]
    compute = "bfloat16" if dtype == "bfloat16" else "float32"
    a, b = cache.create(), cache.create()
    for counts in ([5, 9], [1, 1], [3, 0], [0, 2]):
        step = cache.step([a, b], counts)
        page_table, seq_lens = (on_cpu.int32(x) for x in cache.allocator.page_table([a, b]))
        cu_seqlens = on_cpu.int32([0, counts[0], sum(counts)])
        q, k, v = (on_cpu.array(on_cpu.to_numpy(x), compute) for x in random_tokens(on_cpu, sum(counts)))
        for layer in range(NUM_LAYERS):
            out = step.attend(layer, q, k, v, softcap=2.0)
            of_batch = {"page_table": page_table, "seq_lens": seq_lens, **other[layer].arguments}
            octavo.append_kv(k, v, cu_seqlens=cu_seqlens, **of_batch)
            expected = octavo.paged_attention(q, cu_seqlens_q=cu_seqlens, softcap=2.0, **of_batch)
            assert type(out) is on_cpu.array_type
            np.testing.assert_array_equal(on_cpu.to_float64(out), on_cpu.to_float64(expected))
    assert cache.length(a) == 9
    assert cache.length(b) == 12


def test_scale_slopes_sinks_and_result_are_those_of_the_operator(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    step = cache.step([cache.create()], 7)
    q, k, v = random_tokens(on_cpu, 7)
    slopes = on_cpu.float32([0.5, 0.25, 0.125, 0.0625])
    given = on_cpu.float32(np.full((7, NUM_Q_HEADS, HEAD_DIM), np.nan))
    sinks = on_cpu.float32([2.0, -1.0, 0.5, 4.0])
    out = step.attend(0, q, k, v, softmax_scale=0.3, alibi_slopes=slopes, sinks=sinks, out=given)
    assert out is given
    oracle.attention(
        *(on_cpu.to_numpy(x) for x in (q, k, v)),
        [7],
        [7],
        dtype="float32",
        causal=True,
        softmax_scale=0.3,
        alibi_slopes=on_cpu.to_numpy(slopes),
        sinks=on_cpu.to_numpy(sinks),
    ).check_out(on_cpu.to_numpy(out))


def test_softmax_phi_is_that_of_the_operator(on_cpu: ArrayLibrary) -> None:
    """It changes no result but for rounding: the last bits tell."""
    cache = make_cache(on_cpu)
    step = cache.step([cache.create()], 9)
    q, k, v = random_tokens(on_cpu, 9)
    plain = on_cpu.to_numpy(step.attend(0, q, k, v))
    of_batch = {"page_table": step.page_tables[0], "seq_lens": step.seq_lens, **cache.layers[0].arguments}
    for phi in (3.0, on_cpu.float32([4.0, 3.0, 2.0, 1.0])):
        out = on_cpu.to_numpy(step.attend(0, q, k, v, softmax_phi=phi))
        expected = octavo.paged_attention(q, cu_seqlens_q=step.cu_seqlens_q, softmax_phi=phi, **of_batch)
        np.testing.assert_array_equal(out, on_cpu.to_numpy(expected))
        np.testing.assert_allclose(out, plain, atol=1e-6)
        assert (out != plain).any()


def test_chosen_pages_are_those_of_the_operator(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    seqs = [cache.create(), cache.create()]
    cache.step(seqs, [17, 6]).attend(0, *random_tokens(on_cpu, 23))
    step = cache.step(seqs)
    q, k, v = random_tokens(on_cpu, 2)
    chosen = on_cpu.int32([[[0, 4], [3, 4]], [[1, -1], [0, 1]]])
    out = on_cpu.to_numpy(step.attend(0, q, k, v, chosen_pages=chosen))
    of_batch = {"page_table": step.page_tables[0], "seq_lens": step.seq_lens, **cache.layers[0].arguments}
    expected = octavo.paged_attention(q, chosen_pages=chosen, **of_batch)
    np.testing.assert_array_equal(out, on_cpu.to_numpy(expected))
    assert (out != on_cpu.to_numpy(octavo.paged_attention(q, **of_batch))).any(axis=(1, 2)).all()


def test_layers_that_are_not_causal(on_cpu: ArrayLibrary) -> None:
    """New tokens see each other: all of them, or as far as a window reaches."""
    cache = make_cache(on_cpu, windows=[None, 4])
    seqs = [cache.create(), cache.create()]
    old = random_tokens(on_cpu, 7)
    step = cache.step(seqs, [3, 4])
    for layer in range(2):
        step.attend(layer, *old)
    new = [x + 1 for x in random_tokens(on_cpu, 11)]
    step = cache.step(seqs, [6, 5])
    keys, values = (
        np.concatenate([on_cpu.to_numpy(x)[part] for part, x in parts])
        for parts in (
            [(slice(3), old[i]), (slice(6), new[i]), (slice(3, 7), old[i]), (slice(6, 11), new[i])]
            for i in (1, 2)
        )
    )
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    alibi = {"alibi_slopes": on_cpu.float32(slopes), "alibi_symmetric": True}
    for layer, window_left, window_right in ((0, -1, -1), (1, 4, 2)):
        out = step.attend(layer, *new, causal=False, window_right=window_right, **alibi)
        oracle.attention(
            on_cpu.to_numpy(new[0]),
            keys,
            values,
            [6, 5],
            [9, 9],
            dtype="float32",
            window_left=window_left,
            window_right=window_right,
            alibi_slopes=slopes,
            alibi_symmetric=True,
        ).check_out(on_cpu.to_numpy(out))


@pytest.mark.parametrize("keeps_window", [False, True])
def test_ranges_are_those_of_the_operator(on_cpu: ArrayLibrary, keeps_window: bool) -> None:
    """Ranges of a first step, and of one in which one range has begun before."""
    cache = make_cache(on_cpu, windows=[None, 4])
    seqs = [cache.create(), cache.create()]
    for counts, ranges in (
        ([7, 9], [[[1, 6], [6, 6]], [[2, 4], [5, 9]]]),
        ([5, 3], [[[4, 11], [11, 11]], [[9, 12], [12, 12]]]),
    ):
        step = cache.step(seqs, counts)
        q, k, v = random_tokens(on_cpu, sum(counts))
        given = {
            "bidirectional_ranges": on_cpu.int32(ranges),
            "ranges_keep_window_left": keeps_window,
        }
        of_batch = {"cu_seqlens_q": step.cu_seqlens_q, "seq_lens": step.seq_lens}
        for layer, window_left in ((0, -1), (1, 4)):
            out = on_cpu.to_numpy(step.attend(layer, q, k, v, **given))
            of_layer = {"page_table": step.page_tables[layer], **cache.layers[layer].arguments}
            operator = functools.partial(
                octavo.paged_attention, q, window_left=window_left, **of_batch, **of_layer
            )
            np.testing.assert_array_equal(out, on_cpu.to_numpy(operator(**given)))
            assert (out != on_cpu.to_numpy(operator())).any()


def test_ranges_that_reach_behind_a_window_are_refused(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu, windows=[None, 4])
    seqs = [cache.create(), cache.create()]
    cache.step(seqs, [2, 20])
    step = cache.step(seqs, [3, 3])
    tokens = random_tokens(on_cpu, 6)

    def attend(layer: int, ranges: list[list[list[int]]], **options: Any) -> None:
        step.attend(layer, *tokens, bidirectional_ranges=on_cpu.int32(ranges), **options)

    attend(1, [[[0, 5]], [[16, 23]]])
    attend(1, [[[0, 5]], [[3, 20]]])  # no new token sits in it
    reaches_behind = [[[0, 5], [5, 5]], [[0, 1], [15, 21]]]
    attend(0, reaches_behind)
    attend(1, reaches_behind, ranges_keep_window_left=True)
    message = (
        "attend: bidirectional_ranges[1, 1] must begin at position 16 or later, since layer 1 has no pages "
        "of what its window of 4 has passed; got 15. With ranges_keep_window_left=True windows hold in "
        "ranges, too"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attend(1, reaches_behind)


def test_ranges_of_another_batch_are_refused(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    step = cache.step([cache.create(), cache.create()], [3, 2])
    ranges = on_cpu.int32([[[0, 3]]])
    with pytest.raises(ValueError, match=r"bidirectional_ranges"):
        step.attend(0, *random_tokens(on_cpu, 5), bidirectional_ranges=ranges)
    with pytest.raises(ValueError, match=r"ranges_keep_window_left"):
        step.attend(0, *random_tokens(on_cpu, 5), ranges_keep_window_left=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
def test_rotary_embedding(on_cpu: ArrayLibrary, interleaved: bool, has_out: bool) -> None:
    cache = make_cache(on_cpu)
    angles = np.arange(32)[:, None] / 100.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    seq = cache.create()
    rotated: list[Any] = []
    for count in (5, 1):
        step = cache.step([seq], count)
        q, k, v = random_tokens(on_cpu, count)
        before = on_cpu.to_numpy(q)
        out = step.attend(
            0,
            q,
            k,
            v,
            rotary_cos=on_cpu.float32(cos),
            rotary_sin=on_cpu.float32(sin),
            rotary_interleaved=interleaved,
            out=on_cpu.float32(np.zeros_like(before)) if has_out else None,
        )
        np.testing.assert_array_equal(on_cpu.to_numpy(q), before)
        positions = on_cpu.to_numpy(step.positions)
        turned = [
            oracle.rotate(on_cpu.to_numpy(x), positions, cos, sin, interleaved=interleaved) for x in (q, k)
        ]
        rotated.append((turned[1], on_cpu.to_numpy(v)))
    keys, values = (np.concatenate(x) for x in zip(*rotated, strict=True))
    expected = oracle.attention(turned[0], keys, values, [1], [6], dtype="float32", causal=True)
    np.testing.assert_allclose(on_cpu.to_numpy(out), expected.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim_v", [8, 24])
@pytest.mark.parametrize("has_out", [False, True])
def test_rotary_embedding_with_another_head_dim_of_values(
    on_cpu: ArrayLibrary, head_dim_v: int, has_out: bool
) -> None:
    """Rotated queries have not the shape of the result, and get memory of their own."""
    cache = make_cache(on_cpu, head_dim_v=head_dim_v)
    shape = (32, 4, NUM_KV_HEADS, HEAD_DIM, "float32")
    other = octavo.empty_cache(*shape, like=on_cpu.float32([]), head_dim_v=head_dim_v).arguments
    angles = np.arange(32)[:, None] / 100.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    rotary = {"rotary_cos": on_cpu.float32(np.cos(angles)), "rotary_sin": on_cpu.float32(np.sin(angles))}
    seq = cache.create()
    for count in (5, 1):
        step = cache.step([seq], count)
        q, k, _ = random_tokens(on_cpu, count)
        v = on_cpu.float32(np.random.default_rng(count).standard_normal((count, NUM_KV_HEADS, head_dim_v)))
        before = on_cpu.to_numpy(q)
        given = on_cpu.float32(np.zeros((count, NUM_Q_HEADS, head_dim_v))) if has_out else None
        out = step.attend(0, q, k, v, out=given, **rotary)
        assert given is None or out is given
        np.testing.assert_array_equal(on_cpu.to_numpy(q), before)
        page_table, seq_lens = (on_cpu.int32(x) for x in cache.allocator.page_table([seq]))
        of_step = {"page_table": page_table, "seq_lens": seq_lens, **other}
        cu_seqlens = on_cpu.int32([0, count])
        rotated = octavo.append_kv(k, v, cu_seqlens=cu_seqlens, q=q, **rotary, **of_step)
        expected = octavo.paged_attention(rotated, cu_seqlens_q=cu_seqlens, **of_step)
        np.testing.assert_array_equal(on_cpu.to_numpy(out), on_cpu.to_numpy(expected))


def test_a_prompt_is_found_again(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu, prefix_cache=True)
    prompt = list(range(11))
    first = cache.create(prompt)
    assert cache.length(first) == 0
    q, k, v = random_tokens(on_cpu, 11)
    step = cache.step([first], 11, prompt)
    out = step.attend(0, q, k, v)
    cache.free(first)
    again = cache.create(prompt)
    assert cache.length(again) == 8  # two full pages
    assert cache.length(cache.create(prompt[:8])) == 7  # one token is left to compute
    assert cache.length(cache.create(prompt, namespace="another")) == 0
    step = cache.step([again], 3, prompt[8:])
    tail = step.attend(0, q[8:], k[8:], v[8:])
    np.testing.assert_allclose(on_cpu.to_numpy(tail), on_cpu.to_numpy(out)[8:], rtol=1e-4, atol=1e-6)
    assert cache.stats()["num_hit_tokens"] == 15


def test_an_empty_sequence_has_its_namespace() -> None:
    cache = make_cache(prefix_cache=True)
    prompt = list(range(8))
    for namespace in ("tenant", b"bytes"):
        seq = cache.create(namespace=namespace)
        cache.step([seq], 8, prompt)
        cache.free(seq)
        assert cache.length(cache.create(prompt, namespace)) == 7
    assert cache.length(cache.create(prompt)) == 0


def test_tokens_need_no_prefix_cache() -> None:
    cache = make_cache()
    seq = cache.create([1, 2, 3], namespace="tenant")
    assert cache.length(seq) == 0
    assert cache.step([seq], 3, [1, 2, 3]).num_tokens == 3


def test_padding_of_the_batch(on_cpu: ArrayLibrary) -> None:
    cache, plain = make_cache(on_cpu), make_cache(on_cpu)
    seqs, others = ([x.create() for _ in range(2)] for x in (cache, plain))
    for _ in range(6):
        step, expected = cache.step(seqs, pad_batch=4), plain.step(others)
        q, k, v = random_tokens(on_cpu, 4)
        out = step.attend(0, q, k, v)
        np.testing.assert_array_equal(
            on_cpu.to_numpy(out[:2]), on_cpu.to_numpy(expected.attend(0, q[:2], k[:2], v[:2]))
        )
        assert not on_cpu.to_numpy(out[2:]).any()
    assert (step.batch, step.num_tokens) == (2, 2)
    assert on_cpu.to_numpy(step.seq_lens).tolist() == [6, 6, 0, 0]
    assert on_cpu.to_numpy(step.positions).tolist() == [5, 5, 0, 0]


@pytest.mark.parametrize("pad_tokens", [None, 128])
def test_padding_of_a_batch_beyond_the_tokens_of_a_step(on_cpu: ArrayLibrary, pad_tokens: int | None) -> None:
    cache = make_cache(on_cpu, num_pages=64, max_batch=128, max_tokens=64)
    seq = cache.create()
    cache.step([seq], 6)
    seqs = [seq, *cache.fork(seq, 19)]
    cache.step(seqs)  # with 19 copies
    step = cache.step(seqs[:10], pad_batch=128, pad_tokens=pad_tokens)
    assert on_cpu.to_numpy(step.positions).tolist() == [7] * 10 + [0] * 118
    with pytest.raises(ValueError, match=r"^step: there are 65 new tokens, .* max_tokens \(64\) rows"):
        cache.step(seqs[:1], 65, pad_tokens=pad_tokens)


def test_padding_of_the_tokens(on_cpu: ArrayLibrary) -> None:
    cache, plain = make_cache(on_cpu), make_cache(on_cpu)
    seqs, others = ([x.create() for _ in range(2)] for x in (cache, plain))
    for counts in ([5, 3], [1, 1], [0, 4]):
        step = cache.step(seqs, counts, pad_batch=4, pad_tokens=16)
        expected, total = plain.step(others, counts), sum(counts)
        q, k, v = random_tokens(on_cpu, 16)
        out = step.attend(0, q, k, v)
        np.testing.assert_array_equal(
            on_cpu.to_numpy(out[:total]),
            on_cpu.to_numpy(expected.attend(0, q[:total], k[:total], v[:total])),
        )
        assert not on_cpu.to_numpy(out[total:]).any()
        assert on_cpu.to_numpy(step.positions).tolist() == [
            *on_cpu.to_numpy(expected.positions),
            *[0] * (16 - total),
        ]
        assert on_cpu.to_numpy(step.last_rows).tolist() == [*on_cpu.to_numpy(expected.last_rows), 0, 0]


def test_arrays_stay_where_they_are(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    seqs = [cache.create(), cache.create()]

    def addresses() -> list[int]:
        step = cache.step(seqs, [3, 1])
        arrays = (step.seq_lens, step.cu_seqlens_q, step.positions, step.last_rows, *step.page_tables)
        return [on_cpu.to_numpy(x).size and np.from_dlpack(x).ctypes.data for x in arrays]

    assert addresses() == addresses()


def test_a_step_that_does_not_fit_changes_nothing(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu, num_pages=4)
    a, b = cache.create(), cache.create()
    step = cache.step([a, b], [4, 3])
    q, k, v = random_tokens(on_cpu, 7)
    out = on_cpu.to_numpy(step.attend(0, q, k, v))
    assert (cache.needed([a, b], [1, 9]), cache.needed([a, b])) == (3, 1)
    assert cache.fits([a, b])
    assert not cache.fits([a, b], [1, 9])
    with pytest.raises(octavo.OutOfPages) as refused:
        cache.step([a, b], [1, 9])
    assert refused.value.indices == (1,)
    assert (cache.length(a), cache.length(b), cache.allocator.num_free_pages) == (4, 3, 2)
    np.testing.assert_array_equal(on_cpu.to_numpy(step.seq_lens), [4, 3])
    np.testing.assert_array_equal(on_cpu.to_numpy(step.attend(0, q, k, v)), out)


def test_a_step_is_over_when_the_next_one_begins() -> None:
    cache = make_cache()
    seq = cache.create()
    step = cache.step([seq])
    cache.step([seq])
    with pytest.raises(RuntimeError, match=r"^attend: this step is over, since another one has begun"):
        step.attend(0, *random_tokens(get_library("numpy", "cpu"), 1))


def test_defaults_follow_like(on_cpu: ArrayLibrary) -> None:
    cache = octavo.KVCache(1, 2, 8, num_pages=2000, like=on_cpu.array([], "float16"))
    assert str(cache.layers[0].k_pages.dtype).endswith("float16")
    assert cache.max_length == 8192
    assert octavo.KVCache(1, 2, 8, num_pages=3).max_length == 48


def test_a_refused_step_leaves_the_last_one() -> None:
    cache = make_cache()
    seqs = [cache.create()]
    step = cache.step(seqs, 2)
    with pytest.raises(TypeError, match="pad_tokens must be an int; got float"):
        cache.step(seqs, 1, pad_tokens=4.0)
    assert cache.length(seqs[0]) == 2
    step.attend(0, *random_tokens(get_library("numpy", "cpu"), 2))


def test_numbers_of_tokens_may_be_iterators() -> None:
    cache = make_cache(windows=[None, 3])
    seqs = [cache.create(), cache.create()]
    assert cache.fits(iter(seqs), iter([24, 40]))
    assert not cache.fits(iter(seqs), (n for n in [24, 101]))
    assert cache.needed(seqs, map(int, "59")) == 5
    step = cache.step(seqs, (n for n in [5, 9]))
    assert (step.num_tokens, step.max_seqlen_q) == (14, 9)
    np.testing.assert_array_equal(step.seq_lens, [5, 9])


class CountsOnADevice:
    """As a tensor on a GPU or an array of CuPy, which NumPy cannot read, and whose items are integers."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __dlpack__(self, **options: Any) -> NoReturn:
        raise BufferError("not in the memory of the CPU")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_numbers_of_tokens_may_be_on_a_gpu() -> None:
    cache = make_cache(max_length=16)
    seqs = [cache.create(), cache.create()]
    assert cache.fits(seqs, CountsOnADevice([3, 2]))
    step = cache.step(seqs, CountsOnADevice([3, 2]))
    assert (step.num_tokens, step.max_seqlen_q, len(step.positions)) == (5, 3, 5)
    step.attend(0, *random_tokens(get_library("numpy", "cpu"), 5))
    with pytest.raises(ValueError, match=rf"^step: sequence {seqs[1]} would have 17 tokens; max_length"):
        cache.step(seqs, CountsOnADevice([1, 15]))


def test_numbers_of_tokens_that_are_no_integers_are_refused() -> None:
    torch = pytest.importorskip("torch")
    cache = make_cache()
    with pytest.raises(TypeError, match=r"^step: num_new_tokens must be an int; got torch\.Tensor$"):
        cache.step([cache.create()], torch.ones(1, requires_grad=True))


def test_more_rows_than_the_step_has_are_refused(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    seqs = [cache.create(), cache.create()]
    step = cache.step(seqs, [3, 2])
    with pytest.raises(ValueError, match=r"^attend: q must have the 5 rows of the step at most; got 6$"):
        step.attend(0, *random_tokens(on_cpu, 6))
    step.attend(0, *random_tokens(on_cpu, 5))
    q, k, v = random_tokens(on_cpu, 5)
    for name, arrays in {"q": (q[:4], k, v), "k": (q, k[:4], v), "v": (q, k, v[:4])}.items():
        message = f"^attend: {name} must have a row for each of the 5 new tokens; got 4$"
        with pytest.raises(ValueError, match=message):
            step.attend(0, *arrays)
    step = cache.step(seqs, [3, 2], pad_tokens=8)
    assert step.attend(0, *random_tokens(on_cpu, 8)).shape[0] == 8
    with pytest.raises(ValueError, match=r"^attend: q must have the 8 rows of the step at most; got 9$"):
        step.attend(0, *random_tokens(on_cpu, 9))
