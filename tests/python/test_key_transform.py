"""Keys that are shifted, scaled and rotated before they become codes: codes bit for bit, and attention."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.quantised import KINDS, OPTIONS, Cache, Floats, append_packed, quantise, split

TRANSFORMS = ("offset", "scale", "rotated", "offset+scale", "offset+rotated", "offset+scale+rotated")


def transform_of(name: str, num_kv_heads: int, head_dim: int, size: float = 3.0) -> dict[str, Any]:
    """The arguments of both operators."""
    rng = np.random.default_rng(head_dim)
    shape = (num_kv_heads, head_dim)
    arguments: dict[str, Any] = {}
    if "offset" in name:
        arguments["k_channel_offset"] = (size * rng.standard_normal(shape)).astype(np.float32)
    if "scale" in name:
        arguments["k_channel_scale"] = rng.uniform(0.3, 3, shape).astype(np.float32)
    if "rotated" in name:
        arguments["rotate_keys"] = True
    return arguments


def rotate(rows: NDArray[Any]) -> NDArray[Any]:
    """By sums and differences in the dtype of the rows, as the formula orders them."""
    head_dim = rows.shape[-1]
    size = head_dim & -head_dim
    x, distance = rows.copy(), 1
    while distance < size:
        blocks = x.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = blocks[..., 0, :].copy(), blocks[..., 1, :].copy()
        blocks[..., 0, :], blocks[..., 1, :] = a + b, a - b
        distance *= 2
    return x * x.dtype.type(size**-0.5)


def stored_rows(
    rows: Floats,
    k_channel_offset: Floats | None = None,
    k_channel_scale: Floats | None = None,
    rotate_keys: bool = False,
) -> Floats:
    if k_channel_offset is not None:
        rows = rows - k_channel_offset
    if k_channel_scale is not None:
        rows = rows * (np.float32(1) / k_channel_scale)
    return rotate(rows) if rotate_keys else rows


def keys_of(cache: Cache, transform: dict[str, Any]) -> NDArray[np.float64]:
    """What the codes of keys stand for, the transform undone."""
    keys = cache.values()[0]
    if transform.get("rotate_keys"):
        keys = rotate(keys)
    keys = keys * transform.get("k_channel_scale", np.ones(1)).astype(np.float64)
    return keys + transform.get("k_channel_offset", np.zeros(1)).astype(np.float64)


def filled(
    kind: str, lengths: list[int], transform: dict[str, Any], head_dim: int
) -> tuple[Cache, NDArray[np.int32], NDArray[np.int32]]:
    """Sequences of these lengths in scattered pages of 16 tokens, two KV heads, their table and lengths."""
    rng = np.random.default_rng(len(lengths))
    columns = max(-(-n // 16) for n in lengths)
    cache = Cache.empty(kind, columns * len(lengths), 16, 2, head_dim)
    table = rng.permutation(columns * len(lengths)).reshape(len(lengths), columns).astype(np.int32)
    k, v = rng.standard_normal((2, sum(lengths), 2, head_dim)).astype(np.float32)
    k += transform.get("k_channel_offset", np.zeros(1, np.float32))
    octavo.append_kv(
        k,
        v,
        page_table=table,
        seq_lens=np.array(lengths, np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        **cache.arguments,
        **transform,
    )
    return cache, table, np.array(lengths, np.int32)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 192, 256])
def test_rotation_of_the_formula(head_dim: int) -> None:
    """Orthogonal, its own inverse, and of Hadamard's entries."""
    matrix = rotate(np.eye(head_dim))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-12)
    np.testing.assert_allclose(rotate(matrix), np.eye(head_dim), atol=1e-12)
    size = head_dim & -head_dim
    entries = np.abs(matrix).reshape(-1, size, head_dim // size, size).swapaxes(1, 2)
    np.testing.assert_allclose(entries[range(head_dim // size), range(head_dim // size)], size**-0.5)
    assert np.count_nonzero(np.abs(matrix) > 1e-12) == head_dim * size


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales(kind: str, head_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(head_dim)
    k, v = rng.standard_normal((2, 40, 2, head_dim)).astype(oracle.NUMPY_DTYPES[dtype])
    for name in TRANSFORMS:
        transform = transform_of(name, 2, head_dim)
        cache, plain = (Cache.empty(kind, 1, 40, 2, head_dim) for _ in range(2))
        tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.array([40], np.int32)}
        octavo.append_kv(
            k, v, cu_seqlens=np.array([0, 40], np.int32), **tables, **cache.arguments, **transform
        )
        codes, scales = quantise(stored_rows(k.astype(np.float32), **transform), split(kind)[0])
        assert cache.k_pages[0].tobytes() == codes.tobytes(), name
        assert cache.k_scales[0].tobytes() == scales.tobytes(), name
        append_packed(plain, k, v, tables["page_table"], 40)
        assert cache.v_pages.tobytes() == plain.v_pages.tobytes(), "values stay as they are"


def check_against_oracle(
    cache: Cache,
    q: NDArray[Any],
    table: NDArray[Any],
    lengths: NDArray[Any],
    transform: dict[str, Any],
    **options: Any,
) -> None:
    tables = {"page_table": table, "seq_lens": lengths}
    out, lse = octavo.paged_attention(q, return_lse=True, **tables, **cache.arguments, **transform, **options)
    with np.errstate(invalid="ignore"):
        k, v = (
            oracle.gather_pages(x, table, lengths.tolist())
            for x in (keys_of(cache, transform), cache.values()[1])
        )
    options = {name: x for name, x in options.items() if name not in ("num_splits", "batch_invariant")}
    options.pop("shared_prefix_len", None)
    counts = np.diff(options.pop("cu_seqlens_q", np.arange(len(q) + 1))).tolist()
    options.setdefault("causal", True)
    reference = oracle.attention(
        q.astype(np.float64), k, v, counts, lengths.tolist(), dtype="float32", **options
    )
    tolerance = 2e-5 if q.dtype == np.float32 else 2e-2
    np.testing.assert_allclose(out.astype(np.float32), reference.out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, reference.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("kind", "head_dim"), [("int8", 64), ("int4", 96), ("int8_int4", 128)])
def test_attention(kind: str, head_dim: int, transform: str, dtype: str) -> None:
    arguments = transform_of(transform, 2, head_dim)
    cache, table, lengths = filled(kind, [70, 1, 333], arguments, head_dim)
    q = np.random.default_rng(3).standard_normal((3, 8, head_dim)).astype(oracle.NUMPY_DTYPES[dtype])
    check_against_oracle(cache, q, table, lengths, arguments)


@pytest.mark.parametrize(
    "options", [x for x in OPTIONS if "softcap" not in x], ids=lambda options: "+".join(options)
)
def test_every_option(options: dict[str, Any]) -> None:
    arguments = transform_of("offset+scale+rotated", 2, 72)
    cache, table, lengths = filled("int8", [190, 140, 150, 629], arguments, 72)
    num_queries = options.get("cu_seqlens_q", [4])[-1]
    q = np.random.default_rng(5).standard_normal((num_queries, 8, 72)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths, arguments, **options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sinks_without_an_lse_and_with_a_shared_prefix(dtype: str) -> None:
    """Sinks join behind the offset, whose log-sum-exp is then needed though nobody asked for it."""
    arguments = transform_of("offset+rotated", 2, 64)
    cache, table, lengths = filled("int8", [200], arguments, 64)
    q = np.random.default_rng(6).standard_normal((3, 8, 64)).astype(dtype)
    table, lengths = np.repeat(table, 3, 0), np.array([200, 170, 0], np.int32)
    sinks = np.linspace(-3.0, 9.0, 8, dtype=np.float32)
    given = {"page_table": table, "seq_lens": lengths, **cache.arguments, **arguments, "sinks": sinks}
    out, lse = octavo.paged_attention(q, return_lse=True, **given)
    np.testing.assert_array_equal(octavo.paged_attention(q, **given), out)
    np.testing.assert_array_equal(lse[2], sinks)
    assert not out[2].any()
    check_against_oracle(cache, q[:2], table[:2], lengths[:2], arguments, sinks=sinks)
    check_against_oracle(cache, q[:2], table[:2], lengths[:2], arguments, sinks=sinks, shared_prefix_len=160)


def test_softcap_without_an_offset() -> None:
    arguments = transform_of("scale+rotated", 2, 64)
    cache, table, lengths = filled("int8", [190, 140], arguments, 64)
    q = np.random.default_rng(5).standard_normal((2, 8, 64)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths, arguments, softcap=5.0)


def test_static_scale_and_shared_prefix() -> None:
    """The offset of the LSE does not have the scale of codes."""
    arguments = transform_of("offset+scale+rotated", 2, 64)
    cache, table, lengths = filled("int8", [200], arguments, 64)
    rng = np.random.default_rng(6)
    cache.k_pages[:] = rng.integers(-127, 128, cache.k_pages.shape)
    cache.k_scales[:] = 0.03
    static: dict[str, Any] = {"k_scale": 0.03, "v_scale": 0.02}
    q = rng.standard_normal((3, 8, 64)).astype(np.float32)
    table, lengths = np.repeat(table, 3, 0), np.array([200, 170, 0], np.int32)
    given = {"page_table": table, "seq_lens": lengths, **arguments, "return_lse": True}
    pages = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    out, lse = octavo.paged_attention(q, **pages, **static, **given)
    by_token, lse_by_token = octavo.paged_attention(
        q, **pages, k_scales=cache.k_scales, v_scale=0.02, **given
    )
    np.testing.assert_allclose(out, by_token, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, lse_by_token, rtol=1e-5, atol=1e-5)
    assert (out[2] == 0).all() and np.isneginf(lse[2]).all()
    shared = octavo.paged_attention(q, shared_prefix_len=160, **pages, **static, **given)
    for x, y in zip(shared, (out, lse), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def with_an_empty_sequence(query: float) -> dict[str, Any]:
    """The arguments of a call whose second sequence has no tokens; `query` fills its query."""
    arguments = transform_of("offset+scale+rotated", 2, 64)
    cache, table, lengths = filled("int8", [20, 0], arguments, 64)
    q = np.random.default_rng(3).standard_normal((2, 8, 64)).astype(np.float32)
    q[1] = query
    return {"q": q, "page_table": table, "seq_lens": lengths, **cache.arguments, **arguments}


@pytest.mark.parametrize("query", [np.nan, np.inf, -np.inf])
def test_a_row_that_sees_no_key_lacks_no_term(query: float) -> None:
    """Its LSE is -inf, or its sink, and its output is 0, whatever its query holds."""
    given = with_an_empty_sequence(query)
    out, lse = octavo.paged_attention(return_lse=True, **given)
    assert np.isfinite(lse[0]).all() and np.isneginf(lse[1]).all() and not out[1].any()
    sinks = np.linspace(-3.0, 4.0, 8, dtype=np.float32)
    out, lse = octavo.paged_attention(return_lse=True, sinks=sinks, **given)
    np.testing.assert_array_equal(lse[1], sinks)
    assert not out[1].any()
    assert not octavo.paged_attention(sinks=sinks, **given)[1].any()


def test_out_may_be_q() -> None:
    arguments = transform_of("offset+rotated", 2, 64)
    cache, table, lengths = filled("int4", [70, 33], arguments, 64)
    q = np.random.default_rng(3).standard_normal((2, 8, 64)).astype(np.float32)
    given = {"page_table": table, "seq_lens": lengths, "return_lse": True, **cache.arguments, **arguments}
    expected, lse = octavo.paged_attention(q, **given)
    out, lse_in_place = octavo.paged_attention(q, out=q, **given)
    assert out is q and np.array_equal(out, expected) and np.array_equal(lse, lse_in_place)


@pytest.mark.parametrize("kind", ["int4", "int8", "int8_int4"])
def test_what_it_is_for(kind: str) -> None:
    """Keys with a few large channels lose less. The cache of empty_cache passes the transform on."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 300, 2, 64)).astype(np.float32)
    k[..., [5, 40]] = 12 + 2 * k[..., [5, 40]]
    q = rng.standard_normal((1, 64, 64)).astype(np.float32)
    tables = {
        "page_table": np.arange(19, dtype=np.int32)[None],
        "seq_lens": np.array([300], np.int32),
    }
    exact = oracle.attention(q, k, v, [1], [300], dtype="float32", causal=True).lse

    def error(**transform: Any) -> float:
        cache = octavo.empty_cache(19, 16, 2, 64, kind, **transform)
        octavo.append_kv(k, v, cu_seqlens=np.array([0, 300], np.int32), **tables, **cache.arguments)
        _, lse = octavo.paged_attention(q, return_lse=True, **tables, **cache.arguments)
        return float(np.abs(lse - exact).mean())

    mean = k.mean(0)
    assert error(k_channel_offset=mean, rotate_keys=True) < 0.5 * error()
    assert error(k_channel_offset=mean, k_channel_scale=np.abs(k - mean).max(0)) < 0.5 * error()


HEADS, HEAD_DIM = 4, 32
ARRAY = np.ones((HEADS, HEAD_DIM), np.float32)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k_channel_offset": ARRAY[:3]},
        ValueError,
        "k_channel_offset must have shape [num_kv_heads, head_dim]",
    ),
    ({"k_channel_scale": ARRAY[0]}, ValueError, "k_channel_scale must have shape [num_kv_heads, head_dim]"),
    (
        {"k_channel_scale": ARRAY.astype(np.float16)},
        TypeError,
        "k_channel_scale must be float32; got float16",
    ),
    (
        {"k_channel_offset": ARRAY.T.copy().T},
        ValueError,
        "k_channel_offset must have a unit stride along its last axis",
    ),
    (
        {"k_channel_scale": ARRAY * [[1], [1], [0], [1]]},
        TypeError,
        "k_channel_scale must be float32; got float64",
    ),
    (
        {"k_channel_scale": ARRAY * np.array([[1], [1], [0], [1]], np.float32)},
        ValueError,
        "k_channel_scale[2, 0] must be finite and greater than 0; got 0",
    ),
    (
        {"k_channel_scale": ARRAY * np.float32(1e-39)},
        ValueError,
        "k_channel_scale[0, 0] must be at least 2^-126, as the inverse of a smaller number may be beyond "
        "float32; got 1e-39",
    ),
    (
        {"k_channel_offset": ARRAY * np.float32(np.inf)},
        ValueError,
        "k_channel_offset[0, 0] must be finite; got inf",
    ),
    ({"rotate_keys": 1.5}, TypeError, "rotate_keys must be a bool; got float"),
]


def call(operator: str, dtype: str = "int8", **arguments: Any) -> None:
    cache = octavo.empty_cache(2, 16, HEADS, HEAD_DIM, dtype)
    new = np.ones((1, HEADS, HEAD_DIM), np.float32)
    tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    given = {"q": new} if operator == "paged_attention" else {"k": new, "v": new}
    getattr(octavo, operator)(**given, **cache.arguments, **arguments, **tables)


@pytest.mark.parametrize("operator", ["paged_attention", "append_kv"])
@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_both_refuse(
    operator: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(f"{operator}: {message}")):
        call(operator, **arguments)


@pytest.mark.parametrize("operator", ["paged_attention", "append_kv"])
@pytest.mark.parametrize("name", ["k_channel_offset", "k_channel_scale", "rotate_keys"])
def test_caches_of_floats_have_none(operator: str, name: str) -> None:
    value = True if name == "rotate_keys" else ARRAY
    message = f"{name} belongs to codes of 8 or 4 bits; "
    with pytest.raises(ValueError, match=f"{operator}: {message}k_pages hold float32"):
        call(operator, "float32", **{name: value})
    with pytest.raises(ValueError, match=f"empty_cache: {message}dtype is float16"):
        octavo.empty_cache(2, 16, HEADS, HEAD_DIM, "float16", **{name: value})


def test_an_offset_does_not_go_with_softcap() -> None:
    with pytest.raises(ValueError, match=r"k_channel_offset cannot go with softcap \(5\)"):
        call("paged_attention", k_channel_offset=ARRAY, softcap=5.0)


def test_results_lie_apart() -> None:
    memory = np.ones((1, HEADS, HEAD_DIM), np.float32)
    with pytest.raises(ValueError, match="paged_attention: out must not overlap k_channel_scale in memory"):
        call("paged_attention", k_channel_scale=memory[0], out=memory)
    cache = octavo.empty_cache(2, 16, HEADS, HEAD_DIM, "int8")
    scales = np.ones((2, 16, HEADS), np.float32)
    cache = cache._replace(k_scales=scales, k_channel_scale=scales[0, :1].repeat(HEAD_DIM, 0).T[:, :HEAD_DIM])
    view = np.lib.stride_tricks.as_strided(scales, (HEADS, HEAD_DIM), (128, 4))
    new = np.ones((1, HEADS, HEAD_DIM), np.float32)
    tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    with pytest.raises(ValueError, match="append_kv: k_channel_scale must not overlap k_scales in memory"):
        octavo.append_kv(new, new, **tables, **cache._replace(k_channel_scale=view).arguments)


def test_explain() -> None:
    given = {"k_channel_offset": ARRAY, "rotate_keys": True}
    cache = octavo.empty_cache(2, 16, HEADS, HEAD_DIM, "int8")
    tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    q = np.ones((1, HEADS, HEAD_DIM), np.float16)
    text = octavo.explain("paged_attention", q, **tables, **cache.arguments, **given, device="sm_90")
    assert "before it, transform_queries_kernel<float16>" in text.summary
    plain = octavo.explain("paged_attention", q, **tables, **cache.arguments, device="sm_90")
    assert text.kernel == plain.kernel and "transform" not in plain.summary


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_on_a_gpu(torch: Any, kind: str, head_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(head_dim)
    k, v = rng.standard_normal((2, 37, 2, head_dim)).astype(oracle.NUMPY_DTYPES[dtype])
    kinds = {"kv_dtype": "int4"} if kind.endswith("int4") else {}
    for name in TRANSFORMS:
        transform = transform_of(name, 2, head_dim)
        cache = Cache.empty(kind, 1, 40, 2, head_dim)
        tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.array([37], np.int32)}
        tables["cu_seqlens"] = np.array([0, 37], np.int32)
        octavo.append_kv(k, v, **tables, **cache.arguments, **transform)
        empty = Cache.empty(kind, 1, 40, 2, head_dim).arguments
        gpu = on_gpu(torch, {"k": k, "v": v, **tables, **transform, **empty})
        octavo.append_kv(**gpu, **kinds)
        for array in ("k_pages", "v_pages", "k_scales", "v_scales"):
            on_cpu = gpu[array].contiguous().view(torch.uint8).cpu().numpy()
            assert on_cpu.tobytes() == getattr(cache, array).tobytes(), (name, array)


def on_gpu(torch: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    def move(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            raw = torch.from_numpy(x.view(np.uint16 if x.itemsize == 2 else np.uint8).copy()).cuda()
            return raw.view(getattr(torch, x.dtype.name))
        return torch.from_numpy(np.ascontiguousarray(x)).cuda()

    return {name: move(x) for name, x in arguments.items() if name != "kv_dtype"}


@pytest.mark.gpu
@pytest.mark.parametrize("query", [np.nan, np.inf, -np.inf])
def test_a_row_that_sees_no_key_lacks_no_term_on_a_gpu(torch: Any, query: float) -> None:
    given = with_an_empty_sequence(query)
    gpu = on_gpu(torch, {**given, "q": given["q"].astype(np.float16)})
    out, lse = octavo.paged_attention(return_lse=True, **gpu)
    assert lse[0].isfinite().all() and lse[1].isneginf().all() and not out[1].any()
    sinks = torch.linspace(-3.0, 4.0, 8, device="cuda")
    out, lse = octavo.paged_attention(return_lse=True, sinks=sinks, **gpu)
    torch.testing.assert_close(lse[1], sinks)
    assert not out[1].any()
    assert not octavo.paged_attention(sinks=sinks, **gpu)[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("int8", 64), ("int4", 128), ("int8_int4", 96), ("int8", 256)]
)
@pytest.mark.parametrize("cu_seqlens_q", [None, [0, 1, 2, 203]])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_attention_on_a_gpu(
    torch: Any,
    kind: str,
    head_dim: int,
    transform: str,
    dtype: str,
    cu_seqlens_q: list[int] | None,
    with_sinks: bool,
) -> None:
    """Against the CPU; in a captured graph the bits are those of the call, and follow the arrays."""
    arguments = transform_of(transform, 2, head_dim, size=1.0)
    cache, table, lengths = filled(kind, [70, 1, 333], arguments, head_dim)
    packed = {} if cu_seqlens_q is None else {"cu_seqlens_q": np.array(cu_seqlens_q, np.int32)}
    if with_sinks:
        packed["sinks"] = np.linspace(-3.0, 4.0, 8, dtype=np.float32)
    num_queries = 3 if cu_seqlens_q is None else cu_seqlens_q[-1]
    q = np.random.default_rng(3).standard_normal((num_queries, 8, head_dim))
    q = q.astype(oracle.NUMPY_DTYPES[dtype])
    given = {"page_table": table, "seq_lens": lengths, **packed, **cache.arguments, **arguments}
    expected, expected_lse = octavo.paged_attention(q.astype(np.float32), return_lse=True, **given)
    gpu = on_gpu(torch, {"q": q, **given})
    if "kv_dtype" in given:
        gpu["kv_dtype"] = given["kv_dtype"]
    out, lse = octavo.paged_attention(return_lse=True, **gpu)
    assert torch.equal(octavo.paged_attention(**gpu), out)
    tolerance = 4e-3 if dtype == "float16" else 3e-2
    np.testing.assert_allclose(out.float().cpu().numpy(), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.cpu().numpy(), expected_lse, rtol=tolerance, atol=tolerance)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        in_graph, lse_in_graph = octavo.paged_attention(return_lse=True, **gpu)
    for _ in range(2):
        in_graph.fill_(float("nan"))
        graph.replay()
        assert torch.equal(in_graph, out) and torch.equal(lse_in_graph, lse)
    in_place = gpu["q"].clone()
    octavo.paged_attention(**{**gpu, "q": in_place}, out=in_place)
    assert torch.equal(in_place, out)
