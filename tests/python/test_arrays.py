"""Arrays in and out: what every library's arrays may look like, and that nothing is copied or leaked."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from libraries import ArrayLibrary, get_library
from producers import COPIED, READ_ONLY, NamespacedProducer, Producer

DTYPES = ("float32", "float16", "bfloat16")
CPU_LIBRARIES = [("numpy", "cpu"), ("torch", "cpu"), ("jax", "cpu")]
GPU_LIBRARIES = [("torch", "cuda"), ("cupy", "cuda"), ("jax", "cuda")]


def _parameters(libraries: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(name, device, id=f"{name}_{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
        for name, device in libraries
    ]


def _library(name: str, device: str) -> ArrayLibrary:
    if name != "numpy":
        pytest.importorskip(name, reason=f"{name} is not installed")
    return get_library(name, device)


every_library = pytest.mark.parametrize(("name", "device"), _parameters(CPU_LIBRARIES + GPU_LIBRARIES))
writable_library = pytest.mark.parametrize(
    ("name", "device"), _parameters([x for x in CPU_LIBRARIES + GPU_LIBRARIES if x[0] != "jax"])
)


def dtypes_of(device: str) -> tuple[str, ...]:
    return DTYPES if device == "cpu" else DTYPES[1:]


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def qkv() -> tuple[NDArray[np.float32], ...]:
    return random(2, 3, 4, 64), random(2, 5, 2, 64), random(2, 5, 2, 64) + 1


def expected(dtype: str, *arrays: NDArray) -> NDArray[np.float64]:
    """The same call on NumPy's arrays, which the operators' tests hold against the oracle."""
    numpy = get_library("numpy", "cpu")
    return numpy.to_float64(octavo.attention(*(numpy.array(x, dtype) for x in arrays)))


def assert_equal_results(device: str, actual: NDArray, wanted: NDArray) -> None:
    if device == "cpu":
        np.testing.assert_array_equal(actual, wanted)
    else:  # another backend: within a few roundings of bfloat16
        np.testing.assert_allclose(actual, wanted, atol=0.03)


def cache(num_pages: int = 3, page_size: int = 4) -> SimpleNamespace:
    """A call of append_kv: one new token for each of two sequences."""
    return SimpleNamespace(
        k=random(2, 2, 64),
        v=random(2, 2, 64) + 1,
        k_pages=np.zeros((num_pages, page_size, 2, 64), np.float32),
        v_pages=np.zeros((num_pages, page_size, 2, 64), np.float32),
        page_table=np.array([[2], [0]], np.int32),
        seq_lens=np.array([3, 1], np.int32),
    )


def test_import_needs_numpy_only_and_is_fast() -> None:
    code = """
