"""include/octavo/octavo.h: the C interface, through the example that calls it by ctypes."""

import subprocess
import sys
from ctypes import byref, c_int64
from pathlib import Path

import numpy as np
import pytest

import octavo
from support.c_library import Library, OctavoError, PageAllocator, Tensor, c_interface
from support.quantised import Cache

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library():
    return Library()


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "c_interface.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"octavo {octavo.__version__}: 2 samples")


def test_decode_equals_dense_attention(library):
    k, v, q = normal(22, 2, 64), normal(22, 2, 64)[::-1], normal(2, 8, 64)
    out = c_interface.decode(library, k, v, q)
    for sample in range(2):
        seen = [*range(20), 20 + sample]
        expected = octavo.attention(q[sample][None, None], k[seen][None], v[seen][None])
        np.testing.assert_allclose(out[sample], expected[0, 0], atol=2e-6)


def test_attention_takes_every_argument(library):
    q, k, v = normal(8, 4, 32), normal(8, 2, 32), normal(8, 2, 32) + 1
    slopes, prefixes = np.array([0.5, 0.25, 0.1, 0.2], np.float32), np.array([2, 0], np.int32)
    cu_seqlens = np.array([0, 3, 8], np.int32)
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)
    arrays = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    arrays |= {"alibi_slopes": slopes, "prefix_lens": prefixes, "sinks": 2 * slopes}
    scalars = {"max_seqlen_q": 5, "max_seqlen_k": 5, "softmax_scale": 0.3, "softcap": 4.0, "window_left": 2}
    library.attention(q=q, k=k, v=v, out=out, lse=lse, window_right=1, causal=0, **arrays, **scalars)
    expected = octavo.attention(q, k, v, window_right=1, return_lse=True, **arrays, **scalars)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    dropout = {"dropout_p": 0.25, "dropout_seed": 2**40, "dropout_offset": 3}
    library.attention(q=q, k=k, v=v, out=out, causal=0, **arrays, **dropout)
    np.testing.assert_array_equal(out, octavo.attention(q, k, v, **arrays, **dropout))
    blocks = {"block_mask": np.array([0, 1, 1, 0], np.uint8).reshape(4, 1, 1), "block_size": 64}
    library.attention(q=q, k=k, v=v, out=out, causal=0, **arrays, **blocks)
    np.testing.assert_array_equal(out, octavo.attention(q, k, v, **arrays, **blocks))
    library.attention(q=q, k=k, v=v, out=out, alibi_symmetric=1, **arrays)
    np.testing.assert_array_equal(out, octavo.attention(q, k, v, alibi_symmetric=True, **arrays))
    assert not np.array_equal(out, octavo.attention(q, k, v, **arrays))
    library.attention(q=q, k=k, v=v, out=out, causal=1, **arrays)
    np.testing.assert_array_equal(out, octavo.attention(q, k, v, causal=True, **arrays))


def test_shared_prefix(library):
    arrays = {"k_pages": normal(6, 4, 2, 32), "v_pages": normal(6, 4, 2, 32) + 1, "q": normal(2, 4, 32)}
    arrays["page_table"] = np.array([[3, 0, 1], [3, 0, 5]], np.int32)
    arrays["seq_lens"] = np.array([9, 12], np.int32)
    out = np.full_like(arrays["q"], np.nan)
    library.paged_attention(out=out, shared_prefix_len=8, **arrays)
    np.testing.assert_array_equal(out, octavo.paged_attention(**arrays, shared_prefix_len=8))
    np.testing.assert_allclose(out, octavo.paged_attention(**arrays), rtol=2e-5, atol=2e-6)
    with pytest.raises(OctavoError, match=r"shared_prefix_len \(12\) must not exceed the length"):
        library.paged_attention(out=out, shared_prefix_len=12, **arrays)

    allocator = PageAllocator(library, 16, 4)
    prompt = allocator.create()
    allocator.extend(prompt, 9)
    sequences = [prompt, *allocator.fork(prompt, 2)]
    assert allocator.shared_prefix_len(sequences) == 8
    assert allocator.shared_prefix_len(sequences, num_queries=2) == 4
    with pytest.raises(OctavoError, match="num_queries"):
        allocator.shared_prefix_len(sequences, num_queries=-1)


