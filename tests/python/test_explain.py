"""octavo.explain, which says which kernel a call would run, and OCTAVO_PRINT_KERNELS, which prints it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo
from conftest import gpu_count
from octavo import _core

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that an argument needs to have."""

    shape: tuple[int, ...]
    dtype: Any = "bfloat16"


def decode_arrays(batch: int, length: int, make: Any = Shape, page_size: int = 16) -> list[Any]:
    """Arrays of 32 query heads and 8 KV heads of 128."""
    max_pages = -(-length // page_size)
    pages = make((batch * max_pages, page_size, 8, 128))
    table = make((batch, max_pages), "int32"), make((batch,), "int32")
    return [make((batch, 32, 128)), pages, make(pages.shape), *table]


def dense_arrays(batch: int, length: int, make: Any = Shape, head_dim: int = 128) -> list[Any]:
    return [make((batch, length, heads, head_dim)) for heads in (8, 2, 2)]


def make_numpy(shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    return np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def latent_arrays(page_size: int, batch: int = 4) -> list[Any]:
    table = Shape((batch, 64), "int32"), Shape((batch,), "int32")
    return [Shape((batch, 16, 576)), Shape((99, page_size, 576)), *table]


DECODE = "paged_attention", *decode_arrays(1, 4096)
SHORT_CACHE = [Shape((8, 16, 8, 128)), Shape((8, 16, 8, 128))]
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "split_kv_decode": (DECODE, {}),
    "stream_k_decode": (("paged_attention", *decode_arrays(64, 8192)), {}),
    "sm90_attention": (("attention", *dense_arrays(4, 2048)), {"causal": True}),
    "sm80_attention": (DECODE, {"num_splits": 4}),
    "shared_prefix": (("paged_attention", *decode_arrays(64, 4096)), {"shared_prefix_len": 2048}),
    "append_kv_kernel": (
        ("append_kv", Shape((1, 8, 128)), Shape((1, 8, 128)), *SHORT_CACHE, *DECODE[4:]),
        {},
    ),
    "append_rotary_kernel": (
        ("append_kv", Shape((1, 8, 128)), Shape((1, 8, 128)), *SHORT_CACHE, *DECODE[4:]),
        {"rotary_cos": Shape((99, 64)), "rotary_sin": Shape((99, 64)), "q": Shape((1, 32, 128))},
    ),
    "copy_pages_kernel": (("copy_pages", *SHORT_CACHE, Shape((3, 2), "int32")), {}),
    "merge_states_kernel": (("merge_states", *[Shape((2, 8, 64)), Shape((2, 8), "float32")] * 2), {}),
    # The copy engine cannot cut pages of 60 tokens.
    "latent_attention": (("latent_attention", *latent_arrays(page_size=60)), {"softmax_scale": -0.1}),
    "sm90_latent_attention": (("latent_attention", *latent_arrays(page_size=64)), {"softmax_scale": 0.1}),
    "latent_decode": (("latent_attention", *latent_arrays(64, batch=32)), {"softmax_scale": 0.1}),
    "rms_norm_kernel": (("rms_norm", Shape((2, 64)), Shape((64,))), {"residual": Shape((2, 64))}),
}


@pytest.mark.parametrize("kernel", CALLS)
def test_leads_to_the_kernel(kernel):
    arguments, options = CALLS[kernel]
    explanation = octavo.explain(*arguments, **options, device="h200")
    assert explanation.kernel.split("<")[0] == kernel
    source = (ROOT / explanation.file).read_text(encoding="utf-8")
    name = {"shared_prefix": "combine_prefix_kernel", "append_kv_kernel": kernel}.get(kernel, kernel)
    assert "__global__" in source and name in source
    first, *others = str(explanation).splitlines()
    assert first == f"{explanation.kernel}: {explanation.summary} ({explanation.file})"
    assert others == [f"  not {other}: {reason}" for other, reason in explanation.why_not.items()]
    assert kernel not in explanation.why_not
    assert explanation.plan["dtype"] == "bfloat16"


def test_the_backward():
    q, k, v = dense_arrays(1, 256)
    arguments = "attention_backward", q, q, k, v, q, Shape(q.shape[:-1], "float32")
    explanation = octavo.explain(*arguments, device="cpu")
    assert explanation.kernel.startswith("cpu_attention_backward<bfloat16")
    assert explanation.file == "src/cpu/attention_backward.cpp"
    slopes = Shape(q.shape[2:3], "float32")
    octavo.explain(*arguments, alibi_slopes=slopes, return_dalibi=True, dq=q, device="cpu")
    with pytest.raises(ValueError, match=r"dalibi_slopes .* needs alibi_slopes; got none"):
        octavo.explain(*arguments, return_dalibi=True, device="cpu")
    both_sides = {"alibi_slopes": slopes, "alibi_symmetric": True, "device": "h200"}
    symmetric = octavo.explain(*arguments, **both_sides)
    assert symmetric.kernel == "sm90_backward<bfloat16, head_dim 128, symmetric_alibi>"
    elsewhere = octavo.explain(*arguments, **both_sides, deterministic=True)
    assert elsewhere.kernel.startswith("sm80_backward<bfloat16") and elsewhere.plan["has_dropout"]
    assert "symmetric_alibi" in elsewhere.why_not["sm90_backward"]
    hopper = octavo.explain(*arguments, device="h200")
    assert hopper.kernel == "sm90_backward<bfloat16, head_dim 128>"
    deterministic = octavo.explain(*arguments, deterministic=True, device="h200")
    assert deterministic.kernel == "sm90_backward<bfloat16, head_dim 128, deterministic>"
    capped = octavo.explain(*arguments, deterministic=True, softcap=30.0, device="h200")
    assert capped.kernel.startswith("sm80_backward<bfloat16, head_dim 128")
    assert capped.why_not == {
        "sm90_backward": "no deterministic instance, and none of head_dim above 128, has softcap"
    }
    for explanation in (hopper, deterministic, capped):
        assert (ROOT / explanation.file).is_file()


def test_plan_and_reasons():
    explanation = octavo.explain(*DECODE, device="sm_90")
    assert explanation.kernel == "split_kv_decode<bfloat16, head_dim 128, 8 rows>"
    plan = explanation.plan
    num_splits, combiners = plan["num_splits"], plan["combiners_per_item"]
    assert plan["policy"] == "even" and plan["head_dim"] == 128 and plan["length_first"] is False
    assert plan["num_ctas"] == 8 * (num_splits + combiners)
    assert f"8 KV heads x 1 sequence x {num_splits} splits" in explanation.summary
    assert set(explanation.why_not) == {
        *("shared_prefix", "stream_k_decode", "sm90_attention", "sm80_attention")
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.kernel = "another"
    many_rows = [Shape((20, 32, 128)), *DECODE[2:], Shape((2,), "int32")]
    explanation = octavo.explain(
        "paged_attention", *many_rows[:-1], cu_seqlens_q=many_rows[-1], device="a100"
    )
    assert explanation.why_not["split_kv_decode"] == (
        "it takes at most 16 rows per KV head for head_dim 128, and these are 80: 20 query tokens of 4 query "
        "heads"
    )


def maker(name: str) -> Any:
    """What makes arrays of zeros, or of shapes alone."""
    if name == "numpy":
        return make_numpy
    if name in ("torch", "meta"):
        torch = pytest.importorskip("torch")
        place = "meta" if name == "meta" else "cpu"
        return lambda shape, dtype="bfloat16": torch.zeros(shape, dtype=getattr(torch, dtype), device=place)
    jax = pytest.importorskip("jax")
    make = jax.numpy.zeros if name == "jax" else jax.ShapeDtypeStruct
    return lambda shape, dtype="bfloat16": make(shape, dtype)


@pytest.mark.parametrize("name", ["numpy", "torch", "meta", "jax", "ShapeDtypeStruct"])
def test_shapes_stand_for_arrays(name):
    """Values do not count where a device is named: these tables are full of zeros."""
    make = maker(name)
    for device in ("h200", "a100"):
        for batch, length in ((1, 1024), (5, 256)):
            arrays = decode_arrays(batch, length, make)
            expected = octavo.explain("paged_attention", *decode_arrays(batch, length), device=device)
            assert octavo.explain("paged_attention", *arrays, device=device) == expected
        expected = octavo.explain("attention", *dense_arrays(2, 256), device=device, return_lse=True)
        explanation = octavo.explain("attention", *dense_arrays(2, 256, make), device=device, return_lse=True)
        assert explanation == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strides_count(torch, device):
    q, k, v = (torch.zeros(a.shape, dtype=torch.bfloat16, device=device) for a in dense_arrays(2, 512))
    wide = torch.zeros(2, 512, 2, 129, dtype=torch.bfloat16, device=device)
    explanations = [
        octavo.explain("attention", q, k, v, device="h100")
        for k in (k, wide[..., :128], k.transpose(1, 2).contiguous().transpose(1, 2))
    ]
    kernels = [explanation.kernel.split("<")[0] for explanation in explanations]
    assert kernels == ["sm90_attention", "sm80_attention", "sm90_attention"]
    assert explanations[1].why_not["sm90_attention"] == (
        "the copy engine (TMA) takes strides that are positive multiples of 16 bytes and less than 1 TB, and "
        "k has a stride of 258 elements"
    )


def test_alignment_counts():
    q, k, v = dense_arrays(2, 512, make_numpy)
    buffer = np.zeros(k.size + 64, k.dtype)
    offset = -buffer.ctypes.data % 64 // 2
    aligned, shifted = (buffer[i : i + k.size].reshape(k.shape) for i in (offset, offset + 4))
    assert octavo.explain("attention", q, aligned, v, device="h100").kernel.startswith("sm90_attention")
    explanation = octavo.explain("attention", q, shifted, v, device="h100")
    assert explanation.kernel.startswith("sm80_attention")
    assert explanation.why_not["sm90_attention"] == (
        "the copy engine (TMA) takes arrays that begin on a multiple of 16 bytes, and k begins 8 bytes "
        "behind one"
    )
    out = np.zeros(q.size + 1, q.dtype)[1:].reshape(q.shape)
    explanation = octavo.explain("attention", q, k, v, out=out, device="h100")
    assert explanation.plan["out_aligned"] is False


def test_kernels_that_are_built_are_named_alike():
    instances = octavo.build_info()["instances"]
    if not instances:
        pytest.skip("octavo was built without CUDA")
    for kernel in ("split_kv_decode", "stream_k_decode", "sm90_attention", "sm80_attention"):
        arguments, options = CALLS[kernel]
        assert octavo.explain(*arguments, **options, device="h200").kernel in instances


def test_on_the_cpu():
    q, k, v = dense_arrays(2, 8, make_numpy, head_dim=16)
    isa = _core.cpu_info()["isa"]
    explanation = octavo.explain("attention", q, k, v)
    assert explanation.kernel == f"cpu_attention<bfloat16, {isa}>"
    assert explanation.plan["num_threads"] == octavo.get_num_threads()
    assert (ROOT / explanation.file).is_file()
    assert octavo.explain("attention", *dense_arrays(2, 8), device="cpu").plan["isa"] == isa
    assert octavo.explain("attention", q, Shape(k.shape), v).kernel == explanation.kernel
    float32 = [x.astype(np.float32) for x in (q, k, v)]
    assert octavo.explain("attention", *float32).kernel == f"cpu_attention<float32, {isa}>"


def test_lists_count_as_in_the_call():
    pages, q = np.zeros((2, 4, 2, 8), np.float32), np.zeros((1, 4, 8), np.float32)
    lists, arrays = ([[0]], [1]), (np.array([[0]]), np.array([1]))
    expected = octavo.explain("paged_attention", q, pages, pages, *arrays)
    assert octavo.explain("paged_attention", q, pages, pages, *lists) == expected
    assert octavo.explain("paged_attention", q, pages, pages, *lists, device="cpu") == expected
    with pytest.raises(ValueError, match=r"paged_attention: page_table\[0, 0\]"):
        octavo.explain("paged_attention", q, pages, pages, [[7]], [1])


def test_refuses_what_the_call_refuses():
    q, k, v = dense_arrays(2, 8, make_numpy)
    with pytest.raises(ValueError, match=r"attention: head_dim of k \(64\) must equal that of q \(128\)"):
        octavo.explain("attention", q, k[..., :64], v[..., :64], device="h100")
    with pytest.raises(
        TypeError, match="attention: no CUDA kernel for float32, head_dim 128; there are some"
    ):
        octavo.explain("attention", *(x.astype(np.float32) for x in (q, k, v)), device="h100")
    with pytest.raises(
        TypeError, match="attention: k must be an array, or have a shape and a dtype; got list"
    ):
        octavo.explain("attention", q, [1.0], v, device="h100")
    with pytest.raises(TypeError, match="attention: k must be float32, float16 or bfloat16; got float64"):
        octavo.explain("attention", q, Shape(k.shape, "float64"), v, device="h100")
    with pytest.raises(TypeError, match="attention: causal must be a bool; got"):
        octavo.explain("attention", q, k, v, causal="yes")
    pages = decode_arrays(1, 256, make_numpy)
    pages[-1][:] = 300
    with pytest.raises(ValueError, match=r"seq_lens\[0\] must lie in \[0, max_pages \* page_size = 256\]"):
        octavo.explain("paged_attention", *pages)
    assert octavo.explain("paged_attention", *pages, device="cpu").kernel.startswith("cpu_attention")


@pytest.mark.parametrize("options", [{}, {"v": 1, "window": 3}, {"v": 1, "sm_scale": 0.1}, {"value": 1}])
def test_answers_calls_that_do_not_fit_as_the_operator_does(options):
    q, k, _ = dense_arrays(2, 8, make_numpy)
    with pytest.raises(TypeError) as of_operator:
        octavo.attention(q, k, **options)
    with pytest.raises(TypeError) as of_explain:
        octavo.explain("attention", q, k, **options)
    assert str(of_explain.value) == str(of_operator.value)


def test_refuses_positional_arguments_that_do_not_fit():
    q, k, v = dense_arrays(2, 8, make_numpy)
    with pytest.raises(TypeError, match="attention: too many positional arguments"):
        octavo.explain("attention", q, k, v, True)
    with pytest.raises(TypeError, match="attention: multiple values for argument 'q'"):
        octavo.explain("attention", q, k, v, q=q)


def test_refuses_unknown_names():
    arrays = dense_arrays(2, 8)
    with pytest.raises(ValueError, match=r"explain: operator must be one of attention, .*; got 'softmax'"):
        octavo.explain("softmax", *arrays)
    with pytest.raises(ValueError, match=r"attention: device must be one of cpu, sm_80, a100, .*; got h300"):
        octavo.explain("attention", *arrays, device="h300")
    with pytest.raises(TypeError, match="explain: device must be a str or None; got int"):
        octavo.explain("attention", *arrays, device=0)  # type: ignore[arg-type]
    count = gpu_count()
    place = f"among the {count} GPUs here" if count else "here: "
    with pytest.raises(ValueError if count else RuntimeError, match=f"there is no cuda:99 {place}"):
        octavo.explain("attention", *arrays, device="cuda:99")
    with pytest.raises(
        ValueError, match="attention: explain needs a device for arrays that have shapes alone"
    ):
        octavo.explain("attention", *arrays)


PROGRAM = """
import threading
import numpy as np
import octavo

def call(length):
    q, k = np.ones((1, 1, 2, 16), np.float32), np.ones((1, length, 2, 16), np.float32)
    octavo.attention(q, k, k)

threads = [threading.Thread(target=call, args=(length,)) for length in [7, 9] * 8]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
octavo.merge_states(*[np.ones((2, 16), np.float32), np.ones(2, np.float32)] * 2)
"""


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_what_runs_is_printed_once(value):
    environment = {name: x for name, x in os.environ.items() if name != "OCTAVO_PRINT_KERNELS"}
    if value is not None:
        environment["OCTAVO_PRINT_KERNELS"] = value
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    if value != "1":
        assert lines == []
        return
    arrays = [np.ones((1, 1, 2, 16), np.float32)] * 3
    state = [np.ones((2, 16), np.float32), np.ones(2, np.float32)]
    expected = octavo.explain("attention", *arrays), octavo.explain("merge_states", *state, *state)
    assert lines == [f"octavo: {str(explanation).splitlines()[0]}" for explanation in expected]


@pytest.mark.gpu
def test_on_this_gpu(library):
    import torch

    torch.cuda.init()
    arrays = decode_arrays(
        3, 1000, lambda shape, dtype="bfloat16": torch.zeros(shape, dtype=getattr(torch, dtype)).cuda()
    )
    explanation = octavo.explain("paged_attention", *arrays)
    assert explanation == octavo.explain("paged_attention", *arrays, device="cuda:0")
    assert explanation.kernel in octavo.build_info()["instances"]
    program = """
        import torch, octavo
        q = torch.zeros(3, 32, 128, dtype=torch.bfloat16, device="cuda")
        pages = torch.zeros(3 * 63, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
        table = torch.zeros(3, 63, dtype=torch.int32, device="cuda")
        lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            octavo.paged_attention(q, pages, pages.clone(), table, lengths)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "OCTAVO_PRINT_KERNELS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"octavo: {str(explanation).splitlines()[0]}" in done.stderr.splitlines()


def paged_call(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int = 1,
    head_dim_v: int = 0,
    page_size: int = 16,
    **options: Any,
) -> Any:
    """A call for 32 sequences of up to 4096 keys with this many new tokens each."""
    num_pages = 32 * 4096 // page_size
    k_pages, v_pages = (
        Shape((num_pages, page_size, kv_heads, dim)) for dim in (head_dim, head_dim_v or head_dim)
    )
    q = Shape((32 * tokens, q_heads, head_dim))
    packed = {"cu_seqlens_q": Shape((33,), "int32"), "max_seqlen_q": tokens} if tokens > 1 else {}
    table = Shape((32, 4096 // page_size), "int32"), Shape((32,), "int32")
    return ("paged_attention", q, k_pages, v_pages, *table), packed | options


def latent_call(heads: int, kv_dtype: str = "bfloat16", page_size: int = 64) -> Any:
    table = Shape((32, 4096 // page_size), "int32"), Shape((32,), "int32")
    arrays = Shape((32, heads, 576)), Shape((32 * 4096 // page_size, page_size, 576), kv_dtype), *table
    return ("latent_attention", *arrays), {"softmax_scale": 1}


def packed_call(head_dim: int, head_dim_v: int) -> Any:
    q, v, bounds = Shape((4096, 16, head_dim)), Shape((4096, 16, head_dim_v)), Shape((33,), "int32")
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 512, "max_seqlen_k": 512}
    return ("attention", q, q, v), packed | {"causal": True}


# The first column of a table in docs/how_a_call_runs.md.
DOCUMENTED = {
    "a token, 32/8 heads of 128": paged_call(32, 8, 128),
    "a token, 64/2 heads of 128": paged_call(64, 2, 128),
    "a token, 8/1 heads of 512": paged_call(8, 1, 512),
    "a token, 32/8 heads, keys of 192, values of 128": paged_call(32, 8, 192, head_dim_v=128),
    "a token, 16/1 heads of 512": paged_call(16, 1, 512),
    "3 drafts in a tree, 32/8 heads of 128": paged_call(32, 8, 128, 3, tree_mask=Shape((96,), "int64")),
    "3 drafts in a tree, 32/4 heads of 128": paged_call(32, 4, 128, 3, tree_mask=Shape((96,), "int64")),
    "16 chosen pages, 32/8 heads of 128": paged_call(32, 8, 128, chosen_pages=Shape((32, 16), "int32")),
    "a token, 16 heads over latents": latent_call(16),
    "a token, 16 heads over latents in fp8": latent_call(16, "float8_e4m3fn"),
    "a token, 16 heads over latents in pages of 16": latent_call(16, page_size=16),
    "a token, 128 heads over latents": latent_call(128),
    "prompts with ALiBi, 16/4 heads of 128, pages of 1": paged_call(
        16, 4, 128, 2048, page_size=1, alibi_slopes=Shape((16,), "float32")
    ),
    "prompts with ALiBi, 16/4 heads of 256, pages of 8": paged_call(
        16, 4, 256, 2048, page_size=8, alibi_slopes=Shape((16,), "float32")
    ),
    "packed prompts, keys of 192, values of 128": packed_call(192, 128),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_calls(name: str) -> None:
    page = (ROOT / "docs" / "how_a_call_runs.md").read_text(encoding="utf-8")
    [line] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    call, options = DOCUMENTED[name]
    for device, cell in zip(("h100", "a100"), line.split("|")[2:4], strict=True):
        if cell.strip() == "refused":
            with pytest.raises(ValueError, match="cannot serve this call"):
                octavo.explain(*call, **options, device=device)
        else:
            kernel = octavo.explain(*call, **options, device=device).kernel
            assert kernel.startswith(f"{cell.strip(' `')}<")


def test_all_products_are_documented() -> None:
    q = Shape((1, 16, 8, 64))
    with pytest.raises(ValueError, match="device must be one of") as caught:
        octavo.explain("attention", q, q, q, device="no such GPU")
    known = str(caught.value).split("one of cpu, ")[1].split(", or a GPU")[0].split(", ")
    page = (ROOT / "docs" / "how_a_call_runs.md").read_text(encoding="utf-8")
    [listed] = re.findall(r"Products are (.*?)\. An\n", page, re.DOTALL)
    assert re.findall(r'`"(\w+)"`', listed) == [name for name in known if not name.startswith("sm_")]


def test_all_documented_calls_are_tested() -> None:
    page = (ROOT / "docs" / "how_a_call_runs.md").read_text(encoding="utf-8")
    table = page.split("| call | Hopper | A100 | why |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()] == list(DOCUMENTED)
