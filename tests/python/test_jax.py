"""octavo.jax: the operators inside JAX programs."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import octavo  # noqa: E402
import octavo.jax  # noqa: E402
from octavo import _jax_batching  # noqa: E402

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 6, 16, 2, 16
PAGE_TABLE = np.array([[4, 1, -1], [0, 3, 5]], np.int32)
SHARING_TABLE = np.array([[4, 1, -1], [4, 3, 5]], np.int32)
SEQ_LENS = np.array([20, 41], np.int32)
CU_SEQLENS = np.array([0, 3, 8], np.int32)
WRITTEN = {"append_kv": ("k_pages", "v_pages"), "copy_pages": ("k_pages", "v_pages")}
# Of a program that runs: some versions of JAX make a ValueError of an invalid argument.
RUNTIME_ERRORS = (getattr(jax.errors, "JaxRuntimeError", RuntimeError), ValueError)


def targets(*dtypes):
    return [
        *(pytest.param(("cpu", dtype), id=f"cpu-{dtype}") for dtype in dtypes),
        *(
            pytest.param(("cuda", dtype), id=f"cuda-{dtype}", marks=pytest.mark.gpu)
            for dtype in dtypes
            if dtype != "float32"
        ),
    ]


@pytest.fixture(params=targets("float32", "float16", "bfloat16"))
def dtype(request):
    """Of the arrays; the test runs on this device."""
    device, dtype = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield dtype


@pytest.fixture(params=targets("float32", "bfloat16"))
def one_dtype(request):
    """The same where one 16-bit type will do."""
    device, dtype = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield dtype


def normal(*shape, dtype="float32", seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


def cache(dtype="float32", seed=0):
    shape = NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    return {
        "k_pages": normal(*shape, dtype=dtype, seed=seed),
        "v_pages": normal(*shape, dtype=dtype, seed=seed + 1),
    }


def make_calls(dtype="float32", seed=0):
    """Every operator, with the arguments that change what it takes and returns: (name, arrays, options)."""
    make = partial(normal, dtype=dtype, seed=seed)
    index = partial(jnp.asarray, dtype=jnp.int32)
    masks = {
        "alibi_slopes": jnp.array([0.5, 0.25, 0.125, 0.0625], jnp.float32),
        "prefix_lens": index([2, 0]),
    }
    scores = {"window_left": 7, "softcap": 5.0, "softmax_scale": 0.3, "return_lse": True}
    dense = {
        "q": make(2, 5, 4, HEAD_DIM),
        "k": make(2, 9, NUM_KV_HEADS, HEAD_DIM),
        "v": make(2, 9, NUM_KV_HEADS, HEAD_DIM) + 1,
    }
    packed = {
        "q": make(8, 4, HEAD_DIM),
        "k": make(8, NUM_KV_HEADS, HEAD_DIM),
        "v": make(8, NUM_KV_HEADS, HEAD_DIM) + 1,
        "cu_seqlens_q": index(CU_SEQLENS),
        "cu_seqlens_k": index(CU_SEQLENS),
    }
    tables = {"page_table": index(PAGE_TABLE), "seq_lens": index(SEQ_LENS)}
    paged = {"q": make(2, 4, HEAD_DIM), **cache(dtype, seed), **tables}
    batch_slopes = {"alibi_slopes": jnp.stack([masks["alibi_slopes"], 2 * masks["alibi_slopes"]])}
    new = {"k": make(8, NUM_KV_HEADS, HEAD_DIM), "v": make(8, NUM_KV_HEADS, HEAD_DIM) + 1}
    one_each = {name: x[:2] for name, x in new.items()}
    many = {**new, **cache(dtype, seed), **tables, "cu_seqlens": index(CU_SEQLENS)}
    state = {"out_a": make(2, 4, HEAD_DIM), "lse_a": normal(2, 4, seed=seed)}
    state |= {"out_b": state["out_a"] + 1, "lse_b": state["lse_a"] - 1}
    return [
        ("attention", dense, {}),
        ("attention", {**dense, **masks}, {"window_right": 2, **scores}),
        ("attention", {**dense, **batch_slopes}, {"causal": True}),
        ("attention", packed, {"max_seqlen_q": 5, "max_seqlen_k": 5, "return_lse": True}),
        ("attention", {**packed, **masks}, {}),
        ("paged_attention", paged, {}),
        ("paged_attention", {**paged, **masks}, {"num_splits": 2, "k_scale": 0.5, "v_scale": 2.0, **scores}),
        (
            "paged_attention",
            {**paged, **batch_slopes, "q": packed["q"], "cu_seqlens_q": index(CU_SEQLENS)},
            {"max_seqlen_q": 5, "causal": False, "return_lse": True},
        ),
        ("append_kv", {**one_each, **cache(dtype, seed), **tables}, {}),
        ("append_kv", many, {"k_scale": 2.0, "v_scale": 0.5}),
        ("copy_pages", {**cache(dtype, seed), "copies": index([[4, 2], [0, 1]])}, {}),
        ("merge_states", state, {}),
        ("attention", packed, {"dropout_p": 0.3, "dropout_seed": 2**63 - 1, "return_lse": True}),
        ("attention", dense, {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 2**40}),
        (
            "paged_attention",
            {**paged, "page_table": index(SHARING_TABLE)},
            {"shared_prefix_len": PAGE_SIZE, "return_lse": True},
        ),
    ]


CALLS = [pytest.param(i, id=f"{name}-{i}") for i, (name, _, _) in enumerate(make_calls())]


def results_of_octavo(name, arrays, options):
    """What octavo itself makes of the arrays. JAX's cannot be written to: those are NumPy's then."""
    if name not in WRITTEN:
        results = getattr(octavo, name)(**arrays, **options) if name != "merge_states" else None
        if results is None:
            results = octavo.merge_states(*arrays.values())
        return results if isinstance(results, tuple) else (results,)
    ours = {key: np.array(x) for key, x in arrays.items()}
    getattr(octavo, name)(**ours, **options)
    return tuple(ours[key] for key in WRITTEN[name])


def run(name, arrays, options):
    results = getattr(octavo.jax, name)(**arrays, **options)
    return results if isinstance(results, tuple) else (results,)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype and x.shape == y.shape
        assert np.array(x).tobytes() == np.array(y).tobytes()


@pytest.mark.parametrize("call", CALLS)
def test_equals_octavo(call, dtype):
    """Bit for bit, alone and inside a program; what was given is as before."""
    name, arrays, options = make_calls(dtype)[call]
    expected = results_of_octavo(name, arrays, options)
    before = {key: np.array(x) for key, x in arrays.items()}
    assert_same(run(name, arrays, options), expected)
    assert_same(jax.jit(lambda arrays: run(name, arrays, options))(arrays), expected)
    assert all(np.array(x).tobytes() == before[key].tobytes() for key, x in arrays.items())


# Results are values and streams XLA's; one cache at a time.
NOT_IN_JAX = ("out", "stream", "to_k_pages", "to_v_pages")


def test_signatures_are_those_of_octavo():
    for name in octavo.jax.__all__:
        theirs = dict(inspect.signature(getattr(octavo, name)).parameters)
        ours = inspect.signature(getattr(octavo.jax, name)).parameters
        expected = [(p.name, p.kind, p.default) for key, p in theirs.items() if key not in NOT_IN_JAX]
        assert [(p.name, p.kind, p.default) for p in ours.values()] == expected
        for parameter in ours:
            assert f"        {parameter}: " in inspect.getsource(getattr(octavo.jax, name))


# Mapped axes


def stack(call, num, mapped):
    """`num` variants of a call, and its arrays with those named in `mapped` stacked."""
    variants = [make_calls(seed=10 * i)[call] for i in range(num)]
    name, first, options = variants[0]
    each = [{key: v[1][key] if key in mapped else first[key] for key in first} for v in variants]
    stacked = {
        key: jnp.stack([arrays[key] for arrays in each]) if key in mapped else first[key] for key in first
    }
    return name, options, each, stacked


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", ["all", "first", "tables", "values"])
def test_vmap(call, which):
    names = list(make_calls()[call][1])
    mapped = {
        "all": names,
        "first": names[:1],
        "tables": [n for n in names if n in ("page_table", "seq_lens", "copies", "prefix_lens", "lse_a")],
        "values": [n for n in names if n in ("k", "v", "k_pages", "v_pages", "alibi_slopes", "out_b")],
    }[which]
    if not mapped:
        pytest.skip("the operator has none of these arrays")
    name, options, each, stacked = stack(call, 3, mapped)
    axes = {key: 0 if key in mapped else None for key in stacked}
    results = jax.jit(jax.vmap(lambda arrays: run(name, arrays, options), in_axes=(axes,)))(stacked)
    for i, arrays in enumerate(each):
        for x, y in zip(results, run(name, arrays, options), strict=True):
            np.testing.assert_allclose(
                x[i], y, rtol=2e-5, atol=2e-6
            )  # num_splits=None may depend on the batch


def test_vmap_of_different_tables():
    paged = make_calls()[5][1]
    tables = np.stack([PAGE_TABLE, np.roll(PAGE_TABLE, 1, axis=0)])
    lens = np.stack([SEQ_LENS, np.array([41, 20], np.int32)])
    both = jax.vmap(lambda t, n: octavo.jax.paged_attention(**{**paged, "page_table": t, "seq_lens": n}))
    for i, out in enumerate(both(tables, lens)):
        alone = octavo.paged_attention(
            **{**paged, "page_table": jnp.array(tables[i]), "seq_lens": jnp.array(lens[i])}
        )
        np.testing.assert_allclose(out, alone, rtol=2e-5, atol=2e-6)


def test_vmap_of_different_prefixes():
    """Every element has a prefix of its own, which the sequences of another do not share."""
    _, paged, options = make_calls()[-1]
    tables = np.stack([SHARING_TABLE, np.where(SHARING_TABLE == 4, 2, SHARING_TABLE)])
    both = jax.vmap(lambda table: octavo.jax.paged_attention(**{**paged, "page_table": table}, **options))
    for i, table in enumerate(tables):
        alone = octavo.paged_attention(**{**paged, "page_table": jnp.array(table)}, **options)
        for mapped, expected in zip(both(tables), alone, strict=True):
            np.testing.assert_allclose(mapped[i], expected, rtol=2e-5, atol=2e-6)


def packed_attention(q, k, v, lengths_q, lengths_k, call=octavo.jax.attention):
    offsets = (jnp.cumulative_sum(n, include_initial=True) for n in (lengths_q, lengths_k))
    cu_seqlens_q, cu_seqlens_k = (x.astype(jnp.int32) for x in offsets)
    return call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_lse=True)


def test_packed_tokens_close_up():
    q = np.arange(3 * 8).reshape(3, 8)
    offsets = np.array([[0, 2, 5], [0, 0, 1], [0, 4, 8]], np.int32)
    used = np.concatenate([tokens[: end[-1]] for tokens, end in zip(q, offsets, strict=True)])
    folded_offsets, places, folded = _jax_batching._fold_packed(jnp.asarray(offsets), jnp.asarray(q))
    assert folded_offsets.tolist() == [0, 2, 5, 5, 6, 10, 14]
    assert folded[: len(used)].tolist() == used.tolist()
    assert folded[places].tolist() == q.reshape(-1).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_vmap_of_packed_arrays_that_are_not_full(device):
    """On the CPU that is an error, mapped or not; a GPU cannot look, and keeps to the lengths."""
    lengths_q, lengths_k = jnp.array([[2, 3], [0, 1], [4, 4]]), jnp.array([[3, 2], [5, 4], [0, 7]])
    with jax.default_device(jax.devices(device)[0]):
        q = normal(3, 8, 4, HEAD_DIM, dtype="bfloat16")
        k, v = normal(2, 3, 9, NUM_KV_HEADS, HEAD_DIM, dtype="bfloat16")
        mapped = jax.vmap(packed_attention)
        if device == "cpu":
            with pytest.raises(RUNTIME_ERRORS, match=r"attention: cu_seqlens_q\[6\] must equal .* \(24\)"):
                jax.block_until_ready(mapped(q, k, v, lengths_q, lengths_k))
            return
        outs = mapped(q, k, v, lengths_q, lengths_k)
        for i in range(3):
            num_q, num_k = int(lengths_q[i].sum()), int(lengths_k[i].sum())
            wanted = packed_attention(q[i, :num_q], k[i, :num_k], v[i, :num_k], lengths_q[i], lengths_k[i])
            assert_same([x[i, :num_q] for x in outs], wanted)


def test_vmap_nests_and_has_out_axes():
    q, k, v = (normal(2, 3, 2, 5, 4, HEAD_DIM, seed=i) for i in range(3))
    nested = jax.vmap(jax.vmap(octavo.jax.attention, out_axes=1), in_axes=(1, 1, 1))(q, k, v)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(
                nested[j, :, i], octavo.attention(q[i, j], k[i, j], v[i, j]), rtol=2e-5, atol=2e-6
            )


def test_vmap_keeps_to_its_cache():
    """A page past the end of one cache is not the first of the next."""
    name, _, _, arrays = stack(5, 2, ["q", "k_pages", "v_pages", "page_table"])
    arrays["page_table"] = arrays["page_table"].at[0, 0, 0].set(NUM_PAGES)
    axes = {key: None if key == "seq_lens" else 0 for key in arrays}
    with pytest.raises(RUNTIME_ERRORS, match=r"paged_attention: page_table\[0, 0\] must lie in"):
        jax.block_until_ready(jax.vmap(lambda arrays: run(name, arrays, {}), in_axes=(axes,))(arrays))


# In place


@pytest.mark.parametrize("name", WRITTEN)
def test_a_donated_cache_is_written_in_place(name, one_dtype):
    arrays = next(arrays for called, arrays, _ in make_calls(one_dtype) if called == name)
    expected = results_of_octavo(name, arrays, {})
    given = {key: arrays[key] + 0 for key in WRITTEN[name]}
    addresses = [x.unsafe_buffer_pointer() for x in given.values()]

    @partial(jax.jit, donate_argnums=0)
    def write(written, rest):
        return run(name, {**rest, **written}, {})

    written = write(given, {key: x for key, x in arrays.items() if key not in given})
    assert_same(written, expected)
    assert [x.unsafe_buffer_pointer() for x in written] == addresses
    assert all(x.is_deleted() for x in given.values())


def test_one_array_for_keys_and_values():
    """XLA has to copy then: each result is an array of its own."""
    _, arrays, _ = make_calls()[8]
    k_pages, v_pages = octavo.jax.append_kv(**{**arrays, "v_pages": arrays["k_pages"]})
    expected = results_of_octavo("append_kv", {**arrays, "v_pages": arrays["k_pages"] + 0}, {})
    assert_same((k_pages, v_pages), expected)


def numpy_decode(steps, k_pages, v_pages, page_table, seq_lens, q, k, v):
    outs = []
    for i in range(steps):
        seq_lens = seq_lens + 1
        octavo.append_kv(k[i], v[i], k_pages, v_pages, page_table, seq_lens)
        outs.append(octavo.paged_attention(q[i], k_pages, v_pages, page_table, seq_lens))
    return np.stack(outs), k_pages, v_pages


def decode_inputs(steps, dtype):
    """A cache for `steps` more tokens, and the tokens."""
    k_pages, v_pages = (x + 0 for x in cache(dtype).values())  # XLA's own memory
    q = normal(steps, 2, 4, HEAD_DIM, dtype=dtype)
    k, v = (normal(steps, 2, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    table = np.array([[4, 1, 2], [0, 3, 5]], np.int32)
    return k_pages, v_pages, jnp.asarray(table), jnp.asarray([15, 20], jnp.int32), q, k, v


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_decode_loop(loop, one_dtype):
    """A program that decodes by itself equals NumPy's loop, and moves no cache."""
    steps = 6
    inputs = decode_inputs(steps, one_dtype)

    def step(caches, page_table, seq_lens, q, k, v):
        caches = octavo.jax.append_kv(k, v, *caches, page_table, seq_lens)
        return caches, octavo.jax.paged_attention(q, *caches, page_table, seq_lens)

    @partial(jax.jit, donate_argnums=(0, 1))
    def with_scan(k_pages, v_pages, page_table, seq_lens, q, k, v):
        def body(carry, new):
            caches, lens = carry
            caches, out = step(caches, page_table, lens + 1, *new)
            return (caches, lens + 1), out

        (caches, _), outs = jax.lax.scan(body, ((k_pages, v_pages), seq_lens), (q, k, v))
        return outs, *caches

    @partial(jax.jit, donate_argnums=(0, 1))
    def with_while_loop(k_pages, v_pages, page_table, seq_lens, q, k, v):
        def body(state):
            i, caches, outs = state
            caches, out = step(caches, page_table, seq_lens + 1 + i, q[i], k[i], v[i])
            return i + 1, caches, outs.at[i].set(out)

        state = (jnp.int32(0), (k_pages, v_pages), jnp.zeros_like(q))
        _, caches, outs = jax.lax.while_loop(lambda state: state[0] < steps, body, state)
        return outs, *caches

    expected = numpy_decode(steps, *(np.array(x) for x in inputs))
    addresses = {x.unsafe_buffer_pointer() for x in inputs[:2]}
    program = {"scan": with_scan, "while_loop": with_while_loop}[loop].lower(*inputs).compile()
    outs, *caches = program(*inputs)
    for x, y in zip(caches, expected[1:], strict=True):
        assert np.array(x).tobytes() == y.tobytes()
    if one_dtype == "float32" or jax.__version_info__ >= (
        0,
        6,
    ):  # older XLA widens a loop's bfloat16 on the CPU
        shape = f"[{','.join(map(str, inputs[0].shape))}]"
        assert not [line for line in program.as_text().splitlines() if shape in line and " copy(" in line]
        assert {x.unsafe_buffer_pointer() for x in caches} == addresses
    tolerance = 2e-5 if one_dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.array(outs, np.float32), np.array(expected[0], np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.gpu
def test_replayed_programs():
    """XLA makes CUDA graphs of programs of several calls, and replays them: other lengths, other buffers."""

    def layers(caches, q, new, page_table, seq_lens):
        written = []
        for i, (k_pages, v_pages) in enumerate(caches):
            pages = octavo.jax.append_kv(new, new, k_pages, v_pages, page_table, seq_lens)
            options = {"num_splits": 2} if i == 1 else {"batch_invariant": i == 2}
            q = octavo.jax.paged_attention(q, *pages, page_table, seq_lens, **options)
            written.append(pages)
        return tuple(written), q

    program = jax.jit(layers, donate_argnums=0)
    with jax.default_device(jax.devices("cuda")[0]):
        caches = tuple(tuple(cache("bfloat16", seed).values()) for seed in range(6))
        expected = caches
        for step in range(12):
            q = normal(2, 4, HEAD_DIM, dtype="bfloat16", seed=step)
            new = normal(2, NUM_KV_HEADS, HEAD_DIM, dtype="bfloat16", seed=step)
            arrays = q, new, jnp.asarray(PAGE_TABLE), jnp.asarray(SEQ_LENS - step)
            expected, wanted = layers(expected, *arrays)
            if step % 5 == 0:
                caches = jax.tree.map(lambda x: x + 0, caches)
            caches, out = program(caches, *arrays)
            assert_same((out, *jax.tree.leaves(caches)), (wanted, *jax.tree.leaves(expected)))


# What is refused


def test_wrong_shapes_and_numbers_are_found_by_the_trace():
    q, k, v = (make_calls()[0][1][name] for name in "qkv")
    attention = octavo.jax.attention
    errors = [
        (
            lambda: attention(q[:, :, :3], k, v),
            ValueError,
            r"num_q_heads \(3\) must be a multiple of num_kv_heads",
        ),
        (
            lambda: attention(q, k, v[:1]),
            ValueError,
            r"v must have the shape of k \[2, 9, 2, 16\]; got \[1, 9",
        ),
        (lambda: attention(q, k, v, window_left=-2), ValueError, r"window_left must be -1 .* got -2"),
        (
            lambda: attention(q, k, v, softmax_scale=np.nan),
            ValueError,
            "softmax_scale must be finite; got nan",
        ),
        (lambda: attention(q, k, v, window_left=1 << 70), ValueError, "window_left must fit in 64 bits"),
        (lambda: attention(q, k.astype("float16"), v), TypeError, "k must be float32 like q; got float16"),
        (
            lambda: attention(q.astype("int8"), k, v),
            TypeError,
            "q must be float32, float16 or bfloat16; got int8",
        ),
        (
            lambda: attention(q, k, v, dropout_p=1.0, dropout_seed=1),
            ValueError,
            r"dropout_p must lie in \[0, 1\); got 1",
        ),
        (lambda: attention(q, k, v, dropout_p=0.1), ValueError, r"dropout_p \(0.1\) needs a dropout_seed"),
        (lambda: attention(q, k, v, causal=1), TypeError, "causal must be a bool; got int"),
        (lambda: attention(q, k, v, softcap="1"), TypeError, "softcap must be a float; got str"),
        (lambda: attention(q, k, v, window_left=0.5), TypeError, "window_left must be a int; got float"),
        (lambda: attention(q[(None,) * 3], k, v), ValueError, "q must have at most 6 axes; got 7"),
    ]
    for call, kind, message in errors:
        for traced in (call, lambda call=call: jax.eval_shape(call)):
            with pytest.raises(kind, match=f"attention: {message}"):
                traced()


def test_traced_numbers_are_refused():
    q, k, v = (make_calls()[0][1][name] for name in "qkv")
    with pytest.raises(TypeError, match="softmax_scale is part of the program and must be a Python float"):
        jax.jit(lambda scale: octavo.jax.attention(q, k, v, softmax_scale=scale))(0.5)
    half = octavo.jax.attention(
        q, k, v, softmax_scale=np.float32(0.5), causal=np.True_, window_left=np.int64(3)
    )
    assert_same([half], [octavo.attention(q, k, v, softmax_scale=0.5, causal=True, window_left=3)])


def test_wrong_values_are_found_when_the_program_runs():
    """On the CPU, and nothing is written."""
    _, arrays, _ = make_calls()[8]
    bad = {**arrays, "page_table": arrays["page_table"] + 2}
    with pytest.raises(
        RUNTIME_ERRORS, match=r"append_kv: page_table\[0, 0\] must lie in \[0, num_pages = 6\)"
    ):
        jax.block_until_ready(octavo.jax.append_kv(**bad))
    _, arrays, _ = make_calls()[3]
    with pytest.raises(RUNTIME_ERRORS, match=r"attention: max_seqlen_q \(4\) must be at least every length"):
        jax.block_until_ready(octavo.jax.attention(**arrays, max_seqlen_q=4))


@pytest.mark.gpu
def test_a_dtype_without_a_kernel_is_named():
    with jax.default_device(jax.devices("cuda")[0]):
        _, arrays, _ = make_calls("float32")[0]
        with pytest.raises(RUNTIME_ERRORS, match="attention: no CUDA kernel for float32, head_dim 16"):
            jax.block_until_ready(octavo.jax.attention(**arrays))


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_refused(call):
    name, arrays, options = make_calls()[call]
    floats = {key: x for key, x in arrays.items() if x.dtype == jnp.float32}
    rest = {key: x for key, x in arrays.items() if key not in floats}

    def loss(floats, weight):
        return weight * sum(x.sum() for x in run(name, {**floats, **rest}, options))

    message = f"{name} has no backward yet.*jax.lax.stop_gradient"
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(TypeError, match=message):
            grad(floats, 1.0)
    assert np.isfinite(jax.grad(loss, argnums=1)(jax.lax.stop_gradient(floats), 1.0))


def test_empty_arrays():
    out = octavo.jax.paged_attention(
        normal(0, 4, HEAD_DIM), *cache().values(), jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    )
    assert out.shape == (0, 4, HEAD_DIM)
    pages = cache()
    assert_same(octavo.jax.copy_pages(**pages, copies=np.zeros((0, 2), np.int32)), tuple(pages.values()))


def test_results_vary_inside_shard_map():
    """Who differentiates around a result learns that it differs from device to device; so does a scan."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX before 0.6")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    q = jnp.ones((1, 3, 2, 16))

    def attend(q):
        return octavo.jax.attention(q, q, q)

    with pytest.raises(ValueError, match=r"(?i)replicat|vma|var"):
        jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())(q)

    def loop(pages, tokens):
        table, lens = jnp.array([[0, 1]], jnp.int32), jnp.array([1], jnp.int32)

        def step(pages, token):
            return octavo.jax.append_kv(token, token, *pages, table, lens), token

        return jax.lax.scan(step, (pages, pages), tokens)[0][0]

    pages, tokens = jnp.zeros((2, 4, 1, 16)), jnp.ones((3, 1, 1, 16))
    heads = jax.sharding.PartitionSpec(None, None, "x")
    written = jax.shard_map(loop, mesh=mesh, in_specs=(heads, heads), out_specs=heads)(pages, tokens)
    assert (written[0, 0] == 1).all()


def test_axes_of_no_length_are_mapped():
    q = jnp.zeros((0, 2, 3, 2, 16))
    assert jax.vmap(octavo.jax.attention)(q, q, q).shape == q.shape
    lengths = jnp.zeros((0, 2), jnp.int32)
    assert jax.vmap(packed_attention)(q[:, 0], q[:, 0], q[:, 0], lengths, lengths)[0].shape == (0, 3, 2, 16)


def test_none_is_no_mask():
    q = jnp.ones((1, 3, 2, 16))
    with pytest.raises(TypeError, match="attention: causal must be a bool; got NoneType"):
        octavo.jax.attention(q, q, q, causal=None)


def test_symbolic_shapes_are_refused():
    export = pytest.importorskip("jax.export")
    (batch,) = export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 3, 2, 16), jnp.float32)
    with pytest.raises(TypeError, match=r"attention: \w+ must have a known shape; got"):
        export.export(jax.jit(octavo.jax.attention))(shape, shape, shape)