def test_tree_mask(library):
    arrays = {"k_pages": normal(6, 4, 2, 32), "v_pages": normal(6, 4, 2, 32) + 1, "q": normal(5, 4, 32)}
    arrays["page_table"] = np.array([[3, 0, 1], [3, 0, 5]], np.int32)
    arrays["seq_lens"], arrays["cu_seqlens_q"] = np.array([9, 12], np.int32), np.array([0, 2, 5], np.int32)
    tree = np.concatenate([octavo.tree_mask([-1, -1]), octavo.tree_mask([-1, 0, 0])])
    out = np.full_like(arrays["q"], np.nan)
    library.paged_attention(out=out, tree_mask=tree, **arrays)
    np.testing.assert_array_equal(out, octavo.paged_attention(**arrays, tree_mask=tree))
    assert not np.array_equal(out, octavo.paged_attention(**arrays))


def test_pages_of_values_of_another_head_dim(library):
    k, v, q = normal(20, 2, 48), normal(20, 2, 24) + 1, normal(2, 4, 48)
    pages = {"k_pages": np.zeros((6, 4, 2, 48), np.float32), "v_pages": np.zeros((6, 4, 2, 24), np.float32)}
    tables = {"page_table": np.array([[3, 0, 1], [4, 2, 5]], np.int32), "seq_lens": np.int32([9, 11])}
    library.append_kv(k=k, v=v, cu_seqlens=np.array([0, 9, 20], np.int32), **pages, **tables)
    other = {name: np.zeros((9, *x.shape[1:]), np.float32) for name, x in pages.items()}
    copies = np.array([[i, 8 - i] for i in range(6)], np.int32)
    library.copy_pages(copies=copies, **pages, **{f"to_{name}": x for name, x in other.items()})
    out = np.full((2, 4, 24), np.nan, np.float32)
    library.paged_attention(q=q, out=out, **other, **{**tables, "page_table": 8 - tables["page_table"]})
    for sample, (begin, end) in enumerate(((0, 9), (9, 20))):
        expected = octavo.attention(q[sample][None, None], k[None, begin:end], v[None, begin:end])
        np.testing.assert_allclose(out[sample], expected[0, 0], rtol=2e-5, atol=2e-6)
    with pytest.raises(OctavoError, match="out must have the shape of q with the head_dim of v_pages"):
        library.paged_attention(q=q, out=np.zeros_like(q), **pages, **tables)


def test_bidirectional_ranges(library):
    q, k, v = normal(2, 9, 4, 32), normal(2, 9, 2, 32), normal(2, 9, 2, 32) + 1
    ranges = np.array([[[0, 3], [4, 9]], [[1, 6], [0, 0]]], np.int32)
    out = np.full_like(q, np.nan)
    for options in ({}, {"ranges_keep_window_left": True}):
        arguments = {"window_left": 1, "bidirectional_ranges": ranges, **options}
        library.attention(q=q, k=k, v=v, out=out, causal=1, **arguments)
        np.testing.assert_array_equal(out, octavo.attention(q, k, v, causal=True, **arguments))
        pages = {"page_table": np.array([[0], [1]], np.int32), "seq_lens": np.array([9, 9], np.int32)}
        pages["cu_seqlens_q"] = np.array([0, 9, 18], np.int32)
        paged = np.full((18, 4, 32), np.nan, np.float32)
        library.paged_attention(q=q.reshape(18, 4, 32), k_pages=k, v_pages=v, out=paged, **pages, **arguments)
        np.testing.assert_array_equal(paged.reshape(out.shape), out)
    assert not np.array_equal(out, octavo.attention(q, k, v, causal=True, window_left=1))


