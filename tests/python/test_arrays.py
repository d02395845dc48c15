"""Arrays in and out: what every library's arrays may look like, and that nothing is copied."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import octavo
from support.array_calls import (
    CPU_LIBRARIES,
    DTYPES,
    GPU_LIBRARIES,
    assert_equal_results,
    cache,
    dtypes_of,
    every_library,
    expected,
    installed,
    qkv,
    random,
    writable_library,
)
from support.libraries import get_library


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
    library = installed(name, device)
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
    library = installed(name, device)
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
    library = installed(name, device)
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
    library = installed(name, device)
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
    library = installed(name, device)
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
    library = installed(name, "cpu")
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


@every_library
def test_mixed_frameworks(name: str, device: str) -> None:
    """On one device; the first array is of this library."""
    libraries = [installed(*other) for other in CPU_LIBRARIES + GPU_LIBRARIES if other[1] == device]
    first, *others = sorted(libraries, key=lambda library: library.name != name)
    q, k, v = qkv()
    for dtype in dtypes_of(device):
        out, lse = octavo.attention(
            first.array(q, dtype),
            others[0].array(k, dtype),
            others[1].array(v, dtype),
            prefix_lens=others[0].int32([0, 0]),
            return_lse=True,
        )
        assert isinstance(out, first.array_type)
        assert isinstance(lse, first.array_type)
        assert_equal_results(device, first.to_float64(out), expected(dtype, q, k, v))


def test_subclasses() -> None:
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
