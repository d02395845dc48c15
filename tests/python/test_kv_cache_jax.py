"""octavo.jax.KVCache: its programs compute what octavo.KVCache does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import octavo

jax = pytest.importorskip("jax", reason="JAX is not installed")
octavo_jax = pytest.importorskip("octavo.jax")

WINDOWS = [None, 7]
SIZES: dict[str, Any] = {"num_pages": 32, "page_size": 4, "max_batch": 8, "max_tokens": 32}


def make_caches(**options: Any) -> tuple[Any, octavo.KVCache]:
    arguments = {**SIZES, "windows": WINDOWS, **options}
    return octavo_jax.KVCache(2, 2, 16, **arguments), octavo.KVCache(2, 2, 16, **arguments)


def make_program(**options: Any) -> Any:
    @functools.partial(jax.jit, donate_argnames="pages")
    def forward(pages: Any, step: Any, q: Any, k: Any, v: Any) -> Any:
        for layer in range(len(WINDOWS)):
            q, pages = step.attend(pages, layer, q, k, v, **options)
        return q, pages, (step.positions, step.last_rows, step.seq_lens, step.cu_seqlens_q)

    return forward


def random_tokens(total: int) -> list[np.ndarray]:
    rng = np.random.default_rng(total)
    return [rng.standard_normal((total, heads, 16), np.float32) for heads in (4, 2, 2)]


def test_layers_that_are_not_causal() -> None:
    ours, other = make_caches()
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625])
    options = {"causal": False, "window_right": 2, "alibi_slopes": slopes, "alibi_symmetric": True}
    forward = make_program(**options)
    seqs, others = ([cache.create() for _ in range(2)] for cache in (ours, other))
    for counts in ([5, 9], [6, 3]):
        q, k, v = random_tokens(sum(counts))
        step, expected = ours.step(seqs, counts), other.step(others, counts)
        out, ours.pages, _ = forward(ours.pages, step, q, k, v)
        for layer in range(2):
            q = expected.attend(layer, q, k, v, **options)
        np.testing.assert_array_equal(out, q)


def check_options(counts: list[int], **options: Any) -> None:
    """One step of two sequences, whose results these options change."""
    ours, other = make_caches()
    seqs, others = ([cache.create() for _ in range(2)] for cache in (ours, other))
    q, k, v = random_tokens(sum(counts))
    step, expected = ours.step(seqs, counts), other.step(others, counts)
    out, ours.pages, _ = make_program(**options)(ours.pages, step, q, k, v)
    without = q
    for layer in range(2):
        without = expected.attend(layer, without, k, v)
        q = expected.attend(layer, q, k, v, **options)
    np.testing.assert_array_equal(out, q)
    assert (q != without).any()


@pytest.mark.parametrize("keeps_window", [False, True])
def test_ranges_are_those_of_numpy(keeps_window: bool) -> None:
    ranges = np.int32([[[1, 5]], [[0, 9]]])
    check_options([5, 9], bidirectional_ranges=ranges, ranges_keep_window_left=keeps_window)


def test_tree_masks_are_those_of_numpy() -> None:
    """Rows of bools, and words."""
    ours, other = make_caches()
    seqs, others = ([cache.create() for _ in range(2)] for cache in (ours, other))
    q, k, v = random_tokens(14)
    mask = np.random.default_rng(1).random((14, 9)) < 0.5
    words = octavo.pack_tree_mask(mask)
    step, expected = ours.step(seqs, [5, 9]), other.step(others, [5, 9])
    without = of_words = q
    for layer in range(2):
        without = expected.attend(layer, without, k, v)
        of_words = expected.attend(layer, of_words, k, v, tree_mask=words)
    assert (of_words != without).any()
    for given in (mask, words.view(np.uint32).reshape(-1, 2)):
        out, ours.pages, _ = make_program(tree_mask=given)(ours.pages, step, q, k, v)
        np.testing.assert_array_equal(out, of_words)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("rotates", [False, True])
def test_programs_are_those_of_numpy(dtype: str, rotates: bool) -> None:
    ours, other = make_caches(dtype=dtype)
    angles = np.arange(64)[:, None] / 100.0 ** (np.arange(0, 16, 2) / 16)
    rotary = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)} if rotates else {}
    rotary = {name: table.astype(np.float32) for name, table in rotary.items()}
    forward = make_program(**rotary)
    seqs, others = ([cache.create() for _ in range(2)] for cache in (ours, other))
    for i, counts in enumerate([[5, 9], [1, 1], [2, 0], [1] * 5, [1] * 5, [3, 1, 0, 0, 2]]):
        if i == 3:  # three forks share a page that all of them are to write: four copies, in every layer
            seqs, others = (x + cache.fork(x[0], 3) for x, cache in ((seqs, ours), (others, other)))
        q, k, v = random_tokens(sum(counts))
        step, expected = ours.step(seqs, counts), other.step(others, counts)
        out, ours.pages, arrays = forward(ours.pages, step, q, k, v)
        for layer in range(2):
            q = expected.attend(layer, q, k, v, **rotary)
        np.testing.assert_array_equal(out, q)
        assert (step.batch, step.num_tokens) == (expected.batch, expected.num_tokens)
        for array, name in zip(arrays, ("positions", "last_rows", "seq_lens", "cu_seqlens_q"), strict=True):
            np.testing.assert_array_equal(array, getattr(expected, name))
            np.testing.assert_array_equal(getattr(step, name), array)
        np.testing.assert_array_equal(step.page_tables[1], expected.page_tables[1])


@pytest.mark.parametrize("phi", [3.0, np.float32([4.0, 3.0, 2.0, 1.0])], ids=["number", "array"])
def test_sinks_and_softmax_phi_are_those_of_numpy(phi: Any) -> None:
    """softmax_phi changes no result but for rounding: the last bits tell."""
    ours, other = make_caches()
    options = {"sinks": np.float32([2.0, -1.0, 0.5, 4.0]), "softmax_phi": phi}
    q, k, v = random_tokens(9)
    seq, step = ours.create(), other.step([other.create()], 9)
    out, ours.pages, _ = make_program(**options)(ours.pages, ours.step([seq], 9), q, k, v)
    expected = without = q
    for layer in range(2):
        without = step.attend(layer, without, k, v, sinks=options["sinks"])
        expected = step.attend(layer, expected, k, v, **options)
    np.testing.assert_array_equal(out, expected)
    assert (expected != without).any()


def test_chosen_pages_are_those_of_numpy() -> None:
    check_options([9, 5], chosen_pages=np.int32([[[0, 2], [1, 2]], [[-1, -1], [0, 1]]]))


def test_padded_batches_share_a_program() -> None:
    ours, other = make_caches()
    forward = make_program()
    seqs, others = ([cache.create() for _ in range(5)] for cache in (ours, other))
    for batch in (3, 5, 1, 4):
        step, expected = ours.step(seqs[:batch], pad_batch=8), other.step(others[:batch])
        q, k, v = random_tokens(8)
        out, ours.pages, _ = forward(ours.pages, step, q, k, v)
        q, k, v = (x[:batch] for x in (q, k, v))
        for layer in range(2):
            q = expected.attend(layer, q, k, v)
        np.testing.assert_array_equal(out[:batch], q)
        assert not np.asarray(out[batch:]).any()
    assert forward._cache_size() == 1


def test_padding_of_a_batch_beyond_the_tokens_of_a_step() -> None:
    cache, _ = make_caches(max_batch=128, max_tokens=64)
    seq = cache.create()
    cache.step([seq], 6)
    seqs = [seq, *cache.fork(seq, 19)]
    cache.step(seqs)  # with 19 copies
    step = cache.step(seqs[:10], pad_batch=128)
    assert np.asarray(step.positions).tolist() == [7] * 10 + [0] * 118


def test_padded_prompts_share_a_program() -> None:
    ours, other = make_caches()
    forward = make_program()
    seqs, others = ([cache.create() for _ in range(3)] for cache in (ours, other))
    for counts in ([5, 7], [6, 1, 8], [0, 5, 5]):
        batch, total = len(counts), sum(counts)
        step = ours.step(seqs[:batch], counts, pad_batch=4, pad_tokens=16)
        expected = other.step(others[:batch], counts)
        q, k, v = random_tokens(16)
        out, ours.pages, _ = forward(ours.pages, step, q, k, v)
        q, k, v = (x[:total] for x in (q, k, v))
        for layer in range(2):
            q = expected.attend(layer, q, k, v)
        np.testing.assert_allclose(out[:total], q, rtol=1e-5, atol=1e-6)
        assert not np.asarray(out[total:]).any()
    assert forward._cache_size() == 1  # the bound of 8 tokens a sequence serves them all


def test_the_pages_are_given_up() -> None:
    cache, _ = make_caches()
    before = cache.pages
    step = cache.step([cache.create()])
    _, cache.pages, _ = make_program()(cache.pages, step, *random_tokens(1))
    assert all(layer.k_pages.is_deleted() for layer in before)
    assert not any(layer.k_pages.is_deleted() for layer in cache.pages)


def test_a_prompt_is_found_again() -> None:
    cache, _ = make_caches(prefix_cache=True)
    prompt = list(range(10))
    seq = cache.create(prompt)
    cache.step([seq], 10, prompt)
    cache.free(seq)
    assert cache.length(cache.create(prompt)) == 8


@pytest.mark.parametrize("where", ["step", "_copy_pages", "_Shapes"])
def test_a_step_that_raises_is_taken_back(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    make_step = octavo.PageAllocator.step

    def fail(*args: Any) -> None:
        if where == "step":
            make_step(*args)
        raise KeyboardInterrupt

    ours, other = make_caches()
    forward = make_program()
    seqs, others = ([cache.create()] for cache in (ours, other))
    for counts in ([6], [5, 6], [1, 1]):
        if counts == [5, 6]:
            seqs, others = (x + cache.fork(x[0]) for x, cache in ((seqs, ours), (others, other)))
            with monkeypatch.context() as patch:
                patch.setattr(octavo.PageAllocator if where == "step" else octavo._jax_kv_cache, where, fail)
                with pytest.raises(KeyboardInterrupt):
                    ours.step(seqs, counts)
            assert [ours.length(seq) for seq in seqs] == [6, 6]
        q, k, v = random_tokens(sum(counts))
        step, expected = ours.step(seqs, counts), other.step(others, counts)
        out, ours.pages, _ = forward(ours.pages, step, q, k, v)
        for layer in range(2):
            q = expected.attend(layer, q, k, v)
        np.testing.assert_array_equal(out, q)


def test_free_memory_of_the_cpu() -> None:
    cache = octavo_jax.KVCache(2, 2, 16, memory_fraction=1e-4)
    assert 0 < cache.num_pages * cache.page_size * cache.bytes_per_token < 1e-3 * 2**40


def test_the_default_dtype_is_float32_with_x64_too() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        cache = octavo_jax.KVCache(1, 1, 8, num_pages=4)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert cache.pages[0].k_pages.dtype == np.float32


@pytest.mark.parametrize("like", [np.zeros(1), 3.0])
def test_like_must_be_of_jax(like: Any) -> None:
    with pytest.raises(TypeError, match=r"^KVCache: like must be a JAX array outside of a program; got "):
        octavo_jax.KVCache(2, 2, 16, num_pages=4, like=like)


def test_what_attend_refuses() -> None:
    cache, _ = make_caches()
    step = cache.step([cache.create()])
    with pytest.raises(ValueError, match=r"^attend: layer \(2\) must be from 0 to 1$"):
        step.attend(cache.pages, 2, *random_tokens(1))
    with pytest.raises(ValueError, match=r"^attend: pages must be those of the 2 layers; got 1$"):
        step.attend(cache.pages[:1], 0, *random_tokens(1))
    step = cache.step([cache.create()], 3)
    with pytest.raises(ValueError, match=r"^attend: q must have the 3 rows of the step at most; got 4$"):
        step.attend(cache.pages, 0, *random_tokens(4))
    q, k, v = random_tokens(3)
    with pytest.raises(ValueError, match=r"^attend: k must have a row for each of the 3 new tokens; got 2$"):
        step.attend(cache.pages, 0, q, k[:2], v)
