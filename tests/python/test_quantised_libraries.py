"""Caches of codes through every array library: the bits that NumPy's arrays give."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support.quantised import KINDS, Cache

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 8, 2, 16
TABLES = {"page_table": np.array([[3, 0], [1, 2]], np.int32), "seq_lens": np.array([12, 5], np.int32)}
CU_SEQLENS = np.array([0, 12, 17], np.int32)
COPIES = np.array([[3, 0]], np.int32)
ARRAYS = ("k_pages", "v_pages", "k_scales", "v_scales")


def new_tokens() -> tuple[NDArray[np.float32], ...]:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 17, NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)
    return k, v, rng.standard_normal((2, 2 * NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)


def empty(kind: str) -> Cache:
    cache = Cache.empty(kind, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    for name in ARRAYS:
        getattr(cache, name)[:] = 0
    return cache


def with_numpy(kind: str) -> tuple[Cache, list[NDArray[Any]]]:
    """The cache after an append and a copy, and out and lse in between."""
    cache, (k, v, q) = empty(kind), new_tokens()
    octavo.append_kv(k, v, cu_seqlens=CU_SEQLENS, **TABLES, **cache.arguments)
    results = octavo.paged_attention(q, return_lse=True, **TABLES, **cache.arguments)
    octavo.copy_pages(copies=COPIES, **{name: getattr(cache, name) for name in ARRAYS})
    return cache, list(results)


@pytest.fixture
def octavo_torch() -> ModuleType:
    pytest.importorskip("torch")
    return importlib.import_module("octavo.torch")


@pytest.fixture
def octavo_jax() -> ModuleType:
    pytest.importorskip("jax")
    return importlib.import_module("octavo.jax")


def to_torch(array: NDArray[Any]) -> Any:
    torch = importlib.import_module("torch")
    if array.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return torch.from_numpy(array.view(np.uint8).copy()).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array.copy())


def bytes_of(array: Any) -> bytes:
    if hasattr(array, "untyped_storage"):
        torch = importlib.import_module("torch")
        array = array.contiguous().view(torch.uint8).numpy()
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("face", ["octavo", "octavo.torch", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch(kind: str, face: str, octavo_torch: ModuleType) -> None:
    torch = importlib.import_module("torch")
    cache, expected = with_numpy(kind)
    ours = {name: to_torch(getattr(empty(kind), name)) for name in ARRAYS}
    dtype = {"kv_dtype": "int4"} if "kv_dtype" in cache.arguments else {}
    k, v, q = map(to_torch, new_tokens())
    tables = {name: to_torch(x) for name, x in TABLES.items()}
    cu_seqlens, copies = to_torch(CU_SEQLENS), to_torch(COPIES)
    module: Any = octavo if face == "octavo" else octavo_torch

    def run(cache: dict[str, Any]) -> Any:
        module.append_kv(k, v, cu_seqlens=cu_seqlens, **tables, **cache, **dtype)
        results = module.paged_attention(q, return_lse=True, **tables, **cache, **dtype)
        module.copy_pages(copies=copies, **cache)
        return results

    if face == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    versions = [x._version for x in ours.values()]
    results = run(ours)
    assert [bytes_of(x) for x in results] == [bytes_of(x) for x in expected]
    for name, version in zip(ARRAYS, versions, strict=True):
        assert bytes_of(ours[name]) == bytes_of(getattr(cache, name)), name
        if face == "octavo.torch":
            assert ours[name]._version > version
    to = {f"to_{name}": torch.zeros_like(x) for name, x in ours.items()}
    module.copy_pages(copies=copies, **ours, **to)
    for name in ARRAYS:
        assert bytes_of(to[f"to_{name}"][0]) == bytes_of(getattr(cache, name)[3])


@pytest.mark.parametrize("length", [1, NUM_KV_HEADS])
def test_torch_scales_in_memory(length: int, octavo_torch: ModuleType) -> None:
    torch = importlib.import_module("torch")
    k, v, q = map(to_torch, new_tokens())
    tables = {name: to_torch(x) for name, x in TABLES.items()}
    scales = {"k_scale": torch.full((length,), 0.02), "v_scale": torch.full((length,), 0.03)}
    numbers = {name: float(x[0]) for name, x in scales.items()}
    outs = []
    for module, given in (
        (octavo, numbers),
        (octavo, scales),
        (octavo_torch, scales),
        (octavo_torch, numbers),
    ):
        pages = [
            torch.zeros(NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.int8) for _ in range(2)
        ]
        module.append_kv(k, v, *pages, cu_seqlens=to_torch(CU_SEQLENS), **tables, **given)
        outs.append([*pages, module.paged_attention(q, *pages, **tables, **given)])
    for other in outs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outs[0], other, strict=True))
    scales["k_scale"] = scales["k_scale"].double()
    with pytest.raises(TypeError, match="paged_attention: k_scale must be float32; got float64"):
        octavo_torch.paged_attention(q, *pages, **tables, **scales)


@pytest.mark.parametrize("kind", KINDS)
def test_jax(kind: str, octavo_jax: ModuleType) -> None:
    jax = importlib.import_module("jax")
    cache, expected = with_numpy(kind)
    kv_dtype = "int4" if "kv_dtype" in cache.arguments else None
    k, v, q = map(jax.numpy.asarray, new_tokens())
    names = ("k_pages", "v_pages", "k_scales", "v_scales")

    def step(**arrays: Any) -> Any:
        pages = octavo_jax.append_kv(k, v, cu_seqlens=CU_SEQLENS, **TABLES, **arrays, kv_dtype=kv_dtype)
        arrays = dict(zip(names, pages, strict=True))
        results = octavo_jax.paged_attention(q, return_lse=True, **TABLES, **arrays, kv_dtype=kv_dtype)
        copied = octavo_jax.copy_pages(copies=COPIES, **arrays)
        return results, copied

    def given() -> dict[str, Any]:
        return {name: jax.numpy.asarray(getattr(empty(kind), name)).copy() for name in names}

    for function in (step, jax.jit(step), jax.jit(step, donate_argnames=names)):
        results, copied = function(**given())
        assert [bytes_of(x) for x in results] == [bytes_of(x) for x in expected]
        for name, x in zip(names, copied, strict=True):
            assert bytes_of(x) == bytes_of(getattr(cache, name)), name
    to = {f"to_{name}": jax.numpy.zeros_like(x[:2]) for name, x in given().items()}
    appended = octavo_jax.append_kv(k, v, cu_seqlens=CU_SEQLENS, **TABLES, **given(), kv_dtype=kv_dtype)
    copy = jax.jit(lambda arrays, to: octavo_jax.copy_pages(copies=COPIES, **arrays, **to))
    elsewhere = copy(dict(zip(names, appended, strict=True)), to)
    for name, x in zip(names, elsewhere, strict=True):
        assert bytes_of(x[0]) == bytes_of(getattr(cache, name)[3]), name
        assert x.shape[0] == 2 and not np.asarray(x[1]).view(np.uint8).any()
    donated = given()
    addresses = {x.unsafe_buffer_pointer() for x in donated.values()}
    _, copied = jax.jit(step, donate_argnames=names)(**donated)
    assert {x.unsafe_buffer_pointer() for x in copied} == addresses
    outside = octavo.paged_attention(q, **TABLES, **{**cache.arguments, **given()})
    assert outside.shape == q.shape


def test_jax_scales_in_memory(octavo_jax: ModuleType) -> None:
    jax = importlib.import_module("jax")
    k, v, q = new_tokens()
    pages = {name: np.zeros((NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), np.int8) for name in ARRAYS[:2]}

    @jax.jit
    def step(k_scale: Any, v_scale: Any) -> Any:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        k_pages, v_pages = octavo_jax.append_kv(k, v, **pages, **TABLES, cu_seqlens=CU_SEQLENS, **scales)
        return k_pages, octavo_jax.paged_attention(q, k_pages, v_pages, **TABLES, **scales)

    numbers = {"k_scale": 0.02, "v_scale": 0.03}
    octavo.append_kv(k, v, **pages, **TABLES, cu_seqlens=CU_SEQLENS, **numbers)
    expected = octavo.paged_attention(q, **pages, **TABLES, **numbers)
    for shape in ((), (1,), (NUM_KV_HEADS,)):
        k_pages, out = step(*(np.full(shape, x, np.float32) for x in numbers.values()))
        assert bytes_of(k_pages) == pages["k_pages"].tobytes()
        assert bytes_of(out) == expected.tobytes()
    with pytest.raises(TypeError, match="append_kv: k_scale must be float32; got float16"):
        step(np.ones(1, np.float16), np.ones(1, np.float32))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int8_int4"])
def test_jax_vmap(kind: str, shared: bool, octavo_jax: ModuleType) -> None:
    jax = importlib.import_module("jax")
    cache, _ = with_numpy(kind)
    names = ARRAYS
    kv_dtype = "int4" if "kv_dtype" in cache.arguments else None
    qs = np.random.default_rng(2).standard_normal((3, *new_tokens()[2].shape)).astype(np.float32)
    caches = [getattr(cache, name) for name in names]
    if not shared:
        caches = [np.stack([x, x[::-1], x]) for x in caches]

    def attend(q: Any, *arrays: Any) -> Any:
        return octavo_jax.paged_attention(
            q, **dict(zip(names, arrays, strict=True)), **TABLES, kv_dtype=kv_dtype
        )

    mapped = jax.vmap(attend, in_axes=(0, *[None if shared else 0] * 4))(qs, *caches)
    for i, q in enumerate(qs):
        one = attend(q, *(x if shared else x[i] for x in caches))
        assert bytes_of(mapped[i]) == bytes_of(one)
    if shared:
        return
    k, v, _ = new_tokens()

    def append(*arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return octavo_jax.append_kv(k, v, **given, **TABLES, cu_seqlens=CU_SEQLENS, kv_dtype=kv_dtype)

    for i, results in enumerate(zip(*jax.vmap(append)(*caches), strict=True)):
        assert [bytes_of(x) for x in results] == [bytes_of(x) for x in append(*(x[i] for x in caches))]


def test_jax_vmap_over_static_scales(octavo_jax: ModuleType) -> None:
    jax = importlib.import_module("jax")
    rng = np.random.default_rng(3)
    pages = rng.integers(-127, 128, (2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)).astype(np.int8)
    q, scales = new_tokens()[2], np.array([[0.01], [0.02]], np.float32)

    def attend(scale: Any) -> Any:
        return octavo_jax.paged_attention(q, *pages, **TABLES, k_scale=scale, v_scale=scale)

    mapped = jax.vmap(attend)(scales)
    for i, scale in enumerate(scales):
        assert bytes_of(mapped[i]) == bytes_of(attend(scale))


def test_int4_arrays_are_refused_by_name(octavo_jax: ModuleType) -> None:
    jnp = importlib.import_module("jax.numpy")
    _, _, q = new_tokens()
    pages = jnp.zeros((NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), jnp.int4)
    for module in (octavo, octavo_jax):
        with pytest.raises(
            TypeError, match=r"k_pages must be .* or uint8; got int4; a cache of int4 is of uint8"
        ):
            module.paged_attention(q, pages, pages, **TABLES)


@pytest.mark.parametrize("kind", KINDS)
def test_explain(kind: str) -> None:
    """Arrays that have shapes alone, on the CPU and on a GPU."""
    torch = pytest.importorskip("torch")
    cache = empty(kind)
    k, v, q = (torch.empty(x.shape, device="meta") for x in new_tokens())
    meta = {name: to_torch(getattr(cache, name)).to("meta") for name in ARRAYS}
    tables = {name: to_torch(x).to("meta") for name, x in TABLES.items()}
    options = {"kv_dtype": "int4"} if "kv_dtype" in cache.arguments else {}
    explanation = octavo.explain("paged_attention", q, device="cpu", **meta, **tables, **options)
    assert explanation.file == "src/cpu/forward.cpp"
    appended = {"cu_seqlens": to_torch(CU_SEQLENS).to("meta"), **tables, **options}
    assert octavo.explain("append_kv", k, v, device="cpu", **meta, **appended).file == "src/cpu/cache.cpp"
    half = q.half()
    on_gpu = octavo.explain("paged_attention", half, device="h100", **meta, **tables, **options)
    assert on_gpu.file in ("src/cuda/decode/split_kv.cuh", "src/cuda/sm80_attention/kernel.cuh")
    assert kind.removesuffix("_int4") in on_gpu.kernel or on_gpu.plan["feature"] == "codes"
    with pytest.raises(TypeError, match="paged_attention: no CUDA kernel for float32"):
        octavo.explain("paged_attention", q, device="h100", **meta, **tables, **options)
    wrong = {**meta, "k_scales": meta["k_scales"][0]}
    with pytest.raises(ValueError, match="k_scales must have shape"):
        octavo.explain("paged_attention", q, device="cpu", **wrong, **tables, **options)
    copies = to_torch(COPIES).to("meta")
    assert octavo.explain("copy_pages", copies=copies, device="cpu", **meta).file == "src/cpu/cache.cpp"
    if kind == "int8":
        static = {"k_scale": torch.empty(2, device="meta"), "v_scale": np.float32(0.5)}
        pages = {name: meta[name] for name in ARRAYS[:2]}
        assert octavo.explain("paged_attention", q, device="cpu", **pages, **tables, **static).plan
        with pytest.raises(ValueError, match=r"k_scale must be a number, or have shape \[1\]"):
            octavo.explain("paged_attention", q, device="cpu", **pages, **tables, k_scale=q, v_scale=1.0)
