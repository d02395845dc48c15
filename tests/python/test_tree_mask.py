"""Tree masks: which of its sequence's newest tokens a query sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import calls, problems
from support.calls import assert_same_bits
from support.case import Case
from support.libraries import get_library
from support.producers import Producer
from support.strategies import drawn_cases
from support.targets import Target, cpu_target, every_target

Words = NDArray[np.uint64]

# Trees of the sizes of Medusa's: children by level.
MEDUSA = [[3, 2, 2], [4, 3, 1, 1], [2, 2, 2, 2]]


def medusa_parents(children: list[int]) -> list[int]:
    """Every token of a level has as many children."""
    parents, level = [-1], [0]
    for count in children:
        parents += [token for token in level for _ in range(count)]
        level = list(range(len(parents) - count * len(level), len(parents)))
    return parents


def random_parents(random: np.random.Generator, n: int) -> list[int]:
    return [int(random.integers(-1, max(i, 1))) if i else -1 for i in range(n)]


def ancestors(parents: list[int]) -> Words:
    """The words of a tree, one token after the other."""
    words: list[int] = []
    for i, parent in enumerate(parents):
        words.append(1 << i | (words[parent] if parent >= 0 else 0))
    return np.array(words, np.uint64)


def chain(n: int) -> Words:
    return np.array([(1 << min(i + 1, 64)) - 1 for i in range(n)], np.uint64)


def make_words(kind: str, seqlens_q: tuple[int, ...], seed: int = 0) -> Words:
    random = np.random.default_rng(seed)

    def one(n: int) -> Words:
        if kind == "random" and n <= 64:
            return ancestors(random_parents(random, n))
        if kind == "star" and n <= 64:
            return ancestors([-1, *[0] * (n - 1)][:n])
        if kind == "alone" and n <= 64:
            return ancestors([-1] * n)
        if kind == "none":
            return np.zeros(n, np.uint64)
        if kind == "chain":
            return chain(n)
        return random.integers(0, 2**64, n, np.uint64)  # any bits; also of sequences too long for a tree

    return np.concatenate([np.zeros(0, np.uint64), *map(one, seqlens_q)])


def pairs(words: Words) -> NDArray[np.int32]:
    return words.view(np.int32).reshape(-1, 2)


def bools(words: Words, n: int = 64) -> NDArray[np.bool_]:
    return (words[:, None] >> np.arange(n, dtype=np.uint64) & np.uint64(1)).astype(bool)


def check(target: Target, case: Case, words: Words, **options: Any) -> calls.Result:
    inputs = problems.make_inputs(case, target.dtype)
    tree = [int(word) for word in words]
    reference = problems.make_reference(case, inputs, target.dtype, paged=True, tree_mask=tree)
    cache = problems.make_cache(case, inputs)
    result = calls.paged_attention(
        target, case, inputs, cache, tree_mask=target.int32(pairs(words)), **options
    )
    reference.check(*result)
    return result


TREES = Case("trees", (16, 1, 7, 64, 0, 33), (500, 40, 7, 64, 9, 1600), num_q_heads=8, num_kv_heads=2)
CASES = [
    TREES,
    Case("tree_of_few_rows", (4, 4, 1), (4, 1500, 300), num_q_heads=4, num_kv_heads=2, head_dim=128),
    Case("tree_of_one_head", (16, 9), (2000, 100), num_q_heads=2, num_kv_heads=2, page_size=1),
    Case("tree_beside_a_chunk", (65, 64, 200), (65, 90, 700), num_q_heads=4, num_kv_heads=1, head_dim=96),
    Case("tree_in_window", (40, 12), (300, 12), window_left=20, num_q_heads=4, num_kv_heads=2),
    Case("tree_behind_prefix", (30, 30, 8), (200, 40, 300), prefix_lens=(50, 25, 500), window_left=90),
    Case("tree_with_biases", (20, 3), (150, 90), alibi="head", softcap=8.0, sinks="normal"),
    Case("tree_wide", (64, 64, 64), (1100, 1800, 900), num_q_heads=16, num_kv_heads=2, head_dim=256),
    Case("tree_192_128", (40, 9, 1), (900, 90, 70), num_kv_heads=2, head_dim=192, value_dim=128),
    Case("tree_of_few_64_128", (4, 2, 1), (400, 90, 70), num_kv_heads=2, value_dim=128),
    Case("tree_of_many", (6,) * 40, tuple(range(6, 46)), num_q_heads=4, num_kv_heads=4, page_size=7),
]


@every_target
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["random", "star", "any"])
def test_agrees_with_the_formula(target: Target, case: Case, kind: str) -> None:
    words = make_words(kind, case.seqlens_q)
    check(target, case, words, max_seqlen_q=max(case.seqlens_q))
    check(target, case, words, max_seqlen_q=max(case.seqlens_q), batch_invariant=True)


@every_target
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(target: Target, num_splits: int) -> None:
    check(target, TREES, make_words("random", TREES.seqlens_q), num_splits=num_splits)


@every_target
@pytest.mark.parametrize("n", [64, 33, 5, 0])
def test_bools_are_their_words(target: Target, n: int) -> None:
    """Columns that are not there count as False."""
    words = make_words("random", TREES.seqlens_q)
    kept = words & np.uint64((1 << n) - 1)
    expected = check(target, TREES, kept)
    inputs = problems.make_inputs(TREES, target.dtype)
    cache = problems.make_cache(TREES, inputs)
    for of_rows in (bools(words, n), np.asfortranarray(bools(words, n))):
        mask = target.library.boolean(of_rows)
        assert_same_bits(calls.paged_attention(target, TREES, inputs, cache, tree_mask=mask), expected)
    if target.library.has_views:
        mask = target.library.swap_axes(target.library.boolean(bools(words, n).T), 0, 1)
        assert_same_bits(calls.paged_attention(target, TREES, inputs, cache, tree_mask=mask), expected)


@every_target
def test_medusa(target: Target) -> None:
    for children in MEDUSA:
        n = len(medusa_parents(children))
        case = Case("medusa", (n, n), (n + 100, n), num_q_heads=4, num_kv_heads=1)
        words = octavo.tree_mask([medusa_parents(children)] * 2)
        np.testing.assert_array_equal(words.view(np.uint64)[:n], ancestors(medusa_parents(children)))
        check(target, case, words.view(np.uint64))


@every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chains_are_causal(target: Target, case: Case) -> None:
    """On the CPU bit for bit; on GPUs other kernels may serve calls without a mask."""
    chains = check(target, case, make_words("chain", case.seqlens_q))
    ones = np.full(sum(case.seqlens_q), 2**64 - 1, np.uint64)
    assert_same_bits(check(target, case, ones), chains)
    if target.on_cpu:
        inputs = problems.make_inputs(case, target.dtype)
        cache = problems.make_cache(case, inputs)
        assert_same_bits(calls.paged_attention(target, case, inputs, cache), chains)


@every_target
def test_queries_that_see_nothing(target: Target) -> None:
    case = Case("tree_sees_nothing", (9, 1, 64), (9, 1, 64), num_q_heads=4, num_kv_heads=2)
    out, lse = check(target, case, make_words("none", case.seqlens_q))
    assert not out.any()
    assert np.isneginf(lse).all()


@every_target
@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
def test_shared_prefix(target: Target, seqlen_q: int) -> None:
    """Also for a query that sees nothing behind the prefix, and for padding."""
    case = Case(
        "tree_shared_prefix",
        (seqlen_q,) * 4,
        (64 + seqlen_q, 0, 64 + seqlen_q, 200),
        num_q_heads=4,
        num_kv_heads=2,
        shared_prefix=64,
        sinks="normal",
    )
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    table = cache.page_table.copy()
    table[:, :4] = table[0, :4]
    cache = dataclasses.replace(cache, page_table=table)
    words = make_words("random", case.seqlens_q)
    words[-1] = words[0] = 0
    options = {"tree_mask": target.int32(pairs(words)), "max_seqlen_q": seqlen_q}
    out, lse = calls.paged_attention(target, case, inputs, cache, shared_prefix_len=64, **options)
    expected = calls.paged_attention(target, case, inputs, cache, **options)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[target.dtype]
    np.testing.assert_allclose(out, expected[0], atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], atol=tolerance)


@cpu_target
@settings(deadline=None)
@given(
    drawn_cases(paged=True, value_dims=True),
    st.integers(0, 2**16),
    st.sampled_from(["random", "star", "alone", "any"]),
)
def test_drawn(target: Target, case: Case, seed: int, kind: str) -> None:
    case = dataclasses.replace(case, causal=True)
    check(target, case, make_words(kind, case.seqlens_q, seed))


@cpu_target
def test_hidden_keys_may_hold_anything_on_the_cpu(target: Target) -> None:
    case = Case("tree_hides_nan", (20,), (90,), num_q_heads=8, num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    words = make_words("random", case.seqlens_q) & ~np.uint64(1 << 7 | 1 << 12)
    clean = calls.paged_attention(
        target, case, inputs, problems.make_cache(case, inputs), tree_mask=target.int32(pairs(words))
    )
    for name in ("k", "v"):
        spoilt = getattr(inputs, name).copy()
        spoilt[[77, 82]] = np.nan
        inputs = dataclasses.replace(inputs, **{name: spoilt})
    cache = problems.make_cache(case, inputs)
    result = calls.paged_attention(target, case, inputs, cache, tree_mask=target.int32(pairs(words)))
    assert_same_bits(result, clean)


def paged_call() -> dict[str, Any]:
    case = Case("tree_kinds", (12, 5), (40, 30), num_q_heads=4, num_kv_heads=2, head_dim=16)
    inputs = problems.make_inputs(case, "float32")
    cache = problems.make_cache(case, inputs)
    return {
        "q": inputs.q.astype(np.float32),
        "k_pages": cache.k_pages.astype(np.float32),
        "v_pages": cache.v_pages.astype(np.float32),
        "page_table": cache.page_table,
        "seq_lens": cache.seq_lens,
        "cu_seqlens_q": inputs.cu_seqlens_q,
    }


def test_every_kind_of_words() -> None:
    call, words = paged_call(), make_words("random", (12, 5))
    expected = octavo.paged_attention(**call, tree_mask=words)
    strided = np.zeros((17, 3), np.int64)
    strided[:, 1] = words.view(np.int64)
    for given_words in (words.view(np.int64), pairs(words), pairs(words).view(np.uint32), strided[:, 1]):
        np.testing.assert_array_equal(octavo.paged_attention(**call, tree_mask=given_words), expected)
    assert not np.array_equal(octavo.paged_attention(**call), expected)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_bools_of_every_library(library: str) -> None:
    """Beside NumPy's other arrays."""
    pytest.importorskip(library)
    call, words = paged_call(), make_words("random", (12, 5))
    mask = get_library(library, "cpu").boolean(bools(words, 12))
    expected = octavo.paged_attention(**call, tree_mask=words)
    np.testing.assert_array_equal(octavo.paged_attention(**call, tree_mask=mask), expected)
    np.testing.assert_array_equal(octavo.paged_attention(**call, tree_mask=mask, stream=1), expected)