def test_symmetric_alibi_over_pages(library):
    arrays = {"k_pages": normal(6, 4, 2, 32), "v_pages": normal(6, 4, 2, 32) + 1, "q": normal(5, 4, 32)}
    arrays["page_table"] = np.array([[3, 0, 1], [3, 0, 5]], np.int32)
    arrays["seq_lens"], arrays["cu_seqlens_q"] = np.array([9, 12], np.int32), np.array([0, 2, 5], np.int32)
    arrays["alibi_slopes"] = np.array([0.5, 0.25, 0.1, 0.2], np.float32)
    out = np.full_like(arrays["q"], np.nan)
    library.paged_attention(out=out, causal=0, alibi_symmetric=1, **arrays)
    expected = octavo.paged_attention(**arrays, causal=False, alibi_symmetric=True)
    np.testing.assert_array_equal(out, expected)
    assert not np.array_equal(out, octavo.paged_attention(**arrays, causal=False))


def test_chosen_pages(library):
    arrays = {"k_pages": normal(6, 4, 2, 32), "v_pages": normal(6, 4, 2, 32) + 1, "q": normal(2, 4, 32)}
    arrays["page_table"], arrays["seq_lens"] = np.array([[3, 0, 1], [3, 0, 5]]), np.array([9, 12])
    chosen = np.array([[[0, 2], [2, -1]], [[1, 2], [0, 2]]])
    out = np.full_like(arrays["q"], np.nan)
    library.paged_attention(out=out, chosen_pages=chosen, **arrays)
    np.testing.assert_array_equal(out, octavo.paged_attention(**arrays, chosen_pages=chosen))
    assert not np.array_equal(out, octavo.paged_attention(**arrays))


def test_integers_of_64_bits(library):
    q, pages = normal(5, 4, 32), normal(2, 6, 4, 2, 32)
    tables = {"page_table": [[3, 0, 2**40], [5, 1, 2]], "seq_lens": [8, 12], "cu_seqlens_q": [0, 2, 5]}
    tables = {name: np.array(x) for name, x in tables.items()}
    out = np.full_like(q, np.nan)
    library.paged_attention(q=q, k_pages=pages[0], v_pages=pages[1], out=out, **tables)
    np.testing.assert_array_equal(out, octavo.paged_attention(q, *pages, **tables))
    for window in ({"causal": False, "window_left": 3, "window_right": 1}, {"attention_chunk": 3}):
        library.paged_attention(q=q, k_pages=pages[0], v_pages=pages[1], out=out, **tables, **window)
        np.testing.assert_array_equal(out, octavo.paged_attention(q, *pages, **tables, **window))
    rows = {name: tables[name] for name in ("page_table", "seq_lens")}
    k, v = normal(2, 2, 32), normal(2, 2, 32)
    library.append_kv(k=k, v=v, k_pages=pages[0], v_pages=pages[1], **rows)
    np.testing.assert_array_equal(pages[0, [0, 2], 3], k)
    copies = np.array([[0, 4]])
    library.copy_pages(k_pages=pages[0], v_pages=pages[1], copies=copies)
    np.testing.assert_array_equal(pages[:, 4], pages[:, 0])
    with pytest.raises(OctavoError, match=r"page_table\[0, 2\] must lie in .* got 1099511627776"):
        library.paged_attention(
            q=q, k_pages=pages[0], v_pages=pages[1], out=out, **{**tables, "seq_lens": tables["seq_lens"] + 1}
        )


