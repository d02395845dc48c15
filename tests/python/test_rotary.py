"""The rotary embedding that append_kv applies to new keys and to queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import oracle, problems
from support.calls import GuardedArray
from support.case import Case
from support.quantised import KINDS
from support.targets import Target, cpu_target, writable_target
from test_cache import LAYOUTS, MutableCache
from test_key_transform import TRANSFORMS, transform_of

POSITIONS_PAST_ALL = 5  # rows of the tables that no token uses


def positions_of(case: Case) -> NDArray[np.int64]:
    """The position of each new token; -1 for padding."""
    each = [
        np.arange(m - n, m) if m else np.full(n, -1)
        for n, m in zip(case.seqlens_q, case.seqlens_k, strict=True)
    ]
    return np.concatenate([np.zeros(0, int), *each])


def tables_for(positions: NDArray[np.int64], rotary_dim: int, dtype: str) -> tuple[NDArray, NDArray]:
    """Cosines and sines of numbers of `dtype`; NaN where no token is."""
    max_positions = int(positions.max(initial=0)) + 1 + POSITIONS_PAST_ALL
    angles = np.random.default_rng(rotary_dim).uniform(-4, 4, (max_positions, rotary_dim // 2))
    unused = np.setdiff1d(np.arange(max_positions), positions)
    tables = []
    for table in (np.cos(angles), np.sin(angles)):
        table = oracle.round_to(table, dtype)
        table[unused] = np.nan
        tables.append(table)
    return tables[0], tables[1]


@dataclass
class Problem:
    """New tokens of a case with their queries, and what the operator has to make of them, bit for bit."""

    case: Case
    k: NDArray[np.float64]
    v: NDArray[np.float64]
    q: NDArray[np.float64]
    cos: NDArray[np.float64]
    sin: NDArray[np.float64]
    rotated_k: NDArray[np.float32]
    rotated_q: NDArray[np.float32]

    @classmethod
    def make(
        cls, case: Case, dtype: str, rotary_dim: int, table_dtype: str, *, interleaved: bool = False
    ) -> Problem:
        random = np.random.default_rng(3)
        rows = (
            (case.num_kv_heads, case.head_dim),
            (case.num_kv_heads, case.head_dim_v),
            (case.num_q_heads, case.head_dim),
        )
        total = sum(case.seqlens_q)
        k, v, q = (oracle.round_to(random.standard_normal((total, *row)), dtype) for row in rows)
        positions = positions_of(case)
        cos, sin = tables_for(positions, rotary_dim, table_dtype)
        is_token = positions >= 0
        rotated = []
        for x in (k, q):
            rows = x.astype(np.float32)
            arguments = (x[is_token], positions[is_token], cos, sin)
            rows[is_token] = oracle.rotate(*arguments, interleaved=interleaved, dtype=np.float32)
            true = oracle.rotate(*arguments, interleaved=interleaved)
            assert np.abs(rows[is_token] - true).max(initial=0.0) < 1e-6  # the oracle's own rounding
            rotated.append(rows)
        return cls(case, k, v, q, cos, sin, *rotated)

    def tables(self, target: Target, table_dtype: str) -> dict[str, Any]:
        return {
            "rotary_cos": target.library.array(self.cos, table_dtype),
            "rotary_sin": target.library.array(self.sin, table_dtype),
        }


def check(
    target: Target,
    case: Case,
    rotary_dim: int,
    *,
    layout: str = "contiguous",
    interleaved: bool = False,
    table_dtype: str = "float32",
    packed: bool = True,
    with_queries: bool = True,
) -> None:
    problem = Problem.make(case, target.dtype, rotary_dim, table_dtype, interleaved=interleaved)
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, layout)
    queries = {"q": target.array(problem.q)} if with_queries else {}
    q_out = cache.append(
        case,
        table,
        target.array(problem.k),
        target.array(problem.v),
        problems.cumulative(case.seqlens_q) if packed else None,
        rotary_interleaved=interleaved,
        **problem.tables(target, table_dtype),
        **queries,
    )
    cache.check_append(case, table, oracle.round_to(problem.rotated_k, target.dtype), problem.v)
    if not with_queries:
        assert q_out is None
        return
    assert isinstance(q_out, target.library.array_type) and target.dtype in str(q_out.dtype)
    np.testing.assert_array_equal(
        target.library.to_float64(q_out), oracle.round_to(problem.rotated_q, target.dtype)
    )
    np.testing.assert_array_equal(target.library.to_float64(queries["q"]), problem.q)  # as it was


CASES = (
    (Case("rotary_decode", (1, 1, 1), (1, 16, 17), num_q_heads=4, num_kv_heads=2, head_dim=64), 64),
    (Case("rotary_padding", (1, 1, 1, 1), (0, 5, 0, 40), num_q_heads=3, num_kv_heads=1, head_dim=64), 32),
    (Case("rotary_packed_padding", (3, 5, 2), (0, 9, 0), num_q_heads=2, num_kv_heads=2, head_dim=32), 32),
    (
        Case("rotary_prompts", (33, 0, 1, 17), (33, 5, 1, 90), num_q_heads=2, num_kv_heads=2, head_dim=128),
        128,
    ),
    (Case("rotary_many_heads", (5, 1), (5, 70), num_q_heads=40, num_kv_heads=8, head_dim=128), 128),
    (Case("rotary_page_size_17", (40, 1, 3), (57, 18, 30), page_size=17, num_kv_heads=3, head_dim=80), 32),
    (Case("rotary_neox_20b", (4, 1), (19, 16), num_q_heads=2, num_kv_heads=2, head_dim=96), 24),
    (Case("rotary_pairs", (4, 1), (19, 16), num_q_heads=1, num_kv_heads=1, head_dim=8), 2),
    (Case("rotary_head_dim_7", (4, 1), (19, 16), num_q_heads=2, num_kv_heads=1, head_dim=7), 6),
    (Case("rotary_gptj", (2, 1), (7, 16), num_q_heads=2, num_kv_heads=2, head_dim=256), 64),
    (
        Case("rotary_192_128", (33, 0, 1), (33, 5, 17), num_kv_heads=2, head_dim=192, value_dim=128),
        64,
    ),
    (Case("rotary_64_128", (5, 1), (5, 70), num_q_heads=6, num_kv_heads=2, head_dim=64, value_dim=128), 64),
    (Case("rotary_nothing", (0, 0), (0, 7)), 16),
)
every_case = pytest.mark.parametrize(("case", "rotary_dim"), CASES, ids=[str(case) for case, _ in CASES])


@writable_target
@pytest.mark.parametrize("interleaved", [False, True])
@every_case
def test_keys_and_queries(target: Target, case: Case, rotary_dim: int, interleaved: bool) -> None:
    for table_dtype in {"float32", target.dtype}:
        options: dict[str, Any] = {"interleaved": interleaved, "table_dtype": table_dtype}
        check(target, case, rotary_dim, **options)
        check(target, case, rotary_dim, with_queries=False, **options)
        if case.is_decode:
            check(target, case, rotary_dim, packed=False, **options)


@writable_target
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target: Target, layout: str) -> None:
    for case, rotary_dim in CASES[2:7]:
        check(target, case, rotary_dim, layout=layout)


@st.composite
def rotated_cases(draw: st.DrawFn) -> tuple[Case, int]:
    batch = draw(st.integers(0, 4))
    counts = draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    head_dim = draw(st.one_of(st.integers(2, 40), st.sampled_from((48, 64, 80, 96, 128, 192, 256))))
    case = Case(
        f"rotary {draw(st.integers(0, 1000))}",
        tuple(counts),
        tuple(draw(st.one_of(st.just(0), st.integers(n, n + 60))) for n in counts),
        num_q_heads=draw(st.integers(0, 9)),
        num_kv_heads=draw(st.integers(0, 5)),
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(0), st.integers(1, 260))),
        page_size=draw(st.sampled_from((1, 2, 3, 16, 17, 64))),
    )
    return case, 2 * draw(st.integers(1, head_dim // 2))


@writable_target
@given(
    drawn=rotated_cases(),
    layout=st.sampled_from(LAYOUTS),
    interleaved=st.booleans(),
    is_float32=st.booleans(),
    with_queries=st.booleans(),
)
def test_any_shape(
    target: Target,
    drawn: tuple[Case, int],
    layout: str,
    interleaved: bool,
    is_float32: bool,
    with_queries: bool,
) -> None:
    case, rotary_dim = drawn
    table_dtype = "float32" if is_float32 else target.dtype
    check(
        target,
        case,
        rotary_dim,
        layout=layout,
        interleaved=interleaved,
        table_dtype=table_dtype,
        with_queries=with_queries,
    )


@writable_target
@pytest.mark.parametrize("is_in_place", [False, True])
def test_views_of_one_projection(target: Target, is_in_place: bool) -> None:
    """q, k and v side by side, q rotated where it is; and both tables side by side, as in vLLM."""
    case, rotary_dim = CASES[3]
    problem = Problem.make(case, target.dtype, rotary_dim, "float32")
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, "contiguous")
    projection = target.array(np.concatenate([problem.q, problem.k, problem.v], axis=1))
    q, k, v = projection[:, :2], projection[:, 2:4], projection[:, 4:]
    both = target.library.float32(np.concatenate([problem.cos, problem.sin], axis=1))
    guarded = GuardedArray(target, *problem.q.shape)
    q_out = q if is_in_place else guarded.array
    cos_and_sin = {"rotary_cos": both[:, :64], "rotary_sin": both[:, 64:]}
    result = cache.append(
        case, table, k, v, problems.cumulative(case.seqlens_q), q=q, q_out=q_out, **cos_and_sin
    )
    assert result is q_out
    cache.check_append(case, table, oracle.round_to(problem.rotated_k, target.dtype), problem.v)
    rotated = oracle.round_to(problem.rotated_q, target.dtype)
    np.testing.assert_array_equal(target.library.to_float64(q_out), rotated)
    whole = target.library.to_float64(projection)
    np.testing.assert_array_equal(whole[:, :2], rotated if is_in_place else problem.q)
    np.testing.assert_array_equal(whole[:, 2:], np.concatenate([problem.k, problem.v], axis=1))
    guarded.check_margins()


@writable_target
@pytest.mark.parametrize("head_dim", [60, 64])
def test_scales_of_caches_of_floats(target: Target, head_dim: int) -> None:
    """The rotated key is divided and then rounded, once."""
    case = Case("rotary_scaled", (5, 1, 3), (21, 9, 30), num_q_heads=2, num_kv_heads=2, head_dim=head_dim)
    problem = Problem.make(case, target.dtype, 32, "float32")
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, "contiguous")
    new = target.array(problem.k), target.array(problem.v)
    scales = {"k_scale": 0.3, "v_scale": 2.0}
    cu_seqlens, tables = problems.cumulative(case.seqlens_q), problem.tables(target, "float32")
    q_out = cache.append(case, table, *new, cu_seqlens, q=target.array(problem.q), **scales, **tables)
    keys = oracle.round_to(problem.rotated_k / np.float32(0.3), target.dtype)
    cache.check_append(case, table, keys, problem.v / 2.0)
    np.testing.assert_array_equal(
        target.library.to_float64(q_out), oracle.round_to(problem.rotated_q, target.dtype)
    )


def bytes_of(target: Target, array: Any) -> NDArray[np.uint8]:
    """The bytes of codes or scales."""
    if target.library_name == "torch":
        return array.contiguous().view(target.library.torch.uint8).cpu().numpy().copy()
    return np.ascontiguousarray(target.library.to_numpy(array)).view(np.uint8)


@writable_target
@pytest.mark.parametrize("transform", ["", *TRANSFORMS])
@pytest.mark.parametrize("head_dim_v", [80, 48, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_codes(target: Target, kind: str, head_dim_v: int, transform: str) -> None:
    """Those of keys rotated beforehand, in float32, whatever is done to keys then; queries as ever."""
    head_dim, interleaved = 80, transform == "rotated"
    case = Case(
        "rotary_codes",
        (5, 1, 0, 2),
        (21, 9, 4, 0),
        num_q_heads=3,
        num_kv_heads=2,
        head_dim=head_dim,
        value_dim=head_dim_v,
    )
    problem = Problem.make(case, target.dtype, 48, "float32", interleaved=interleaved)
    table, num_pages = problems.make_page_table(case)
    transforms = {
        name: target.library.float32(x) if isinstance(x, np.ndarray) else x
        for name, x in transform_of(transform, 2, head_dim).items()
    }
    arrays = {
        "page_table": target.int32(table),
        "seq_lens": target.int32(case.seqlens_k),
        "cu_seqlens": target.int32(problems.cumulative(case.seqlens_q)),
    }

    def empty() -> octavo.PagedCache:
        cache = octavo.empty_cache(
            num_pages,
            case.page_size,
            2,
            head_dim,
            kind,
            like=arrays["page_table"],
            head_dim_v=head_dim_v,
            **transforms,
        )
        for array in cache.arrays.values():
            array[...] = 0
        return cache

    expected, cache = empty(), empty()
    rotated_k, v = (target.library.float32(x) for x in (problem.rotated_k, problem.v))
    octavo.append_kv(rotated_k, v, **arrays, **expected.arguments)
    q_out = octavo.append_kv(
        target.array(problem.k),
        target.array(problem.v),
        **arrays,
        **cache.arguments,
        **problem.tables(target, "float32"),
        rotary_interleaved=interleaved,
        q=target.array(problem.q),
    )
    for ours, theirs in zip(cache.arrays.values(), expected.arrays.values(), strict=True):
        np.testing.assert_array_equal(bytes_of(target, ours), bytes_of(target, theirs))
        assert bytes_of(target, ours).any()
    np.testing.assert_array_equal(
        target.library.to_float64(q_out), oracle.round_to(problem.rotated_q, target.dtype)
    )


@writable_target
def test_codes_with_static_scales_and_queries_in_place(target: Target) -> None:
    case, rotary_dim = CASES[1]
    problem = Problem.make(case, target.dtype, rotary_dim, target.dtype)
    table, num_pages = problems.make_page_table(case)
    like = target.int32([0])
    make = {"like": like, "token_scales": False}
    caches = [octavo.empty_cache(num_pages, 16, 1, 64, "int8", **make) for _ in range(2)]
    for cache in caches:
        cache.k_pages[...] = cache.v_pages[...] = 0
    arguments = {"page_table": target.int32(table), "seq_lens": target.int32(case.seqlens_k)}
    arguments |= {"k_scale": 0.02, "v_scale": 0.03}
    q, v = target.array(problem.q), target.library.float32(problem.v)
    octavo.append_kv(target.library.float32(problem.rotated_k), v, **arguments, **caches[0].arguments)
    tables = problem.tables(target, target.dtype)
    new = target.array(problem.k), target.array(problem.v)
    assert octavo.append_kv(*new, **arguments, **caches[1].arguments, **tables, q=q, q_out=q) is q
    for ours, theirs in zip(caches[1].arrays.values(), caches[0].arrays.values(), strict=True):
        np.testing.assert_array_equal(bytes_of(target, ours), bytes_of(target, theirs))
    np.testing.assert_array_equal(
        target.library.to_float64(q), oracle.round_to(problem.rotated_q, target.dtype)
    )


@cpu_target
def test_a_rotated_step_over_a_shared_prefix(target: Target) -> None:
    """Two forks of a prompt, a token each: attention of keys and queries that were rotated by themselves."""
    alloc = octavo.PageAllocator(8, 4)
    prompt = alloc.create()
    alloc.extend(prompt, 9)
    random = np.random.default_rng(0)
    k, v = (oracle.round_to(random.standard_normal((11, 2, 16)), target.dtype) for _ in "kv")
    q = oracle.round_to(random.standard_normal((2, 4, 16)), target.dtype)
    cos, sin = tables_for(np.arange(10), 16, "float32")
    tables = {"rotary_cos": cos.astype(np.float32), "rotary_sin": sin.astype(np.float32)}
    k_pages, v_pages = target.nan(8, 4, 2, 16), target.nan(8, 4, 2, 16)
    page_table, seq_lens = alloc.page_table([prompt])
    octavo.append_kv(
        *(target.array(x[:9]) for x in (k, v)),
        *(k_pages, v_pages, page_table, seq_lens),
        cu_seqlens=np.array([0, 9], np.int32),
        **tables,
    )
    samples = [prompt, *alloc.fork(prompt)]
    for sample in samples:
        alloc.extend(sample, 1)
    octavo.copy_pages(k_pages, v_pages, alloc.take_copies())
    page_table, seq_lens = alloc.page_table(samples)
    new = (target.array(x[9:]) for x in (k, v))
    arrays = (k_pages, v_pages, page_table, seq_lens)
    rotated = octavo.append_kv(*new, *arrays, **tables, q=target.array(q))
    result = octavo.paged_attention(rotated, *arrays, shared_prefix_len=8, return_lse=True)

    positions = np.append(np.arange(9), [9, 9])
    keys = oracle.round_to(oracle.rotate(k, positions, cos, sin, dtype=np.float32), target.dtype)
    queries = oracle.round_to(oracle.rotate(q, positions[9:], cos, sin, dtype=np.float32), target.dtype)
    tokens = np.array([*range(9), 9, *range(9), 10])
    reference = oracle.attention(
        queries, keys[tokens], v[tokens], (1, 1), (10, 10), dtype=target.dtype, causal=True
    )
    reference.check(*(target.library.to_float64(x) for x in result))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_equals_that_of_transformers(heads: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    num_q_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, num_q_heads, 64, generator=generator)
    k, v = (torch.randn(7, num_kv_heads, 64, generator=generator) for _ in "kv")
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    position_ids = torch.arange(13, 20)
    cos, sin = (torch.cat([x, x], dim=-1)[position_ids][None] for x in (angles.cos(), angles.sin()))
    expected = llama.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)

    k_pages, v_pages = torch.zeros(2, 5, 4, num_kv_heads, 64)
    page_table, seq_lens = torch.arange(5, dtype=torch.int32)[None], torch.tensor([20], dtype=torch.int32)
    q_out = octavo.append_kv(
        *(k, v, k_pages, v_pages, page_table, seq_lens),
        cu_seqlens=torch.tensor([0, 7], dtype=torch.int32),
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        q=q,
    )
    torch.testing.assert_close(q_out, expected[0][0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    stored = k_pages.view(20, num_kv_heads, 64)[13:]
    torch.testing.assert_close(stored, expected[1][0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("head_dim", [64, 60])
def test_positions_past_the_tables_become_nan_on_a_gpu(kind: str, head_dim: int) -> None:
    """Nothing is read past the tables, no other sequence is touched, and whoever attends notices."""
    torch = pytest.importorskip("torch")
    like = torch.zeros(1, device="cuda")
    cache = octavo.empty_cache(4, 4, 2, head_dim, kind, like=like)
    for array in cache.arrays.values():
        array.zero_()
    k = torch.ones(2, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    tables = torch.ones(
        2, 9, 20, device="cuda"
    )  # 40 numbers of a head are rotated; their last row is not ours
    indices = {"dtype": torch.int32, "device": "cuda"}
    arguments = {
        "page_table": torch.tensor([[0, 1, 2], [3, -1, -1]], **indices),
        "seq_lens": torch.tensor([9, 1], **indices),
        "rotary_cos": tables[0, :8],
        "rotary_sin": tables[1, :8],
    }
    q_out = octavo.append_kv(k, k, **arguments, **cache.arguments, q=k)
    assert q_out[0, :, :40].isnan().all() and (q_out[0, :, 40:] == 1).all() and q_out[1].isfinite().all()
    stored = cache.k_scales[2, 0] if cache.k_scales is not None else cache.k_pages[2, 0, :, :40].float()
    assert stored.isnan().all()
    tables_of_pages = {name: arguments[name] for name in ("page_table", "seq_lens")}
    if head_dim % 8 == 0:  # as paged_attention wants it
        out = octavo.paged_attention(q_out, **tables_of_pages, **cache.arguments)
        assert out[0].isnan().all() and out[1].isfinite().all()
    with pytest.raises(ValueError, match=r"seq_lens\[0\] \(9\) must be at most max_positions \(8\)"):
        octavo.check_page_table(**tables_of_pages, num_pages=4, page_size=4, max_positions=8)


def test_plan() -> None:
    """Pieces of 16 bytes where all strides, and the halves of what is rotated, permit them."""
    torch = pytest.importorskip("torch")

    def make(*shape: int, dtype: Any = torch.float16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    def plan(head_dim: int = 128, rotary_dim: int = 128, table: Any = torch.float32, **arrays: Any) -> Any:
        new, pages = make(3, 8, head_dim), make(2, 16, 8, head_dim)
        indices = make(3, 1, dtype=torch.int32), make(3, dtype=torch.int32)
        tables = make(40, rotary_dim // 2, dtype=table)
        options = {"rotary_cos": tables, "rotary_sin": tables, **arrays}
        explanation = octavo.explain("append_kv", new, new, pages, pages, *indices, **options, device="h200")
        assert explanation.kernel == "append_rotary_kernel<float16>" and explanation.plan["rotary"]
        return explanation.plan["num_ctas"], explanation.plan["in_chunks"]

    assert plan() == (3, True)
    assert plan(q=make(3, 32, 128)) == (9, True)
    assert plan(k_scale=0.5) == (3, True)
    assert plan(80, 32) == (3, True)
    assert plan(96, 24) == (18, False)
    assert plan(table=torch.float16) == (3, True)
    assert plan(rotary_cos=make(40, 66, dtype=torch.float32)[:, :64]) == (24, False)
    assert plan(q=make(3, 8, 130)[..., :128]) == (36, False)