def test_bools_that_octavo_jax_makes_an_array_of() -> None:
    octavo_jax = pytest.importorskip("octavo.jax")
    call, words = paged_call(), make_words("random", (12, 5))
    expected = octavo_jax.paged_attention(**call, tree_mask=pairs(words))
    for mask in (bools(words, 12), bools(words, 12).tolist()):
        np.testing.assert_array_equal(octavo_jax.paged_attention(**call, tree_mask=mask), expected)
    with pytest.raises(ValueError, match=r"paged_attention: tree_mask of bool must have .*; got \[17\]"):
        octavo_jax.paged_attention(**call, tree_mask=np.zeros(17, bool))


def test_words_that_octavo_jax_makes_pairs_of() -> None:
    octavo_jax = pytest.importorskip("octavo.jax")
    call, words = paged_call(), make_words("random", (12, 5)) | np.uint64(1 << 63 | 1 << 40)
    expected = octavo_jax.paged_attention(**call, tree_mask=pairs(words))
    for mask in (words, words.view(np.int64), words.view(np.int64).tolist(), np.stack([words] * 2, 1)[:, 0]):
        np.testing.assert_array_equal(octavo_jax.paged_attention(**call, tree_mask=mask), expected)


@pytest.mark.gpu
def test_bools_on_a_stream_of_the_callers() -> None:
    """The words live as long as the work, and nothing is read back: a graph holds how they are made."""
    torch = pytest.importorskip("torch")
    words = [make_words("random", (12, 5), seed) for seed in range(2)]
    call = {name: torch.from_numpy(x).cuda() for name, x in paged_call().items()}
    for name in ("q", "k_pages", "v_pages"):
        call[name] = call[name].half()
    masks = [torch.from_numpy(bools(x, 12)).cuda() for x in words]
    of_words = [torch.from_numpy(x.view(np.int64)).cuda() for x in words]
    expected = [octavo.paged_attention(**call, tree_mask=x) for x in of_words]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for mask, wanted in zip(masks, expected, strict=True):
        out = octavo.paged_attention(**call, tree_mask=mask, stream=stream)
        for _ in range(16):
            torch.zeros(17, dtype=torch.int64, device="cuda")  # memory that the words no longer need
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
    graph, mask = torch.cuda.CUDAGraph(), masks[0].clone()
    with torch.cuda.graph(graph):
        out = octavo.paged_attention(**call, tree_mask=mask)
    for new, wanted in zip(masks, expected, strict=True):
        mask.copy_(new)
        graph.replay()
        assert torch.equal(out, wanted)