def test_merge_states(library):
    states = normal(3, 2, 8), normal(3, 2), normal(3, 2, 8) + 1, normal(3, 2) - 1
    results = np.empty_like(states[0]), np.empty_like(states[1])
    library.call("merge_states", *(byref(Tensor.of(array)) for array in (*states, *results)), None)
    for ours, expected in zip(results, octavo.merge_states(*states), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("which", [0, 2])
def test_merge_states_in_place(library, which):
    states = [normal(3, 2, 8), normal(3, 2), normal(3, 2, 8) + 1, normal(3, 2) - 1]
    expected = octavo.merge_states(*states)
    results = states[which : which + 2]
    library.call("merge_states", *(byref(Tensor.of(array)) for array in (*states, *results)), None)
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("result", "other"),
    [(a, b) for a in ("out", "lse") for b in ("out_a", "lse_a", "out_b", "lse_b", "out") if a != b],
)
def test_merge_states_of_results_that_overlap(library, result, other):
    """A result that begins one element behind another array would be written before inputs are read."""
    memory = np.zeros(100, np.float32)
    shapes = dict.fromkeys(("out_a", "out_b", "out"), (3, 2, 8))
    shapes |= dict.fromkeys(("lse_a", "lse_b", "lse"), (3, 2))
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, begin in ((other, 0), (result, 1)):
        arrays[name] = memory[begin : begin + arrays[name].size].reshape(shapes[name])
    order = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")
    message = f"merge_states: {result} must not overlap {other} in memory"
    with pytest.raises(OctavoError, match=message) as error:
        library.call("merge_states", *(byref(Tensor.of(arrays[name])) for name in order), None)
    assert error.value.status == 1


def test_rotary_append(library):
    arrays = {"k": normal(3, 2, 16), "v": normal(3, 2, 16) + 1, "q": normal(3, 4, 16)}
    arrays |= {"rotary_cos": normal(12, 4), "rotary_sin": normal(12, 4) + 1}
    arrays["page_table"] = np.array([[3, 0, 1], [2, 4, 5]], np.int32)
    arrays["seq_lens"], arrays["cu_seqlens"] = np.array([9, 2], np.int32), np.array([0, 2, 3], np.int32)
    for interleaved in (0, 1):
        ours, theirs = np.zeros((2, 2, 6, 4, 2, 16), np.float32)
        q_out = np.full_like(arrays["q"], np.nan)
        options = {"rotary_interleaved": interleaved, "q_out": q_out}
        library.append_kv(k_pages=ours[0], v_pages=ours[1], **arrays, **options)
        expected = octavo.append_kv(
            k_pages=theirs[0], v_pages=theirs[1], rotary_interleaved=bool(interleaved), **arrays
        )
        np.testing.assert_array_equal(q_out, expected)
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(OctavoError, match="append_kv: q and q_out must be given together; got only q"):
        library.append_kv(k_pages=ours[0], v_pages=ours[1], **arrays)


def test_latent_attention(library):
    q, kv_pages = normal(2, 3, 40), normal(5, 4, 40)
    table, lengths = np.array([[1, 3], [0, 0]], np.int32), np.array([7, 2], np.int32)
    out, lse = np.empty((2, 3, 24), np.float32), np.empty((2, 3), np.float32)
    arrays = {"q": q, "kv_pages": kv_pages, "page_table": table, "seq_lens": lengths, "out": out}
    library.latent_attention(**arrays, lse=lse, v_dim=24, softmax_scale=0.25, kv_scale=0.5)
    expected = octavo.latent_attention(
        q, kv_pages, table, lengths, v_dim=24, softmax_scale=0.25, kv_scale=0.5, return_lse=True
    )
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    with pytest.raises(OctavoError, match="latent_attention: softmax_scale must be given"):
        library.latent_attention(**arrays, v_dim=24)


def test_rms_norm(library):
    x, residual, weight = normal(3, 2, 40), normal(3, 2, 40) + 1, normal(40)
    out, residual_out = np.full_like(x, np.nan), np.full_like(x, np.nan)
    library.rms_norm(x=x, weight=weight, out=out)
    np.testing.assert_array_equal(out, octavo.rms_norm(x, weight))
    library.rms_norm(x=x, weight=weight, residual=residual, out=out, residual_out=residual_out, eps=0.5)
    expected = octavo.rms_norm(x, weight, 0.5, residual)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(residual_out, expected[1])
    with pytest.raises(OctavoError, match="rms_norm: residual and residual_out must be given together"):
        library.rms_norm(x=x, weight=weight, residual=residual, out=out)


