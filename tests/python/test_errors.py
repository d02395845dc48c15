"""What every operator refuses: arrays and numbers of the wrong kind, word for word."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo
from conftest import gpu_count
from support.producers import Producer
from support.refusals import (
    FLOATS,
    NO_ARRAY,
    OPERATORS,
    PACKED,
    A,
    Arguments,
    C,
    K,
    M,
    P,
    T,
    append,
    between,
    case,
    copy,
    dense,
    f32,
    paged,
    refused,
)

CASES = [
    # What is no array, or not of a kind that can be taken.
    case(*A, TypeError, f"q {NO_ARRAY}; got list", q=[1.0]),
    case(*A, TypeError, f"k {NO_ARRAY}; got NoneType", k=None),
    case(*A, TypeError, f"v {NO_ARRAY}; got numpy.float32", v=np.float32(1)),
    case(*A, TypeError, f"out {NO_ARRAY}; got str", out="out"),
    case(*P, TypeError, f"page_table {NO_ARRAY}; got dict", page_table={0: [2, 1]}),
    case(*K, TypeError, f"k_pages {NO_ARRAY}; got dict", k_pages={}),
    case(*C, TypeError, f"copies {NO_ARRAY}; got set", copies={0, 1}),
    case(*M, TypeError, f"lse_b {NO_ARRAY}; got float", lse_b=1.0),
    case(*T, TypeError, f"seq_lens {NO_ARRAY}; got range", seq_lens=range(2)),
    case(*A, TypeError, f"q {FLOATS}; got float64", q=np.ones((2, 3, 4, 8))),
    case(*A, TypeError, f"q {FLOATS}; got uint8", q=np.ones((2, 3, 4, 8), np.uint8)),
    case(*A, TypeError, f"q {FLOATS}; got bool", q=np.ones((2, 3, 4, 8), bool)),
    case(*A, TypeError, f"q {FLOATS}; got complex64", q=np.ones((2, 3, 4, 8), np.complex64)),
    case(*A, TypeError, f"q {FLOATS}; got int32", q=np.ones((2, 3, 4, 8), np.int32)),
    case(*A, TypeError, f"q {FLOATS}; got float32x2", q=Producer(f32(2, 3, 4, 8), lanes=2)),
    case(*A, TypeError, f"q {FLOATS}; got float8_e5m2", q=Producer(f32(2), code=12, bits=8)),
    case(*A, TypeError, f"q {FLOATS}; got DLPack type 99", q=Producer(f32(2), code=99)),
    case(
        *PACKED,
        TypeError,
        "cu_seqlens_q must be int32 or int64; got int8",
        cu_seqlens_q=np.array([0, 1, 3], np.int8),
    ),
    case(*PACKED, TypeError, "cu_seqlens_k must be int32 or int64; got float32", cu_seqlens_k=f32(3)),
    case(*A, TypeError, "prefix_lens must be int32 or int64; got int16", prefix_lens=np.zeros(2, "i2")),
    case(*A, TypeError, "alibi_slopes must be float32; got float64", alibi_slopes=np.ones(4)),
    case(*A, TypeError, "alibi_slopes must be float32; got float16", alibi_slopes=np.ones(4, np.float16)),
    case(*P, TypeError, "page_table must be int32 or int64; got uint32", page_table=np.ones((2, 2), "u4")),
    case(*P, TypeError, "seq_lens must be int32 or int64; got uint32", seq_lens=np.ones(2, np.uint32)),
    case(*C, TypeError, "copies must be int32 or int64; got uint64", copies=np.array([[0, 1]], np.uint64)),
    case(*M, TypeError, "lse_a must be float32; got float64", lse_a=np.ones((3, 4))),
    case(
        *A,
        TypeError,
        "q (numpy.ndarray of >f4) cannot be taken through DLPack: DLPack only supports native byte order.",
        q=np.ones((2, 3, 4, 8), ">f4"),
    ),
    case(
        *A,
        ValueError,
        "q must be aligned to its elements of 4 bytes",
        q=np.frombuffer(bytes(4 * 192 + 1), np.float32, offset=1).reshape(2, 3, 4, 8),
    ),
    case(*A, ValueError, "q must have at most 6 axes; got 7", q=f32(1, 1, 1, 1, 1, 1, 8)),
    *(
        case(
            op,
            make,
            TypeError,
            f"{name} is a masked array, and its mask would be ignored; use {name}.filled(...) or {name}.data",
            **{name: np.ma.masked_array(make().get(name, f32(2, 3, 4, 8)))},
        )
        for op, make, name in ((*A, "q"), (*A, "out"), (*P, "page_table"), (*K, "k_pages"))
    ),
    case(*A, TypeError, "q has no data (is it a meta or fake tensor?)", q=Producer(f32(2), with_data=False)),
    case(*A, TypeError, "k comes in a version of DLPack other than 1", k=Producer(f32(2), version=(2, 0))),
    case(*A, TypeError, "k: __dlpack__ must return a DLPack capsule; got int", k=Producer(f32(2), result=5)),
    case(
        *A,
        TypeError,
        "k (support.producers.Producer) cannot be taken through DLPack: not today",
        k=Producer(f32(2), error=BufferError("not today\nat line 3")),
    ),
    case(
        *A,
        TypeError,
        "k (support.producers.Producer) cannot be taken through DLPack: no",
        k=Producer(f32(2), error=TypeError("no")),
    ),
    case(
        *A,
        RuntimeError,
        "k (support.producers.Producer) cannot be taken through DLPack: out of luck",
        k=Producer(f32(2), error=RuntimeError("out of luck")),
    ),
    case(
        *A,
        TypeError,
        "q (support.producers.Producer) cannot be taken through DLPack: nowhere",
        q=Producer(f32(2), device_error=ValueError("nowhere")),
    ),
    case(
        *A,
        RuntimeError,
        "q must be on a CPU or CUDA device; it is on DLPack device type 10",
        q=Producer(f32(2), device=(10, 0)),
    ),
    case(
        *A,
        RuntimeError,
        "all arrays must be on one device; k is on cuda:1, the first array on cpu",
        k=Producer(f32(2), device=(2, 1)),
    ),
    case(
        *A,
        TypeError,
        "out cannot be made: support.producers.Producer has no __array_namespace__",
        q=Producer(f32(2, 3, 4, 8)),
    ),
    # Numbers.
    case(*A, TypeError, "causal must be a bool; got int", causal=1),
    case(*A, TypeError, "causal must be a bool; got str", causal="no"),
    case(*A, TypeError, "return_lse must be a bool; got NoneType", return_lse=None),
    case(*A, TypeError, "window_left must be an int; got float", window_left=1.5),
    case(*A, TypeError, "window_right must be an int; got NoneType", window_right=None),
    case(*A, ValueError, f"window_left must fit in 64 bits with a sign; got {2**64}", window_left=2**64),
    case(
        *A,
        ValueError,
        f"window_left must fit in 64 bits with a sign; got {-(1 << 20_000):#x}",
        window_left=-(1 << 20_000),
    ),
    case(*A, TypeError, "window_left must be an int; got numpy.ndarray", window_left=np.ones(2, int)),
    case(*A, TypeError, "softcap must be a float; got str", softcap="1"),
    case(*A, TypeError, "softcap must be a float; got numpy.ndarray", softcap=np.ones(2)),
    case(*A, ValueError, "softmax_scale does not fit in a float", softmax_scale=10**400),
    case(*A, TypeError, "softmax_scale must be a float; got list", softmax_scale=[1.0]),
    case(*PACKED, TypeError, "max_seqlen_q must be an int; got str", max_seqlen_q="3"),
    case(*P, TypeError, "num_splits must be an int; got float", num_splits=2.0),
    case(*P, TypeError, "k_scale must be a float, or an array of float32; got str", k_scale="1"),
    case(*K, TypeError, "v_scale must be a float, or an array of float32; got list", v_scale=[1.0]),
    case(*T, TypeError, "num_pages must be an int; got str", num_pages="3"),
    case(
        *A,
        TypeError,
        "stream must be an int, or an object with __cuda_stream__, cuda_stream or ptr; got str",
        stream="current",
    ),
    case(*A, TypeError, "stream's address must be an int; got str", stream=SimpleNamespace(ptr="5")),
    case(*A, ValueError, "stream must be an address of 0 to 64 bits; got -1", stream=-1),
    *(
        case(
            *A,
            TypeError,
            f"stream's __cuda_stream__ must give (version, address); got {pair!r}",
            stream=SimpleNamespace(__cuda_stream__=pair),
        )
        for pair in ((), (0,), (0, 5, 7), 5)
    ),
]


test_refused = refused(CASES)


@pytest.mark.parametrize(("op", "make"), [A, PACKED, P, K, C, M, T], ids=lambda x: getattr(x, "__name__", x))
def test_the_calls_above_are_right_otherwise(op: str, make: Callable[[], Arguments]) -> None:
    OPERATORS[op](**make())


@pytest.mark.parametrize("op", OPERATORS)
def test_misuse_of_the_signature(op: str) -> None:
    with pytest.raises(TypeError, match=r"missing .* required"):
        OPERATORS[op]()
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        OPERATORS[op](window=3)
    with pytest.raises(TypeError, match="positional"):
        OPERATORS[op](*range(20))


def test_causes_are_kept() -> None:
    problem = BufferError("not today")
    with pytest.raises(TypeError) as caught:
        octavo.attention(**{**dense(), "k": Producer(f32(2), error=problem)})
    assert caught.value.__cause__ is problem


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("full"), SystemExit(3)])
def test_what_is_no_fault_of_the_array_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        octavo.attention(**{**dense(), "k": Producer(f32(2), error=error)})
    assert caught.value is error


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_names_with_lone_surrogates() -> None:
    """UTF-8 has none of them, but Python's names may: those of modules, classes and dtypes, and reasons."""
    kind = type("Kind", (Producer,), {"__module__": "\ud800", "__qualname__": "Kin\ud801", "dtype": "\ud802"})
    q = kind(f32(2, 3, 4, 8), error=ZeroDivisionError("\ud803"))
    message = re.escape(r"attention: q (\ud800.Kin\ud801 of \ud802) cannot be taken through DLPack: \ud803")
    with pytest.raises(TypeError, match=f"^{message}$"):
        octavo.attention(**{**dense(), "q": q})