def test_one_query_a_sequence() -> None:
    call = paged_call()
    del call["cu_seqlens_q"]
    call["q"] = call["q"][:2]
    plain, lse = octavo.paged_attention(**call, return_lse=True)
    out, lse_of_tree = octavo.paged_attention(**call, tree_mask=np.array([-1, 0]), return_lse=True)
    np.testing.assert_array_equal(out[0], plain[0])
    assert (lse_of_tree[1] < lse[1]).all()


BOOL_SHAPE = r"tree_mask of bool must have shape \[total_q, n\] with n at most 64, the bits of a word; got "


@pytest.mark.parametrize(
    ("mask", "options", "kind", "message"),
    [
        (np.zeros(3, np.int64), {}, ValueError, r"total_q of tree_mask \(3\) must equal that of q \(17\)"),
        (
            np.zeros(17, np.int32),
            {},
            ValueError,
            r"tree_mask must have shape \[total_q, 2\] of int32; got \[17\]",
        ),
        (np.zeros((17, 2), np.int64), {}, ValueError, r"tree_mask must have shape \[total_q\] of int64"),
        (
            np.zeros((17, 3), np.int32),
            {},
            ValueError,
            r"of int32 must be \[total_q, 2\] in C order; got \[17, 3\]",
        ),
        (np.zeros((17, 4), np.int32)[:, :2], {}, ValueError, r"must be \[total_q, 2\] in C order"),
        (
            np.zeros(17, np.int16),
            {},
            TypeError,
            "must be int64 or uint64, pairs of int32 or uint32, or bool; got int16",
        ),
        (
            Producer(np.zeros((17, 5), np.uint8), code=6),  # DLPack's bool
            {},
            TypeError,
            r"or bool; got bool of a library that octavo\.pack_tree_mask does not know",
        ),
        (np.ma.zeros((17, 5), bool), {}, TypeError, "tree_mask is a masked array"),
        (np.zeros(17, bool), {}, ValueError, BOOL_SHAPE + r"\[17\]"),
        (np.zeros((17, 65), bool), {}, ValueError, BOOL_SHAPE + r"\[17, 65\]"),
        (np.zeros((1, 17, 17), bool), {}, ValueError, BOOL_SHAPE + r"\[1, 17, 17\]"),
        (np.zeros((3, 5), bool), {}, ValueError, r"total_q of tree_mask \(3\) must equal that of q \(17\)"),
        (np.zeros((17, 5), bool), {"causal": False}, ValueError, "tree_mask needs causal"),
        (np.zeros(17, np.int64), {"causal": False}, ValueError, "tree_mask needs causal"),
    ],
)
def test_refusals(mask: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^paged_attention: .*" + message):
        octavo.paged_attention(**paged_call(), tree_mask=mask, **options)


def test_explain() -> None:
    call = {name: octavo_shape(x) for name, x in paged_call().items()}
    shapes = {"int64": (17,), "uint64": (17,), "uint32": (17, 2), "bool": (17, 5), "torch.bool": (17, 64)}
    for tree in (Shape(shape, dtype) for dtype, shape in shapes.items()):
        assert octavo.explain("paged_attention", **call, tree_mask=tree, device="h100").kernel
    with pytest.raises(ValueError, match="total_q of tree_mask"):
        octavo.explain("paged_attention", **call, tree_mask=Shape((3,), "int64"), device="h100")
    with pytest.raises(ValueError, match=BOOL_SHAPE + r"\[17, 65\]"):
        octavo.explain("paged_attention", **call, tree_mask=Shape((17, 65), "bool"), device="h100")


@dataclasses.dataclass
class Shape:
    """All that octavo.explain needs of an argument."""

    shape: tuple[int, ...]
    dtype: str


def octavo_shape(x: NDArray[Any]) -> Shape:
    return Shape(x.shape, "bfloat16" if x.dtype == np.float32 else str(x.dtype))


def test_helpers() -> None:
    random = np.random.default_rng(3)
    for n in (1, 2, 5, 31, 32, 33, 63, 64):
        parents = random_parents(random, n)
        words = ancestors(parents)
        sees = (words[:, None] >> np.arange(n, dtype=np.uint64) & np.uint64(1)).astype(bool)
        for made in (
            octavo.tree_mask(parents),
            octavo.pack_tree_mask(sees),
            octavo.pack_tree_mask(sees.tolist()),
        ):
            assert made.dtype == np.int64
            np.testing.assert_array_equal(made.view(np.uint64), words)
    both = octavo.tree_mask(np.array([[-1, 0, 0], [-1, -1, 1]]))
    np.testing.assert_array_equal(both, [1, 3, 5, 1, 2, 6])
    assert octavo.tree_mask(np.zeros((2, 0), np.int64)).shape == (0,)


def test_helpers_of_torch() -> None:
    torch = pytest.importorskip("torch")
    parents = random_parents(np.random.default_rng(4), 64)
    words = octavo.tree_mask(torch.tensor(parents, dtype=torch.int32))
    assert words.dtype == torch.int64
    np.testing.assert_array_equal(words.numpy().view(np.uint64), ancestors(parents))


def test_helpers_of_jax() -> None:
    jax = pytest.importorskip("jax")
    parents = random_parents(np.random.default_rng(5), 64)
    for words in (
        octavo.tree_mask(jax.numpy.array(parents)),
        jax.jit(octavo.tree_mask)(jax.numpy.array(parents)),
    ):
        assert words.dtype == "uint32"
        np.testing.assert_array_equal(np.asarray(words).reshape(-1).view(np.uint64), ancestors(parents))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: octavo.tree_mask([0]),
            ValueError,
            "must be -1 or less than their child's index; got 0 for token 0",
        ),
        (lambda: octavo.tree_mask([-1, 0, -2]), ValueError, "got -2 for token 2"),
        (
            lambda: octavo.tree_mask(range(65)),
            ValueError,
            "at most 64 tokens of a sequence, the bits of a word; got 65",
        ),
        (
            lambda: octavo.tree_mask([[-1, 0], [-1]]),
            ValueError,
            "^tree_mask: parents must be an array or a list of ints, rows of one length: ",
        ),
        (
            lambda: octavo.pack_tree_mask([[True], [True, False]]),
            ValueError,
            "^pack_tree_mask: mask must be an array or a list of bools, rows of one length: ",
        ),
        (
            lambda: octavo.tree_mask(np.zeros(0)),
            TypeError,
            "parents must be of integers; got float64",
        ),
        (lambda: octavo.tree_mask([0.5]), TypeError, "parents must be of integers; got float64"),
        (lambda: octavo.tree_mask(3), ValueError, r"must have one axis or more; got shape"),
        (lambda: octavo.pack_tree_mask([[1]]), TypeError, "mask must be of bool; got int64"),
        (lambda: octavo.pack_tree_mask(np.ones((2, 65), bool)), ValueError, "got 65"),
        (
            lambda: octavo.pack_tree_mask(Producer(np.ones((2, 2), bool))),
            TypeError,
            "^pack_tree_mask: mask must be an array of NumPy, PyTorch, CuPy or JAX, or a list; got Producer$",
        ),
        (
            lambda: octavo.tree_mask(Producer(np.zeros(2, np.int32))),
            TypeError,
            "^tree_mask: parents must be an array of NumPy, PyTorch, CuPy or JAX, or a list; got Producer$",
        ),
    ],
)
def test_refusals_of_helpers(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_helpers_of_nothing() -> None:
    """A sequence without new tokens, several of them, and no sequence."""
    for words in (
        octavo.tree_mask([]),
        octavo.tree_mask([[], []]),
        octavo.tree_mask(np.zeros((0, 5), np.int32)),
        octavo.pack_tree_mask([]),
        octavo.pack_tree_mask(np.zeros((0, 5), bool)),
    ):
        assert words.dtype == np.int64
    assert octavo.tree_mask([]).shape == octavo.tree_mask([[], []]).shape == (0,)
    np.testing.assert_array_equal(octavo.pack_tree_mask([[], []]), [0, 0])


@cpu_target
def test_kv_cache(target: Target) -> None:
    cache = octavo.KVCache(2, 2, 64, num_pages=8, page_size=16, dtype=target.dtype)
    sequence = cache.create()
    random = np.random.default_rng(6)
    new = [target.array(random.standard_normal((1, heads, 64)).repeat(7, 0)) for heads in (4, 2, 2)]
    prompt = cache.step([sequence], 7)
    prompt.attend(0, *new)
    step = cache.step([sequence], 7)
    tree = octavo.tree_mask([-1, 0, 0, 1, 1, 2, 5])
    parts = [target.array(random.standard_normal((7, heads, 64))) for heads in (4, 2, 2)]
    out = step.attend(0, *parts, tree_mask=tree)
    of_bools = step.attend(0, *parts, tree_mask=bools(tree.view(np.uint64), 7))
    np.testing.assert_array_equal(np.asarray(of_bools, np.float32), np.asarray(out, np.float32))
    chain_out = step.attend(0, *parts, tree_mask=np.full(7, -1))
    plain_out = step.attend(0, *parts)
    np.testing.assert_array_equal(np.asarray(chain_out, np.float32), np.asarray(plain_out, np.float32))
    assert not np.array_equal(np.asarray(out, np.float32), np.asarray(plain_out, np.float32))