import sys, time
import numpy
start = time.perf_counter()
import octavo
seconds = time.perf_counter() - start
loaded = {"torch", "jax", "cupy", "ml_dtypes"} & set(sys.modules)
assert not loaded, loaded
assert seconds < 0.1, seconds
"""
    # The best of three: the machine may be busy.
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert any(run.returncode == 0 for run in runs), runs[0].stderr


@every_library
def test_results_are_of_the_callers_kind(name: str, device: str) -> None:
    library = _library(name, device)
    arrays = qkv()
    for dtype in dtypes_of(device):
        q, k, v = (library.array(x, dtype) for x in arrays)
        out, lse = octavo.attention(q, k, v, return_lse=True)
        alone = octavo.attention(q, k, v)
        for result in (out, lse, alone):
            assert isinstance(result, library.array_type)
            assert str(result.device) == str(q.device)
        assert str(out.dtype) == str(q.dtype)
        assert "float32" in str(lse.dtype)
        assert tuple(out.shape) == (2, 3, 4, 64)
        assert tuple(lse.shape) == (2, 3, 4)
        assert_equal_results(device, library.to_float64(out), expected(dtype, *arrays))
        np.testing.assert_array_equal(library.to_float64(alone), library.to_float64(out))
        merged, merged_lse = octavo.merge_states(out, lse, out, lse)
        assert isinstance(merged, library.array_type)
        assert isinstance(merged_lse, library.array_type)
        np.testing.assert_allclose(
            library.to_float64(merged_lse), library.to_float64(lse) + np.log(2), rtol=1e-5, atol=1e-5
        )


@every_library
def test_empty_arrays(name: str, device: str) -> None:
    library = _library(name, device)
    none = np.zeros((0, 3, 4, 64))
    out, lse = octavo.attention(*(library.array(none, "float16") for _ in range(3)), return_lse=True)
    assert tuple(out.shape) == (0, 3, 4, 64)
    assert tuple(lse.shape) == (0, 3, 4)
    # Keys without queries, and queries without keys.
    keys = library.array(random(2, 5, 4, 64), "float16")
    no_queries = library.array(np.zeros((2, 0, 4, 64)), "float16")
    assert tuple(octavo.attention(no_queries, keys, keys).shape) == (2, 0, 4, 64)
    out, lse = octavo.attention(keys, no_queries, no_queries, return_lse=True)
    assert (library.to_float64(out) == 0).all()
    assert (library.to_float64(lse) == -np.inf).all()


@writable_library
def test_writes_go_to_the_callers_memory(name: str, device: str) -> None:
    library = _library(name, device)
    for dtype in dtypes_of(device):
        call = cache()
        k, v = library.array(call.k, dtype), library.array(call.v, dtype)
        k_pages, v_pages = library.array(call.k_pages, dtype), library.array(call.v_pages, dtype)
        table, lengths = library.int32(call.page_table), library.int32(call.seq_lens)
        assert octavo.append_kv(k, v, k_pages, v_pages, table, lengths) is None
        for pages, new in ((k_pages, k), (v_pages, v)):
            written, values = library.to_float64(pages), library.to_float64(new)
            np.testing.assert_array_equal(written[2, 2], values[0])
            np.testing.assert_array_equal(written[0, 0], values[1])
            assert np.count_nonzero(written) == np.count_nonzero(values)
        before = library.to_float64(k_pages)
        assert octavo.copy_pages(k_pages, v_pages, library.int32([[2, 1]])) is None
        before[1] = before[2]
        np.testing.assert_array_equal(library.to_float64(k_pages), before)


@writable_library
def test_out_is_returned_itself(name: str, device: str) -> None:
    library = _library(name, device)
    for dtype in dtypes_of(device):
        q, k, v = (library.array(x, dtype) for x in qkv())
        wanted = library.to_float64(octavo.attention(q, k, v))
        out = library.array(np.full((2, 3, 4, 64), np.nan), dtype)
        assert octavo.attention(q, k, v, out=out) is out
        np.testing.assert_array_equal(library.to_float64(out), wanted)
        out, given = library.array(np.full((2, 3, 4, 64), np.nan), dtype), out
        result, lse = octavo.attention(q, k, v, out=given, return_lse=True)
        assert result is given
        assert tuple(lse.shape) == (2, 3, 4)
        # Into every second row of a bigger array.
        big = library.array(np.full((2, 6, 4, 64), np.nan), dtype)
        view = big[:, ::2]
        assert octavo.attention(q, k, v, out=view) is view
        np.testing.assert_array_equal(library.to_float64(big)[:, ::2], wanted)
        assert np.isnan(library.to_float64(big)[:, 1::2]).all()


@writable_library
def test_views_with_a_unit_last_stride(name: str, device: str) -> None:
    library = _library(name, device)
    arrays = qkv()
    for dtype in dtypes_of(device):
        wanted = library.to_float64(octavo.attention(*(library.array(x, dtype) for x in arrays)))
        head_major = [library.swap_axes(library.array(x.swapaxes(1, 2), dtype), 1, 2) for x in arrays]
        np.testing.assert_array_equal(library.to_float64(octavo.attention(*head_major)), wanted)
        sliced = [library.array(np.repeat(x, 2, axis=1), dtype)[:, 1::2] for x in arrays]
        np.testing.assert_array_equal(library.to_float64(octavo.attention(*sliced)), wanted)
        wide = [library.array(np.concatenate([x, x], -1), dtype)[..., 64:] for x in arrays]
        np.testing.assert_array_equal(library.to_float64(octavo.attention(*wide)), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_strides(dtype: str) -> None:
    library = get_library("numpy", "cpu")
    q, k, v = (library.array(x, dtype) for x in qkv())
    wanted = octavo.attention(q, k, v)
    flipped = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)]
    assert all(x.strides[1] < 0 for x in flipped)
    np.testing.assert_array_equal(octavo.attention(*flipped), wanted)
    out = np.empty_like(q)
    octavo.attention(q, k, v, out=out[:, :, ::-1])
    np.testing.assert_array_equal(out[:, :, ::-1], wanted)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_inputs_are_not_copied(name: str) -> None:
    """A cache of 2**36 bytes that is one page over and over: no copy of it would fit into memory."""
    library = _library(name, "cpu")
    page = library.array(random(1, 16, 1, 64), "float32")
    shape = (2**24, 16, 1, 64)
    pages = np.broadcast_to(page, shape) if name == "numpy" else page.expand(shape)
    q = library.array(random(1, 1, 64), "float32")
    table, seq_lens = library.int32([[2**24 - 1, 7]]), library.int32([20])
    out = octavo.paged_attention(q, pages, pages, table, seq_lens)
    first = library.array(random(1, 16, 1, 64), "float32")
    wanted = octavo.paged_attention(q, first, first, library.int32([[0, 0]]), seq_lens)
    np.testing.assert_array_equal(library.to_float64(out), library.to_float64(wanted))


def test_jax_inputs_are_not_copied() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import resource
import jax.numpy as jnp, numpy as np, octavo
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
lens = jnp.zeros(4, "int32")
octavo.check_page_table(jnp.zeros((4, 4), "int32"), lens, num_pages=1, page_size=1)
table = jnp.zeros((4, 2**25), "int32").block_until_ready()
before = peak()
for _ in range(3):
    octavo.check_page_table(table, lens, num_pages=1, page_size=1)
assert peak() - before < table.nbytes // 8, (peak() - before, table.nbytes)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_read_only_inputs() -> None:
    arrays = qkv()
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        writable = [x.astype(dtype) for x in arrays]
        frozen = [x.copy() for x in writable]
        for x in frozen:
            x.flags.writeable = False
        np.testing.assert_array_equal(octavo.attention(*frozen), octavo.attention(*writable))
        out = octavo.attention(*frozen)
        assert out.flags.writeable
    call = cache()
    for x in (call.k, call.v, call.page_table, call.seq_lens):
        x.flags.writeable = False
    octavo.append_kv(**vars(call))
    assert call.k_pages.any()


def test_many_dtype_objects() -> None:
    """What is known of the dtypes seen last: more of them than are remembered, between bfloat16 arrays."""
    arrays = qkv()
    expected = octavo.attention(*arrays)
    bfloat16 = [x.astype(ml_dtypes.bfloat16) for x in arrays]
    expected_bfloat16 = octavo.attention(*bfloat16)
    for i in range(40):
        dtype = np.dtype(np.float32, metadata={"i": i})
        assert dtype is not np.dtype(np.float32)
        out = octavo.attention(*(x.view(dtype) for x in arrays))
        np.testing.assert_array_equal(out, expected)
        if i % 3 == 0:
            np.testing.assert_array_equal(octavo.attention(*bfloat16), expected_bfloat16)


def test_bfloat16_arrays_of_ml_dtypes_stay_what_they_are() -> None:
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in qkv())
    out = octavo.attention(q, k, v)
    assert out.dtype == np.dtype(ml_dtypes.bfloat16)
    given = np.empty_like(q)
    assert octavo.attention(q, k, v, out=given) is given
    np.testing.assert_array_equal(given, out)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = get_library("torch", "cpu")
    same = octavo.attention(*(library.from_numpy(x) for x in (q, k, v)))
    assert same.dtype == torch.bfloat16
    np.testing.assert_array_equal(library.to_numpy(same), out)


@pytest.mark.parametrize("first", [name for name, _ in CPU_LIBRARIES])
def test_mixed_frameworks(first: str) -> None:
    libraries = {name: _library(name, "cpu") for name, _ in CPU_LIBRARIES}
    others = [name for name in libraries if name != first]
    q, k, v = qkv()
    for dtype in DTYPES:
        out, lse = octavo.attention(
            libraries[first].array(q, dtype),
            libraries[others[0]].array(k, dtype),
            libraries[others[1]].array(v, dtype),
            prefix_lens=libraries[others[0]].int32([0, 0]),
            return_lse=True,
        )
        for result in (out, lse):
            assert isinstance(result, libraries[first].array_type)
        np.testing.assert_array_equal(libraries[first].to_float64(out), expected(dtype, q, k, v))


def test_subclasses_and_parameters() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q, k, v = (torch.from_numpy(x) for x in qkv())
    wanted = octavo.attention(q, k, v)
    with torch.no_grad():
        assert torch.equal(octavo.attention(torch.nn.Parameter(q), k, v), wanted)
    with torch.inference_mode():
        assert torch.equal(octavo.attention(q.clone(), k, v), wanted)

    class OldTensor(torch.Tensor):  # as before torch had the exchange table
        __dlpack_c_exchange_api__ = None

    old = [x.as_subclass(OldTensor) for x in (q, k, v)]
    out, lse = octavo.attention(*old, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out.as_subclass(torch.Tensor), wanted)
    assert lse.dtype == torch.float32
    old[0].requires_grad_()
    with torch.no_grad():
        assert torch.equal(octavo.attention(*old), wanted)
    with pytest.raises(TypeError, match=r"attention: q requires grad"):
        octavo.attention(*old)
    recarray = qkv()[0].view(np.recarray)  # a subclass of numpy.ndarray
    np.testing.assert_array_equal(octavo.attention(recarray, *qkv()[1:]), wanted.numpy())


class ExchangeTable(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 5),
    ]


def test_variants_of_the_exchange_table() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no exchange table")
    name = b"dlpack_exchange_api"
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = get_pointer(torch.Tensor.__dlpack_c_exchange_api__, name)

    def copy() -> ExchangeTable:
        return ExchangeTable.from_buffer_copy(
            (ctypes.c_char * ctypes.sizeof(ExchangeTable)).from_address(address)
        )

    without_borrowing, newer, unknown, incomplete = copy(), copy(), copy(), copy()
    without_borrowing.functions[3] = None  # optional
    newer.major, newer.previous = 2, address
    unknown.major, unknown.previous = 2, None
    incomplete.functions[0] = None
    q, k, v = (torch.from_numpy(x) for x in qkv())
    wanted = octavo.attention(q, k, v)
    for table in (without_borrowing, newer, unknown, incomplete):
        capsule = new_capsule(ctypes.addressof(table), name, None)
        kind = type("Tensor", (torch.Tensor,), {"__dlpack_c_exchange_api__": capsule})
        out, lse = octavo.attention(*(x.as_subclass(kind) for x in (q, k, v)), return_lse=True)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out.as_subclass(torch.Tensor), wanted)
        assert lse.shape == (2, 3, 4)


def test_stream_is_ignored_on_the_cpu() -> None:
    q, k, v = qkv()
    wanted = octavo.attention(q, k, v)
    streams = [0, 12345, np.int64(7).item(), SimpleNamespace(ptr=5), SimpleNamespace(cuda_stream=5)]
    streams += [SimpleNamespace(__cuda_stream__=lambda: (0, 5)), SimpleNamespace(__cuda_stream__=(0, 5))]
    for stream in streams:
        np.testing.assert_array_equal(octavo.attention(q, k, v, stream=stream), wanted)


def test_numpy_scalars_as_numbers() -> None:
    q, k, v = qkv()
    wanted = octavo.attention(q, k, v, causal=True, window_left=2, softmax_scale=0.5, softcap=3.0)
    out = octavo.attention(
        q,
        k,
        v,
        causal=np.True_,
        window_left=np.int64(2),
        softmax_scale=np.float64(0.5),
        softcap=np.float32(3),
    )
    np.testing.assert_array_equal(out, wanted)


# Hand-made producers.


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("with_strides", [True, False])
@pytest.mark.parametrize("byte_offset", [0, 256])
def test_capsules(versioned: bool, with_strides: bool, byte_offset: int) -> None:
    options = {"versioned": versioned, "with_strides": with_strides, "byte_offset": byte_offset}
    k, v = (Producer(x, **options) for x in qkv()[1:])
    out = octavo.attention(qkv()[0], k, v)
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    for producer in (k, v):
        assert (producer.lent, producer.given_back) == (1, 1)
        assert producer.requests == [{"max_version": (1, 3)}]


@pytest.mark.parametrize("keywords", [("stream",), ()])
def test_producers_from_before_max_version(keywords: tuple[str, ...]) -> None:
    k = Producer(qkv()[1], keywords=keywords, versioned=False)
    out = octavo.attention(qkv()[0], k, qkv()[2])
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    assert k.requests == [{"max_version": (1, 3)}, {}]
    assert (k.lent, k.given_back) == (1, 1)


def test_tensors_are_given_back_after_an_error() -> None:
    k, v = (Producer(x) for x in qkv()[1:])
    with pytest.raises(ValueError, match="window_left"):
        octavo.attention(qkv()[0], k, v, window_left=-2)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an array"):
        octavo.attention(qkv()[0], k, v, cu_seqlens_q=3)
    newer = Producer(qkv()[2], version=(2, 0))
    with pytest.raises(TypeError, match="version"):
        octavo.attention(qkv()[0], k, newer)
    for producer, times in ((k, 3), (v, 2), (newer, 1)):
        assert (producer.lent, producer.given_back) == (times, times)


def test_pinned_host_memory_is_the_cpus() -> None:
    k = Producer(qkv()[1], device=(3, 0))
    np.testing.assert_array_equal(octavo.attention(qkv()[0], k, qkv()[2]), expected("float32", *qkv()))


def test_results_for_any_framework_with_a_namespace() -> None:
    q = NamespacedProducer(qkv()[0])
    out, lse = octavo.attention(q, *qkv()[1:], return_lse=True)
    assert isinstance(out, np.ndarray)  # what the namespace makes of them
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    assert lse.shape == (2, 3, 4)
    given = np.empty_like(qkv()[0])
    assert octavo.attention(Producer(qkv()[0]), *qkv()[1:], out=given) is given


def test_flags_of_outputs() -> None:
    call = cache()
    call.k_pages = Producer(call.k_pages, flags=READ_ONLY)
    with pytest.raises(ValueError, match="append_kv: k_pages must be writable; it is read-only"):
        octavo.append_kv(**vars(call))
    call.k_pages = Producer(call.k_pages.values, flags=COPIED)
    with pytest.raises(TypeError, match="append_kv: k_pages is written to, but was handed over as a copy"):
        octavo.append_kv(**vars(call))
    call.k = Producer(call.k, flags=READ_ONLY | COPIED)
    call.k_pages = Producer(call.k_pages.values)
    octavo.append_kv(**vars(call))
    assert call.k_pages.values.any()
    assert call.k_pages.given_back == 1


# Leaks and the interpreter lock.


@pytest.mark.parametrize(("name", "device"), _parameters(CPU_LIBRARIES + GPU_LIBRARIES))
def test_no_reference_is_kept(name: str, device: str) -> None:
    library = _library(name, device)
    q, k, v = (library.array(x, "float16") for x in qkv())
    lens, wrong = library.int32([1, 2]), library.int32([1, 2, 3])
    dtype = q.dtype
    octavo.attention(q, k, v, prefix_lens=lens)
    before = [sys.getrefcount(x) for x in (q, k, v, lens, wrong, dtype)]
    for _ in range(50):
        octavo.attention(q, k, v, prefix_lens=lens, return_lse=True)
        with pytest.raises(ValueError, match="prefix_lens"):
            octavo.attention(q, k, v, prefix_lens=wrong)
        with pytest.raises(TypeError):
            octavo.attention(q, k, v, prefix_lens=q)
    gc.collect()
    after = [sys.getrefcount(x) for x in (q, k, v, lens, wrong, dtype)]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 5
    out, lse = octavo.attention(q, k, v, return_lse=True)
    dead = [weakref.ref(out), weakref.ref(lse)]
    del out, lse
    gc.collect()
    assert all(reference() is None for reference in dead)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "other"])
def test_results_are_freed(name: str) -> None:
    q = np.zeros((1, 2**15, 1, 8), np.float32)  # 1 MiB
    k = np.zeros((1, 1, 1, 8), np.float32)
    mine = NamespacedProducer(q) if name == "other" else _library(name, "cpu").from_numpy(q)
    for _ in range(20):
        octavo.attention(mine, k, k, return_lse=True)
    before = resident_bytes()
    for _ in range(100):
        octavo.attention(mine, k, k, return_lse=True)
    gc.collect()
    assert resident_bytes() - before < 50 * 2**20


def test_the_interpreter_lock_is_released() -> None:
    q = random(1, 4096, 8, 64)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        start = time.perf_counter()
        octavo.attention(q, q, q)
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    during = sum(start < t < end for t in ticks)
    assert end - start > 0.02
    assert during >= 3, f"{during} ticks in {end - start:.3f} s"


def test_calls_from_several_threads() -> None:
    wanted = expected("float32", *qkv())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                np.testing.assert_array_equal(octavo.attention(*qkv()), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# CUDA devices and streams.


def cuda_qkv(library: ArrayLibrary) -> list[Any]:
    return [library.array(x, "float16") for x in qkv()]


@pytest.mark.gpu
def test_torch_current_stream() -> None:
    import torch

    library = get_library("torch", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = octavo.attention(q, k, v)
    torch.cuda.synchronize()
    late = torch.zeros_like(k)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(k)
        out = octavo.attention(q, late, v)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["address", "torch", "cupy", "protocol"])
def test_stream_argument_waits_for_the_current_stream(kind: str) -> None:
    import cupy
    import torch

    library = get_library("torch", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = octavo.attention(q, k, v)
    torch.cuda.synchronize()
    theirs = torch.cuda.Stream()
    stream: Any = {
        "address": theirs.cuda_stream,
        "torch": theirs,
        "cupy": cupy.cuda.ExternalStream(theirs.cuda_stream),
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, theirs.cuda_stream)),
    }[kind]
    late = torch.zeros_like(k)
    out = torch.zeros_like(q)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    late.copy_(k)
    assert octavo.attention(q, late, v, out=out, stream=stream) is out
    theirs.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_cupy_current_stream() -> None:
    import cupy
    import torch

    library = get_library("cupy", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = library.to_numpy(octavo.attention(q, k, v))
    late = cupy.zeros_like(k)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(50_000_000)
        late[...] = k
        out = octavo.attention(q, late, v)
        stream.synchronize()
    np.testing.assert_array_equal(library.to_numpy(out), wanted)
    # An array of CuPy's current stream beside a call on torch's.
    torch_q = get_library("torch", "cuda").from_numpy(library.to_numpy(q))
    late[...] = 0
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(50_000_000)
        late[...] = k
        result = octavo.attention(torch_q, late, v)
    torch.cuda.current_stream().synchronize()
    np.testing.assert_array_equal(result.cpu().numpy(), wanted)


@pytest.mark.gpu
def test_the_current_stream_of_a_cache_waits_for_what_is_written() -> None:
    import cupy
    import torch

    call = cache()
    torch_library, cupy_library = get_library("torch", "cuda"), get_library("cupy", "cuda")
    k, v = (torch_library.array(x, "float16") for x in (call.k, call.v))
    k_pages, v_pages = (cupy_library.array(x, "float16") for x in (call.k_pages, call.v_pages))
    table, lengths = torch_library.int32(call.page_table), torch_library.int32(call.seq_lens)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(50_000_000)
        octavo.append_kv(k, v, k_pages, v_pages, table, lengths)
        written = cupy.asnumpy(k_pages[0, 0].copy())
    np.testing.assert_array_equal(written, torch_library.to_numpy(k)[1])


@pytest.mark.gpu
def test_jax_results_are_ready() -> None:
    import jax

    library = get_library("jax", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = library.to_numpy(octavo.attention(q, k, v))
    multiply = jax.jit(lambda x: x @ x)
    big = jax.device_put(np.eye(4096, dtype=np.float16), library.jax_device)
    for _ in range(20):
        big = multiply(big)
        late = k + big[0, 1]  # zero, once all that is done
        out = octavo.attention(q, late, v)
        assert next(iter(out.devices())).platform == "gpu"
        np.testing.assert_array_equal(library.to_numpy(out), wanted)
        del late


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["torch", "cupy", "jax"])
def test_mixed_frameworks_on_a_gpu(first: str) -> None:
    libraries = {name: get_library(name, "cuda") for name in ("torch", "cupy", "jax")}
    others = [name for name in libraries if name != first]
    q, k, v = qkv()
    for dtype in ("float16", "bfloat16"):
        out, lse = octavo.attention(
            libraries[first].array(q, dtype),
            libraries[others[0]].array(k, dtype),
            libraries[others[1]].array(v, dtype),
            prefix_lens=libraries[others[0]].int32([0, 0]),
            return_lse=True,
        )
        assert isinstance(out, libraries[first].array_type)
        assert isinstance(lse, libraries[first].array_type)
        assert_equal_results("cuda", libraries[first].to_float64(out), expected(dtype, q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_mixed_devices_are_refused(name: str) -> None:
    library = get_library(name, "cuda")
    q, k, v = cuda_qkv(library)
    host = qkv()[1].astype(np.float16)
    message = "attention: all arrays must be on one device; k is on cpu, the first array on cuda:0"
    with pytest.raises(RuntimeError) as error:
        octavo.attention(q, host, v)
    assert str(error.value) == message
    message = "attention: all arrays must be on one device; k is on cuda:0, the first array on cpu"
    with pytest.raises(RuntimeError) as error:
        octavo.attention(qkv()[0].astype(np.float16), k, v)
    assert str(error.value) == message


@pytest.mark.gpu
def test_cuda_graph_capture_with_new_results() -> None:
    import torch

    library = get_library("torch", "cuda")
    q, k, v = cuda_qkv(library)
    octavo.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = octavo.attention(q, k, v, return_lse=True)
    q.mul_(0.5)
    graph.replay()
    wanted, wanted_lse = octavo.attention(q, k, v, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


@pytest.mark.gpu
def test_pinned_torch_tensors_are_the_cpus() -> None:
    import torch

    q, k, v = (torch.from_numpy(x).pin_memory() for x in qkv())
    out = octavo.attention(q, k, v)
    assert out.device.type == "cpu"
    np.testing.assert_array_equal(out.numpy().astype(np.float64), expected("float32", *qkv()))


@pytest.mark.gpu
def test_streams_given_to_producers() -> None:
    """A CUDA array of an unknown framework is asked for on our stream; 1 stands for the legacy default."""
    import torch

    data = get_library("torch", "cuda").array(qkv()[1], "float16")

    class Wrapper:
        streams: list[Any]

        def __init__(self) -> None:
            self.streams = []

        def __dlpack_device__(self) -> tuple[int, int]:
            return data.__dlpack_device__()

        def __dlpack__(self, *, stream: int | None = None, **keywords: Any) -> object:
            self.streams.append(stream)
            return data.__dlpack__(stream=stream, **keywords)

    q, _, v = cuda_qkv(get_library("torch", "cuda"))
    k = Wrapper()
    octavo.attention(q, k, v)
    side = torch.cuda.Stream()
    octavo.attention(q, k, v, stream=side)
    side.synchronize()
    assert k.streams == [1, side.cuda_stream]