def test_cuda_arrays_where_cuda_cannot_be_used() -> None:
    q = Producer(f32(2, 3, 4, 8), device=(2, 0))
    with pytest.raises(RuntimeError, match=r"^attention: CUDA arrays cannot be used here: .+") as caught:
        octavo.attention(**{**dense(), "q": q})
    assert type(caught.value) is RuntimeError
    assert not q.requests  # not even asked for


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch", reason="torch is not installed")

    def refused(self, message: str, error: type[Exception] = TypeError, **overrides: Any) -> None:
        arguments = {name: self.torch.from_numpy(x) for name, x in dense().items()}
        with pytest.raises(error, match=f"^attention: {message}"):
            octavo.attention(**{**arguments, **overrides})

    def test_gradients(self) -> None:
        needs_grad = self.torch.ones(2, 5, 2, 8, requires_grad=True)
        why = r"requires grad, and this call has no backward; use octavo\.torch\.attention without out,"
        self.refused(rf"k {why} k.detach\(\) or torch.no_grad\(\)$", k=needs_grad)
        self.refused(rf"v {why} v.detach\(\)", v=needs_grad * 2)
        self.refused(rf"out {why} out.detach\(\)", out=self.torch.ones(2, 3, 4, 8, requires_grad=True))
        with self.torch.no_grad():
            octavo.attention(self.torch.ones(2, 3, 4, 8), needs_grad, needs_grad)

    def test_gradients_of_numbers(self) -> None:
        scale = self.torch.tensor(0.5, requires_grad=True)
        why = r"requires grad, and this call has no backward for numbers; use"
        for name in ("softmax_scale", "softcap"):
            self.refused(rf"{name} {why} {name}.detach\(\) or torch.no_grad\(\)$", **{name: scale})
        q = self.torch.ones(2, 3, 4, 8)
        with self.torch.no_grad():
            octavo.attention(q, q, q, softmax_scale=scale)
        octavo.attention(q, q, q, softmax_scale=scale.detach())
        forward = pytest.importorskip("torch.autograd.forward_ad")
        with forward.dual_level():
            dual = forward.make_dual(self.torch.tensor(0.5), self.torch.tensor(1.0))
            self.refused("softcap has a tangent .* use softcap.detach", softcap=dual)

    def test_negative_bit(self) -> None:
        imaginary = self.torch.ones(2, 5, 2, 8, dtype=self.torch.complex64).conj().imag
        self.refused(r"k has its negative bit set; use k.resolve_neg\(\)$", k=imaginary)

    def test_tensors_without_memory(self) -> None:
        torch = self.torch
        through = r"k \(torch.Tensor of torch.float32\) cannot be taken through DLPack: "
        self.refused(through + ".*meta.*$", k=torch.ones(2, 5, 2, 8, device="meta"))
        self.refused(through, k=torch.ones(2, 5).to_sparse())
        fake = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake.FakeTensorMode():
            pretended = torch.ones(2, 5, 2, 8)
        self.refused(r"k has no data \(is it a meta or fake tensor\?\)$", k=pretended)

    def test_dtypes(self) -> None:
        torch = self.torch
        self.refused(
            "q must be float32, float16 or bfloat16; got float64$", q=torch.ones(2, 3, 4, 8).double()
        )
        self.refused(
            "q must be float32, float16 or bfloat16; got complex64$", q=torch.ones(2, dtype=torch.complex64)
        )
        lens = torch.tensor([1, 2], dtype=torch.int16)
        self.refused("prefix_lens must be int32 or int64; got int16$", prefix_lens=lens)
        self.refused("q must be float32, float16 or bfloat16; got int64$", q=torch.ones(2, 3, 4, 8).long())


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax", reason="jax is not installed")

    def test_results_cannot_be_written_to_jax_arrays(self) -> None:
        why = "is written to and cannot be a JAX array, which is immutable"
        cases: list[tuple[str, Arguments, str]] = [
            ("attention", {**dense(), "out": f32(2, 3, 4, 8)}, "out"),
            ("paged_attention", {**paged(), "out": f32(2, 4, 8)}, "out"),
            ("append_kv", append(), "k_pages"),
            ("append_kv", append(), "v_pages"),
            ("copy_pages", copy(), "k_pages"),
            ("copy_pages", copy(), "v_pages"),
            ("copy_pages", between(), "to_k_pages"),
            ("copy_pages", between(), "to_v_pages"),
        ]
        for op, arguments, name in cases:
            arguments[name] = self.jax.numpy.asarray(arguments[name])
            before = np.array(arguments[name])
            with pytest.raises(TypeError, match=re.escape(f"{op}: {name} {why}")):
                OPERATORS[op](**arguments)
            np.testing.assert_array_equal(arguments[name], before)

    def test_tracers(self) -> None:
        call = dense()
        message = "attention: q is traced by JAX, .*; use the functions of octavo.jax, .*; got jax.*Tracer\\b"
        with pytest.raises(TypeError, match=f"^{message}"):
            self.jax.jit(lambda q: octavo.attention(q, call["k"], call["v"]))(call["q"])

    def test_deleted(self) -> None:
        for name in ("q", "k"):
            array = self.jax.numpy.asarray(dense()[name])
            array.delete()
            with pytest.raises(RuntimeError) as caught:
                octavo.attention(**{**dense(), name: array})
            message = f"attention: {name} is a JAX array that was deleted, or donated to a jitted function"
            assert str(caught.value) == message

    def test_dtypes(self) -> None:
        with pytest.raises(TypeError, match=r"^attention: q must be float32, float16 or bfloat16; got int8$"):
            octavo.attention(**{**dense(), "q": self.jax.numpy.zeros((2, 3, 4, 8), "int8")})


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.float64, "f4,f4", object, "datetime64[s]"]
)
def test_every_other_numpy_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^attention: q "):
        octavo.attention(**{**dense(), "q": np.zeros((2, 3, 4, 8), dtype)})


def test_set_num_threads() -> None:
    before = octavo.get_num_threads()
    for wrong in (0, -5, 65537, 2**40):
        with pytest.raises(
            ValueError, match=rf"^set_num_threads: num_threads \({wrong}\) must be from 1 to 65536$"
        ):
            octavo.set_num_threads(wrong)
    with pytest.raises(TypeError, match=r"^set_num_threads: num_threads must be an int; got float$"):
        octavo.set_num_threads(2.0)  # type: ignore[arg-type]
    assert octavo.get_num_threads() == before
    octavo.set_num_threads(before)


def test_exported_exceptions() -> None:
    assert issubclass(octavo.OutOfPages, RuntimeError)
    assert issubclass(octavo.InvalidSequence, ValueError)
    allocator = octavo.PageAllocator(1, 4)
    sequence = allocator.create()
    with pytest.raises(octavo.OutOfPages):
        allocator.extend(sequence, 5)
    allocator.free(sequence)
    with pytest.raises(octavo.InvalidSequence) as caught:
        allocator.length(sequence)
    assert type(caught.value).__module__ == "octavo"


def test_octavo_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "octavo.vllm", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.vllm needs vLLM: pip install octavo\[vllm\]"):
        importlib.import_module("octavo.vllm")