@pytest.mark.parametrize("masks", [{"causal": True}, {"window_right": 1, "alibi_symmetric": True}])
def test_attention_backward(library, masks):
    q, k, v = normal(1, 5, 4, 16), normal(1, 9, 2, 16), normal(1, 9, 2, 16) + 1
    dout, slopes = normal(1, 5, 4, 16) - 1, np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    options = {"softcap": 5.0, "window_left": 6, "dropout_p": 0.25, "dropout_seed": 3, "sinks": 2 * slopes}
    options |= masks
    out, lse = octavo.attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    results = [np.full_like(x, np.nan) for x in (q, k, v, slopes, slopes)]
    library.attention_backward(
        **dict(zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, out, lse), strict=True)),
        **dict(zip(("dq", "dk", "dv", "dalibi_slopes", "dsinks"), results, strict=True)),
        dlse=lse,
        alibi_slopes=slopes,
        **options,
    )
    expected = octavo.attention_backward(
        *(dout, q, k, v, out, lse),
        dlse=lse,
        alibi_slopes=slopes,
        return_dalibi=True,
        return_dsinks=True,
        **options,
    )
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(OctavoError, match="attention_backward: dv must have data"):
        library.attention_backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            dq=q,
            dk=k,
            dv=Tensor(shape=Tensor.of(v).shape, ndim=4),
        )


def test_linear(library):
    x, w, bias, residual = normal(2, 3, 8), normal(6, 8), normal(6), normal(2, 3, 3)
    out = np.full_like(residual, np.nan)
    library.linear(x=x, w=w, bias=bias, residual=residual, out=out, activation=2, batch_invariant=1)
    expected = octavo.linear(x, w, bias, residual=residual, activation="silu_gate")
    np.testing.assert_array_equal(out, expected)
    plain = np.full((2, 3, 6), np.nan, np.float32)
    library.linear(x=x, w=w.astype(np.float16), out=plain, static_weight=1)
    np.testing.assert_array_equal(plain, octavo.linear(x, w.astype(np.float16)))
    with pytest.raises(OctavoError, match=r"linear: activation \(3\) must be an octavo_activation, or -1"):
        library.linear(x=x, w=w, out=plain, activation=3)
    on_gpu = [Tensor.of(array) for array in (x, w, plain)]
    for tensor in on_gpu:
        tensor.device_type = 1
    with pytest.raises(OctavoError, match="linear: its CUDA kernels multiply float16 and bf") as error:
        library.linear(**dict(zip(("x", "w", "out"), on_gpu, strict=True)))
    assert error.value.status == 2


def empty(*shape, dtype="float32"):
    """An array without elements, and without data."""
    assert 0 in shape
    return Tensor(shape=(c_int64 * len(shape))(*shape), ndim=len(shape), dtype=c_interface.DTYPES[dtype])


def test_empty_arrays_need_no_data(library):
    pages = {"k_pages": normal(3, 4, 2, 16), "v_pages": normal(3, 4, 2, 16)}
    before = {name: x.copy() for name, x in pages.items()}
    new = {"k": empty(0, 2, 16), "v": empty(0, 2, 16)}
    library.append_kv(**new, **pages, slot_mapping=empty(0, dtype="int64"))
    tables = {"page_table": empty(0, 2, dtype="int32"), "seq_lens": empty(0, dtype="int32")}
    library.append_kv(**new, **pages, **tables)
    to = {f"to_{name}": empty(0, 4, 2, 16) for name in pages}
    library.copy_pages(**pages, **to, copies=empty(0, 2, dtype="int32"))
    for name, array in pages.items():
        np.testing.assert_array_equal(array, before[name])
    one = {"to_k_pages": empty(0, 4, 2, 16), "copies": empty(0, 2, dtype="int32")}
    with pytest.raises(OctavoError, match="to_v_pages must be given together; got only to_k_pages"):
        library.copy_pages(**pages, **one)
    results = {"out": normal(1, 3, 2, 8), "lse": Tensor(shape=(c_int64 * 3)(1, 3, 2), ndim=3)}
    with pytest.raises(OctavoError, match="attention: lse must have data"):
        library.attention(q=normal(1, 3, 2, 8), k=normal(1, 3, 2, 8), v=normal(1, 3, 2, 8), **results)


def test_copies(library):
    here, there = normal(2, 5, 4, 1, 8), normal(2, 3, 4, 1, 8)
    expected = here.copy(), there.copy()
    copies = np.array([[4, 0], [1, 2]], np.int32)
    given = {"k_pages": here[0], "v_pages": here[1], "copies": copies}
    library.copy_pages(**given, to_k_pages=there[0], to_v_pages=there[1])
    expected[1][:, [0, 2]] = here[:, [4, 1]]
    library.copy_pages(**given)
    expected[0][:, [0, 2]] = here[:, [4, 1]]
    np.testing.assert_array_equal(here, expected[0])
    np.testing.assert_array_equal(there, expected[1])
    with pytest.raises(OctavoError, match="copy_pages: to_k_pages and to_v_pages must be given together"):
        library.copy_pages(**given, to_v_pages=there[1])


@pytest.mark.parametrize("kind", ["int8", "int4", "int8_int4"])
def test_codes(library, kind):
    """A cache of codes with a scale of each token and head; static scales as numbers and as arrays."""
    ours, theirs = Cache.empty(kind, 3, 4, 2, 16), Cache.empty(kind, 3, 4, 2, 16)
    k, v = normal(5, 2, 16), normal(5, 2, 16) + 1
    rows = {
        "page_table": np.array([[2, 0]], np.int32),
        "seq_lens": np.array([5], np.int32),
        "cu_seqlens": np.array([0, 5], np.int32),
    }
    kv_dtype = {"kv_dtype": c_interface.INT4} if "kv_dtype" in ours.arguments else {}
    library.append_kv(k=k, v=v, **rows, **{**ours.arguments, **kv_dtype})
    octavo.append_kv(k, v, **rows, **theirs.arguments)
    copies = {"copies": np.array([[2, 1]], np.int32)}
    arrays = [
        {name: x for name, x in cache.arguments.items() if name != "kv_dtype"} for cache in (ours, theirs)
    ]
    library.copy_pages(**copies, **arrays[0])
    octavo.copy_pages(**copies, **arrays[1])
    for name, array in arrays[0].items():
        assert array.tobytes() == arrays[1][name].tobytes()
    rows = {"page_table": np.array([[1, 0]], np.int32), "seq_lens": rows["seq_lens"]}
    q, out = normal(1, 4, 16), np.empty((1, 4, 16), np.float32)
    library.paged_attention(q=q, out=out, **rows, **{**ours.arguments, **kv_dtype})
    np.testing.assert_array_equal(out, octavo.paged_attention(q, **rows, **theirs.arguments))
    if kind == "int8":
        pages = {"k_pages": ours.k_pages, "v_pages": ours.v_pages}
        library.paged_attention(q=q, out=out, **rows, **pages, k_scale=0.5, v_scale=0.25)
        static = {"k_scale": np.float32([0.5]), "v_scale": np.float32([0.25, 0.25])}
        np.testing.assert_array_equal(out, octavo.paged_attention(q, **rows, **pages, **static))
        again = np.empty_like(out)
        static = {f"{name}_array": x for name, x in static.items()}
        library.paged_attention(q=q, out=again, **rows, **pages, **static)
        np.testing.assert_array_equal(out, again)
        with pytest.raises(OctavoError, match="k_scale must not be given both as a number and as an array"):
            library.paged_attention(q=q, out=again, **rows, **pages, **static, k_scale=0.5)
        ones = {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
        expected = octavo.paged_attention(q, **rows, **pages, **ones)
        as_arrays = {f"{name}_array": x for name, x in ones.items()}
        library.paged_attention(q=q, out=out, **rows, **pages, **as_arrays)
        np.testing.assert_array_equal(out, expected)
        message = (
            r"v_scale \(1\) means none, and pages of int8 need a scale: give v_scale_array, which may be 1, "
            "v_scales, or another v_scale"
        )
        with pytest.raises(OctavoError, match=f"paged_attention: {message}"):
            library.paged_attention(q=q, out=out, **rows, **pages, k_scale=0.5, v_scale=1)
        with pytest.raises(OctavoError, match=f"append_kv: {message}"):
            library.append_kv(k=k[:1], v=v[:1], **rows, **pages, k_scale=0.5, v_scale=1)
    else:
        for wrong, message in (
            (0, "kv_dtype must be float8_e4m3fn, float8_e5m2 or int4; got float32"),
            (9, r"kv_dtype \(9\) must be an octavo_dtype, or -1"),
        ):
            with pytest.raises(OctavoError, match=f"paged_attention: {message}"):
                library.paged_attention(q=q, out=out, **rows, **{**ours.arguments, "kv_dtype": wrong})


@pytest.mark.gpu
def test_attention_on_a_gpu(library):
    torch = pytest.importorskip("torch")

    def lent(array):
        shape = (c_interface.c_int64 * array.ndim)(*array.shape)
        return Tensor(array.data_ptr(), shape, None, array.ndim, c_interface.DTYPES["float16"], 1, 0)

    q = torch.randn(2, 5, 4, 64, dtype=torch.float16, device="cuda")
    k, v = torch.randn(2, 2, 9, 2, 64, dtype=torch.float16, device="cuda").unbind()
    out = torch.full_like(q, torch.nan)
    stream = torch.cuda.current_stream().cuda_stream
    library.attention(q=lent(q), k=lent(k), v=lent(v), out=lent(out), causal=1, stream=stream)
    assert torch.equal(out, octavo.attention(q, k, v, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_paged_attention_on_a_gpu(library, kind):
    torch = pytest.importorskip("torch")

    def lent(array):
        shape = (c_interface.c_int64 * array.ndim)(*array.shape)
        number = c_interface.DTYPES[str(array.dtype).removeprefix("torch.")]
        return Tensor(array.data_ptr(), shape, None, array.ndim, number, 1, 0)

    q, pages = (torch.randn(*n, dtype=torch.float16, device="cuda") for n in ((5, 4, 64), (2, 6, 4, 2, 64)))
    tables = {"page_table": [[3, 0, 0], [5, 1, 2]], "seq_lens": [8, 12], "cu_seqlens_q": [0, 2, 5]}
    tables = {name: torch.tensor(x, dtype=getattr(torch, kind), device="cuda") for name, x in tables.items()}
    out = torch.full_like(q, torch.nan)
    given = {"q": q, "k_pages": pages[0], "v_pages": pages[1], "out": out, **tables}
    stream = torch.cuda.current_stream().cuda_stream
    library.paged_attention(**{name: lent(x) for name, x in given.items()}, stream=stream)
    tables = {name: x.int() for name, x in tables.items()}
    assert torch.equal(out, octavo.paged_attention(q, pages[0], pages[1], **tables))


def test_dtypes_of_gpus_are_known_without_one(library):
    arrays = normal(2, 1, 5, 4, 64)
    q, out = map(Tensor.of, arrays)
    q.device_type = out.device_type = 1
    message = (
        "no CUDA kernel for float32, head_dim 64; there are some for bfloat16 and float16, head_dim up to 512"
    )
    with pytest.raises(OctavoError, match=message):
        library.attention(q=q, k=q, v=q, out=out)


def test_allocator(library):
    allocator = PageAllocator(library, 4, 16)
    sequence = allocator.create()
    allocator.extend(sequence, 40)
    with pytest.raises(OctavoError) as error:
        allocator.extend(sequence, 100)
    assert error.value.status == 4 and "page" in str(error.value)
    assert allocator.length(sequence) == 40 and allocator.num_free_pages() == 1
    forks = allocator.fork(sequence, 2)
    assert len({sequence, *forks}) == 3
    allocator.truncate(sequence, 16)
    table, lengths = allocator.page_table([sequence, *forks])
    assert lengths.tolist() == [16, 40, 40]
    assert table[0, 1:].tolist() == [-1, -1] and (table[1] == table[2]).all() and table[0, 0] == table[1, 0]
    for handle in (sequence, *forks):
        allocator.free(handle)
    assert allocator.num_free_pages() == 4
    with pytest.raises(OctavoError) as error:
        allocator.length(sequence)
    assert error.value.status == 5
    allocator.delete()
